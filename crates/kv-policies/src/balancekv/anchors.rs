use std::ops::Range;

use burn::tensor::{Device, Int, Tensor};
use kv_core::Selection;

use crate::{KeyDiff, Observation, Result, Scorer};

/// The `count` tokens of `middle`, counted from its first, whose keys point away from the others' most.
pub(super) fn anchors(
    observation: &Observation<'_>,
    middle: &Range<usize>,
    count: usize,
) -> Result<Selection> {
    let [batch, kv_heads, ..] = observation.dims();
    if count == 0 {
        return Ok(Selection::new(vec![Vec::new(); batch * kv_heads])?);
    }
    let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, middle.start, middle.len());
    let (keys, values) = (part(observation.keys), part(observation.values));
    let scores = KeyDiff {}
        .prefill(&Observation { keys: &keys, values: &values, ..observation.clone() }, count)?;
    Ok(Selection::highest(scores, count)?)
}

/// The tokens of `middle` that are no anchors, which count from its first, `[P, n]`; there are some.
pub(super) fn without(
    anchors: &Selection,
    middle: &Range<usize>,
    device: &Device,
) -> Result<Tensor<2, Int>> {
    let pairs = anchors.pairs();
    let rest = anchors.others(&vec![middle.len(); pairs])?;
    Ok(rest.lists(&vec![middle.start; pairs], device)?.slots)
}
