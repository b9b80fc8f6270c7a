//! What products do with their sums before they store them.

use cubecl::prelude::*;

use crate::extension::EpilogueConfig;

/// Output `output` of `outputs`, stored at `to`, from its sum; where gated, from the gate's and
/// that of what it gates.
#[cube]
pub(super) fn finish<E: Float>(
    bias: &[E],
    residual: &[E],
    first: f32,
    second: f32,
    output: usize,
    outputs: usize,
    to: usize,
    #[comptime] epilogue: EpilogueConfig,
) -> E {
    let mut total = first;
    if comptime!(epilogue.biased) {
        total += f32::cast_from(bias[output]);
    }
    if comptime!(epilogue.gated) {
        let mut up = second;
        if comptime!(epilogue.biased) {
            up += f32::cast_from(bias[outputs + output]);
        }
        total = total / (1.0f32 + (-total).exp()) * up;
    }
    if comptime!(epilogue.adds) {
        total += f32::cast_from(residual[to]);
    }
    E::cast_from(total)
}
