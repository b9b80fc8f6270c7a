//! Many kept slots a row, and more victims than a cube looks at in one go.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::merge_reference::{Member, merge_group};
use kv_kernels::{KeyRule, MergeLists, MergeOptions, SlotLists, VOTES_RADIX, merge_slots};
use kv_testing::{Numbers, devices, relative_error};

const DIM: usize = 128;
const RADIX: u64 = VOTES_RADIX as u64;

struct Slot {
    key: Vec<f64>,
    value: Vec<f64>,
    log_weight: f64,
    log_score: f64,
    votes: u64,
    sum: f64,
}

impl Slot {
    fn member(&self) -> Member<'_> {
        let Self { key, value, log_weight, log_score, .. } = self;
        Member { key, value, log_weight: *log_weight, log_score: *log_score }
    }
}

fn slots(numbers: &mut Numbers, count: usize) -> Vec<Slot> {
    let slot = |_| {
        let mut row = |width: usize| -> Vec<f64> {
            numbers.normal(width).into_iter().map(f64::from).collect()
        };
        let (key, value, log_score, sum) = (row(DIM), row(DIM), row(1)[0], row(1)[0]);
        let log_weight = (1.0 + numbers.below(9) as f64).ln();
        // Together far above what f32 counts.
        let votes = 1 + numbers.below(1 << 26) as u64;
        Slot { key, value, log_weight, log_score, votes, sum }
    };
    (0..count).map(slot).collect()
}

/// Of one row, all victims go into the last slot.
#[test]
fn many_victims_go_into_many_slots() {
    let sizes = [(40usize, 700usize), (17, 257)];
    let (places, width) = (40, 700);
    let mut numbers = Numbers::new(6);
    let (kept, victims) = (slots(&mut numbers, 2 * places), slots(&mut numbers, 2 * width));
    let mut targets: Vec<i32> =
        (0..width).map(|_| numbers.below(sizes[0].0 + 1) as i32 - 1).collect();
    targets.extend(vec![sizes[1].0 as i32 - 1; width]);
    for tested in devices() {
        let device = &tested.device;
        let floats = |values: Vec<f64>| {
            let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
            Tensor::<1>::from_data(values.as_slice(), (device, DType::F32))
        };
        let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, (device, DType::I32));
        let list = |width: usize, counts: [i32; 2]| SlotLists {
            slots: Tensor::<1, Int>::arange(0..2 * width as i64, (device, DType::I32))
                .reshape([2, width]),
            counts: ints(&counts),
        };
        let keys =
            |slots: &[Slot]| floats(slots.iter().flat_map(|slot| slot.key.clone()).collect());
        let values =
            |slots: &[Slot]| floats(slots.iter().flat_map(|slot| slot.value.clone()).collect());
        let weights = |slots: &[Slot], columns: usize| {
            let numbers = slots.iter().flat_map(|slot| {
                let votes = [slot.votes % RADIX, slot.votes / RADIX].map(|part| part as f64);
                let all = [slot.log_weight, slot.log_score, votes[0], votes[1], slot.sum];
                all.into_iter().take(columns)
            });
            floats(numbers.collect())
        };
        for (rule, columns) in [(KeyRule::Votes, 4), (KeyRule::Mean, 5)] {
            let from = [keys(&victims), values(&victims)].map(|t| t.reshape([2 * width, DIM]));
            let [mut into_keys, mut into_values] =
                [keys(&kept), values(&kept)].map(|t| t.reshape([2 * places, DIM]));
            let lists = MergeLists {
                victims: list(width, sizes.map(|(_, victims)| victims as i32)),
                targets: ints(&targets).reshape([2, width]),
                victim_weights: weights(&victims, columns).reshape([2, width, columns]),
                kept: list(places, sizes.map(|(kept, _)| kept as i32)),
                kept_weights: weights(&kept, columns).reshape([2, places, columns]),
            };
            let options = MergeOptions { rule, ..Default::default() };
            let from = Some([&from[0], &from[1]]);
            let merged = merge_slots(from, [&mut into_keys, &mut into_values], &lists, &options);
            let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
            let weights = read(merged.unwrap().weights.reshape([-1]));
            let (keys, values) = (read(into_keys.reshape([-1])), read(into_values.reshape([-1])));
            for (row, &(kept_count, victim_count)) in sizes.iter().enumerate() {
                for place in 0..kept_count {
                    let own = targets[row * width..][..victim_count].iter().enumerate();
                    let own = own.filter(|(_, target)| **target == place as i32);
                    let own = own.map(|(at, _)| &victims[row * width + at]);
                    let at = row * places + place;
                    let all: Vec<&Slot> = std::iter::once(&kept[at]).chain(own).collect();
                    let votes: u64 = all.iter().map(|slot| slot.votes).sum();
                    let sum: f64 = all.iter().map(|slot| slot.sum).sum();
                    let members: Vec<Member<'_>> = all.into_iter().map(Slot::member).collect();
                    let scale = 1.0 / (DIM as f64).sqrt();
                    let exact = merge_group(&members, None, rule, 4.0, scale);
                    let context = format!("{} {rule:?} row {row} place {place}", tested.name);
                    for (actual, expected) in [(&keys, &exact.key), (&values, &exact.value)] {
                        let error = relative_error(&actual[at * DIM..][..DIM], expected);
                        assert!(error < 1e-5, "{context}: off by {error}");
                    }
                    let of = [exact.log_weight, exact.log_score];
                    let error = relative_error(&weights[columns * at..][..2], &of);
                    assert!(error < 1e-5, "{context}: weights off by {error}");
                    let [low, high] = [weights[columns * at + 2], weights[columns * at + 3]];
                    let counted = low as u64 + RADIX * high as u64;
                    assert_eq!(counted, votes, "{context}");
                    if columns > 4 {
                        let off = (f64::from(weights[columns * at + 4]) - sum).abs();
                        assert!(off < 1e-4, "{context}: a sum off by {off}");
                    }
                }
            }
        }
    }
}
