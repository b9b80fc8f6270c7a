//! Settings that would change the computation in a way that is not implemented.

use super::settings::Settings;
use super::{Architecture, rope};
use crate::error::Result;

/// What `transformers` assumes for Mistral where the key is absent (`null` means no window).
const MISTRAL_SLIDING_WINDOW: usize = 4096;

/// Refuses what is the same for all architectures.
pub(super) fn unsupported(settings: &Settings) -> Result<()> {
    for key in ["hidden_act", "hidden_activation"] {
        match settings.get::<String>(key, "silu")?.as_deref() {
            None | Some("silu" | "swish") => {}
            Some(_) => return Err(settings.unsupported(key, "silu")),
        }
    }
    for key in ["quantization_config", "compression_config"] {
        if settings.value(key).is_some() {
            return Err(settings.unsupported(key, "weights in f32, f16 or bf16, without it"));
        }
    }
    rope::whole_rotation(settings)
}

/// Refuses attention that does not reach back to the first token.
pub(super) fn sliding_window(
    settings: &Settings,
    architecture: Architecture,
    max_positions: usize,
) -> Result<()> {
    let layers: Vec<String> = settings.get("layer_types", "a list")?.unwrap_or_default();
    if layers.iter().any(|layer| layer != "full_attention") {
        return Err(settings.unsupported("layer_types", "full_attention in every layer"));
    }
    if settings.flag("use_sliding_window", false)? {
        return Err(settings.unsupported("use_sliding_window", "false"));
    }
    // Qwen has a window only where `use_sliding_window` says so, Llama none at all.
    if architecture != Architecture::Mistral {
        return Ok(());
    }
    let window = match settings.has("sliding_window") {
        true => settings.get("sliding_window", "null or a number of tokens")?,
        false => Some(MISTRAL_SLIDING_WINDOW),
    };
    match window {
        Some(window) if window < max_positions => {
            let all = format!("null, or at least max_position_embeddings ({max_positions})");
            Err(settings.unsupported("sliding_window", all))
        }
        _ => Ok(()),
    }
}
