//! Schedules that begin at a layer and go on with depth (PrHS, eq. 15 and 16).

use crate::Result;
use crate::policy::check::Check;

/// The layer `ℓ_s` behind which a schedule begins, counted from 1: three quarters of the layers,
/// rounded down, unless `start` is given.
pub(crate) fn start_layer(start: Option<usize>, layers: usize) -> usize {
    start.unwrap_or(3 * layers / 4)
}

/// The warning about a schedule that leaves all of a model's layers as they are.
pub(crate) fn idle(what: &str, start: Option<usize>, layers: usize) -> Vec<String> {
    let start = start_layer(start, layers);
    let idle = (start >= layers).then(|| {
        format!(
            "{what} change nothing in this model: they begin behind layer {start} of {layers}; \
             `start` may name an earlier one"
        )
    });
    idle.into_iter().collect()
}

/// Checks a schedule's base and exponent, by their names.
pub(crate) fn check_schedule(policy: &str, parameters: [(&str, f64); 2]) -> Result<()> {
    let [(base_name, base), (name, exponent)] = parameters;
    let check = Check(policy);
    check.that(base_name, base, base > 0.0 && base <= 1.0, "above 0 and at most 1")?;
    let holds = exponent >= 0.0 && exponent.is_finite();
    check.that(name, exponent, holds, "a number of at least 0")
}
