//! The rotary embedding's settings, in the form of transformers 4 and of transformers 5.

use super::RopeScaling;
use super::settings::Settings;
use crate::error::Result;

/// Base and scaling.
///
/// Transformers 4 writes `rope_theta` and `rope_scaling: {type | rope_type, ...}`; transformers 5
/// writes all of it into `rope_parameters`.
pub(super) fn rope(settings: &Settings) -> Result<(f64, RopeScaling)> {
    let (old, new) = (settings.value("rope_scaling"), settings.value("rope_parameters"));
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        return Err(settings.unsupported("rope_scaling", "either it or rope_parameters, not both"));
    }
    let base = settings.positive("rope_theta")?.unwrap_or(10_000.0);
    let (key, prefix) = match new {
        Some(_) => ("rope_parameters", "rope_parameters."),
        None => ("rope_scaling", "rope_scaling."),
    };
    let Some(map) = settings.get(key, "null or an object")? else {
        return Ok((base, RopeScaling::None));
    };
    let rope = Settings::nested(map, prefix);
    Ok((rope.positive("rope_theta")?.unwrap_or(base), scaling(&rope)?))
}

fn scaling(rope: &Settings) -> Result<RopeScaling> {
    // Inside `rope_parameters` or beside it, a partial rotation is a partial rotation.
    whole_rotation(rope)?;
    let key = if rope.has("rope_type") { "rope_type" } else { "type" };
    let kind: String = rope.get(key, "a string")?.unwrap_or_else(|| "default".into());
    let (scaling, parameters): (_, &[&str]) = match kind.as_str() {
        "default" => (RopeScaling::None, &[]),
        "linear" => {
            (RopeScaling::Linear { factor: rope.required_positive("factor")? }, &["factor"])
        }
        "llama3" => (llama3(rope)?, &["factor", "low_freq_factor", "high_freq_factor"]),
        _ => return Err(rope.unsupported(key, "default, linear, llama3")),
    };
    let common = [
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    ];
    for key in rope.keys() {
        if !common.contains(&key) && !parameters.contains(&key) && rope.value(key).is_some() {
            return Err(rope.unsupported(key, format!("rope type {kind} without it")));
        }
    }
    Ok(scaling)
}

fn llama3(rope: &Settings) -> Result<RopeScaling> {
    let low_freq_factor = rope.required_positive("low_freq_factor")?;
    let high_freq_factor = rope.required_positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        let above = format!("a number above low_freq_factor ({low_freq_factor})");
        return Err(rope.unsupported("high_freq_factor", above));
    }
    Ok(RopeScaling::Llama3 {
        factor: rope.required_positive("factor")?,
        low_freq_factor,
        high_freq_factor,
        original_max_positions: rope.required_size("original_max_position_embeddings")?,
    })
}

/// Refuses a rotation of only a part of each head.
pub(super) fn whole_rotation(settings: &Settings) -> Result<()> {
    match settings.get::<f64>("partial_rotary_factor", "1")? {
        Some(part) if part != 1.0 => Err(settings.unsupported("partial_rotary_factor", "1")),
        _ => Ok(()),
    }
}
