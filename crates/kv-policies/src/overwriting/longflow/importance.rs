//! Importance of slots behind a step's attention.

use burn::tensor::{DType, Int, Tensor};
use kv_core::LayerCache;
use kv_kernels::{GroupReduction, value_norms};

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
