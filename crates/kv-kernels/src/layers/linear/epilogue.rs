//! The end of a product: bias, gate and residual, between the sums and the stored outputs.

use cubecl::prelude::*;

use super::args::EpilogueConfig;

/// The output of a product, and the tensors that are added to it.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ProductOutputs<E: Float> {
    /// `[N]`, where [`EpilogueConfig::biased`]; `N` is `outputs`, or `2 outputs` where gated.
    pub(super) bias: Box<[E]>,
    /// `[M, outputs]`, where [`EpilogueConfig::adds`].
    pub(super) residual: Box<[E]>,
    /// `[M, outputs]`
    pub(super) y: Box<[E]>,
    /// `M`
    pub(super) rows: usize,
    pub(super) outputs: usize,
}

/// The residual of the result at `to`, or 0.
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

/// [`finish_wide`], rounded.
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
    E::cast_from(finish_wide::<E>(bias, added, first, second, output, outputs, epilogue))
}

/// The output `output` of `outputs`, from its sum; where gated, from the sums of the gate and of
/// the gated output. `added` is the result of [`added_to`].
#[cube]
pub(super) fn finish_wide<E: Float>(
    bias: &[E],
    added: f32,
    first: f32,
    second: f32,
    output: usize,
    outputs: usize,
    #[comptime] epilogue: EpilogueConfig,
) -> f32 {
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
    total
}
