//! What products do with their sums before they store them.

use cubecl::prelude::*;

use super::args::EpilogueConfig;

/// What a product writes, and what is added before.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ProductOutputs<E: Float> {
    /// `[N]`, where [`EpilogueConfig::biased`]; `N` is `outputs`, or twice as many where gated.
    pub(super) bias: Box<[E]>,
    /// `[M, outputs]`, where [`EpilogueConfig::adds`].
    pub(super) residual: Box<[E]>,
    /// `[M, outputs]`
    pub(super) y: Box<[E]>,
    /// `M`
    pub(super) rows: usize,
    pub(super) outputs: usize,
}

/// What is added to the result at `to`.
#[cube]
pub(super) fn added_to<E: Float>(
    residual: &[E],
    to: usize,
    #[comptime] epilogue: EpilogueConfig,
) -> f32 {
    let mut added = 0.0f32;
    if comptime!(epilogue.adds) {
        added = f32::cast_from(residual[to]);
    }
    added
}

/// Output `output` of `outputs` from its sum; where gated, from the gate's and that of what it
/// gates. `added` is [`added_to`]'s.
#[cube]
pub(super) fn finish<E: Float>(
    bias: &[E],
    added: f32,
    first: f32,
    second: f32,
    output: usize,
    outputs: usize,
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
        total += added;
    }
    E::cast_from(total)
}
