//! Slots: copied, dropped, chosen, written.

use burn::backend::{DType, Flex, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};

use super::buffers::{compacted, dropped, moved, owned, scatter_into, slice, wide};
use crate::argmin_slots::Protection;
use crate::argmin_slots::reference::argmin;
use crate::extension::{Drops, Lists, Scalars, SlotOps, SlotPools};
use crate::reading::Reading;
use crate::top_slots::reference::{above, top};

impl SlotOps for Flex {
    fn begin_read(tensor: FlexTensor) -> Reading {
        let tensor = tensor.to_contiguous();
        Reading::new(move || Ok(slice(&tensor).to_vec()))
    }

    fn copy_slots(
        from: SlotPools<Self>,
        rows: FlexTensor,
        to: SlotPools<Self>,
        slots: FlexTensor,
    ) -> SlotPools<Self> {
        let (rows, slots) = (rows.to_contiguous(), slots.to_contiguous());
        let (rows, slots) = (slice::<i32>(&rows), slice::<i32>(&slots));
        let log_weights = match (from.weighted, to.weighted) {
            (true, true) => moved(from.log_weights, rows, to.log_weights, slots),
            (false, true) => {
                let fresh = FlexTensor::from_data(TensorData::new(vec![0.0f32], [1]));
                moved(fresh, &vec![0; slots.len()], to.log_weights, slots)
            }
            _ => to.log_weights,
        };
        SlotPools {
            keys: moved(from.keys, rows, to.keys, slots),
            values: moved(from.values, rows, to.values, slots),
            positions: moved(from.positions, rows, to.positions, slots),
            log_weights,
            weighted: to.weighted,
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
            log_weights: match pools.weighted {
                true => compacted(pools.log_weights, lists),
                false => pools.log_weights,
            },
            weighted: pools.weighted,
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
            log_weights: match pools.weighted {
                true => dropped(pools.log_weights, drops),
                false => pools.log_weights,
            },
            weighted: pools.weighted,
        };
        let own = lengths.storage_mut::<i32>().iter_mut().zip(victims.iter().zip(goes));
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
            let values = pool.storage_mut::<f32>();
            for (&offset, &length) in slice::<i32>(&offsets).iter().zip(slice::<i32>(&lengths)) {
                if length > 0 {
                    values[(offset + length - 1) as usize] = initial;
                }
            }
            pool
        };
        pools.map(|pools| pools.into_iter().zip(initial).map(reset).collect())
    }

    fn top_slots(
        scores: FlexTensor,
        lengths: FlexTensor,
        counts: FlexTensor,
        bounds: FlexTensor,
        most: usize,
        by_bound: bool,
    ) -> (FlexTensor, FlexTensor) {
        let [rows, columns] = scores.layout().shape().dims();
        let (scores, bounds) = (wide(&scores), wide(&bounds));
        let (lengths, counts) = (lengths.to_contiguous(), counts.to_contiguous());
        let (lengths, counts) = (slice::<i32>(&lengths), slice::<i32>(&counts));
        let (mut indices, mut found) = (Vec::with_capacity(rows * most), Vec::new());
        for (row, scores) in scores.chunks_exact(columns).enumerate() {
            let scores = &scores[..lengths[row] as usize];
            let chosen = match by_bound {
                true => above(scores, bounds[row]),
                false => top(scores, (counts[row] as usize).min(most)),
            };
            let count = chosen.len().min(most);
            indices.extend(&chosen[..count]);
            indices.resize((row + 1) * most, -1);
            found.push(count as i32);
        }
        (
            FlexTensor::from_data(TensorData::new(indices, [rows, most])),
            FlexTensor::from_data(TensorData::new(found, [rows])),
        )
    }

    fn scatter_rows(pool: FlexTensor, slots: FlexTensor, rows: FlexTensor) -> FlexTensor {
        match pool.dtype() {
            DType::F16 => scatter_into::<f16>(pool, slots, rows),
            DType::BF16 => scatter_into::<bf16>(pool, slots, rows),
            _ => scatter_into::<f32>(pool, slots, rows),
        }
    }

    fn scatter_ints(pool: FlexTensor, slots: FlexTensor, values: FlexTensor) -> FlexTensor {
        scatter_into::<i32>(pool, slots, values)
    }

    fn assign(_to: FlexTensor, from: FlexTensor) -> FlexTensor {
        from.to_contiguous()
    }

    fn assign_ints(_to: FlexTensor, from: FlexTensor) -> FlexTensor {
        from.to_contiguous()
    }

    fn argmin_slots(
        scores: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        positions: FlexTensor,
        newest: FlexTensor,
        protection: Option<Protection>,
    ) -> FlexTensor {
        let shape = offsets.layout().shape().clone();
        let scores = scores.to_contiguous();
        let [offsets, lengths, positions, newest] =
            [offsets, lengths, positions, newest].map(|tensor| tensor.to_contiguous());
        let ranges = [slice(&offsets), slice(&lengths)];
        let ages = [slice(&positions), slice(&newest)];
        let slots = argmin(slice(&scores), ranges, ages, protection);
        FlexTensor::from_data(TensorData::new(slots, shape))
    }
}
