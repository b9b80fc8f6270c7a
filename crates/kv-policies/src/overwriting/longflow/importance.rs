//! Importance of slots behind a step's attention.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{Error, LayerCache};
use kv_kernels::{GroupReduction, NO_RECORD, value_norms};

use crate::policy::write_slots::RECORDS;
use crate::{DecodeView, Result, Scope};

/// `Σ α ‖v‖₁` of every slot over its group's query heads, `[S]` (equation 6); with [`Scope::Layer`]
/// also over all key-value heads.
pub(super) fn importance(view: &DecodeView<'_>, scope: Scope) -> Result<Tensor<1>> {
    let (logits, log_sum_exp) = view.logits()?;
    let shares = view.cache.probabilities(logits, log_sum_exp, GroupReduction::Sum)?;
    let scores = shares * value_norms(view.cache.values().clone());
    Ok(match scope {
        Scope::Head => scores,
        Scope::Layer => over_heads(view.cache, &scores),
    })
}

/// Raises each slot's record, `max_t (ln I_t − t ln γ)`, to its importance at this step, `[S]`,
/// where that breaks it. `t` is the newest token's position, `[B]`. A record stays where the
/// importance is NaN.
pub(super) fn remember(
    cache: &mut LayerCache,
    importance: Tensor<1>,
    position: &Tensor<1, Int>,
    decay: f64,
) -> Result<()> {
    let rows = cache.slot_ranges().clone().div_scalar(cache.layout().kv_heads() as i32);
    let growth = position.clone().float().cast(DType::F32).mul_scalar(-decay.ln());
    let now = importance.log() + growth.select(0, rows);
    let before = cache.track(RECORDS).cloned().unwrap_or_else(|| now.full_like(NO_RECORD));
    let broken = now.clone().greater(before.clone());
    Ok(cache.set_track(RECORDS, before.mask_where(broken, now), NO_RECORD)?)
}

/// The records of all slots, `[S]`.
pub(super) fn records(cache: &LayerCache) -> Result<Tensor<1>> {
    let none = || Error::InvalidPlan { what: "step", reason: "no step was remembered".into() };
    Ok(cache.track(RECORDS).cloned().ok_or_else(none)?)
}

/// Each slot's score summed over the heads of its layer, which hold equally many slots in one
/// order.
fn over_heads(cache: &LayerCache, scores: &Tensor<1>) -> Tensor<1> {
    let (batch, heads) = (cache.layout().batch(), cache.layout().kv_heads());
    let offsets = cache.ranges().offsets.clone().reshape([batch, heads]);
    let slots = scores.dims()[0];
    let device = scores.device();
    let ranges = cache.slot_ranges().clone();
    // A slot's place within its head range.
    let slot = Tensor::<1, Int>::arange(0..slots as i64, (&device, DType::I32));
    let place = slot - offsets.clone().reshape([batch * heads]).select(0, ranges.clone());
    let rows = ranges.div_scalar(heads as i32);
    let of_head = |head: usize| {
        let first = offsets.clone().narrow(1, head, 1).reshape([batch]).select(0, rows.clone());
        // Slots beyond a head range are not live, and their sums do not count.
        scores.clone().select(0, (first + place.clone()).clamp(0, slots as i32 - 1))
    };
    (1..heads).fold(of_head(0), |sum, head| sum + of_head(head))
}
