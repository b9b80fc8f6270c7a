//! Tokens that are merged, or of which a subset stands for all.

use burn::backend::{Flex, TensorData};
use burn_flex::FlexTensor;

use super::buffers::{owned, rounded, slice, wide};
use crate::average_scores::AverageWeights;
use crate::average_scores::reference::average;
use crate::balance::WalkConfig;
use crate::balance::reference::Lists as WalkLists;
use crate::extension::{
    Classes, MergeOps, MergedPools, Merges, MergingPools, SlotOps, StepMerges, Walk,
};
use crate::merge_nearest::NearestConfig;
use crate::merge_nearest::reference::Slots as MergingReference;
use crate::merge_slots::MergeConfig;
use crate::merge_slots::reference::Groups;
use crate::nearest_slots::reference::Pairing;
use crate::rankings::reference::{ranking, turns};

impl MergeOps for Flex {
    fn balance(
        keys: FlexTensor,
        values: FlexTensor,
        walk: Walk<Self>,
        config: WalkConfig,
    ) -> Classes<Self> {
        let [_, head_dim] = keys.layout().shape().dims();
        let [rows, _] = walk.lists.layout().shape().dims();
        let [keys, values, log_gamma, means, weights, numbers] =
            [keys, values, walk.log_gamma, walk.means, walk.weights, walk.numbers]
                .map(|tensor| wide(&tensor));
        let [lists, counts, seeds] =
            [walk.lists, walk.counts, walk.seeds].map(|tensor| tensor.to_contiguous());
        let classes = WalkLists {
            keys: &keys,
            values: &values,
            lists: slice::<i32>(&lists),
            counts: slice::<i32>(&counts),
            log_gamma: &log_gamma,
            means: &means,
            weights: &weights,
            seeds: slice::<i32>(&seeds),
            numbers: &numbers,
            head_dim,
            config,
        }
        .balance();
        let ints = |values: Vec<i32>| {
            let width = values.len() / rows;
            FlexTensor::from_data(TensorData::new(values, [rows, width]))
        };
        Classes {
            signs: ints(classes.signs),
            kept: ints(classes.kept),
            failed: ints(classes.failed),
        }
    }

    fn nearest_slots(
        keys: FlexTensor,
        of: FlexTensor,
        of_counts: FlexTensor,
        among: FlexTensor,
        among_counts: FlexTensor,
        earlier: bool,
    ) -> (FlexTensor, FlexTensor) {
        let [_, head_dim] = keys.layout().shape().dims();
        let shape: [usize; 2] = of.layout().shape().dims();
        let keys = wide(&keys);
        let [of, of_counts, among, among_counts] =
            [of, of_counts, among, among_counts].map(|tensor| tensor.to_contiguous());
        let (places, cosines) = Pairing {
            keys: &keys,
            head_dim,
            of: slice::<i32>(&of),
            of_counts: slice::<i32>(&of_counts),
            among: slice::<i32>(&among),
            among_counts: slice::<i32>(&among_counts),
            earlier,
        }
        .nearest();
        let places = FlexTensor::from_data(TensorData::new(places, shape));
        (places, FlexTensor::from_data(TensorData::new(cosines, shape)))
    }

    fn rankings(scores: FlexTensor) -> FlexTensor {
        let shape: [usize; 2] = scores.layout().shape().dims();
        let scores = scores.to_contiguous();
        let rows = slice::<f32>(&scores).chunks(shape[1]);
        let ranked: Vec<i32> = rows.flat_map(ranking).collect();
        FlexTensor::from_data(TensorData::new(ranked, shape))
    }

    fn turns_of_groups(scores: FlexTensor, ranked: FlexTensor, leaders: FlexTensor) -> FlexTensor {
        let shape: [usize; 2] = scores.layout().shape().dims();
        let [scores, ranked, leaders] = [scores, ranked, leaders].map(|t| t.to_contiguous());
        let rows = |tensor| slice::<i32>(tensor).chunks(shape[1]);
        let scores = slice::<f32>(&scores).chunks(shape[1]);
        let rows = scores.zip(rows(&ranked)).zip(rows(&leaders));
        let all: Vec<f32> =
            rows.flat_map(|((scores, ranked), leaders)| turns(scores, ranked, leaders)).collect();
        FlexTensor::from_data(TensorData::new(all, shape))
    }

    fn merge_slots(
        keys: FlexTensor,
        values: FlexTensor,
        merges: Merges<Self>,
        config: MergeConfig,
    ) -> MergedPools<Self> {
        let [_, head_dim] = keys.layout().shape().dims();
        let shape: [usize; 2] = merges.kept.layout().shape().dims();
        let [from_keys, from_values, victim_weights, kept_weights, queries] = [
            &merges.from_keys,
            &merges.from_values,
            &merges.victim_weights,
            &merges.kept_weights,
            &merges.queries,
        ]
        .map(wide);
        let [victims, victim_counts, targets, kept, kept_counts] =
            [merges.victims, merges.victim_counts, merges.targets, merges.kept, merges.kept_counts]
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
        let [rows, places] = shape;
        MergedPools {
            keys: write(keys, new_keys),
            values: write(values, new_values),
            weights: FlexTensor::from_data(TensorData::new(weights, [rows, places, numbers])),
            guarded: FlexTensor::from_data(TensorData::new(guarded, shape)),
        }
    }

    fn merge_nearest(
        pools: MergingPools<Self>,
        merges: StepMerges<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self> {
        let [_, head_dim] = pools.keys.layout().shape().dims();
        let (mut keys, mut values) = (wide(&pools.keys), wide(&pools.values));
        let [mut log_weights, mut log_scores, mut log_samples] =
            [pools.log_weights, pools.log_scores, pools.log_samples].map(owned);
        let [mut votes, mut votes_high] = [pools.votes, pools.votes_high].map(owned);
        let StepMerges { offsets, lengths, victims, goes, queries, logits } = merges;
        let ints = [offsets, lengths, victims, goes].map(|tensor| tensor.to_contiguous());
        let changed = MergingReference {
            keys: &mut keys,
            values: &mut values,
            log_weights: log_weights.storage_mut::<f32>(),
            log_scores: log_scores.storage_mut::<f32>(),
            log_samples: log_samples.storage_mut::<f32>(),
            votes: votes.storage_mut::<f32>(),
            votes_high: votes_high.storage_mut::<f32>(),
            head_dim,
        }
        .merge(
            std::array::from_fn(|i| slice(&ints[i])),
            &wide(&queries),
            &wide(&logits),
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
        }
    }

    fn average_scores(
        log_scores: FlexTensor,
        log_samples: FlexTensor,
        logits: FlexTensor,
        log_weights: FlexTensor,
        weighted: bool,
        weights: AverageWeights,
    ) -> (FlexTensor, FlexTensor) {
        let [mut log_scores, mut log_samples] = [log_scores, log_samples].map(owned);
        let (logits, log_weights) = (logits.to_contiguous(), log_weights.to_contiguous());
        average(
            log_scores.storage_mut::<f32>(),
            log_samples.storage_mut::<f32>(),
            slice(&logits),
            weighted.then(|| slice(&log_weights)),
            weights,
        );
        (log_scores, log_samples)
    }
}
