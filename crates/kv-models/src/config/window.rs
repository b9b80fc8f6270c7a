//! How far attention reaches back.

use super::Architecture;
use super::settings::Settings;
use crate::error::Result;

/// What `transformers` assumes where `sliding_window` is absent (`null` means no window).
const SLIDING_WINDOW: usize = 4096;

/// What `transformers` assumes where Qwen's `max_window_layers` is absent.
const MAX_WINDOW_LAYERS: usize = 28;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// The window of the layers that have one, in tokens; `None` if all attend to all tokens.
///
/// Where `model_type` names another family than `architectures`, a `sliding_window` that is given
/// holds if either family has windows: tokens beyond it would be attended to untrained.
pub(super) fn sliding_window(
    settings: &Settings,
    architecture: Architecture,
) -> Result<Option<usize>> {
    let window = of_family(settings, architecture)?;
    let model_type: Option<String> = settings.get("model_type", "a string")?;
    let other = Architecture::ALL
        .into_iter()
        .find(|other| *other != architecture && model_type.as_deref() == Some(other.model_type()));
    match other {
        Some(other) if window.is_none() && settings.value("sliding_window").is_some() => {
            of_family(settings, other)
        }
        _ => Ok(window),
    }
}

/// The window that a family's layers have by these settings.
fn of_family(settings: &Settings, architecture: Architecture) -> Result<Option<usize>> {
    let types: Option<Vec<String>> = settings.get("layer_types", "a list")?;
    let known = |kind: &String| [FULL, SLIDING].contains(&kind.as_str());
    if !types.iter().flatten().all(known) {
        return Err(settings.unsupported("layer_types", format!("{FULL}, {SLIDING}")));
    }
    let slides = types.as_ref().map(|types| types.iter().any(|kind| kind == SLIDING));
    let size = || match settings.has("sliding_window") {
        true => settings.size("sliding_window"),
        false => Ok(Some(SLIDING_WINDOW)),
    };
    let window = match architecture {
        Architecture::Llama => {
            if settings.flag("use_sliding_window", false)? {
                return Err(settings.unsupported("use_sliding_window", "false"));
            }
            None
        }
        // All layers have the window, whatever `layer_types` says.
        Architecture::Mistral => size()?,
        Architecture::Ministral => size()?.filter(|_| slides.unwrap_or(true)),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let from = settings.get("max_window_layers", "a number of layers")?;
            let from: usize = from.unwrap_or(MAX_WINDOW_LAYERS);
            let layers = settings.required_size("num_hidden_layers")?;
            match settings.flag("use_sliding_window", false)? {
                true => size()?.filter(|_| slides.unwrap_or(from < layers)),
                false => None,
            }
        }
    };
    match window {
        None if slides == Some(true) => {
            Err(settings.unsupported("layer_types", format!("{FULL} without `sliding_window`")))
        }
        window => Ok(window),
    }
}
