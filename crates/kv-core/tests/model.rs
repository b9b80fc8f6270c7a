//! A cache as plain vectors: what every operation of the real one must amount to.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{CacheOptions, LayerCache, Merge, MergePlan, Selection, SlotLayout, read_f32};
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
        let pairs = capacities.len();
        let mut cache = LayerCache::new(SlotLayout::new(kv_heads, capacities), DIM, options);
        let slots = cache.keys().dims()[0];
        let zeros = Tensor::zeros([slots], (device, DType::F32));
        cache.set_track("track", zeros, 0.5).unwrap();
        Self {
            cache,
            heads: vec![Vec::new(); pairs],
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

    fn fresh(&self, pair: usize, keys: &[f32], values: &[f32]) -> Slot {
        Slot {
            position: self.next,
            weight: 1.0,
            track: 0.5,
            key: keys[pair * DIM..][..DIM].to_vec(),
            value: values[pair * DIM..][..DIM].to_vec(),
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
            for pair in 0..self.heads.len() {
                let slot = self.fresh(pair, &keys, &values);
                self.heads[pair].push(slot);
            }
            self.next += 1;
        }
    }

    /// Overwrites one live slot of every head that has one.
    pub(crate) fn overwrite(&mut self) {
        let ((key, keys), (value, values)) = (self.rows(), self.rows());
        let offsets = self.cache.layout().offsets().to_vec();
        let mut slots = Vec::new();
        for (pair, &offset) in offsets.iter().enumerate() {
            let length = self.heads[pair].len();
            if length == 0 {
                slots.push(-1);
                continue;
            }
            let index = self.numbers.below(length);
            slots.push((offset + index) as i32);
            self.heads[pair][index] = self.fresh(pair, &keys, &values);
        }
        let layout = self.cache.layout();
        let data = TensorData::new(slots, [layout.batch(), layout.kv_heads()]);
        let slots = Tensor::from_data(data, (&self.device, DType::I32));
        self.cache.overwrite(slots, key, value, self.position()).unwrap();
        self.next += 1;
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
        let counts: Vec<usize> = (0..self.heads.len()).map(|pair| (count + pair) % 6).collect();
        for (pair, head) in self.heads.iter_mut().enumerate() {
            let own = layout.live(pair);
            scores[own.clone()].fill_with(|| self.numbers.below(4) as f32);
            let own = &scores[own];
            let mut order: Vec<usize> = (0..head.len()).collect();
            order.sort_by(|&a, &b| own[b].total_cmp(&own[a]).then(a.cmp(&b)));
            order.truncate(counts[pair]);
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
        self.cache.evict_lowest(scores, &vec![limit; self.heads.len()]).unwrap();
        for head in &mut self.heads {
            if head.len() > limit {
                let lowest = head.iter().enumerate();
                let lowest = lowest.min_by(|a, b| a.1.key[0].total_cmp(&b.1.key[0])).unwrap().0;
                // The last slot fills the gap.
                head.swap_remove(lowest);
            }
        }
    }

    /// Merges every third slot into a neighbour and drops every fifth.
    pub(crate) fn merge(&mut self) {
        let mut plan = MergePlan::default();
        for head in &mut self.heads {
            let (mut merges, mut dropped) = (Vec::new(), Vec::new());
            for index in 0..head.len() as u32 {
                if index % 3 == 1 {
                    let importance = 0.25 + self.numbers.below(8) as f32;
                    merges.push(Merge { victim: index, target: index - 1, importance });
                } else if index % 15 == 5 {
                    dropped.push(index);
                }
            }
            for merge in &merges {
                let victim = head[merge.victim as usize].clone();
                let target = &mut head[merge.target as usize];
                let (ours, theirs) = (target.weight, victim.weight * merge.importance);
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
            let gone = |index: u32| {
                merges.iter().any(|merge| merge.victim == index) || dropped.contains(&index)
            };
            let stays = (0..head.len() as u32).filter(|&index| !gone(index));
            *head = stays.map(|index| head[index as usize].clone()).collect();
            plan.merges.push(merges);
            plan.dropped.push(dropped);
        }
        self.cache.merge(&plan).unwrap();
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
        for (pair, head) in self.heads.iter().enumerate() {
            let mut seen = std::collections::BTreeSet::new();
            for (slot, expected) in layout.live(pair).zip(head) {
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
