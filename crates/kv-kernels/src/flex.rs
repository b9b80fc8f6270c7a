//! The extension's methods on the CPU: the references, on the tensors' own buffers.

mod attention;
mod buffers;
mod sketch;
mod subset;

use burn::backend::{DType, Element, Flex, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use attention::Args;
use buffers::{compacted, dropped, moved, owned, rounded, rounding, scatter_into, slice, wide};

use crate::Share;
use crate::add_probabilities::GroupReduction;
use crate::add_probabilities::reference::add;
use crate::argmin_slots::Protection;
use crate::argmin_slots::reference::argmin;
use crate::average_scores::AverageWeights;
use crate::average_scores::reference::average;
use crate::balance::WalkConfig;
use crate::balance::reference::Lists as WalkLists;
use crate::decode_attention::DecodeConfig;
use crate::decode_attention::reference::Scores;
use crate::evicting_attention::reference::{Decision, HostGuard, log_norm};
use crate::evicting_attention::{EvictionConfig, EvictionScope};
use crate::extension::{
    Classes, Drawn, Drops, Epilogue, EpilogueConfig, Eviction, LabelTensors, Lists, MergedPools,
    Merges, MergingPools, Places, Projection, Retrieval, Revised, Revision, SampleTensors, Scalars,
    SketchAttended, SketchTensors, SketchTokens, SlotOps, SlotPools, Walk, Written,
};
use crate::heads::reference::Tokens;
use crate::heads::{HeadConfig, Place};
use crate::linear::reference::{finish, product};
use crate::merge_nearest::NearestConfig;
use crate::merge_nearest::reference::Slots as MergingReference;
use crate::merge_slots::MergeConfig;
use crate::merge_slots::reference::Groups;
use crate::nearest_slots::reference::Pairing;
use crate::pages::PageOptions;
use crate::random::uniform;
use crate::reading::Reading;
use crate::retrieve_slots::{self, SteerOptions};
use crate::rms_norm::reference::rms_norm;
use crate::sample::reference::{Settings, sample};
use crate::sample::{DrawConfig, FLOATS, INTS};
use crate::swiglu::reference::swiglu;
use crate::top_slots::reference::{above, top};
use crate::window_starts::reference::starts;

impl SlotOps for Flex {
    fn decode_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        log_weights: FlexTensor,
        numerators: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        view: FlexTensor,
        config: DecodeConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let args =
            Args { query, keys, values, log_weights, numerators, offsets, lengths, view, config };
        args.solve(match (config.features.scores, config.raw) {
            (false, _) => Scores::None,
            (true, false) => Scores::Probabilities,
            (true, true) => Scores::Logits,
        })
    }

    fn evicting_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        log_weights: FlexTensor,
        eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [pairs @ .., kv_heads] = eviction.offsets.layout().shape().dims::<2>();
        let group = query.layout().shape()[1] / kv_heads;
        let args = Args {
            query,
            keys,
            values,
            numerators: log_weights.clone(),
            log_weights,
            offsets: eviction.offsets.clone(),
            lengths: eviction.lengths.clone(),
            view: eviction.lengths.clone(),
            config: config.attention,
        };
        let (output, log_sum_exp, logits) = args.solve(Scores::Logits);
        let [offsets, lengths, limits, places, positions, now] = [
            eviction.offsets,
            eviction.lengths,
            eviction.limits,
            eviction.places,
            eviction.positions,
            eviction.now,
        ]
        .map(|tensor| tensor.to_contiguous());
        let log_norms = eviction.log_norms.to_contiguous();
        let decision = Decision {
            logits: slice::<f32>(&logits),
            log_sum_exp: slice::<f32>(&log_sum_exp),
            log_norms: slice::<f32>(&log_norms),
            offsets: slice::<i32>(&offsets),
            lengths: slice::<i32>(&lengths),
            limits: slice::<i32>(&limits),
            newest: slice::<i32>(&places),
            spares_newest: config.spares_newest,
            guard: config.guarded.then(|| HostGuard {
                positions: slice::<i32>(&positions),
                now: slice::<i32>(&now),
                sinks: config.sinks,
                recents: config.recents,
            }),
            kv_heads,
            group,
            together: config.scope == EvictionScope::Layer,
        };
        let importance = decision.importance();
        let next = TensorData::new(decision.next(&importance), Shape::from([pairs[0], kv_heads]));
        let slots = importance.len();
        let importance = TensorData::new(importance, [slots]);
        (output, FlexTensor::from_data(next), FlexTensor::from_data(importance))
    }

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
            weights: FlexTensor::from_data(TensorData::new(weights, [rows, places, 2])),
            guarded: FlexTensor::from_data(TensorData::new(guarded, shape)),
        }
    }

    fn merge_nearest(
        pools: MergingPools<Self>,
        offsets: FlexTensor,
        lengths: FlexTensor,
        victims: FlexTensor,
        goes: FlexTensor,
        queries: FlexTensor,
        config: NearestConfig,
    ) -> MergingPools<Self> {
        let [_, head_dim] = pools.keys.layout().shape().dims();
        let (mut keys, mut values) = (wide(&pools.keys), wide(&pools.values));
        let [mut log_weights, mut log_scores, mut votes, mut votes_high] =
            [pools.log_weights, pools.log_scores, pools.votes, pools.votes_high].map(owned);
        let samples = wide(&pools.log_samples);
        let ints = [offsets, lengths, victims, goes].map(|tensor| tensor.to_contiguous());
        let changed = MergingReference {
            keys: &mut keys,
            values: &mut values,
            log_weights: log_weights.storage_mut::<f32>(),
            log_scores: log_scores.storage_mut::<f32>(),
            log_samples: &samples,
            votes: votes.storage_mut::<f32>(),
            votes_high: votes_high.storage_mut::<f32>(),
            head_dim,
        }
        .merge(std::array::from_fn(|i| slice(&ints[i])), &wide(&queries), config);
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
            log_samples: pools.log_samples,
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

    fn add_probabilities(
        sums: FlexTensor,
        logits: FlexTensor,
        log_sum_exp: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        reduction: GroupReduction,
    ) -> FlexTensor {
        let mut sums = owned(sums);
        let [logits, log_sum_exp, offsets, lengths] =
            [logits, log_sum_exp, offsets, lengths].map(|tensor| tensor.to_contiguous());
        let ranges = [slice(&offsets), slice(&lengths)];
        let values = sums.storage_mut::<f32>();
        add(values, slice(&logits), slice(&log_sum_exp), ranges, reduction);
        sums
    }

    fn sketch_insert(
        sketch: SketchTensors<Self>,
        tokens: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        sign: f32,
    ) -> (FlexTensor, FlexTensor) {
        sketch::insert(sketch, tokens, keys, values, sign)
    }

    fn sketch_query(
        sketch: SketchTensors<Self>,
        tokens: FlexTensor,
        dtype: DType,
    ) -> (FlexTensor, FlexTensor) {
        sketch::query(sketch, tokens, dtype)
    }

    fn sketch_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        tokens: SketchTokens<Self>,
        scale: f32,
        _longest: usize,
    ) -> SketchAttended<Self> {
        sketch::attend(query, [keys, values], [offsets, lengths], tokens, scale)
    }

    fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
        sketch::revise(revision)
    }

    fn retrieve_slots(retrieval: Retrieval<Self>) -> (FlexTensor, FlexTensor, FlexTensor) {
        let Retrieval { config, .. } = retrieval;
        let [pairs, parts, _] = retrieval.vectors.layout().shape().dims();
        let [_, head_dim] = retrieval.keys.layout().shape().dims();
        let [query, vectors, keys] =
            [&retrieval.query, &retrieval.vectors, &retrieval.keys].map(wide);
        let ints = [retrieval.offsets, retrieval.lengths, retrieval.newest]
            .map(|tensor| tensor.to_contiguous());
        let (mut table, mut set_vectors) = (owned(retrieval.table), owned(retrieval.set_vectors));
        let problem = retrieve_slots::reference::Problem {
            query: &query,
            vectors: &vectors,
            parts,
            keys: &keys,
            head_dim,
            offsets: slice(&ints[0]),
            lengths: slice(&ints[1]),
            newest: slice(&ints[2]),
            config,
        };
        let sums = problem.solve(table.storage_mut::<i32>(), set_vectors.storage_mut::<f32>());
        let group = sums.len() / pairs;
        (table, set_vectors, rounded(sums, [pairs, group], DType::F32))
    }

    fn retrieving_attention(
        retrieval: Retrieval<Self>,
        values: FlexTensor,
        attention: DecodeConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [query, keys] = [&retrieval.query, &retrieval.keys].map(Clone::clone);
        let [offsets, lengths] = [&retrieval.offsets, &retrieval.lengths].map(Clone::clone);
        let none = rounded(vec![0.0], [1], DType::F32);
        let (table, set_vectors, _) = Self::retrieve_slots(retrieval);
        let (output, ..) = Self::decode_attention(
            query,
            keys,
            values,
            none.clone(),
            none,
            offsets,
            lengths,
            table.clone(),
            attention,
        );
        (table, set_vectors, output)
    }

    fn begin_read(tensor: FlexTensor) -> Reading {
        let tensor = tensor.to_contiguous();
        Reading::new(move || Ok(slice(&tensor).to_vec()))
    }

    fn steer_sets(table: FlexTensor, dropped: FlexTensor, options: SteerOptions) -> FlexTensor {
        let (mut table, dropped) = (owned(table), wide(&dropped));
        let [pairs, _] = table.layout().shape().dims();
        retrieve_slots::steer::reference(table.storage_mut::<i32>(), &dropped, pairs, options);
        table
    }

    fn skinny_product(x: FlexTensor, weight: FlexTensor, epilogue: Epilogue<Self>) -> FlexTensor {
        match x.dtype() {
            DType::F16 => product_of::<f16>(x, weight, epilogue, f16::to_f32),
            DType::BF16 => product_of::<bf16>(x, weight, epilogue, bf16::to_f32),
            _ => product_of::<f32>(x, weight, epilogue, |x| x),
        }
    }

    fn swiglu(x: FlexTensor) -> FlexTensor {
        let [rows, width] = x.layout().shape().dims();
        rounded(swiglu(&wide(&x), width / 2), [rows, width / 2], x.dtype())
    }

    fn rms_norm(
        x: FlexTensor,
        delta: FlexTensor,
        weight: FlexTensor,
        epsilon: f32,
        adds: bool,
    ) -> (FlexTensor, FlexTensor) {
        let dtype = x.dtype();
        let shape: [usize; 2] = x.layout().shape().dims();
        let sum = if adds {
            let sum = wide(&x).iter().zip(wide(&delta)).map(|(x, delta)| x + delta).collect();
            rounded(sum, shape, dtype)
        } else {
            x
        };
        let normed = rms_norm(&wide(&sum), &wide(&weight), epsilon, rounding(dtype));
        (rounded(normed, shape, dtype), sum)
    }

    fn split_heads(
        projection: Projection<Self>,
        tokens: usize,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let dtype = projection.projected.dtype();
        let HeadConfig { query_heads, kv_heads, head_dim, .. } = projection.config;
        let data = ProjectionData::new(&projection);
        let new = data.tokens();
        let batch = data.positions.len() / tokens;
        let part = |first: usize, count: usize| {
            rounded(new.heads(first, count, tokens), [batch, count, tokens, head_dim], dtype)
        };
        (part(0, query_heads), part(query_heads, kv_heads), part(query_heads + kv_heads, kv_heads))
    }

    fn write_heads(
        projection: Projection<Self>,
        pools: SlotPools<Self>,
        places: Places<Self>,
    ) -> Written<Self> {
        let dtype = projection.projected.dtype();
        let HeadConfig { query_heads, kv_heads, head_dim, .. } = projection.config;
        let data = ProjectionData::new(&projection);
        let new = data.tokens();
        let batch = data.positions.len();
        let shape = [batch, query_heads, head_dim];
        let query = rounded(new.heads(0, query_heads, 1), shape, dtype);

        let mut lengths = owned(places.lengths);
        let (offsets, next) = (places.offsets.to_contiguous(), places.next.to_contiguous());
        let heads = slice::<i32>(&offsets).iter().zip(slice::<i32>(&next));
        let heads = heads.zip(lengths.storage_mut::<i32>());
        let slots = heads.map(|((&offset, &next), length)| match places.place {
            Place::Slots => offset,
            Place::Append => {
                *length += 1;
                offset + *length - 1
            }
            Place::Next => {
                *length += i32::from(next == *length);
                offset + next
            }
        });
        let slots: Vec<i32> = slots.collect();
        let count = batch * kv_heads;
        let at = FlexTensor::from_data(TensorData::new(slots, [count]));
        let rows = |pool: FlexTensor, first: usize| {
            let rows = new.heads(first, kv_heads, 1);
            let dtype = pool.dtype();
            Self::scatter_rows(pool, at.clone(), rounded(rows, [count, head_dim], dtype))
        };
        let positions = data.positions.iter();
        let positions: Vec<i32> =
            positions.flat_map(|&position| std::iter::repeat_n(position, kv_heads)).collect();
        let positions = FlexTensor::from_data(TensorData::new(positions, [count]));
        let log_weights = if pools.weighted {
            let ones = FlexTensor::from_data(TensorData::new(vec![0.0f32; count], [count]));
            Self::scatter_rows(pools.log_weights, at.clone(), ones)
        } else {
            pools.log_weights
        };
        let log_norms = if places.place == Place::Next {
            let values = new.heads(query_heads + kv_heads, kv_heads, 1);
            let values = wide(&rounded(values, [count, head_dim], pools.values.dtype()));
            let norms: Vec<f32> = values.chunks(head_dim).map(log_norm).collect();
            let norms = FlexTensor::from_data(TensorData::new(norms, [count]));
            Self::scatter_rows(places.log_norms, at.clone(), norms)
        } else {
            places.log_norms
        };
        let pools = SlotPools {
            keys: rows(pools.keys, query_heads),
            values: rows(pools.values, query_heads + kv_heads),
            positions: Self::scatter_ints(pools.positions, at.clone(), positions),
            log_weights,
            weighted: pools.weighted,
        };
        Written { query, pools, lengths, log_norms }
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

    fn drop_slots(pools: SlotPools<Self>, drops: Drops<Self>) -> SlotPools<Self> {
        let drops = [drops.offsets, drops.lengths, drops.victims, drops.goes];
        let drops = drops.map(|tensor| tensor.to_contiguous());
        let drops: [&[i32]; 4] = std::array::from_fn(|i| slice(&drops[i]));
        SlotPools {
            keys: dropped(pools.keys, drops),
            values: dropped(pools.values, drops),
            positions: dropped(pools.positions, drops),
            log_weights: match pools.weighted {
                true => dropped(pools.log_weights, drops),
                false => pools.log_weights,
            },
            weighted: pools.weighted,
        }
    }

    fn drop_scalars(
        pools: Scalars<Self>,
        drops: Drops<Self>,
        shrinks: bool,
    ) -> (Scalars<Self>, FlexTensor) {
        let mut lengths = owned(drops.lengths);
        let [offsets, victims, goes] =
            [drops.offsets, drops.victims, drops.goes].map(|tensor| tensor.to_contiguous());
        let (victims, goes) = (slice::<i32>(&victims), slice::<i32>(&goes));
        let drops = [slice(&offsets), slice(&lengths), victims, goes];
        let drop = |pools: Vec<_>| pools.into_iter().map(|pool| dropped(pool, drops)).collect();
        let pools = pools.map(drop);
        let own = lengths.storage_mut::<i32>().iter_mut().zip(victims.iter().zip(goes));
        for (length, (&victim, &goes)) in own.take_while(|_| shrinks) {
            *length -= i32::from(goes != 0 && victim >= 0 && *length > 0);
        }
        (pools, lengths)
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

    fn draw(logits: FlexTensor, state: SampleTensors<Self>, _config: DrawConfig) -> Drawn<Self> {
        let [rows, vocabulary] = logits.layout().shape().dims();
        let (logits, floats, ints) =
            (wide(&logits), wide(&state.floats), state.ints.to_contiguous());
        let ints = slice::<i32>(&ints).chunks_exact(INTS);
        let settings = floats.chunks_exact(FLOATS).zip(ints);
        let (mut draws, mut positions) = (owned(state.draws), owned(state.positions));
        let mut drawn = Vec::with_capacity(rows);
        let moving = draws.storage_mut::<i32>().iter_mut().zip(positions.storage_mut::<i32>());
        let rows = logits.chunks_exact(vocabulary).zip(settings).zip(moving);
        for ((logits, (floats, ints)), (draw, position)) in rows {
            let settings = Settings {
                temperature: floats[0],
                top_p: floats[1],
                min_p: floats[2],
                top_k: ints[0].unsigned_abs() as usize,
                seed: [ints[1] as u32, ints[2] as u32],
            };
            let token = sample(logits, &settings, *draw as u32);
            drawn.push(token.map_or(-1, |token| token as i32));
            *draw += 1;
            *position += ints[3];
        }
        let mut tokens = owned(state.tokens);
        let stored = tokens.storage_mut::<i32>().iter_mut().zip(&drawn);
        stored.for_each(|(token, drawn)| *token = (*drawn).max(0));
        let count = drawn.len();
        let drawn = FlexTensor::from_data(TensorData::new(drawn, [count]));
        Drawn { drawn, draws, positions, tokens }
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

    fn page_bounds(
        keys: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        bounds: FlexTensor,
        page: usize,
        _pages: usize,
        last: bool,
    ) -> FlexTensor {
        subset::bounds(keys, offsets, lengths, bounds, page, last)
    }

    fn page_scores(
        query: FlexTensor,
        bounds: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        budgets: FlexTensor,
        pages: usize,
        options: PageOptions,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        subset::page_scores(query, bounds, offsets, lengths, budgets, pages, options)
    }

    fn page_slots(
        pages: FlexTensor,
        found: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        page: usize,
        always_last: bool,
    ) -> (FlexTensor, FlexTensor) {
        subset::page_slots(pages, found, offsets, lengths, page, always_last)
    }

    fn label_scores(
        query: FlexTensor,
        keys: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        labels: LabelTensors<Self>,
        columns: usize,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        subset::label_scores(query, keys, offsets, lengths, labels, columns)
    }

    fn keep_lists(
        lists: FlexTensor,
        indices: FlexTensor,
        found: FlexTensor,
        wanted: FlexTensor,
        budgets: FlexTensor,
        lengths: FlexTensor,
        board: FlexTensor,
        layer: Option<usize>,
    ) -> (FlexTensor, FlexTensor) {
        subset::keep(lists, [indices, found, wanted, lengths], budgets, board, layer)
    }

    fn list_slots(
        table: FlexTensor,
        sources: FlexTensor,
        budgets: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        width: usize,
    ) -> (FlexTensor, FlexTensor) {
        subset::list_slots(table, sources, budgets, offsets, lengths, width)
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

    fn uniforms(seeds: FlexTensor, draws: FlexTensor) -> FlexTensor {
        let shape = draws.layout().shape().clone();
        let (seeds, draws) = (seeds.to_contiguous(), draws.to_contiguous());
        let seeds = slice::<i32>(&seeds).chunks(2);
        let numbers = seeds
            .zip(slice::<i32>(&draws))
            .map(|(seed, &draw)| uniform([seed[0] as u32, seed[1] as u32], draw as u32));
        FlexTensor::from_data(TensorData::new(numbers.collect::<Vec<f32>>(), shape))
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

    fn window_starts(
        positions: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        newest: FlexTensor,
        share: Share,
    ) -> FlexTensor {
        let shape = offsets.layout().shape().clone();
        let [positions, offsets, lengths, newest] =
            [positions, offsets, lengths, newest].map(|tensor| tensor.to_contiguous());
        let [positions, offsets, lengths, newest] =
            [&positions, &offsets, &lengths, &newest].map(slice);
        let starts = starts(positions, offsets, lengths, newest, share);
        FlexTensor::from_data(TensorData::new(starts, shape))
    }
}

/// New tokens' numbers as f32.
struct ProjectionData {
    projected: Vec<f32>,
    positions: Vec<i32>,
    tables: [Vec<f32>; 2],
    norms: [Vec<f32>; 2],
    config: HeadConfig,
    round: fn(f32) -> f32,
}

impl ProjectionData {
    fn new(projection: &Projection<Flex>) -> Self {
        let Projection { projected, positions, cos, sin, query_norm, key_norm, config } =
            projection;
        let positions = positions.to_contiguous();
        Self {
            projected: wide(projected),
            positions: slice::<i32>(&positions).to_vec(),
            tables: [wide(cos), wide(sin)],
            norms: [wide(query_norm), wide(key_norm)],
            config: *config,
            round: rounding(projected.dtype()),
        }
    }

    fn tokens(&self) -> Tokens<'_> {
        let config = self.config;
        let [cos, sin] = &self.tables;
        let [query, key] = &self.norms;
        Tokens {
            projected: &self.projected,
            positions: &self.positions,
            rotation: config.rotates.then_some([cos, sin]),
            norms: config.normalises.then_some(([query, key], config.epsilon)),
            query_heads: config.query_heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            round: self.round,
        }
    }
}

fn product_of<E: Element + Pod + Sync>(
    x: FlexTensor,
    weight: FlexTensor,
    epilogue: Epilogue<Flex>,
    load: impl Fn(E) -> f32 + Copy + Sync,
) -> FlexTensor {
    let ([rows, inputs], [outputs, _]) =
        (x.layout().shape().dims(), weight.layout().shape().dims());
    let dtype = x.dtype();
    let EpilogueConfig { biased, gated, adds } = epilogue.config;
    let weight = weight.to_contiguous();
    let sums = product(&wide(&x), slice::<E>(&weight), inputs, load);
    let bias = biased.then(|| wide(&epilogue.bias));
    let residual = adds.then(|| wide(&epilogue.residual));
    let y = finish(sums, outputs, bias.as_deref(), gated, residual.as_deref());
    rounded(y, [rows, outputs / epilogue.config.parts()], dtype)
}
