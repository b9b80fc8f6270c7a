//! The scaling of the rotary embedding.

use std::f64::consts::TAU;

use serde_json::{Value, json};

use crate::error::{GgufError, quoted};
use crate::metadata::{Metadata, missing};

const TYPE: &str = "llama.rope.scaling.type";
const FACTOR: &str = "llama.rope.scaling.factor";
const ORIGINAL: &str = "llama.rope.scaling.original_context_length";
const ATTENTION_FACTOR: &str = "llama.rope.scaling.attn_factor";

/// Llama 3's scaling, as Meta publishes it. A file has the factors that follow from it, not these.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
const LLAMA3_ORIGINAL: f64 = 8192.0;
/// Factors are computed in f32 and stored in f32.
const TOLERANCE: f64 = 1e-3;

/// `rope_theta`.
pub(crate) fn theta(metadata: &Metadata) -> Result<f64, GgufError> {
    Ok(metadata.positive("llama.rope.freq_base")?.unwrap_or(10_000.0))
}

/// `rope_scaling`. `factors` are those that the file has for each frequency, the highest first.
pub(crate) fn scaling(metadata: &Metadata, factors: Option<&[f32]>) -> Result<Value, GgufError> {
    let said = from_metadata(metadata)?;
    match factors.map(|factors| from_factors(theta(metadata)?, factors)).transpose()? {
        None | Some(Value::Null) => Ok(said),
        Some(scaling) if said.is_null() => Ok(scaling),
        Some(_) => Err(GgufError::Value {
            key: TYPE.to_owned(),
            expected: "none, as the file also has rope_freqs.weight".to_owned(),
            actual: said["rope_type"].to_string(),
        }),
    }
}

fn from_metadata(metadata: &Metadata) -> Result<Value, GgufError> {
    // Before there was a type, there was a factor of the linear one.
    let factor = match metadata.positive(FACTOR)? {
        Some(factor) => Some(factor),
        None => metadata.positive("llama.rope.scale_linear")?,
    };
    let kind = metadata.text(TYPE)?.unwrap_or("linear");
    let factor = match (kind, factor) {
        ("none", _) | ("linear", None) => return Ok(Value::Null),
        ("linear", Some(1.0)) => return Ok(Value::Null),
        ("linear", Some(factor)) => return Ok(json!({"rope_type": "linear", "factor": factor})),
        ("yarn", factor) => factor.ok_or_else(|| missing(FACTOR))?,
        (kind, _) => {
            let expected = "none, linear or yarn".to_owned();
            return Err(GgufError::Value { key: TYPE.into(), expected, actual: quoted(kind) });
        }
    };
    let mut yarn = json!({"rope_type": "yarn", "factor": factor});
    if let Some(original) = metadata.size(ORIGINAL)? {
        yarn["original_max_position_embeddings"] = original.into();
    }
    for key in ["beta_fast", "beta_slow"] {
        if let Some(beta) = metadata.positive(&format!("llama.rope.scaling.yarn_{key}"))? {
            yarn[key] = beta.into();
        }
    }
    // The file's factor multiplies the usual one of YaRN; Hugging Face's takes its place.
    if let Some(attention) = metadata.positive(ATTENTION_FACTOR)?.filter(|factor| *factor != 1.0) {
        yarn["attention_factor"] = (attention * (1.0 + 0.1 * factor.ln())).into();
    }
    Ok(yarn)
}

/// Llama 3's scaling of frequencies `theta^(-2 i / D)`, checked factor by factor.
///
/// A wave fits `turns = 8192 f / (2 pi)` times into the original context. Frequencies of more than
/// 4 turns keep their factor of 1, those of less than 1 have the full factor `s`, and between them
/// the factor is `1 / ((1 - k) / s + k)` with `k = (turns - 1) / 3`.
///
/// Source: `transformers`, `modeling_rope_utils.py`; `convert_hf_to_gguf.py` writes the factors.
fn from_factors(theta: f64, factors: &[f32]) -> Result<Value, GgufError> {
    let largest = factors.iter().fold(1.0, |most: f64, factor| most.max(f64::from(*factor)));
    for (index, actual) in factors.iter().map(|factor| f64::from(*factor)).enumerate() {
        let frequency = theta.powf(-(index as f64) / factors.len() as f64);
        let turns = LLAMA3_ORIGINAL * frequency / TAU;
        let kept = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - kept) / largest + kept);
        // Also refuses what is no number.
        let close = (actual - expected).abs() <= TOLERANCE * expected;
        if !close {
            return Err(GgufError::RopeFactors { index, expected, actual, factor: largest });
        }
    }
    if largest == 1.0 {
        return Ok(Value::Null);
    }
    Ok(json!({
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL as u64,
    }))
}
