//! Steers the size of each range's sets so that steps drop a target share of attention: `k ← k ·
//! exp(clamp(gain · (dropped / target − 1), −1, 1))`.

#[cfg(feature = "gpu")]
use burn::backend::TensorMetadata;
#[cfg(feature = "gpu")]
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
#[cfg(feature = "gpu")]
use cubecl::prelude::*;

use super::SteerOptions;
use super::table::*;
#[cfg(feature = "gpu")]
use crate::backend::client::grid;

/// Changes the table in its own buffer, by the kernel.
#[cfg(feature = "gpu")]
pub(crate) fn steer(table: CubeTensor, dropped: CubeTensor, options: SteerOptions) -> CubeTensor {
    const UNITS: u32 = 64;
    let (table, dropped) = (into_contiguous(table), into_contiguous(dropped));
    let [total_kv_heads, row] = table.shape().dims();
    let [_, group] = dropped.shape().dims();
    // SAFETY: shapes were checked.
    unsafe {
        steer_kernel::launch_unchecked(
            &table.client.clone(),
            grid(total_kv_heads.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            table.clone().into_buffer_arg(),
            dropped.into_buffer_arg(),
            SteeredSizesLaunch::new(options.target, options.gain, options.most as f32),
            total_kv_heads,
            row,
            group,
        );
    }
    table
}

/// The next size before rounding, where a step has dropped the share `dropped`.
pub(super) fn steered(exact: f32, dropped: f32, options: SteerOptions) -> f32 {
    let error = (dropped / options.target - 1.0) * options.gain;
    (exact * error.clamp(-MOST_CHANGE, MOST_CHANGE).exp()).clamp(1.0, options.most as f32)
}

/// The largest change of a size's logarithm in one step.
const MOST_CHANGE: f32 = 1.0;

/// The op in plain loops. `dropped` `[P, G]` counts as a mean over each range's queries.
pub(crate) fn reference(
    table: &mut [i32],
    dropped: &[f32],
    total_kv_heads: usize,
    options: SteerOptions,
) {
    let (row, group) = (table.len() / total_kv_heads, dropped.len() / total_kv_heads);
    for (own, dropped) in table.chunks_exact_mut(row).zip(dropped.chunks_exact(group)) {
        let mean = dropped.iter().sum::<f32>() / group as f32;
        let held = f32::from_bits(own[EXACT_TOP] as u32);
        // `TOP` may have been set anew since: it counts then.
        let held = if held as i32 == own[TOP] { held } else { own[TOP] as f32 };
        let exact = steered(held, mean, options);
        own[EXACT_TOP] = exact.to_bits() as i32;
        own[TOP] = exact as i32;
        own[MEASURED] = mean.to_bits() as i32;
    }
}

/// [`SteerOptions`] as the kernel takes them.
#[cfg(feature = "gpu")]
#[derive(CubeType, CubeLaunch)]
pub(super) struct SteeredSizes {
    /// The share of attention that steps shall drop.
    target: f32,
    /// The change of a size's logarithm for each unit of the relative error.
    gain: f32,
    /// The largest size.
    most: f32,
}

/// One unit steers a range.
///
/// # Shapes
/// `table` `[P, row]`, `dropped` `[P, G]`.
#[cfg(feature = "gpu")]
#[cube(launch_unchecked)]
pub(super) fn steer_kernel(
    table: &mut [i32],
    dropped: &[f32],
    sizes: &SteeredSizes,
    total_kv_heads: usize,
    row: usize,
    group: usize,
) {
    let kv_head = ABSOLUTE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    let own = kv_head * row;
    let mut sum = 0.0f32;
    for g in 0..group {
        sum += dropped[kv_head * group + g];
    }
    let top = table[own + TOP];
    let mut held = f32::reinterpret(table[own + EXACT_TOP]);
    if i32::cast_from(held) != top {
        held = f32::cast_from(top);
    }
    let mean = sum / f32::cast_from(group);
    let error = (mean / sizes.target - 1.0f32) * sizes.gain;
    let change = min(max(error, -MOST_CHANGE), MOST_CHANGE);
    let exact = min(max(held * change.exp(), 1.0f32), sizes.most);
    table[own + EXACT_TOP] = i32::reinterpret(exact);
    table[own + TOP] = i32::cast_from(exact);
    table[own + MEASURED] = i32::reinterpret(mean);
}
