//! Settings that would change the computation in a way that is not implemented.

use super::rope;
use super::settings::Settings;
use crate::error::Result;

/// Refuses settings that no architecture supports.
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
