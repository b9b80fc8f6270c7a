use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    KeepLists, KernelError, SlotPool, SlotRanges, SlotSource, compact_slots, copy_slots,
    drop_slots, reset_last,
};
use kv_testing::{Numbers, STEP, devices};

/// What a pool holds, on the host.
#[derive(Debug, Clone, PartialEq)]
struct Slots {
    keys: Vec<f32>,
    values: Vec<f32>,
    positions: Vec<i32>,
    log_weights: Vec<f32>,
}

struct Pool {
    keys: Tensor<2>,
    values: Tensor<2>,
    positions: Tensor<1, Int>,
    log_weights: Tensor<1>,
}

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

impl Pool {
    fn new(slots: usize, width: usize, seed: u64, device: &Device, dtype: DType) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut rows = || numbers.tensor([slots, width], device).cast(dtype);
        let (keys, values) = (rows(), rows());
        let positions: Vec<i32> = (0..slots as i32).map(|slot| 1000 + slot).collect();
        let log_weights = numbers.tensor([1, slots], device).reshape([slots]);
        Self { keys, values, positions: ints(&positions, device), log_weights }
    }

    fn read(&self) -> Slots {
        let floats = |tensor: &Tensor<2>| tensor.clone().try_into_vec_as::<f32>().unwrap();
        Slots {
            keys: floats(&self.keys),
            values: floats(&self.values),
            positions: self.positions.clone().try_into_vec_as::<i32>().unwrap(),
            log_weights: self.log_weights.clone().try_into_vec_as::<f32>().unwrap(),
        }
    }

    fn source(&self, weighted: bool) -> SlotSource<'_> {
        SlotSource {
            keys: &self.keys,
            values: &self.values,
            positions: &self.positions,
            log_weights: weighted.then_some(&self.log_weights),
        }
    }

    fn pool(&mut self, weighted: bool) -> SlotPool<'_> {
        SlotPool {
            keys: &mut self.keys,
            values: &mut self.values,
            positions: &mut self.positions,
            log_weights: weighted.then_some(&mut self.log_weights),
        }
    }
}

impl Slots {
    /// Row `row` of `from` into slot `slot`; `weight` is the row's own, another, or left as it is.
    fn copy(&mut self, from: &Self, row: usize, slot: usize, width: usize, weight: Option<f32>) {
        let (row_of, slot_of) = (row * width..(row + 1) * width, slot * width);
        self.keys[slot_of..slot_of + width].copy_from_slice(&from.keys[row_of.clone()]);
        self.values[slot_of..slot_of + width].copy_from_slice(&from.values[row_of]);
        self.positions[slot] = from.positions[row];
        if let Some(weight) = weight {
            self.log_weights[slot] = weight;
        }
    }
}

#[test]
fn rows_go_into_their_slots() {
    for tested in devices() {
        let dtypes = tested.float_dtypes();
        for (&from_dtype, &to_dtype) in dtypes.iter().zip(&dtypes).chain([(&dtypes[1], &dtypes[0])])
        {
            for width in [3, 32, 128] {
                for (weighted, to_weighted) in [(true, true), (false, true), (false, false)] {
                    let device = &tested.device;
                    let from = Pool::new(40, width, 1, device, from_dtype);
                    let mut to = Pool::new(30, width, 2, device, to_dtype);
                    let (rows, slots) = ([7, 39, 0, 7, 21], [29, 0, 3, 11, -1]);
                    let (source, mut expected) = (from.read(), to.read());
                    for (row, slot) in rows.into_iter().zip(slots).take(4) {
                        let (row, slot) = (row as usize, slot as usize);
                        let own = if weighted { source.log_weights[row] } else { 0.0 };
                        expected.copy(&source, row, slot, width, to_weighted.then_some(own));
                    }
                    let (rows, slots) = (ints(&rows, device), ints(&slots, device));
                    copy_slots(from.source(weighted), rows, to.pool(to_weighted), slots).unwrap();
                    let context = format!(
                        "{} {from_dtype:?} to {to_dtype:?} {width} {weighted} {to_weighted}",
                        tested.name
                    );
                    assert_eq!(to.read(), expected, "{context}");
                }
            }
        }
    }
}

/// Ragged lists, among them an empty one, a whole range, and one longer than a cube takes at once;
/// and lists as they are timed.
#[test]
fn kept_slots_move_together_in_place() {
    let ragged: [Vec<i32>; 4] = [
        vec![3, 4, 9, 48, 49],
        (0..3000).filter(|at| at % 3 != 1).collect(),
        vec![],
        (0..7).collect(),
    ];
    let timed: [Vec<i32>; STEP.pairs()] =
        std::array::from_fn(|_| (0..STEP.slots as i32).step_by(4).collect());
    let ragged = ([50usize, 3000, 20, 7], ragged);
    let timed = ([STEP.slots; STEP.pairs()], timed);
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for (width, weighted, (capacities, kept)) in
                [(3, true, &ragged), (128, false, &ragged), (STEP.head_dim, false, &timed)]
            {
                let device = &tested.device;
                let before = |pair: usize| capacities[..pair].iter().sum::<usize>();
                let offsets: Vec<i32> = (0..4).map(|pair| before(pair) as i32).collect();
                let mut pool = Pool::new(before(4), width, 5, device, dtype);
                let before = pool.read();
                let mut expected = before.clone();
                for (kept, &offset) in kept.iter().zip(&offsets) {
                    for (to, &from) in kept.iter().enumerate() {
                        let (from, to) = ((offset + from) as usize, offset as usize + to);
                        let weight = weighted.then_some(before.log_weights[from]);
                        expected.copy(&before, from, to, width, weight);
                    }
                }
                let counts: Vec<i32> = kept.iter().map(|kept| kept.len() as i32).collect();
                let starts = [0, 1, 2, 3].map(|pair| counts[..pair].iter().sum::<i32>());
                let lists = KeepLists {
                    kept: ints(&kept.concat(), device),
                    starts: ints(&starts, device).reshape([2, 2]),
                    counts: ints(&counts, device).reshape([2, 2]),
                    most: 2000,
                };
                let offsets_there = ints(&offsets, device).reshape([2, 2]);
                compact_slots(pool.pool(weighted), &offsets_there, &lists).unwrap();
                let after = pool.read();
                let context = format!("{} {dtype:?} {width}", tested.name);
                // Behind the kept slots lies what was there.
                for (pair, &capacity) in capacities.iter().enumerate() {
                    let first = offsets[pair] as usize;
                    let rows = first * width..(first + capacity) * width;
                    let slots = first..first + capacity;
                    assert_eq!(after.keys[rows.clone()], expected.keys[rows.clone()], "{context}");
                    assert_eq!(after.values[rows.clone()], expected.values[rows], "{context}");
                    assert_eq!(after.positions[slots.clone()], expected.positions[slots.clone()]);
                    assert_eq!(after.log_weights[slots.clone()], expected.log_weights[slots]);
                }
            }
        }
    }
}

#[test]
fn the_last_slot_takes_the_victims_place() {
    for tested in devices() {
        let device = &tested.device;
        for dtype in tested.float_dtypes() {
            // With as many numbers beside them as a launch takes, more, and none.
            for (weighted, width, count) in [(true, 8, 6), (false, 5, 9), (true, 1031, 0)] {
                // One in the middle, the last itself, one that stays, an empty range.
                let (offsets, lengths) = ([0, 10, 20, 30], [7, 4, 10, 0]);
                let (victims, goes) = ([2, 13, 25, -1], [1, 1, 0, 1]);
                let mut pool = Pool::new(33, width, 6, device, dtype);
                let before = pool.read();
                let mut expected = before.clone();
                let weight = weighted.then_some(before.log_weights[6]);
                expected.copy(&before, 6, 2, width, weight);
                let pairs = |values: &[i32]| ints(values, device).reshape([2, 2]);
                let mut ranges = SlotRanges { offsets: pairs(&offsets), lengths: pairs(&lengths) };
                let (victims, goes) = (pairs(&victims), pairs(&goes));
                let numbers: Vec<f32> = (0..33).map(|slot| slot as f32).collect();
                let track = || Tensor::<1>::from_data(numbers.as_slice(), (device, DType::F32));
                let mut tracks: Vec<_> = (0..count).map(|_| track()).collect();
                let mut scalars: Vec<_> = tracks.iter_mut().collect();
                drop_slots(pool.pool(weighted), &mut scalars, &mut ranges, &victims, &goes)
                    .unwrap();
                assert_eq!(pool.read(), expected, "{} {dtype:?} {width}", tested.name);
                let mut expected = numbers.clone();
                expected[2] = 6.0;
                let read = |track: &Tensor<1>| track.clone().try_into_vec_as::<f32>().unwrap();
                assert!(tracks.iter().all(|track| read(track) == expected), "{}", tested.name);
                let left = ranges.lengths.clone().try_into_vec_as::<i32>().unwrap();
                assert_eq!(left, [6, 3, 10, 0], "{}", tested.name);

                // Every range's last slot starts anew.
                let (mut one, mut other) = (track(), track().mul_scalar(2.0));
                reset_last(&mut [(&mut one, -1.0), (&mut other, 7.0)], &ranges).unwrap();
                let mut ones = numbers.clone();
                let mut others: Vec<f32> = numbers.iter().map(|x| 2.0 * x).collect();
                for (offset, left) in offsets.iter().zip(&left).filter(|(_, left)| **left > 0) {
                    ones[(offset + left - 1) as usize] = -1.0;
                    others[(offset + left - 1) as usize] = 7.0;
                }
                assert_eq!(read(&one), ones, "{}", tested.name);
                assert_eq!(read(&other), others, "{}", tested.name);
            }
        }
    }
}

/// A pool may be a part of a larger tensor: it is written in its own place.
#[test]
fn parts_of_larger_tensors_are_written_in_their_places() {
    for tested in devices() {
        let device = &tested.device;
        let all: Vec<f32> = (0..100).map(|i| i as f32).collect();
        let all = || Tensor::<1>::from_data(&all[..], (device, DType::F32));
        let one = |value: i32| ints(&[value], device).unsqueeze();
        let ranges = SlotRanges { offsets: one(0), lengths: one(5) };
        let mut pool = all().narrow(0, 64, 5);
        reset_last(&mut [(&mut pool, -1.0)], &ranges).unwrap();
        let written = pool.try_into_vec_as::<f32>().unwrap();
        assert_eq!(written, [64.0, 65.0, 66.0, 67.0, -1.0], "{}", tested.name);
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    for tested in devices() {
        let device = &tested.device;
        let from = Pool::new(4, 8, 1, device, DType::F32);
        let mut to = Pool::new(4, 6, 2, device, DType::F32);
        let before = to.read();
        let one = || ints(&[0], device);
        let error = copy_slots(from.source(true), one(), to.pool(true), one()).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "keys", .. }), "{error}");
        let lists = KeepLists {
            kept: one(),
            starts: one().unsqueeze(),
            counts: ints(&[1, 1], device).unsqueeze(),
            most: 1,
        };
        let error = compact_slots(to.pool(true), &one().unsqueeze(), &lists).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "counts", .. }), "{error}");
        let pair = || one().unsqueeze::<2>();
        let mut ranges = SlotRanges { offsets: pair(), lengths: pair().add_scalar(2) };
        let mut short = Tensor::<1>::zeros([3], (device, DType::F32));
        let error = drop_slots(to.pool(true), &mut [&mut short], &mut ranges, &pair(), &pair());
        let error = error.unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "scalars", .. }), "{error}");
        assert_eq!(ranges.lengths.try_into_vec_as::<i32>().unwrap(), [2]);
        assert_eq!(to.read(), before);
    }
}
