//! Fisher information, and the gradients that it is made of, against differences of the loss that
//! prefill computes.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use kv_core::{LayerAllocation, read_f32};
use kv_kernels::{KernelError, LinearOptions, linear};
use kv_models::{Fisher, FisherError, Llama, Model, ModelError, PrefillPass, TextWindows};
use kv_testing::{Numbers, devices, quick_devices, quick_exact_devices};

use super::support::{embedded, embedded_folder};

const TEXT: &str = "The sea was calm that day, and the old boat lay upon the sand. When the wind \
    rose in the evening, the fishermen went down to the shore and drew it up, for they knew the \
    coast well, and none of them trusted a red sky over the hills in the last weeks of autumn.";

/// Moves the key and value weights of one layer.
struct Moved {
    layer: usize,
    /// `[(Hq + 2 Hkv) D, hidden]`
    by: Tensor<2>,
}

impl ModuleMapper for Moved {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.dims();
        // No other matrix of the model has the projection's shape.
        if shape[..] != self.by.dims()[..] {
            return param;
        }
        let here = self.layer == 0;
        self.layer = self.layer.wrapping_sub(1);
        let by = self.by.clone().reshape(shape);
        if here { param.map(|weights| weights + by) } else { param }
    }
}

/// The mean negative log-likelihood of all tokens but the first, from prefill.
fn loss(llama: &Llama, tokens: &[u32]) -> f64 {
    let count = tokens.len() - 1;
    let pass = PrefillPass::default();
    let prefilled = llama.prefill(&[&tokens[..count]], pass, &mut |_| Ok(None)).unwrap();
    let [_, _, width] = prefilled.hidden.dims();
    let logits = llama.logits(prefilled.hidden.reshape([count, width])).unwrap();
    let logits = read_f32("logits", logits).unwrap();
    let rows = logits.chunks(llama.config().vocab_size).zip(&tokens[1..]);
    let sum: f64 = rows
        .map(|(row, &next)| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            sum.ln() - f64::from(row[next as usize] - max)
        })
        .sum();
    sum / count as f64
}

fn dot(a: &Tensor<2>, b: &Tensor<2>) -> f64 {
    f64::from(read_f32("product", (a.clone() * b.clone()).sum()).unwrap()[0])
}

/// Along each gradient, and along directions that know nothing of it.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    for tested in quick_exact_devices("gradients_are_the_slopes_of_the_loss") {
        let model = Model::load("needle-1m", &tested.device, Some(DType::F32)).unwrap();
        let llama = model.llama();
        let tokens = model.encode(TEXT).unwrap();
        let gradients = llama.kv_gradients(&tokens).unwrap();
        let expected = loss(llama, &tokens);
        let found = f64::from(read_f32("loss", gradients.loss).unwrap()[0]);
        assert!((found - expected).abs() <= 1e-5 * expected, "{found} against {expected}");

        let config = model.config();
        let [queries, keys] =
            [config.num_query_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
        let mut numbers = Numbers::new(1);
        for (layer, pair) in gradients.layers.iter().enumerate() {
            for (part, gradient) in pair.iter().enumerate() {
                let shape = gradient.dims();
                assert_eq!(shape, [keys, config.hidden_size]);
                let size = dot(gradient, gradient).sqrt();
                let random = numbers.tensor::<2>(shape, &tested.device);
                for direction in [gradient.clone().mul_scalar(1.0 / size), random] {
                    let length = dot(&direction, &direction).sqrt();
                    // Far enough for the difference to stand out of f32, near enough for a line.
                    let step = 0.015 / length;
                    let slope = |sign: f64| {
                        let by = direction.clone().mul_scalar(sign * step);
                        let by = match part {
                            0 => Tensor::cat(vec![by.clone(), by.zeros_like()], 0),
                            _ => Tensor::cat(vec![by.zeros_like(), by], 0),
                        };
                        let zeros = [queries, config.hidden_size];
                        let zeros = Tensor::zeros(zeros, (&tested.device, DType::F32));
                        let by = Tensor::cat(vec![zeros, by], 0);
                        loss(&llama.clone().map(&mut Moved { layer, by }), &tokens)
                    };
                    let actual = (slope(1.0) - slope(-1.0)) / (2.0 * step);
                    let expected = dot(gradient, &direction);
                    let error = (actual - expected).abs() / expected.abs().max(size);
                    assert!(error <= 5e-3, "{} {layer}.{part}: {actual} {expected}", tested.name);
                }
            }
        }
    }
}

/// The mean over windows of the squared gradients' sums, the same every time.
#[test]
fn fisher_information_is_the_mean_of_squares() {
    for tested in quick_devices("fisher") {
        let model = embedded(&tested);
        let windows = TextWindows::new(&model, TEXT, 24, 3).unwrap();
        let mut done = 0;
        let fisher = Fisher::measure(&model, "the sea", &windows, || done += 1).unwrap();
        assert_eq!((done, fisher.window, fisher.samples), (3, 24, 3));
        assert_eq!(fisher.text, "the sea");
        assert!(fisher.model.starts_with("needle-1m (4 x 2 x 32"), "{}", fisher.model);
        let mut expected = vec![[0.0; 2]; 4];
        for window in windows.tokens() {
            let gradients = model.llama().kv_gradients(window).unwrap();
            for (sums, pair) in expected.iter_mut().zip(&gradients.layers) {
                for (sum, gradient) in sums.iter_mut().zip(pair) {
                    let values = read_f32("gradient", gradient.clone()).unwrap();
                    *sum += values.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / 3.0;
                }
            }
        }
        for (layer, [keys, values]) in fisher.layers.iter().zip(expected) {
            let close = |actual: f32, exact: f64| (f64::from(actual) - exact).abs() <= 1e-5 * exact;
            assert!(keys > 0.0 && close(layer.keys, keys), "{}", tested.name);
            assert!(close(layer.values, values), "{}", tested.name);
        }
        let again = Fisher::measure(&model, "the sea", &windows, || ()).unwrap();
        if tested.name == "cpu" {
            assert_eq!(again, fisher);
        }
        // Elsewhere gradients are summed in whatever order the device has them.
        for (layer, again) in fisher.layers.iter().zip(&again.layers) {
            assert!((layer.keys - again.keys).abs() <= 1e-6 * layer.keys, "{}", tested.name);
            assert!((layer.values - again.values).abs() <= 1e-6 * layer.values, "{}", tested.name);
        }
        // What was differentiated is not tracked afterwards: kernels would refuse it.
        assert!(loss(model.llama(), &windows.tokens()[0]).is_finite());
    }
}

#[test]
fn windows_are_spread_and_begin_like_prompts() {
    let model = embedded(&devices()[0]);
    let all = model.encode_continuation(TEXT).unwrap();
    let start = model.encode("").unwrap().len();
    let windows = TextWindows::new(&model, TEXT, start + 10, 4).unwrap();
    for (index, window) in windows.tokens().iter().enumerate() {
        let first = index * all.len() / 4;
        assert_eq!(window[start..], all[first..first + 10]);
    }
    let most = all.len() / 4;
    assert!(TextWindows::new(&model, TEXT, start + most, 4).is_ok());
    let error = TextWindows::new(&model, TEXT, start + most + 1, 4).unwrap_err();
    let expected = all.len();
    assert!(
        matches!(error, ModelError::Fisher(FisherError::TextTooShort { tokens, samples: 4, window })
            if (tokens, window) == (expected, most + 1)),
        "{error}"
    );
    for (window, samples) in [(1, 4), (2049, 1), (24, 0)] {
        let error = TextWindows::new(&model, TEXT, window, samples).unwrap_err();
        assert!(matches!(error, ModelError::Fisher(FisherError::InvalidWindows { .. })), "{error}");
    }
    let gradients = |tokens: &[u32]| model.llama().kv_gradients(tokens).unwrap_err();
    assert!(matches!(gradients(&[7]), ModelError::EmptyPrompt));
    assert!(matches!(gradients(&[7, 5000]), ModelError::TokenOutOfRange { token: 5000, .. }));
    assert!(matches!(gradients(&[7; 2049]), ModelError::PromptTooLong { .. }));
}

#[test]
fn files_come_back_and_become_budgets() {
    let model = embedded(&devices()[0]);
    let windows = TextWindows::new(&model, TEXT, 24, 2).unwrap();
    let fisher = Fisher::measure(&model, "the sea", &windows, || ()).unwrap();
    let folder = embedded_folder();
    let path = Fisher::beside(&folder.path().to_string_lossy()).unwrap();
    let missing = Fisher::load(&path).unwrap_err().to_string();
    assert!(missing.contains("bench fisher") && missing.contains("fisher.json"), "{missing}");
    fisher.save(&path).unwrap();
    let read = Fisher::load(&path).unwrap();
    assert_eq!(read, fisher);
    let LayerAllocation::Weights(weights) = read.allocation(4).unwrap() else {
        panic!("not weights");
    };
    assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    let ratio = fisher.layers[2].sum() / fisher.layers[0].sum();
    assert!((weights[2] / weights[0] - ratio).abs() <= 1e-9 * ratio);
    let error = read.allocation(5).unwrap_err().to_string();
    assert!(error.contains("has 4 layers, the model 5"), "{error}");

    for model in ["needle-1m", "random:qwen3-1.7b", "organisation/name"] {
        let error = Fisher::beside(model).unwrap_err();
        assert!(matches!(error, ModelError::Fisher(FisherError::NoFolder { .. })), "{error}");
    }
    let layer = r#"{"keys": 0.0, "values": VALUE}"#;
    let file = r#"{"model": "m", "text": "t", "window": 2, "samples": 1, "layers": [LAYER]}"#;
    for value in ["0.0", "-1.0", "null"] {
        let text = file.replace("LAYER", &layer.replace("VALUE", value));
        std::fs::write(&path, text).unwrap();
        let error = Fisher::load(&path).unwrap_err();
        assert!(matches!(error, ModelError::InvalidJson { .. }), "{value}: {error}");
    }
}

/// Kernels know nothing of automatic differentiation; they say so instead of losing track.
#[test]
fn tracked_tensors_are_refused_by_kernels() {
    for tested in devices() {
        let model = embedded(&tested);
        let hidden = Tensor::<2>::ones([3, 128], (&tested.device, DType::F32)).autodiff();
        let error = model.llama().logits(hidden.clone()).unwrap_err();
        assert!(error.to_string().contains("without autodiff"), "{error}");
        let plain = hidden.clone().without_autodiff();
        let error = linear(plain, hidden, LinearOptions::default()).unwrap_err();
        assert!(matches!(error, KernelError::Device { argument: "weight", .. }), "{error}");
    }
}
