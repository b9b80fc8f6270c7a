//! What a step changes in slots and sketches: every token in one place, and devices that agree.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_kernels::{
    ABSENT, HEAD_FIELDS, SketchHashes, SketchPool, SketchScores, SketchSource, SketchUpdateOptions,
    SlotPool, SlotRanges, StepLogits, sketch_insert, sketch_query, update_sketch,
};
use kv_testing::{Numbers, devices, relative_error};

const ENTRIES: usize = 4;

/// What a sketch is like, and when tokens come back.
#[derive(Debug, Clone, Copy)]
struct Kind {
    dtype: DType,
    buckets: usize,
    signed_keys: bool,
    replace_rate: f32,
    head_dim: usize,
    /// Whether steps attend to anything: all scores are equal where they do not.
    attends: bool,
}

const PAPER: Kind = Kind {
    dtype: DType::F32,
    buckets: 3,
    signed_keys: false,
    replace_rate: 1.1,
    head_dim: 8,
    attends: true,
};
/// Further ones: odd and even numbers of buckets, keys with signs, tokens that come back early and
/// never.
const OTHERS: [Kind; 4] = [
    Kind { buckets: 1, ..PAPER },
    Kind { buckets: 2, signed_keys: true, replace_rate: 1.0, ..PAPER },
    Kind { buckets: 9, signed_keys: true, ..PAPER },
    Kind { replace_rate: f32::INFINITY, ..PAPER },
];

/// A batch of caches that take in a token a step.
struct Caches {
    device: Device,
    batch: usize,
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    tokens: usize,
    keys: Tensor<2>,
    values: Tensor<2>,
    positions: Tensor<1, Int>,
    slot_scores: Tensor<1>,
    token_scores: Tensor<1>,
    moved: Tensor<2, Int>,
    ranges: SlotRanges,
    sketch: [Tensor<2>; 2],
    heads: Tensor<2, Int>,
    hashes: SketchHashes,
    options: SketchUpdateOptions,
    kind: Kind,
    newest: Vec<i32>,
}

impl Caches {
    fn new(
        [limit, recents, slack]: [usize; 3],
        tokens: usize,
        kind: Kind,
        device: &Device,
    ) -> Self {
        let Kind { dtype, buckets, replace_rate, head_dim, .. } = kind;
        let (batch, kv_heads) = (2, 2);
        let pairs = batch * kv_heads;
        let capacity = limit + slack + 1;
        let ints = |values: Vec<i32>, shape: [usize; 2]| {
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), (device, DType::I32))
        };
        let floats = |rows: usize| Tensor::<2>::zeros([rows, head_dim], (device, DType::F32));
        let heads = (0..pairs).flat_map(|pair| {
            [pair * ENTRIES * buckets, ENTRIES, pair * tokens, tokens, limit, recents]
                .map(|x| x as i32)
        });
        let seeds: Vec<[u32; 2]> = (0..pairs as u32).map(|pair| [11, pair]).collect();
        let offsets = (0..pairs).map(|pair| (pair * capacity) as i32).collect();
        Self {
            device: device.clone(),
            batch,
            kv_heads,
            head_dim,
            capacity,
            tokens,
            keys: floats(pairs * capacity).cast(dtype),
            values: floats(pairs * capacity).cast(dtype),
            positions: Tensor::zeros([pairs * capacity], (device, DType::I32)),
            slot_scores: Tensor::zeros([pairs * capacity], (device, DType::F32)),
            token_scores: Tensor::full([pairs * tokens], ABSENT, (device, DType::F32)),
            moved: ints(vec![0; pairs * 2], [pairs, 2]),
            ranges: SlotRanges {
                offsets: ints(offsets, [batch, kv_heads]),
                lengths: ints(vec![0; pairs], [batch, kv_heads]),
            },
            sketch: [0, 1].map(|_| floats(pairs * ENTRIES * buckets)),
            heads: ints(heads.collect(), [pairs, HEAD_FIELDS]),
            hashes: SketchHashes::seeded(&seeds, buckets, device),
            options: SketchUpdateOptions { slack, replace_rate, longest: tokens },
            kind,
            newest: vec![-1; batch],
        }
    }

    fn pairs(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Of numbers of all slots those of the ones that hold tokens.
    fn live(&self, numbers: Vec<f32>) -> Vec<f32> {
        let range = numbers.len() / self.pairs();
        let lengths = ints(&self.ranges.lengths);
        let ranges = numbers.chunks(range).zip(lengths);
        ranges.flat_map(|(own, n)| &own[..n as usize * range / self.capacity]).copied().collect()
    }

    /// Appends a token to every range, by hand.
    fn append(&mut self, numbers: &mut Numbers) {
        let rows = self.pairs();
        let slots: Vec<i32> = ints(&self.ranges.lengths)
            .iter()
            .enumerate()
            .map(|(pair, length)| (pair * self.capacity) as i32 + length)
            .collect();
        self.newest.iter_mut().for_each(|newest| *newest += 1);
        let at = Tensor::<1, Int>::from_data(slots.as_slice(), (&self.device, DType::I32));
        for pool in [&mut self.keys, &mut self.values] {
            let new = numbers.tensor::<2>([rows, self.head_dim], &self.device);
            let new = new.cast(pool.dtype());
            kv_kernels::scatter_rows(pool, at.clone(), new).unwrap();
        }
        let positions: Vec<i32> = (0..rows).map(|pair| self.newest[pair / self.kv_heads]).collect();
        let positions =
            Tensor::<1, Int>::from_data(positions.as_slice(), (&self.device, DType::I32));
        kv_kernels::scatter_ints(&mut self.positions, at.clone(), positions).unwrap();
        let zeros = Tensor::zeros([rows], (&self.device, DType::F32));
        kv_kernels::scatter_scalars(&mut self.slot_scores, at, zeros).unwrap();
        self.ranges.lengths = self.ranges.lengths.clone().add_scalar(1);
    }

    /// A step of random attention.
    fn revise(&mut self, numbers: &mut Numbers, group: usize) {
        let (slots, tokens) = (self.keys.dims()[0], self.pairs() * self.tokens);
        let mut logits = |rows: usize| {
            let logits = numbers.tensor::<2>([rows, group], &self.device);
            if self.kind.attends { logits } else { logits.sub_scalar(1e9) }
        };
        let step = StepLogits {
            slots: Some(logits(slots)),
            tokens: logits(tokens),
            log_sum_exp: Tensor::full(
                [self.batch, self.kv_heads * group],
                1.0,
                (&self.device, DType::F32),
            ),
        };
        let newest =
            Tensor::<1, Int>::from_data(self.newest.as_slice(), (&self.device, DType::I32));
        let [sketch_keys, sketch_values] = &mut self.sketch;
        update_sketch(
            SketchPool {
                keys: sketch_keys,
                values: sketch_values,
                heads: &self.heads,
                most_entries: ENTRIES * self.kind.buckets,
                hashes: &self.hashes,
                signed_keys: self.kind.signed_keys,
            },
            SlotPool {
                keys: &mut self.keys,
                values: &mut self.values,
                positions: &mut self.positions,
                log_weights: None,
            },
            &mut self.ranges,
            SketchScores {
                slots: &mut self.slot_scores,
                tokens: &mut self.token_scores,
                moved: &mut self.moved,
            },
            step,
            newest,
            self.options,
        )
        .unwrap();
    }

    fn slots(&self) -> Slots {
        let (positions, lengths) = (ints(&self.positions), ints(&self.ranges.lengths));
        let pools = [&self.keys, &self.values].map(|pool| read(pool.clone()));
        let pairs = lengths.iter().enumerate();
        let slots = pairs.flat_map(|(pair, length)| {
            let first = pair * self.capacity;
            (first..first + *length as usize).map(move |slot| (pair, slot))
        });
        let row =
            |slot: usize, pool: &Vec<f32>| pool[slot * self.head_dim..][..self.head_dim].to_vec();
        slots
            .map(|(pair, slot)| {
                ((pair, positions[slot]), [row(slot, &pools[0]), row(slot, &pools[1])])
            })
            .collect()
    }

    fn query(&self, tokens: &[i32]) -> [Vec<f32>; 2] {
        let source = SketchSource {
            keys: &self.sketch[0],
            values: &self.sketch[1],
            heads: &self.heads,
            most_entries: ENTRIES * self.kind.buckets,
            hashes: &self.hashes,
            signed_keys: self.kind.signed_keys,
        };
        let data = TensorData::new(tokens.to_vec(), [self.pairs(), tokens.len() / self.pairs()]);
        let tokens = Tensor::from_data(data, (&self.device, DType::I32));
        sketch_query(source, tokens, DType::F32).unwrap().map(read)
    }
}

fn ints<const D: usize>(tensor: &Tensor<D, Int>) -> Vec<i32> {
    tensor.clone().try_into_vec_as::<i32>().unwrap()
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).try_into_vec_as::<f32>().unwrap()
}

/// Steps of an empty cache up to many times its limit: the same on every device, and every token in
/// one part alone.
#[test]
fn devices_move_the_same_tokens() {
    let (limit, recents, steps) = (12, 5, 70);
    // Room for many tokens has their scores added up by a kernel of its own.
    let cases = [
        (0, steps, PAPER),
        (5, steps, PAPER),
        (5, 9_000, PAPER),
        (5, steps, Kind { dtype: DType::F16, ..PAPER }),
        (0, steps, Kind { dtype: DType::BF16, ..PAPER }),
        // Bulks of more than are chosen at a time, in rows that do not divide a cube's units.
        (40, steps, Kind { head_dim: 96, ..PAPER }),
        // Rows that leave a cube's units one team for all buckets.
        (20, steps, Kind { head_dim: 256, buckets: 9, signed_keys: true, ..PAPER }),
        (20, steps, Kind { attends: false, replace_rate: f32::INFINITY, ..PAPER }),
    ];
    for (slack, tokens, kind) in cases.into_iter().chain(OTHERS.map(|kind| (2, steps, kind))) {
        let dtype = kind.dtype;
        let able = devices().into_iter().filter(|tested| tested.device.supports_dtype(dtype));
        let results = able.map(|tested| {
            let mut numbers = Numbers::new(6);
            let sizes = [limit, recents, slack];
            let mut caches = Caches::new(sizes, tokens, kind, &tested.device);
            for step in 0..steps {
                caches.append(&mut numbers);
                caches.revise(&mut numbers, 3);
                check(&caches, limit, slack, step + 1, tested.name);
            }
            let moved = ints(&caches.moved);
            assert!(moved.chunks(2).all(|pair| pair[0] > 40), "{moved:?}");
            let swaps = moved.chunks(2).map(|pair| pair[1]).sum::<i32>();
            // Few bulks leave few steps in which what went is heavier than what stays.
            let least = if slack > 5 { 0 } else { 10 };
            let some = if kind.replace_rate.is_finite() { swaps > least } else { swaps == 0 };
            assert!(some, "{kind:?}: {moved:?}");
            (tested.name, caches)
        });
        let results: Vec<_> = results.collect();
        let (_, expected) = &results[0];
        for (name, actual) in &results[1..] {
            assert_eq!(ints(&actual.positions), ints(&expected.positions), "{name}");
            assert_eq!(ints(&actual.moved), ints(&expected.moved), "{name}");
            assert_eq!(ints(&actual.ranges.lengths), ints(&expected.ranges.lengths), "{name}");
            let all: Vec<i32> = (0..steps as i32).collect::<Vec<_>>().repeat(4);
            let pairs = actual.query(&all).into_iter().zip(expected.query(&all));
            let slots = [
                (&actual.keys, &expected.keys),
                (
                    &actual.slot_scores.clone().unsqueeze_dim(1),
                    &expected.slot_scores.clone().unsqueeze_dim(1),
                ),
            ]
            .map(|(a, e)| (actual.live(read(a.clone())), expected.live(read(e.clone()))));
            for (actual, expected) in pairs.chain(slots) {
                let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                let error = relative_error(&actual, &expected);
                let most = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                assert!(error < most, "{name} {kind:?}: off by {error}");
            }
        }
    }
}

/// Every token of a range is a slot's or in the sketch, and the limits hold.
fn check(caches: &Caches, limit: usize, slack: usize, seen: usize, name: &str) {
    let (positions, lengths) = (ints(&caches.positions), ints(&caches.ranges.lengths));
    let scores = read(caches.token_scores.clone());
    for pair in 0..caches.pairs() {
        let length = lengths[pair] as usize;
        assert!(length <= (limit + slack).min(seen), "{name}: {length} slots of {limit} + {slack}");
        let mut parts = vec![0; caches.tokens];
        for slot in pair * caches.capacity..pair * caches.capacity + length {
            parts[positions[slot] as usize] += 1;
        }
        for (token, score) in scores[pair * caches.tokens..][..caches.tokens].iter().enumerate() {
            assert!(*score == ABSENT || *score >= 0.0);
            parts[token] += usize::from(*score >= 0.0);
        }
        assert!(parts[..seen].iter().all(|count| *count == 1), "{name}: {parts:?}");
        assert!(parts[seen..].iter().all(|count| *count == 0), "{name}: {parts:?}");
    }
}

/// A sketch holds what went into it less what was taken out: the sums of a sketch that is made anew
/// of every token's rows as they went in, less those as which it came back, however often.
#[test]
fn sums_are_those_of_a_sketch_made_anew() {
    let steps = if cfg!(feature = "slow-tests") { 1_000_000 } else { 20_000 };
    let device = &devices()[0].device;
    let mut numbers = Numbers::new(31);
    let (mut swaps, mut taken) = (0, 0);
    let mut kinds = [PAPER].into_iter().chain(OTHERS).cycle();
    while taken < steps {
        // A long one first.
        let episode = if taken == 0 { 2_000 } else { 250 };
        let (limit, slack) = (9 + numbers.below(8), numbers.below(6));
        let kind = kinds.next().unwrap_or(PAPER);
        let mut caches = Caches::new([limit, 4, slack], episode, kind, device);
        let mut ledger = Ledger::new(&caches);
        for step in 0..episode {
            caches.append(&mut numbers);
            let before = caches.slots();
            caches.revise(&mut numbers, 1);
            ledger.note(&before, &caches.slots(), 1 + step as i32);
            if (step + 1) % 125 == 0 {
                check(&caches, limit, slack, step + 1, "cpu");
                ledger.check(&caches);
            }
        }
        taken += episode;
        swaps += ints(&caches.moved).chunks(2).map(|pair| pair[1]).sum::<i32>();
    }
    assert!(swaps > 100, "{swaps} swaps");
}

/// What slots hold: by pair and token, key and value.
type Slots = BTreeMap<(usize, i32), [Vec<f32>; 2]>;

/// What a sketch should hold of every token.
struct Ledger {
    episode: usize,
    rows: [Vec<f32>; 2],
}

impl Ledger {
    fn new(caches: &Caches) -> Self {
        let empty = || vec![0.0; caches.pairs() * caches.tokens * caches.head_dim];
        Self { episode: caches.tokens, rows: [empty(), empty()] }
    }

    /// Notes which tokens a step put in and took out.
    fn note(&mut self, before: &Slots, after: &Slots, seen: i32) {
        for (at, rows) in before {
            if !after.contains_key(at) {
                self.add(*at, rows, 1.0);
            }
        }
        for (at, rows) in after {
            if at.1 < seen && !before.contains_key(at) {
                self.add(*at, rows, -1.0);
            }
        }
    }

    fn add(&mut self, (pair, token): (usize, i32), rows: &[Vec<f32>; 2], sign: f32) {
        for (sums, row) in self.rows.iter_mut().zip(rows) {
            let at = (pair * self.episode + token as usize) * row.len();
            sums[at..at + row.len()].iter_mut().zip(row).for_each(|(sum, x)| *sum += sign * x);
        }
    }

    /// Compares the sums with the sketches'.
    fn check(&self, caches: &Caches) {
        for (actual, expected) in caches.sketch.iter().zip(self.sketch(caches)) {
            let expected: Vec<f64> = read(expected).iter().map(|x| f64::from(*x)).collect();
            let error = relative_error(&read(actual.clone()), &expected);
            assert!(error < 1e-5, "{:?}: off by {error}", caches.kind);
        }
    }

    /// A sketch of all of them.
    fn sketch(&self, caches: &Caches) -> [Tensor<2>; 2] {
        let device = &caches.device;
        let shape = [caches.pairs(), self.episode, caches.head_dim];
        let floats = |rows: &Vec<f32>| {
            Tensor::<3>::from_data(TensorData::new(rows.clone(), shape), (device, DType::F32))
        };
        let tokens = (0..self.episode as i32).collect::<Vec<_>>().repeat(shape[0]);
        let tokens = TensorData::new(tokens, [shape[0], self.episode]);
        let zeros = || Tensor::<2>::zeros(caches.sketch[0].dims(), (device, DType::F32));
        let (mut keys, mut values) = (zeros(), zeros());
        sketch_insert(
            SketchPool {
                keys: &mut keys,
                values: &mut values,
                heads: &caches.heads,
                most_entries: ENTRIES * caches.kind.buckets,
                hashes: &caches.hashes,
                signed_keys: caches.kind.signed_keys,
            },
            Tensor::from_data(tokens, (device, DType::I32)),
            floats(&self.rows[0]),
            floats(&self.rows[1]),
            1.0,
        )
        .unwrap();
        [keys, values]
    }
}
