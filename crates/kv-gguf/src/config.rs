//! `config.json` in Hugging Face's form.

use serde_json::{Value, json};

use crate::layout::Stored;
use crate::metadata::{Metadata, missing};
use crate::model::Model;
use crate::{GgufError, TensorType, rope};

const EPSILON: &str = "llama.attention.layer_norm_rms_epsilon";
pub(crate) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(crate) const EOS: &str = "tokenizer.ggml.eos_token_id";
/// Tokens that end a turn or a message. Generation ends at them, too.
const OTHER_ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
const PADDING: &str = "tokenizer.ggml.padding_token_id";

/// The config of a model. `rope_factors` are the numbers of the file's `rope_freqs.weight`.
pub(crate) fn config(
    metadata: &Metadata,
    model: &Model,
    stored: &[Stored],
    rope_factors: Option<&[f32]>,
) -> Result<Value, GgufError> {
    let has = |suffix: &str| stored.iter().any(|tensor| tensor.name.ends_with(suffix));
    let projections = ["attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"];
    let feed_forward = ["ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"];
    let token = |key: &str| metadata.token(key, model.vocab);
    Ok(json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": metadata.required_size("llama.context_length")?,
        "rms_norm_eps": shortest(metadata.positive(EPSILON)?.ok_or_else(|| missing(EPSILON))?),
        "rope_theta": shortest(rope::theta(metadata)?),
        "rope_scaling": rope::scaling(metadata, rope_factors)?,
        "vocab_size": model.vocab,
        "tie_word_embeddings": !stored.iter().any(|tensor| tensor.name == "output.weight"),
        "attention_bias": projections.into_iter().any(has),
        "mlp_bias": feed_forward.into_iter().any(has),
        "bos_token_id": token(BOS)?,
        "eos_token_id": ends(token)?,
        "pad_token_id": token(PADDING)?,
        "torch_dtype": dtype(stored),
    }))
}

/// One id, a list where there are several, or null.
fn ends(token: impl Fn(&str) -> Result<Option<usize>, GgufError>) -> Result<Value, GgufError> {
    let mut ids = Vec::new();
    for key in [EOS].into_iter().chain(OTHER_ENDS) {
        if let Some(id) = token(key)?.filter(|id| !ids.contains(id)) {
            ids.push(id);
        }
    }
    Ok(match ids[..] {
        [] => Value::Null,
        [id] => id.into(),
        _ => ids.into(),
    })
}

/// The number that an f32 in the file was meant to be: 1e-5, not 9.999999747378752e-6.
fn shortest(number: f64) -> f64 {
    let narrow = number as f32;
    if f64::from(narrow) != number {
        return number;
    }
    narrow.to_string().parse().unwrap_or(number)
}

/// The narrowest type that holds the matrices as they are. Quantised numbers count as f16, which
/// their scales have.
fn dtype(stored: &[Stored]) -> &'static str {
    let of = |kind| stored.iter().any(|tensor| tensor.kind == kind && tensor.shape.len() == 2);
    let all = |kind| stored.iter().all(|tensor| tensor.kind == kind || tensor.shape.len() < 2);
    if all(TensorType::F32) {
        "float32"
    } else if of(TensorType::BF16) {
        "bfloat16"
    } else {
        "float16"
    }
}
