//! Tokens that are merged, or of which a subset stands for all.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use crate::average_scores::{AverageWeights, kernel as average_scores};
use crate::balance::WalkConfig;
use crate::extension::{Classes, MergeOps, MergedPools, Merges, MergingPools, StepMerges, Walk};
use crate::gpu::{empty_like, grid, is_cuda};
use crate::merge_nearest::NearestConfig;
use crate::merge_slots::MergeConfig;
use crate::rankings::kernel as rankings;
use crate::{balance, merge_nearest, merge_slots, nearest_slots};

impl MergeOps for CubeBackend {
    fn balance(
        keys: CubeTensor,
        values: CubeTensor,
        walk: Walk<Self>,
        config: WalkConfig,
    ) -> Classes<Self> {
        balance::launch::run(keys, values, walk, config)
    }

    fn nearest_slots(
        keys: CubeTensor,
        of: CubeTensor,
        of_counts: CubeTensor,
        among: CubeTensor,
        among_counts: CubeTensor,
        earlier: bool,
    ) -> (CubeTensor, CubeTensor) {
        nearest_slots::launch::run(keys, of, of_counts, among, among_counts, earlier)
    }

    fn rankings(scores: CubeTensor) -> CubeTensor {
        let [rows, columns] = scores.shape().dims();
        let scores = into_contiguous(scores);
        let ranked = empty_like(&scores, scores.shape(), DType::I32);
        let none = empty_like(&scores, Shape::from([1]), DType::F32);
        let any = empty_like(&scores, Shape::from([1]), DType::I32);
        // SAFETY: shapes were checked, and the kernel guards its accesses.
        unsafe {
            rankings::rankings_kernel::launch_unchecked(
                &scores.client.clone(),
                grid(rows * columns.div_ceil(rankings::UNITS)),
                CubeDim::new_1d(rankings::UNITS as u32),
                scores.into_buffer_arg(),
                any.clone().into_buffer_arg(),
                any.into_buffer_arg(),
                ranked.clone().into_buffer_arg(),
                none.into_buffer_arg(),
                rows,
                columns,
                rankings::Says::Index,
            );
        }
        ranked
    }

    fn turns_of_groups(scores: CubeTensor, ranked: CubeTensor, leaders: CubeTensor) -> CubeTensor {
        let [rows, columns] = scores.shape().dims();
        let [scores, ranked, leaders] = [scores, ranked, leaders].map(into_contiguous);
        let joins = empty_like(&scores, scores.shape(), DType::I32);
        let [sums, turns] = [(); 2].map(|()| empty_like(&scores, scores.shape(), DType::F32));
        let none = empty_like(&scores, Shape::from([1]), DType::I32);
        let client = scores.client.clone();
        let cube = CubeDim::new_1d(rankings::UNITS as u32);
        // SAFETY: shapes were checked; places are taken at their word.
        unsafe {
            rankings::joined_sums_kernel::launch_unchecked(
                &client,
                grid(rows),
                cube,
                scores.into_buffer_arg(),
                ranked.clone().into_buffer_arg(),
                leaders.into_buffer_arg(),
                joins.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                rows,
                columns,
                !is_cuda(&client),
            );
            rankings::rankings_kernel::launch_unchecked(
                &client,
                grid(rows * columns.div_ceil(rankings::UNITS)),
                cube,
                sums.into_buffer_arg(),
                ranked.into_buffer_arg(),
                joins.into_buffer_arg(),
                none.into_buffer_arg(),
                turns.clone().into_buffer_arg(),
                rows,
                columns,
                rankings::Says::Turn,
            );
        }
        turns
    }

    fn merge_slots(
        keys: CubeTensor,
        values: CubeTensor,
        merges: Merges<Self>,
        config: MergeConfig,
    ) -> MergedPools<Self> {
        merge_slots::launch::run(keys, values, merges, config)
    }

    fn merge_nearest(
        pools: MergingPools<Self>,
        merges: StepMerges<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self> {
        merge_nearest::launch::run(pools, merges, config)
    }

    fn average_scores(
        log_scores: CubeTensor,
        log_samples: CubeTensor,
        logits: CubeTensor,
        log_weights: CubeTensor,
        weighted: bool,
        weights: AverageWeights,
    ) -> (CubeTensor, CubeTensor) {
        let [slots, group] = logits.shape().dims();
        let client = logits.client.clone();
        let cube_dim = CubeDim::new(&client, slots);
        average_scores::average_scores_kernel::launch(
            &client,
            calculate_cube_count_elemwise(&client, slots, cube_dim),
            cube_dim,
            log_scores.clone().into_buffer_arg(),
            log_samples.clone().into_buffer_arg(),
            into_contiguous(logits).into_buffer_arg(),
            into_contiguous(log_weights).into_buffer_arg(),
            slots,
            weights.new,
            weights.old,
            group,
            weighted,
        );
        (log_scores, log_samples)
    }
}
