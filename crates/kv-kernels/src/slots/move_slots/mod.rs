//! Moves slots with everything that belongs to them, in one launch: into another pool, together
//! within their own pool, or into a dropped slot's place.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, SlotPool, SlotRanges, SlotSource};
use args::{Drops, Lists, SCALARS, Scalars};
use backend::MoveSlotsOps;

/// The slots of each (sequence, key-value head) that are kept.
#[derive(Debug, Clone)]
pub struct KeepLists {
    /// Kept slots, counted from their range's first slot, ascending within a range, `[N]`, 32-bit.
    /// The lists of all ranges follow one another.
    pub kept: Tensor<1, Int>,
    /// Where each range's list begins in `kept`, `[B, Hkv]`, 32-bit.
    pub starts: Tensor<2, Int>,
    /// The length of each range's list, `[B, Hkv]`, 32-bit.
    pub counts: Tensor<2, Int>,
    /// An upper bound of the lengths. Kept slots beyond it may stay where they are.
    pub most: usize,
}

/// Copies row `rows[n]` of `from` into slot `slots[n]` of `to`: key, value, position and weight.
/// Dtypes may differ. Rows of a source without weights get weight 1; a target without weights takes
/// none.
///
/// Negative slots are skipped. A slot that occurs twice gets one of its rows.
///
/// # Shapes
/// `rows` and `slots` `[N]`, 32-bit. Their contents are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn copy_slots(
    from: SlotSource<'_>,
    rows: Tensor<1, Int>,
    mut to: SlotPool<'_>,
    slots: Tensor<1, Int>,
) -> Result<(), KernelError> {
    let check = Check::new("copy_slots", to.keys);
    check.supported()?;
    let width = to.keys.dims()[1];
    from.check(&check, width)?;
    to.check(&check, width)?;
    check.int("rows", &rows)?;
    check.int("slots", &slots)?;
    check.shape("rows", &rows, &slots.dims())?;
    if slots.dims()[0] == 0 || width == 0 {
        return Ok(());
    }
    let pools = <Dispatch as MoveSlotsOps>::copy_slots(
        from.tensors(),
        rows.into_dispatch(),
        to.take(&check),
        slots.into_dispatch(),
    );
    to.put_back(pools);
    Ok(())
}

/// Moves the kept slots of each range to its beginning, in place. The slots after them hold garbage
/// then, and the caller must adapt the ranges' lengths.
///
/// # Shapes
/// `offsets` `[B, Hkv]`, 32-bit. The contents of the lists are on the device and are not checked:
/// they must ascend and lie within their ranges.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn compact_slots(
    mut pool: SlotPool<'_>,
    offsets: &Tensor<2, Int>,
    lists: &KeepLists,
) -> Result<(), KernelError> {
    let check = Check::new("compact_slots", pool.keys);
    check.supported()?;
    let width = pool.keys.dims()[1];
    pool.check(&check, width)?;
    for (argument, ints) in
        [("offsets", offsets), ("starts", &lists.starts), ("counts", &lists.counts)]
    {
        check.shape(argument, ints, &offsets.dims())?;
        check.int(argument, ints)?;
    }
    check.int("kept", &lists.kept)?;
    check.shape("kept", &lists.kept, &lists.kept.dims())?;
    if lists.kept.dims()[0] == 0 || lists.most == 0 || width == 0 {
        return Ok(());
    }
    let tensors = Lists {
        kept: lists.kept.clone().into_dispatch(),
        starts: lists.starts.clone().into_dispatch(),
        counts: lists.counts.clone().into_dispatch(),
        most: lists.most,
    };
    let pools = <Dispatch as MoveSlotsOps>::compact_slots(
        pool.take(&check),
        offsets.clone().into_dispatch(),
        tensors,
    );
    pool.put_back(pools);
    Ok(())
}

/// Drops one slot of each range, in place: the range's last slot moves into the victim's place,
/// with key, value, position, weight, and its number in each of the `scalars`, `[S]`, f32. The
/// lengths of ranges that drop a slot become one less, in place. Up to six scalars take one launch.
/// A pool whose rows have no columns stays unchanged, as do its scalars and lengths.
///
/// # Shapes
/// `victims` `[B, Hkv]`, slots counted in the pool, 32-bit, negative for none; `goes` `[B, Hkv]`,
/// 32-bit, 0 for ranges that drop nothing. Their contents are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn drop_slots(
    mut pool: SlotPool<'_>,
    scalars: &mut [&mut Tensor<1>],
    ranges: &mut SlotRanges,
    victims: &Tensor<2, Int>,
    goes: &Tensor<2, Int>,
) -> Result<(), KernelError> {
    let check = Check::new("drop_slots", pool.keys);
    check.supported()?;
    let [slots, width] = pool.keys.dims();
    pool.check(&check, width)?;
    for pool in scalars.iter() {
        check.shape("scalars", &**pool, &[slots])?;
        check.f32("scalars", &**pool)?;
    }
    let [batch, kv_heads] = victims.dims();
    check.ranges(ranges, batch, kv_heads)?;
    for (argument, tensor) in [("victims", victims), ("goes", goes)] {
        check.shape(argument, tensor, &[batch, kv_heads])?;
        check.int(argument, tensor)?;
    }
    if batch * kv_heads == 0 || width == 0 {
        return Ok(());
    }
    // The last launch changes the lengths. It runs even without scalars.
    let launches = scalars.len().div_ceil(SCALARS).max(1);
    let mut pools = pool.take(&check);
    for launch in 0..launches {
        let (first, end) = (launch * SCALARS, scalars.len().min((launch + 1) * SCALARS));
        let own = &mut scalars[first..end];
        let drops = Drops {
            offsets: ranges.offsets.clone().into_dispatch(),
            lengths: check.take_ints(&mut ranges.lengths).into_dispatch(),
            victims: victims.clone().into_dispatch(),
            goes: goes.clone().into_dispatch(),
        };
        let whole = launch + 1 == launches;
        let (moved, numbers, lengths) =
            <Dispatch as MoveSlotsOps>::drop_slots(pools, take(&check, own), drops, whole);
        pools = moved;
        put_back(own, numbers);
        ranges.lengths = Tensor::from_dispatch(lengths);
    }
    pool.put_back(pools);
    Ok(())
}

/// Sets the number of every range's last slot, in each of `pools` `[S]`, f32, to the pool's
/// `initial`: the start value of a new token. One launch takes up to six pools.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn reset_last(
    pools: &mut [(&mut Tensor<1>, f32)],
    ranges: &SlotRanges,
) -> Result<(), KernelError> {
    let check = Check::new("reset_last", &ranges.offsets);
    check.supported()?;
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    let initial: Vec<f32> = pools.iter().map(|(_, initial)| *initial).collect();
    let mut pools: Vec<&mut Tensor<1>> = pools.iter_mut().map(|(pool, _)| &mut **pool).collect();
    for pool in &pools {
        check.shape("pool", &**pool, &pool.dims())?;
        check.f32("pool", &**pool)?;
    }
    if batch * kv_heads == 0 {
        return Ok(());
    }
    for (own, initial) in pools.chunks_mut(SCALARS).zip(initial.chunks(SCALARS)) {
        let (offsets, lengths) = (ranges.offsets.clone(), ranges.lengths.clone());
        let reset = <Dispatch as MoveSlotsOps>::reset_last(
            take(&check, own),
            initial.to_vec(),
            offsets.into_dispatch(),
            lengths.into_dispatch(),
        );
        put_back(own, reset);
    }
    Ok(())
}

fn take(check: &Check, pools: &mut [&mut Tensor<1>]) -> Scalars<Dispatch> {
    let taken = pools.iter_mut().map(|pool| check.take(pool).into_dispatch());
    Scalars::new(taken.collect())
}

fn put_back(pools: &mut [&mut Tensor<1>], changed: Scalars<Dispatch>) {
    for (pool, changed) in pools.iter_mut().zip(changed.into_pools()) {
        **pool = Tensor::from_dispatch(changed);
    }
}
