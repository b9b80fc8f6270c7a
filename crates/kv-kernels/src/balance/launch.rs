//! Launches `balance` on CubeCL devices: the mean keys where keys are centred by lists, then the
//! walk.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::{BalanceArgs, CentreArgs, Classes, DrawArgs};
use super::walk::{BlockClassesLaunch, CentresLaunch, TokenListsLaunch, WalkRulesLaunch};
use super::{BalanceStrategy, WalkConfig, mean, plain, tensor_core};
use crate::backend::client::{elem_type, empty_like, grid, unread_like, unrolled};
use crate::components::pool::PoolLaunch;

/// Units of a plane that has matrix instructions.
const PLANE: usize = 32;

/// Splits every block into classes.
pub(super) fn run(walk: BalanceArgs<CubeBackend>) -> Classes<CubeBackend> {
    let config = walk.config;
    let keys = into_contiguous(walk.keys);
    let [valued, weighted] = [&walk.values, &walk.weights].map(|tensor| tensor.as_ref().is_some());
    let values = walk.values.or_stand_in(&keys);
    let client = keys.client.clone();
    let [_, head_dim] = keys.shape().dims();
    let [rows, longest] = walk.lists.shape().dims();
    let blocks = longest.div_ceil(config.block);
    let [signs, kept, failed] = [longest, (longest / 2).max(1), blocks]
        .map(|width| empty_like(&keys, Shape::from([rows, width]), DType::I32));
    let [lists, counts] = [walk.lists, walk.counts].map(into_contiguous);
    let centred = !matches!(walk.centre, CentreArgs::None);
    let (means, centres) = match walk.centre {
        CentreArgs::None => (unread_like(&keys), 1),
        CentreArgs::List => (list_means(&keys, &lists, &counts), 1),
        CentreArgs::Block(means) => (into_contiguous(means), blocks),
    };
    let log_gamma = into_contiguous(walk.log_gamma);
    let weights = walk.weights.or_stand_in(&log_gamma);
    // The kernel reads seeds or numbers.
    let (seeds, numbers, seeded) = match walk.draws {
        DrawArgs::Seeds(seeds) => (into_contiguous(seeds), log_gamma.clone(), true),
        DrawArgs::Numbers(numbers) => (counts.clone(), into_contiguous(numbers), false),
    };
    let WalkConfig { block, span, scale, value_offset, halves, .. } = config;
    // Both kernels take these arguments.
    macro_rules! balance {
        ($kernel:path, $units:expr, [$($lanes:expr)?], $blueprint:expr) => {
            // SAFETY: shapes were checked; the kernel stays within the lists and the slots that
            // they name.
            unsafe {
                $kernel(
                    &client,
                    grid(rows * blocks),
                    CubeDim::new_1d($units as u32),
                    $($lanes,)?
                    PoolLaunch::new(keys.clone().into_buffer_arg(), values.into_buffer_arg()),
                    TokenListsLaunch::new(
                        lists.into_buffer_arg(),
                        counts.into_buffer_arg(),
                        rows,
                        longest,
                    ),
                    CentresLaunch::new(means.into_buffer_arg(), centres),
                    WalkRulesLaunch::new(
                        log_gamma.into_buffer_arg(),
                        weights.into_buffer_arg(),
                        seeds.into_buffer_arg(),
                        numbers.into_buffer_arg(),
                        scale,
                        value_offset,
                    ),
                    BlockClassesLaunch::new(
                        signs.clone().into_buffer_arg(),
                        kept.clone().into_buffer_arg(),
                        failed.clone().into_buffer_arg(),
                    ),
                    $blueprint,
                    elem_type(keys.dtype),
                )
            }
        };
    }
    if config.strategy == BalanceStrategy::TensorCore {
        let planes = block.div_ceil(PLANE);
        balance!(
            tensor_core::tensor_core_kernel::launch_unchecked,
            planes * PLANE,
            [],
            tensor_core::Blueprint {
                block,
                planes,
                head_dim,
                centred,
                valued,
                weighted,
                seeded,
                halves
            }
        );
    } else {
        let lanes = lanes_of(head_dim);
        balance!(
            plain::plain_kernel::launch_unchecked,
            block,
            [lanes],
            plain::Blueprint {
                block,
                span,
                columns: head_dim / lanes,
                turns: unrolled(&client, plain::TURNS),
                centred,
                valued,
                weighted,
                seeded,
                halves
            }
        );
    }
    Classes { signs, kept, failed }
}

fn lanes_of(head_dim: usize) -> usize {
    if head_dim.is_multiple_of(4) { 4 } else { 1 }
}

/// The mean key of every list, `[P, D]`, f32.
fn list_means(keys: &CubeTensor, lists: &CubeTensor, counts: &CubeTensor) -> CubeTensor {
    let client = keys.client.clone();
    let [_, head_dim] = keys.shape().dims();
    let [rows, longest] = lists.shape().dims();
    let chunks = longest.div_ceil(mean::CHUNK);
    let lanes = lanes_of(head_dim);
    let sums = empty_like(keys, Shape::from([rows * chunks * head_dim]), DType::F32);
    let means = empty_like(keys, Shape::from([rows * head_dim]), DType::F32);
    // SAFETY: as in `run`.
    unsafe {
        mean::chunk_sums_kernel::launch_unchecked(
            &client,
            grid(rows * chunks),
            CubeDim::new_1d(mean::UNITS as u32),
            lanes,
            keys.clone().into_buffer_arg(),
            TokenListsLaunch::new(
                lists.clone().into_buffer_arg(),
                counts.clone().into_buffer_arg(),
                rows,
                longest,
            ),
            sums.clone().into_buffer_arg(),
            head_dim / lanes,
            elem_type(keys.dtype),
        );
        mean::means_kernel::launch_unchecked(
            &client,
            grid((rows * head_dim).div_ceil(mean::UNITS)),
            CubeDim::new_1d(mean::UNITS as u32),
            sums.into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            means.clone().into_buffer_arg(),
            rows * head_dim,
            longest,
            head_dim,
        );
    }
    means
}
