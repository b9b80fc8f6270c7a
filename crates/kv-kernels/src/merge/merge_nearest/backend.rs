//! The backend trait of `merge_nearest`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::NearestConfig;
use super::args::{MergingPools, StepMerges};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait MergeNearestOps: Backend {
    /// Merges one victim of every range into its most similar slot, in place. Where there are
    /// logits, averages take them in first.
    fn merge_nearest(
        #[extension_type] pools: MergingPools<Self>,
        #[extension_type] merges: StepMerges<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self>;
}

#[cfg(feature = "gpu")]
impl MergeNearestOps for CubeBackend {
    fn merge_nearest(
        pools: MergingPools<Self>,
        merges: StepMerges<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self> {
        super::launch::run(pools, merges, config)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::MergeNearestOps;
    use crate::backend::host_buffers::{owned, rounded, slice, slice_mut, wide};
    use crate::backend::optional::OptionalFloat;
    use crate::merge::merge_nearest::NearestConfig;
    use crate::merge::merge_nearest::args::{MergingPools, StepMerges};
    use crate::merge::merge_nearest::reference::Slots as MergingReference;
    use crate::slots::scatter_rows::backend::ScatterRowsOps;

    impl MergeNearestOps for Flex {
        fn merge_nearest(
            pools: MergingPools<Self>,
            merges: StepMerges<Self>,
            config: NearestConfig,
        ) -> MergingPools<Self> {
            let [_, head_dim] = pools.keys.layout().shape().dims();
            let (mut keys, mut values) =
                (wide(&pools.keys).into_vec(), wide(&pools.values).into_vec());
            let [mut log_weights, mut log_scores, mut log_samples] =
                [pools.log_weights, pools.log_scores, pools.log_samples].map(owned);
            let [mut votes, mut votes_high] = [pools.votes, pools.votes_high].map(owned);
            let mut inherited = pools.inherited.into_option().map(owned);
            let StepMerges { offsets, lengths, victims, goes, queries, logits, takes } = merges;
            let ints = [offsets, lengths, victims, goes].map(|tensor| tensor.to_contiguous());
            let changed = MergingReference {
                keys: &mut keys,
                values: &mut values,
                log_weights: slice_mut::<f32>(&mut log_weights),
                log_scores: slice_mut::<f32>(&mut log_scores),
                log_samples: slice_mut::<f32>(&mut log_samples),
                votes: slice_mut::<f32>(&mut votes),
                votes_high: slice_mut::<f32>(&mut votes_high),
                inherited: inherited.as_mut().map(slice_mut::<f32>),
                takes: &takes.as_ref().map(wide).unwrap_or_default(),
                head_dim,
            }
            .merge(
                std::array::from_fn(|i| slice(&ints[i])),
                &queries.as_ref().map(wide).unwrap_or_default(),
                &logits.as_ref().map(wide).unwrap_or_default(),
                config,
            );
            let count = changed.len();
            let slots: Vec<i32> = changed.iter().map(|&slot| slot as i32).collect();
            let slots = FlexTensor::from_data(TensorData::new(slots, [count]));
            let write = |pool: FlexTensor, all: &[f32]| {
                let rows = changed.iter().flat_map(|&slot| &all[slot * head_dim..][..head_dim]);
                let rows = rounded(rows.copied().collect(), [count, head_dim], pool.dtype());
                if count == 0 { pool } else { Self::scatter_rows(pool, slots.clone(), rows) }
            };
            MergingPools {
                keys: write(pools.keys, &keys),
                values: write(pools.values, &values),
                log_weights,
                log_scores,
                log_samples,
                votes,
                votes_high,
                inherited: OptionalFloat::of(inherited),
            }
        }
    }
}
