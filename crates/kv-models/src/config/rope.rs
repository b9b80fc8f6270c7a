//! The rotary embedding's settings, in the form of transformers 4 and of transformers 5.

use super::RopeScaling;
use super::settings::{MAX_SIZE, Settings};
use crate::error::Result;

/// The rotary embedding of a configuration.
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
    /// Positions that it reaches.
    pub(super) max_positions: usize,
}

/// Reads the rotary embedding of a configuration of `max_positions` (`max_position_embeddings`).
///
/// Transformers 4 writes `rope_theta` and `rope_scaling: {type | rope_type, ...}`; transformers 5
/// writes all of it into `rope_parameters`.
pub(super) fn rope(settings: &Settings, max_positions: usize) -> Result<Rope> {
    let (old, new) = (settings.value("rope_scaling"), settings.value("rope_parameters"));
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        return Err(settings.unsupported("rope_scaling", "either it or rope_parameters, not both"));
    }
    let theta = settings.positive("rope_theta")?.unwrap_or(10_000.0);
    let (key, prefix) = match new {
        Some(_) => ("rope_parameters", "rope_parameters."),
        None => ("rope_scaling", "rope_scaling."),
    };
    let Some(map) = settings.get(key, "null or an object")? else {
        return Ok(Rope { theta, scaling: RopeScaling::None, max_positions });
    };
    let rope = Settings::nested(map, prefix);
    let scaling = scaling(settings, &rope, max_positions)?;
    let max_positions = match scaling {
        RopeScaling::Yarn { factor, original_max_positions, .. }
        | RopeScaling::Dynamic { factor, original_max_positions } => {
            max_positions.max(reach(&rope, factor, original_max_positions)?)
        }
        _ => max_positions,
    };
    Ok(Rope { theta: rope.positive("rope_theta")?.unwrap_or(theta), scaling, max_positions })
}

/// Positions that a context scaled by a factor has.
fn reach(rope: &Settings, factor: f64, original: usize) -> Result<usize> {
    let most = MAX_SIZE as f64 / original as f64;
    if factor > most {
        return Err(rope.unsupported("factor", format!("at most {most}")));
    }
    Ok((factor * original as f64) as usize)
}

fn scaling(settings: &Settings, rope: &Settings, max_positions: usize) -> Result<RopeScaling> {
    // A partial rotation may stand inside `rope_parameters` or beside it.
    whole_rotation(rope)?;
    let key = if rope.has("rope_type") { "rope_type" } else { "type" };
    let kind: String = rope.get(key, "a string")?.unwrap_or_else(|| "default".into());
    let (scaling, parameters): (_, &[&str]) = match kind.as_str() {
        "default" => (RopeScaling::None, &[]),
        "linear" => (RopeScaling::Linear { factor: required_factor(rope)? }, &["factor"]),
        "llama3" => (llama3(rope)?, &["factor", "low_freq_factor", "high_freq_factor"]),
        "yarn" => {
            // A first context beside the object takes precedence over one inside it.
            let of = |settings: &Settings| settings.size("original_max_position_embeddings");
            let original = of(settings)?.or(of(rope)?).unwrap_or(max_positions);
            (yarn(rope, max_positions, original)?, &YARN)
        }
        "dynamic" => {
            let factor = required_factor(rope)?;
            (RopeScaling::Dynamic { factor, original_max_positions: max_positions }, &["factor"])
        }
        _ => return Err(rope.unsupported(key, "default, linear, llama3, yarn, dynamic")),
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

/// How many times longer a context becomes. Factors below 1 would shrink the context;
/// `transformers` warns of them.
fn factor(rope: &Settings) -> Result<Option<f64>> {
    match rope.positive("factor")? {
        Some(factor) if factor < 1.0 => Err(rope.unsupported("factor", "a number of at least 1")),
        factor => Ok(factor),
    }
}

fn required_factor(rope: &Settings) -> Result<f64> {
    factor(rope)?.ok_or_else(|| rope.missing("factor"))
}

/// Parameters of YaRN.
const YARN: [&str; 7] = [
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
];

/// As `_compute_yarn_parameters` of `transformers` reads them.
fn yarn(rope: &Settings, max_positions: usize, original: usize) -> Result<RopeScaling> {
    let factor = factor(rope)?.unwrap_or(max_positions as f64 / original as f64);
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let inferred = match (rope.positive("mscale")?, rope.positive("mscale_all_dim")?) {
        (Some(mscale), Some(all_dim)) => scale(mscale) / scale(all_dim),
        _ => scale(1.0),
    };
    let beta_slow = rope.positive("beta_slow")?.unwrap_or(1.0);
    let beta_fast = rope.positive("beta_fast")?.unwrap_or(32.0);
    if beta_fast < beta_slow {
        let least = format!("a number of at least beta_slow ({beta_slow})");
        return Err(rope.unsupported("beta_fast", least));
    }
    Ok(RopeScaling::Yarn {
        factor,
        original_max_positions: original,
        attention_factor: rope.positive("attention_factor")?.unwrap_or(inferred),
        beta_fast,
        beta_slow,
        truncate: rope.flag("truncate", true)?,
    })
}

fn llama3(rope: &Settings) -> Result<RopeScaling> {
    let low_freq_factor = rope.required_positive("low_freq_factor")?;
    let high_freq_factor = rope.required_positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        let above = format!("a number above low_freq_factor ({low_freq_factor})");
        return Err(rope.unsupported("high_freq_factor", above));
    }
    Ok(RopeScaling::Llama3 {
        factor: required_factor(rope)?,
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
