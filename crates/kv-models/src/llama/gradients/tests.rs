//! The plain form computes what prefill computes, for every part that a decoder may have.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use kv_core::read_f32;
use kv_parallel::Solo;
use kv_testing::{Numbers, TestDevice, exact_devices};

use super::super::plain::Plain;
use crate::config::{Architecture, ModelConfig, RopeScaling};
use crate::{Llama, PrefillPass, preset};

/// Norms and biases that are not all 1 or 0.
struct Stirred(Numbers);

impl ModuleMapper for Stirred {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let noise = self.0.tensor::<D>(param.dims(), &param.device());
        param.map(|tensor| tensor + noise * 0.1)
    }
}

/// A decoder in miniature.
fn small(change: impl Fn(&mut ModelConfig), tested: &TestDevice) -> Llama {
    let mut config = ModelConfig {
        vocab_size: 97,
        hidden_size: 48,
        intermediate_size: 80,
        num_layers: 3,
        num_query_heads: 6,
        num_kv_heads: 2,
        head_dim: 10,
        max_positions: 64,
        ..preset("llama-3.1-8b").unwrap()
    };
    change(&mut config);
    let llama = Llama::random(config, DType::F32, &tested.device, Arc::new(Solo)).unwrap();
    llama.map(&mut Stirred(Numbers::new(3)))
}

fn agrees(llama: &Llama, tokens: usize, what: &str, tested: &TestDevice) {
    let vocabulary = llama.config().vocab_size;
    let mut numbers = Numbers::new(5);
    let ids: Vec<u32> = (0..tokens).map(|_| numbers.below(vocabulary) as u32).collect();
    let prefilled = llama.prefill(&[&ids], PrefillPass::default(), &mut |_| Ok(None)).unwrap();
    let [_, _, width] = prefilled.hidden.dims();
    let expected = llama.logits(prefilled.hidden.reshape([tokens, width])).unwrap();
    let plain = Plain::new(llama, tokens);
    let embedded = plain.embed(llama.upload(&ids));
    let hidden = llama
        .layers
        .iter()
        .fold(embedded, |hidden, layer| plain.layer(layer, hidden, plain.key_value_weights(layer)));
    let actual = read_f32("logits", plain.logits(hidden)).unwrap();
    let expected = read_f32("logits", expected).unwrap();
    let worst = actual.iter().zip(&expected).map(|(a, e)| (a - e).abs()).fold(0.0, f32::max);
    let size = expected.iter().copied().map(f32::abs).fold(0.0, f32::max);
    assert_eq!(actual.len(), tokens * vocabulary);
    assert!(size > 0.5 && worst <= 1e-4 * size, "{what} on {}: {worst} of {size}", tested.name);
}

#[test]
fn the_plain_form_is_the_decoder() {
    for tested in exact_devices("the_plain_form_is_the_decoder") {
        let llama31 = small(|_| (), &tested);
        assert!(matches!(llama31.config().rope_scaling, RopeScaling::Llama3 { .. }));
        agrees(&llama31, 37, "llama 3.1", &tested);
        let biased = |config: &mut ModelConfig| {
            config.architecture = Architecture::Qwen2;
            (config.qkv_bias, config.output_bias, config.mlp_bias) = (true, true, true);
            config.rope_scaling = RopeScaling::Linear { factor: 2.0 };
        };
        agrees(&small(biased, &tested), 20, "biases", &tested);
        let qwen3 = |config: &mut ModelConfig| {
            config.architecture = Architecture::Qwen3;
            (config.qk_norm, config.tie_embeddings) = (true, true);
            (config.num_kv_heads, config.rope_scaling) = (6, RopeScaling::None);
        };
        agrees(&small(qwen3, &tested), 64, "qwen3", &tested);
        #[cfg(feature = "needle-1m")]
        {
            let model = crate::Model::load("needle-1m", &tested.device, None).unwrap();
            agrees(model.llama(), 150, "needle-1m", &tested);
        }
    }
}
