//! The CubeCL kernel: a unit a slot of a row.

use cubecl::prelude::*;

use crate::select::scored_rows::BUDGETS;

/// # Shapes
/// As [`super::label_scores`]'s; `lists` `[rows, width]` and `sources` `[rows, source_width]` where
/// rows share.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
#[allow(clippy::collapsible_if, reason = "kernels evaluate both sides of `&&`")]
pub(crate) fn label_scores_kernel<E: Float>(
    query: &[E],
    keys: &[E],
    offsets: &[i32],
    lengths: &[i32],
    channels: &[f32],
    budgets: &[f32],
    lists: &[f32],
    sources: &[f32],
    scores: &mut [f32],
    candidates: &mut [i32],
    wanted: &mut [i32],
    rows: usize,
    columns: usize,
    heads: usize,
    group: usize,
    head_dim: usize,
    labels: usize,
    width: usize,
    source_width: usize,
    layer: usize,
    period: usize,
    #[comptime] shares: bool,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= rows * columns {
        terminate!();
    }
    let (row, column) = (at / columns, at % columns);
    let (offset, length) = (offsets[row / group] as usize, lengths[row / group] as usize);
    let mut due = true;
    if shares {
        due = sources[row * source_width] as usize == row % heads;
        if source_width > 1 {
            if sources[row * source_width + 1] as usize != layer {
                due = false;
            }
        }
        if length % period != 0 {
            if lists[row * width] >= 0.0f32 {
                due = false;
            }
        }
    }
    let mut own = 0usize;
    let mut count = 0usize;
    let sinks = budgets[row * BUDGETS + 1] as usize;
    if due {
        count = budgets[row * BUDGETS] as usize;
        let ends = sinks + budgets[row * BUDGETS + 2] as usize;
        if length > ends {
            own = length - ends;
        }
    }
    if column == 0 {
        candidates[row] = i32::cast_from(own);
        wanted[row] = i32::cast_from(count);
    }
    if column < own {
        let from = (offset + sinks + column) * head_dim;
        let mut sum = 0.0f32;
        for label in 0..labels {
            let channel = channels[row * labels + label] as usize;
            let q = f32::cast_from(query[row * head_dim + channel]);
            sum += q * f32::cast_from(keys[from + channel]);
        }
        scores[at] = sum;
    }
}
