//! The backend trait of `merge_slots`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{MergeSlotsArgs, MergedPools};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait MergeSlotsOps: Backend {
    /// Merges victims into kept slots of keys and values, in place.
    fn merge_slots(#[extension_type] args: MergeSlotsArgs<Self>) -> MergedPools<Self>;
}

#[cfg(feature = "gpu")]
impl MergeSlotsOps for CubeBackend {
    fn merge_slots(args: MergeSlotsArgs<Self>) -> MergedPools<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::MergeSlotsOps;
    use crate::backend::host_buffers::{rounded, slice, wide};
    use crate::merge::merge_slots::args::{MergeSlotsArgs, MergedPools};
    use crate::merge::merge_slots::reference::Groups;
    use crate::slots::scatter_rows::backend::ScatterRowsOps;

    impl MergeSlotsOps for Flex {
        fn merge_slots(merges: MergeSlotsArgs<Self>) -> MergedPools<Self> {
            let MergeSlotsArgs { keys, values, config, .. } = merges;
            let [_, head_dim] = keys.layout().shape().dims();
            let shape: [usize; 2] = merges.kept.layout().shape().dims();
            let [victim_weights, kept_weights] =
                [&merges.victim_weights, &merges.kept_weights].map(wide);
            let [from_keys, from_values, queries] =
                [&merges.from_keys, &merges.from_values, &merges.queries]
                    .map(|tensor| tensor.as_ref().map(wide).unwrap_or_default());
            let [victims, victim_counts, targets, kept, kept_counts] = [
                merges.victims,
                merges.victim_counts,
                merges.targets,
                merges.kept,
                merges.kept_counts,
            ]
            .map(|tensor| tensor.to_contiguous());
            let [.., numbers]: [usize; 3] = merges.kept_weights.layout().shape().dims();
            let groups = Groups {
                from_keys: &from_keys,
                from_values: &from_values,
                victims: slice::<i32>(&victims),
                victim_counts: slice::<i32>(&victim_counts),
                targets: slice::<i32>(&targets),
                victim_weights: &victim_weights,
                kept: slice::<i32>(&kept),
                kept_counts: slice::<i32>(&kept_counts),
                kept_weights: &kept_weights,
                queries: &queries,
                head_dim,
                config,
            };
            let (written, weights, guarded) = groups.merge(&wide(&keys), &wide(&values));
            let slots: Vec<i32> = written.iter().map(|row| row.slot as i32).collect();
            let count = slots.len();
            let slots = FlexTensor::from_data(TensorData::new(slots, [count]));
            let (new_keys, new_values): (Vec<_>, Vec<_>) =
                written.into_iter().map(|row| (row.key, row.value)).unzip();
            let write = |pool: FlexTensor, rows: Vec<Vec<f32>>| {
                let rows = rounded(rows.concat(), [count, head_dim], pool.dtype());
                if count == 0 { pool } else { Self::scatter_rows(pool, slots.clone(), rows) }
            };
            let [rows, n_kept] = shape;
            MergedPools {
                keys: write(keys, new_keys),
                values: write(values, new_values),
                weights: FlexTensor::from_data(TensorData::new(weights, [rows, n_kept, numbers])),
                guarded: FlexTensor::from_data(TensorData::new(guarded, shape)),
            }
        }
    }
}
