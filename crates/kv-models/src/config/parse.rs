//! `config.json` to [`ModelConfig`].

use burn::tensor::DType;
use serde_json::Value;

use super::settings::Settings;
use super::{Architecture, ModelConfig, refuse, rope, window};
use crate::error::{ModelError, Result};

/// What `transformers` assumes where a key is absent.
struct Defaults {
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    max_positions: usize,
    bos: Option<u32>,
}

impl Defaults {
    const fn of(architecture: Architecture) -> Self {
        let llama = Self { num_kv_heads: None, head_dim: None, max_positions: 2048, bos: Some(1) };
        let qwen = Self { max_positions: 32_768, bos: None, ..llama };
        match architecture {
            Architecture::Llama => llama,
            Architecture::Mistral | Architecture::Ministral => {
                Self { num_kv_heads: Some(8), max_positions: 131_072, ..llama }
            }
            Architecture::Qwen2 => qwen,
            Architecture::Qwen3 => Self { head_dim: Some(128), ..qwen },
        }
    }
}

pub(super) fn config(json: &str) -> Result<ModelConfig> {
    let settings = Settings::parse("config.json", json)?;
    let architecture = architecture(&settings)?;
    let defaults = Defaults::of(architecture);
    let max_positions = settings.size("max_position_embeddings")?.unwrap_or(defaults.max_positions);
    refuse::unsupported(&settings)?;

    let hidden_size = settings.required_size("hidden_size")?;
    let num_query_heads = settings.required_size("num_attention_heads")?;
    let (num_kv_heads, head_dim) = heads(&settings, &defaults, hidden_size, num_query_heads)?;
    let rope = rope::rope(&settings, max_positions)?;
    let sliding_window = window::sliding_window(&settings, architecture)?;
    let sliding_window = sliding_window.filter(|window| *window < rope.max_positions);
    let (qkv_bias, output_bias) = attention_bias(&settings, architecture)?;
    let mlp_bias = settings.flag("mlp_bias", false)?;
    if mlp_bias && architecture != Architecture::Llama {
        return Err(settings.unsupported("mlp_bias", format!("false for {architecture}")));
    }
    Ok(ModelConfig {
        architecture,
        vocab_size: settings.required_size("vocab_size")?,
        hidden_size,
        intermediate_size: settings.required_size("intermediate_size")?,
        num_layers: settings.required_size("num_hidden_layers")?,
        num_query_heads,
        num_kv_heads,
        head_dim,
        max_positions: sliding_window.unwrap_or(rope.max_positions),
        sliding_window,
        rms_norm_eps: settings.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: rope.theta,
        rope_scaling: rope.scaling,
        tie_embeddings: settings.flag("tie_word_embeddings", false)?,
        qkv_bias,
        output_bias,
        mlp_bias,
        qk_norm: architecture == Architecture::Qwen3,
        bos_token_id: match settings.has("bos_token_id") {
            true => settings.get("bos_token_id", "a token id or null")?,
            false => defaults.bos,
        },
        eos_token_ids: token_ids(&settings, "eos_token_id")?.unwrap_or_default(),
        dtype: dtype(&settings)?,
    })
}

/// `eos_token_id` of a `generation_config.json`, if it has any.
pub(super) fn generation_eos(json: &str) -> Result<Option<Vec<u32>>> {
    token_ids(&Settings::parse("generation_config.json", json)?, "eos_token_id")
}

fn architecture(settings: &Settings) -> Result<Architecture> {
    let names: Option<Vec<String>> = settings.get("architectures", "a list with one name")?;
    let (name, of): (_, fn(Architecture) -> &'static str) =
        match names.and_then(|names| names.into_iter().next()) {
            Some(name) => (name, Architecture::name),
            None => match settings.get("model_type", "a string")? {
                Some(name) => (name, Architecture::model_type),
                None => return Err(settings.missing("architectures")),
            },
        };
    Architecture::ALL.into_iter().find(|a| of(*a) == name).ok_or_else(|| {
        let supported = Architecture::ALL.map(of).to_vec();
        ModelError::UnknownArchitecture { name, supported }
    })
}

fn heads(
    settings: &Settings,
    defaults: &Defaults,
    hidden_size: usize,
    num_query_heads: usize,
) -> Result<(usize, usize)> {
    let num_kv_heads = match settings.has("num_key_value_heads") {
        true => settings.size("num_key_value_heads")?,
        false => defaults.num_kv_heads,
    }
    .unwrap_or(num_query_heads);
    if !num_query_heads.is_multiple_of(num_kv_heads) {
        let divisor = format!("a divisor of num_attention_heads ({num_query_heads})");
        return Err(settings.unsupported("num_key_value_heads", divisor));
    }
    let head_dim = match settings.has("head_dim") {
        true => settings.size("head_dim")?,
        false => defaults.head_dim,
    };
    let Some(head_dim) = head_dim else {
        return match hidden_size.is_multiple_of(2 * num_query_heads) {
            true => Ok((num_kv_heads, hidden_size / num_query_heads)),
            false => {
                let even = format!("an even multiple of num_attention_heads ({num_query_heads})");
                Err(settings.unsupported("hidden_size", even))
            }
        };
    };
    match head_dim.is_multiple_of(2) {
        true => Ok((num_kv_heads, head_dim)),
        false => Err(settings.unsupported("head_dim", "an even number")),
    }
}

/// Biases on (query, key, value) and on the output projection.
fn attention_bias(settings: &Settings, architecture: Architecture) -> Result<(bool, bool)> {
    let key = "attention_bias";
    match architecture {
        Architecture::Llama | Architecture::Qwen3 => {
            let bias = settings.flag(key, false)?;
            Ok((bias, bias))
        }
        // Architectures without this setting: a file may only repeat their behaviour.
        Architecture::Mistral | Architecture::Ministral if settings.flag(key, false)? => {
            Err(settings.unsupported(key, format!("false for {architecture}")))
        }
        Architecture::Qwen2 if !settings.flag(key, true)? => {
            Err(settings.unsupported(key, format!("true for {architecture}")))
        }
        Architecture::Mistral | Architecture::Ministral => Ok((false, false)),
        Architecture::Qwen2 => Ok((true, false)),
    }
}

/// One id, or a list of them.
fn token_ids(settings: &Settings, key: &str) -> Result<Option<Vec<u32>>> {
    let expected = "a token id or a list of them";
    match settings.value(key) {
        Some(Value::Array(_)) => settings.get(key, expected),
        _ => Ok(settings.get(key, expected)?.map(|id| vec![id])),
    }
}

fn dtype(settings: &Settings) -> Result<Option<DType>> {
    // transformers 4 writes `torch_dtype`, transformers 5 `dtype`.
    let key = if settings.value("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let name: Option<String> = settings.get(key, "a string")?;
    match name.as_deref().map(|name| name.trim_start_matches("torch.")) {
        None | Some("auto") => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some(_) => Err(settings.unsupported(key, "float32, float16, bfloat16, auto")),
    }
}
