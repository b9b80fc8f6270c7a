use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
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

/// The tokens of `middle` that are no anchors, which count from its first, `[P, n]`.
pub(super) fn without(
    anchors: &Selection,
    middle: &Range<usize>,
    device: &Device,
) -> Tensor<2, Int> {
    let pairs = anchors.pairs();
    if anchors.total() == 0 {
        let all = middle.start as i64..middle.end as i64;
        let all = Tensor::<1, Int>::arange(all, (device, DType::I32));
        return all.unsqueeze::<2>().repeat_dim(0, pairs);
    }
    let rest: Vec<i32> = anchors
        .kept()
        .iter()
        .flat_map(|anchors| {
            // Both ascend.
            let mut anchors = anchors.iter().peekable();
            let all = 0..middle.len() as u32;
            all.filter(move |at| anchors.next_if_eq(&at).is_none())
                .map(|at| middle.start as i32 + at as i32)
        })
        .collect();
    let width = rest.len() / pairs;
    Tensor::from_data(TensorData::new(rest, [pairs, width]), (device, DType::I32))
}
