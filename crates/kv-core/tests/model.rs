//! A cache as plain vectors: what every operation of the real one must amount to.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{CacheOptions, LayerCache, Selection, SlotLayout, read_f32};
use kv_kernels::{KeyRule, MergeLists, MergeOptions, SlotLists};
use kv_testing::Numbers;

pub(crate) const DIM: usize = 8;

/// One slot.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slot {
    pub(crate) position: i32,
    pub(crate) weight: f32,
    pub(crate) track: f32,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

/// The real cache and its model, driven together.
pub(crate) struct Pair {
    pub(crate) cache: LayerCache,
    pub(crate) heads: Vec<Vec<Slot>>,
    pub(crate) next: i32,
    numbers: Numbers,
    device: Device,
}

impl Pair {
    pub(crate) fn new(capacities: Vec<usize>, kv_heads: usize, device: &Device) -> Self {
        let mut options = CacheOptions::new(device, DType::F32);
        options.weighted = true;
        let total_kv_heads = capacities.len();
        let mut cache = LayerCache::new(SlotLayout::new(kv_heads, capacities), DIM, options);
        let slots = cache.keys().dims()[0];
        let zeros = Tensor::zeros([slots], (device, DType::F32));
        cache.set_track("track", zeros, 0.5).unwrap();
        Self {
            cache,
            heads: vec![Vec::new(); total_kv_heads],
            next: 0,
            numbers: Numbers::new(11),
            device: device.clone(),
        }
    }

    fn rows(&mut self) -> (Tensor<3>, Vec<f32>) {
        let layout = self.cache.layout();
        let shape = [layout.batch(), layout.kv_heads(), DIM];
        let values = self.numbers.normal(shape.iter().product());
        let data = TensorData::new(values.clone(), shape);
        (Tensor::from_data(data, (&self.device, DType::F32)), values)
    }

    fn position(&self) -> Tensor<1, Int> {
        Tensor::full([self.cache.layout().batch()], self.next, (&self.device, DType::I32))
    }

    fn fresh(&self, range: usize, keys: &[f32], values: &[f32]) -> Slot {
        Slot {
            position: self.next,
            weight: 1.0,
            track: 0.5,
            key: keys[range * DIM..][..DIM].to_vec(),
            value: values[range * DIM..][..DIM].to_vec(),
        }
    }

    /// Appends a token; both must agree on whether there is room.
    pub(crate) fn append(&mut self) {
        let ((key, keys), (value, values)) = (self.rows(), self.rows());
        let capacities = self.cache.layout().capacities();
        let fits = self.heads.iter().zip(capacities).all(|(head, &capacity)| head.len() < capacity);
        let result = self.cache.append(key, value, self.position());
        assert_eq!(result.is_ok(), fits, "{result:?}");
        if fits {
            for range in 0..self.heads.len() {
                let slot = self.fresh(range, &keys, &values);
                self.heads[range].push(slot);
            }
            self.next += 1;
        }
    }

    /// Gives one live slot of every head that has one another weight and track, and adds to its
    /// value.
    pub(crate) fn rewrite(&mut self) {
        let total_kv_heads = self.heads.len();
        let rows = self.numbers.normal(total_kv_heads * DIM);
        let offsets = self.cache.layout().offsets().to_vec();
        let (mut slots, mut weights, mut tracks) = (Vec::new(), Vec::new(), Vec::new());
        for (range, &offset) in offsets.iter().enumerate() {
            let length = self.heads[range].len();
            weights.push(1.0 + self.numbers.below(4) as f32);
            tracks.push(self.numbers.below(9) as f32);
            if length == 0 {
                slots.push(-1);
                continue;
            }
            let index = self.numbers.below(length);
            slots.push((offset + index) as i32);
            let slot = &mut self.heads[range][index];
            (slot.weight, slot.track) = (weights[range], tracks[range]);
            let added = &rows[range * DIM..][..DIM];
            slot.value.iter_mut().zip(added).for_each(|(value, added)| *value += added);
        }
        let slots = Tensor::<1, Int>::from_data(slots.as_slice(), (&self.device, DType::I32));
        let floats = |of: &[f32]| Tensor::<1>::from_data(of, (&self.device, DType::F32));
        let logs: Vec<f32> = weights.iter().map(|weight| weight.ln()).collect();
        self.cache.write_log_weights(&slots, floats(&logs)).unwrap();
        self.cache.write_track("track", &slots, floats(&tracks)).unwrap();
        let rows = floats(&rows).reshape([total_kv_heads, DIM]);
        self.cache.add_values(&slots, rows).unwrap();
    }

    /// Keeps a random subset of every head, of different sizes.
    pub(crate) fn retain(&mut self) {
        let mut kept = Vec::new();
        for head in &mut self.heads {
            let stays: Vec<u32> =
                (0..head.len() as u32).filter(|_| self.numbers.below(4) > 0).collect();
            *head = stays.iter().map(|&index| head[index as usize].clone()).collect();
            kept.push(stays);
        }
        self.cache.retain(&Selection::new(kept).unwrap()).unwrap();
    }

    /// Keeps so many slots of the highest scores of every head, among few scores, so that most are
    /// equal to another.
    pub(crate) fn retain_highest(&mut self, count: usize) {
        let layout = self.cache.layout();
        // What lies behind a head's slots must not count.
        let mut scores = vec![f32::NAN; self.cache.keys().dims()[0]];
        let counts: Vec<usize> = (0..self.heads.len()).map(|range| (count + range) % 6).collect();
        for (range, head) in self.heads.iter_mut().enumerate() {
            let own = layout.live(range);
            scores[own.clone()].fill_with(|| self.numbers.below(4) as f32);
            let own = &scores[own];
            let mut order: Vec<usize> = (0..head.len()).collect();
            order.sort_by(|&a, &b| own[b].total_cmp(&own[a]).then(a.cmp(&b)));
            order.truncate(counts[range]);
            order.sort_unstable();
            *head = order.into_iter().map(|index| head[index].clone()).collect();
        }
        let slots = scores.len();
        let scores = TensorData::new(scores, [slots]);
        let scores = Tensor::from_data(scores, (&self.device, DType::F32));
        let kept = self.cache.highest(scores, &counts).unwrap();
        self.cache.retain(&kept).unwrap();
    }

    /// Evicts the lowest key component from every head above `limit`.
    pub(crate) fn evict(&mut self, limit: usize) {
        let scores = self.cache.keys().clone().narrow(1, 0, 1).squeeze_dim(1);
        let victims = self.cache.lowest_slots(scores).unwrap();
        self.cache.evict_slots(victims, &vec![limit; self.heads.len()]).unwrap();
        for head in &mut self.heads {
            if head.len() > limit {
                let lowest = head.iter().enumerate();
                let lowest = lowest.min_by(|a, b| a.1.key[0].total_cmp(&b.1.key[0])).unwrap().0;
                // The last slot fills the gap.
                head.swap_remove(lowest);
            }
        }
    }

    /// Merges every third slot into the one before it and drops every fifth.
    pub(crate) fn merge(&mut self) {
        let (mut merges, mut kept) = (Vec::new(), Vec::new());
        for head in &mut self.heads {
            let mut own: Vec<(u32, f32)> = Vec::new();
            for index in (1..head.len() as u32).step_by(3) {
                own.push((index, 0.25 + self.numbers.below(8) as f32));
            }
            for &(index, importance) in &own {
                let victim = head[index as usize].clone();
                let target = &mut head[index as usize - 1];
                let (ours, theirs) = (target.weight, victim.weight * importance);
                for (into, from) in
                    [(&mut target.key, &victim.key), (&mut target.value, &victim.value)]
                {
                    into.iter_mut().zip(from).for_each(|(into, from)| {
                        *into = (*into * ours + from * theirs) / (ours + theirs);
                    });
                }
                target.weight += victim.weight;
                target.track += victim.track;
            }
            let stays: Vec<u32> =
                (0..head.len() as u32).filter(|index| index % 3 != 1 && index % 15 != 5).collect();
            merges.push(own);
            kept.push(stays);
        }
        self.merge_on_device(&merges);
        for (head, stays) in self.heads.iter_mut().zip(&kept) {
            *head = stays.iter().map(|&index| head[index as usize].clone()).collect();
        }
        self.cache.retain(&Selection::new(kept).unwrap()).unwrap();
    }

    /// Each head's merges of a slot, with its importance, into the one before it.
    fn merge_on_device(&mut self, merges: &[Vec<(u32, f32)>]) {
        let most = merges.iter().map(Vec::len).max().unwrap_or_default();
        if most == 0 {
            return;
        }
        let total_kv_heads = merges.len();
        let weights = self.cache.read_weights().unwrap();
        let tracks = read_f32("track", self.cache.track("track").unwrap().clone()).unwrap();
        let fill = |value: i32| vec![value; total_kv_heads * most];
        let (mut victims, mut targets, mut kept) = (fill(0), fill(-1), fill(-1));
        let mut logs = [vec![0.0; total_kv_heads * most * 2], vec![0.0; total_kv_heads * most * 2]];
        let mut sums = vec![0.0; total_kv_heads * most];
        for (range, own) in merges.iter().enumerate() {
            let offset = self.cache.layout().offsets()[range];
            for (at, &(index, importance)) in own.iter().enumerate() {
                let (slot, row) = (offset + index as usize, range * most + at);
                (victims[row], kept[row], targets[row]) = (slot as i32, slot as i32 - 1, at as i32);
                logs[0][2 * row..][..2].copy_from_slice(&[weights[slot].ln(), importance.ln()]);
                logs[1][2 * row] = weights[slot - 1].ln();
                sums[row] = tracks[slot] + tracks[slot - 1];
            }
        }
        let device = &self.device;
        let ints = |of: &[i32]| {
            Tensor::<1, Int>::from_data(of, (device, DType::I32)).reshape([total_kv_heads, most])
        };
        let counts: Vec<i32> = merges.iter().map(|own| own.len() as i32).collect();
        let counts = Tensor::<1, Int>::from_data(counts.as_slice(), (device, DType::I32));
        let [victim_weights, kept_weights] = logs.map(|logs| {
            let flat = Tensor::<1>::from_data(logs.as_slice(), (device, DType::F32));
            flat.reshape([total_kv_heads, most, 2])
        });
        let slots = ints(&kept).reshape([total_kv_heads * most]);
        let lists = MergeLists {
            victims: SlotLists { slots: ints(&victims), counts: counts.clone() },
            targets: ints(&targets),
            victim_weights,
            kept: SlotLists { slots: ints(&kept), counts },
            kept_weights,
        };
        let options = MergeOptions { rule: KeyRule::Mean, ..MergeOptions::default() };
        let merged = self.cache.merge_slots(None, &lists, &options).unwrap();
        let weights = merged.weights.narrow(2, 0, 1).reshape([total_kv_heads * most]);
        self.cache.write_log_weights(&slots, weights).unwrap();
        let sums = Tensor::<1>::from_data(sums.as_slice(), (device, DType::F32));
        self.cache.write_track("track", &slots, sums).unwrap();
    }

    /// Compares everything.
    pub(crate) fn check(&self) {
        let layout = self.cache.layout();
        let lengths: Vec<usize> = self.heads.iter().map(Vec::len).collect();
        assert_eq!(layout.lengths(), lengths);
        assert!(layout.lengths().iter().zip(layout.capacities()).all(|(l, c)| l <= c));
        let on_device = self.cache.ranges().lengths.clone().try_into_vec_as::<i32>().unwrap();
        let expected: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        assert_eq!(on_device, expected, "the device's lengths");

        let positions = self.cache.read_positions().unwrap();
        let weights = self.cache.read_weights().unwrap();
        let track = read_f32("track", self.cache.track("track").unwrap().clone()).unwrap();
        let keys = read_f32("keys", self.cache.keys().clone()).unwrap();
        let values = read_f32("values", self.cache.values().clone()).unwrap();
        let close = |a: f32, b: f32| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
        for (range, head) in self.heads.iter().enumerate() {
            let mut seen = std::collections::BTreeSet::new();
            for (slot, expected) in layout.live(range).zip(head) {
                assert_eq!(positions[slot], expected.position);
                assert!(seen.insert(positions[slot]), "position {} twice", positions[slot]);
                assert!(close(weights[slot], expected.weight));
                assert!(close(track[slot], expected.track));
                let row = |all: &[f32]| all[slot * DIM..][..DIM].to_vec();
                for (actual, expected) in
                    [(row(&keys), &expected.key), (row(&values), &expected.value)]
                {
                    let same = actual.iter().zip(expected).all(|(a, b)| close(*a, *b));
                    assert!(same, "{actual:?} for {expected:?}");
                }
            }
        }
    }
}
