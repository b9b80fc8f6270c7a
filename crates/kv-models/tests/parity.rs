//! Logits, hidden states and greedy tokens of Hugging Face transformers.

use burn::tensor::{DType, Tensor};
use kv_core::read_f32;
use kv_models::{Model, PrefillPass, Session};
use kv_policies::build;
use kv_testing::{Golden, TestDevice, exact_devices, golden_files, skip};
use serde_json::json;

use super::support::model_folder;

fn worst(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    actual.iter().zip(expected).map(|(a, e)| (f64::from(*a) - e).abs()).fold(0.0, f64::max)
}

fn agrees(golden: &Golden, model: &Model, tested: &TestDevice) {
    let llama = model.llama();
    let count = golden.names().iter().filter(|name| name.ends_with(".ids")).count();
    for index in 0..count {
        let part = |name: &str| golden.tensor(&format!("{index}.{name}"));
        let context = format!("{} prompt {index} on {}", golden.name, tested.name);
        let ids = part("ids").indices();
        // Whole and in chunks.
        let chunk = (index % 2 == 1).then_some(100);
        let pass = PrefillPass { trace: true, chunk, ..PrefillPass::default() };
        let prefilled = llama.prefill(&[&ids], pass, &mut |_| Ok(None)).unwrap();

        let expected = part("logits_last32");
        let [_, tokens, width] = prefilled.hidden.dims();
        let rows = expected.shape[0];
        let hidden = prefilled.hidden.clone().reshape([tokens, width]);
        let logits = llama.logits(hidden.clone().narrow(0, tokens - rows, rows)).unwrap();
        let difference = worst(&read_f32("logits", logits).unwrap(), &expected.values);
        assert!(difference <= 2e-3, "{context}: logits differ by {difference}");

        let trace: Tensor<2> = Tensor::cat(prefilled.trace, 0);
        let expected = part("hidden_last");
        let difference = worst(&read_f32("trace", trace).unwrap(), &expected.values);
        assert!(difference <= 2e-3, "{context}: hidden states differ by {difference}");

        let logits =
            read_f32("logits", llama.logits(hidden.narrow(0, 0, tokens - 1)).unwrap()).unwrap();
        let logprobs: Vec<f32> = logits
            .chunks(llama.config().vocab_size)
            .zip(&ids[1..])
            .map(|(row, &next)| {
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
                row[next as usize] - max - sum.ln()
            })
            .collect();
        let difference = worst(&logprobs, &part("token_logprob").values);
        assert!(difference <= 2e-3, "{context}: log-probabilities differ by {difference}");

        let greedy = part("greedy24").indices();
        let policy = build(&json!({"policy": "full"})).unwrap();
        let mut session =
            Session::start(model, policy, std::slice::from_ref(&ids), &[0], greedy.len()).unwrap();
        for (step, &expected) in greedy.iter().enumerate() {
            let logits = &session.read_logits().unwrap()[0];
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            assert_eq!(best, Some(expected as usize), "{context}: greedy token {step}");
            session.step(&[expected]).unwrap();
        }
    }
}

#[test]
fn golden_hf_needle_1m() {
    for golden in golden_files("golden_hf_needle_1m", "needle-1m-hf-logits") {
        for tested in exact_devices("golden_hf") {
            let model = Model::load("needle-1m", &tested.device, Some(DType::F32)).unwrap();
            agrees(&golden, &model, &tested);
        }
    }
}

#[test]
fn golden_hf_needle_25m() {
    const TEST: &str = "golden_hf_needle_25m";
    let goldens = golden_files(TEST, "needle-25m-hf-logits");
    let Some(folder) = model_folder("needle-25m") else {
        return skip(TEST, "no model folder needle-25m; set KV_MODELS_DIR");
    };
    for golden in goldens {
        for tested in exact_devices("golden_hf") {
            let model = Model::from_folder(&folder, &tested.device, Some(DType::F32)).unwrap();
            agrees(&golden, &model, &tested);
        }
    }
}
