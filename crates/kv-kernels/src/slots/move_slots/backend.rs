//! The backend trait of the ops that move slots, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{Drops, Lists, Scalars};
use crate::slots::pool::SlotPools;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait MoveSlotsOps: Backend {
    /// Copies row `rows[n]` of `from` to row `slots[n]` of `to`, in place. Where only `to` has
    /// weights, the rows get weight 1.
    fn copy_slots(
        #[extension_type] from: SlotPools<Self>,
        rows: IntTensor<Self>,
        #[extension_type] to: SlotPools<Self>,
        slots: IntTensor<Self>,
    ) -> SlotPools<Self>;

    /// Moves the kept slots of each range to its beginning, in place.
    fn compact_slots(
        #[extension_type] pools: SlotPools<Self>,
        offsets: IntTensor<Self>,
        #[extension_type] lists: Lists<Self>,
    ) -> SlotPools<Self>;

    /// Moves the last slot of each range into its victim's place, in place. Either the `whole` slot
    /// moves, and the lengths, which are returned, become one less; or its scalars alone move.
    fn drop_slots(
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] scalars: Scalars<Self>,
        #[extension_type] drops: Drops<Self>,
        whole: bool,
    ) -> (SlotPools<Self>, Scalars<Self>, IntTensor<Self>);

    /// Sets the number of every range's last slot, in place.
    fn reset_last(
        #[extension_type] pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
    ) -> Scalars<Self>;
}

#[cfg(feature = "gpu")]
impl MoveSlotsOps for CubeBackend {
    fn copy_slots(
        from: SlotPools<Self>,
        rows: IntTensor<Self>,
        to: SlotPools<Self>,
        slots: IntTensor<Self>,
    ) -> SlotPools<Self> {
        super::launch::copy(from, rows, to, slots)
    }

    fn compact_slots(
        pools: SlotPools<Self>,
        offsets: IntTensor<Self>,
        lists: Lists<Self>,
    ) -> SlotPools<Self> {
        super::launch::compact(pools, offsets, lists)
    }

    fn drop_slots(
        pools: SlotPools<Self>,
        scalars: Scalars<Self>,
        drops: Drops<Self>,
        whole: bool,
    ) -> (SlotPools<Self>, Scalars<Self>, IntTensor<Self>) {
        super::launch::drop(pools, scalars, drops, whole)
    }

    fn reset_last(
        pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
    ) -> Scalars<Self> {
        super::launch::reset_last(pools, initial, offsets, lengths)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::MoveSlotsOps;
    use crate::backend::host_buffers::{owned, rounded, slice, slice_mut, wide, with_element};
    use crate::slots::move_slots::args::{Drops, Lists, Scalars};
    use crate::slots::move_slots::reference::{compact, copy, drop_rows};
    use crate::slots::pool::SlotPools;

    impl MoveSlotsOps for Flex {
        fn copy_slots(
            from: SlotPools<Self>,
            rows: FlexTensor,
            to: SlotPools<Self>,
            slots: FlexTensor,
        ) -> SlotPools<Self> {
            let (rows, slots) = (rows.to_contiguous(), slots.to_contiguous());
            let (rows, slots) = (slice::<i32>(&rows), slice::<i32>(&slots));
            let log_weights = to.log_weights.map(|to| match from.log_weights.into_option() {
                Some(from) => moved(from, rows, to, slots),
                None => {
                    let fresh = FlexTensor::from_data(TensorData::new(vec![0.0f32], [1]));
                    moved(fresh, &vec![0; slots.len()], to, slots)
                }
            });
            SlotPools {
                keys: moved(from.keys, rows, to.keys, slots),
                values: moved(from.values, rows, to.values, slots),
                positions: moved(from.positions, rows, to.positions, slots),
                log_weights,
            }
        }

        fn compact_slots(
            pools: SlotPools<Self>,
            offsets: FlexTensor,
            lists: Lists<Self>,
        ) -> SlotPools<Self> {
            let ints = [&offsets, &lists.kept, &lists.starts, &lists.counts];
            let ints = ints.map(|tensor| tensor.to_contiguous());
            let lists: [&[i32]; 4] = std::array::from_fn(|i| slice(&ints[i]));
            SlotPools {
                keys: compacted(pools.keys, lists),
                values: compacted(pools.values, lists),
                positions: compacted(pools.positions, lists),
                log_weights: pools.log_weights.map(|weights| compacted(weights, lists)),
            }
        }

        fn drop_slots(
            pools: SlotPools<Self>,
            scalars: Scalars<Self>,
            drops: Drops<Self>,
            whole: bool,
        ) -> (SlotPools<Self>, Scalars<Self>, FlexTensor) {
            let mut lengths = owned(drops.lengths);
            let [offsets, victims, goes] =
                [drops.offsets, drops.victims, drops.goes].map(|tensor| tensor.to_contiguous());
            let (victims, goes) = (slice::<i32>(&victims), slice::<i32>(&goes));
            let drops = [slice(&offsets), slice(&lengths), victims, goes];
            let drop = |pools: Vec<_>| pools.into_iter().map(|pool| dropped(pool, drops)).collect();
            let scalars = scalars.map(drop);
            if !whole {
                return (pools, scalars, lengths);
            }
            let pools = SlotPools {
                keys: dropped(pools.keys, drops),
                values: dropped(pools.values, drops),
                positions: dropped(pools.positions, drops),
                log_weights: pools.log_weights.map(|weights| dropped(weights, drops)),
            };
            let own = slice_mut::<i32>(&mut lengths).iter_mut().zip(victims.iter().zip(goes));
            for (length, (&victim, &goes)) in own {
                *length -= i32::from(goes != 0 && victim >= 0 && *length > 0);
            }
            (pools, scalars, lengths)
        }

        fn reset_last(
            pools: Scalars<Self>,
            initial: Vec<f32>,
            offsets: FlexTensor,
            lengths: FlexTensor,
        ) -> Scalars<Self> {
            let (offsets, lengths) = (offsets.to_contiguous(), lengths.to_contiguous());
            let reset = |(pool, initial): (FlexTensor, f32)| {
                let mut pool = owned(pool);
                let values = slice_mut::<f32>(&mut pool);
                for (&offset, &length) in slice::<i32>(&offsets).iter().zip(slice::<i32>(&lengths))
                {
                    if length > 0 {
                        values[(offset + length - 1) as usize] = initial;
                    }
                }
                pool
            };
            pools.map(|pools| pools.into_iter().zip(initial).map(reset).collect())
        }
    }

    /// The pool `to` with rows of `from`, converted where the dtypes differ.
    fn moved(from: FlexTensor, rows: &[i32], to: FlexTensor, slots: &[i32]) -> FlexTensor {
        let mut to = owned(to);
        let width = to.layout().shape().iter().skip(1).product();
        if from.dtype() != to.dtype() {
            let (wide, dtype) = (wide(&from).into_vec(), to.dtype());
            let shape: Vec<usize> = from.layout().shape().to_vec();
            return moved(rounded(wide, shape, dtype), rows, to, slots);
        }
        let from = from.to_contiguous();
        with_element!(to.dtype(), E => {
            copy(slice::<E>(&from), rows, slice_mut::<E>(&mut to), slots, width);
        });
        to
    }

    /// The pool with the kept rows of each range at its beginning.
    fn compacted(pool: FlexTensor, lists: [&[i32]; 4]) -> FlexTensor {
        let mut pool = owned(pool);
        let width = pool.layout().shape().iter().skip(1).product();
        with_element!(pool.dtype(), E => compact(slice_mut::<E>(&mut pool), lists, width));
        pool
    }

    /// The pool with each range's last row in its victim's place.
    fn dropped(pool: FlexTensor, drops: [&[i32]; 4]) -> FlexTensor {
        let mut pool = owned(pool);
        let width = pool.layout().shape().iter().skip(1).product();
        with_element!(pool.dtype(), E => drop_rows(slice_mut::<E>(&mut pool), drops, width));
        pool
    }
}
