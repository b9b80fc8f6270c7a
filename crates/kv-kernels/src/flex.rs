//! The extension's methods on the CPU: the references, on the tensors' own buffers.

use burn::backend::{DType, Element, Flex, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use crate::argmin_slots::reference::argmin;
use crate::balance::WalkConfig;
use crate::balance::reference::Lists as WalkLists;
use crate::decode_attention::reference::{Problem, Scores, Solution, View, solve};
use crate::decode_attention::{DecodeConfig, ViewKind};
use crate::evicting_attention::reference::{Decision, HostGuard, log_norm};
use crate::evicting_attention::{EvictionConfig, EvictionScope};
use crate::extension::{
    Classes, Drawn, Epilogue, EpilogueConfig, Eviction, Lists, Places, Projection, SampleTensors,
    SlotOps, SlotPools, Walk, Written,
};
use crate::heads::reference::Tokens;
use crate::heads::{HeadConfig, Place};
use crate::linear::reference::{finish, product};
use crate::move_slots::reference::{compact, copy};
use crate::rms_norm::reference::rms_norm;
use crate::sample::reference::{Settings, sample};
use crate::sample::{DrawConfig, FLOATS, INTS};
use crate::scatter_rows::reference::scatter;
use crate::swiglu::reference::swiglu;
use crate::top_slots::reference::{above, top};

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
        let probabilities = config.features.probabilities;
        args.solve(if probabilities { Scores::Probabilities } else { Scores::None })
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

    fn argmin_slots(scores: FlexTensor, offsets: FlexTensor, lengths: FlexTensor) -> FlexTensor {
        let shape = offsets.layout().shape().clone();
        let slots = argmin(
            slice::<f32>(&scores.to_contiguous()),
            slice::<i32>(&offsets.to_contiguous()),
            slice::<i32>(&lengths.to_contiguous()),
        );
        FlexTensor::from_data(TensorData::new(slots, shape))
    }
}

struct Args {
    query: FlexTensor,
    keys: FlexTensor,
    values: FlexTensor,
    log_weights: FlexTensor,
    numerators: FlexTensor,
    offsets: FlexTensor,
    lengths: FlexTensor,
    view: FlexTensor,
    config: DecodeConfig,
}

impl Args {
    fn solve(self, scores: Scores) -> (FlexTensor, FlexTensor, FlexTensor) {
        match self.query.dtype() {
            DType::F16 => self.run::<f16>(scores, f16::to_f32, f16::from_f32),
            DType::BF16 => self.run::<bf16>(scores, bf16::to_f32, bf16::from_f32),
            _ => self.run::<f32>(scores, |x| x, |x| x),
        }
    }

    fn run<E: Element + Pod>(
        self,
        scores: Scores,
        load: impl Fn(E) -> f32,
        store: impl Fn(f32) -> E,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let shape = self.query.layout().shape().clone();
        let ranges = self.offsets.layout().shape().clone();
        let (query_heads, head_dim, kv_heads) = (shape[1], shape[2], ranges[1]);
        let group = query_heads / kv_heads;
        let features = self.config.features;
        let [query, keys, values, log_weights, numerators] =
            [self.query, self.keys, self.values, self.log_weights, self.numerators]
                .map(|tensor| tensor.to_contiguous());
        let [offsets, lengths, view] =
            [self.offsets, self.lengths, self.view].map(|tensor| tensor.to_contiguous());
        let view = slice::<i32>(&view);
        let problem = Problem {
            query: slice::<E>(&query),
            keys: slice::<E>(&keys),
            values: slice::<E>(&values),
            log_weights: features.weighted.then(|| slice::<f32>(&log_weights)),
            numerators: features.numerators.then(|| slice::<f32>(&numerators)),
            view: match features.view {
                ViewKind::All => View::All,
                ViewKind::Window => View::Window { sinks: self.config.sinks, starts: view },
                ViewKind::List => View::List(view),
            },
            offsets: slice::<i32>(&offsets),
            lengths: slice::<i32>(&lengths),
            kv_heads,
            group,
            head_dim,
            scale: self.config.scale,
        };
        let Solution { output, log_sum_exp, scores } = solve(&problem, scores, load);

        let output = TensorData::new(output.into_iter().map(store).collect::<Vec<E>>(), shape);
        let rows = log_sum_exp.len() / query_heads;
        let log_sum_exp = TensorData::new(log_sum_exp, Shape::from([rows, query_heads]));
        let slots = scores.len() / group;
        let scores = TensorData::new(scores, Shape::from([slots, group]));
        (
            FlexTensor::from_data(output),
            FlexTensor::from_data(log_sum_exp),
            FlexTensor::from_data(scores),
        )
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

/// A tensor's elements as f32.
fn wide(tensor: &FlexTensor) -> Vec<f32> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::F16 => slice::<f16>(&tensor).iter().map(|x| x.to_f32()).collect(),
        DType::BF16 => slice::<bf16>(&tensor).iter().map(|x| x.to_f32()).collect(),
        _ => slice::<f32>(&tensor).to_vec(),
    }
}

/// f32 numbers as a tensor of a dtype.
fn rounded(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    let shape: Shape = shape.into();
    let data = match dtype {
        DType::F16 => {
            TensorData::new(values.into_iter().map(f16::from_f32).collect::<Vec<_>>(), shape)
        }
        DType::BF16 => {
            TensorData::new(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>(), shape)
        }
        _ => TensorData::new(values, shape),
    };
    FlexTensor::from_data(data)
}

/// Rounding to a dtype.
fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::BF16 => |x| bf16::from_f32(x).to_f32(),
        _ => |x| x,
    }
}

/// Rows of one pool copied into another, converted where their dtypes differ.
fn moved(from: FlexTensor, rows: &[i32], to: FlexTensor, slots: &[i32]) -> FlexTensor {
    let mut to = owned(to);
    let width = to.layout().shape().iter().skip(1).product();
    if from.dtype() != to.dtype() {
        let (wide, dtype) = (wide(&from), to.dtype());
        let shape: Vec<usize> = from.layout().shape().to_vec();
        return moved(rounded(wide, shape, dtype), rows, to, slots);
    }
    let from = from.to_contiguous();
    match to.dtype() {
        DType::I32 => copy(slice::<i32>(&from), rows, to.storage_mut::<i32>(), slots, width),
        DType::F16 => copy(slice::<f16>(&from), rows, to.storage_mut::<f16>(), slots, width),
        DType::BF16 => copy(slice::<bf16>(&from), rows, to.storage_mut::<bf16>(), slots, width),
        _ => copy(slice::<f32>(&from), rows, to.storage_mut::<f32>(), slots, width),
    }
    to
}

/// A pool whose ranges hold their kept rows alone.
fn compacted(pool: FlexTensor, lists: [&[i32]; 4]) -> FlexTensor {
    let mut pool = owned(pool);
    let width = pool.layout().shape().iter().skip(1).product();
    match pool.dtype() {
        DType::I32 => compact(pool.storage_mut::<i32>(), lists, width),
        DType::F16 => compact(pool.storage_mut::<f16>(), lists, width),
        DType::BF16 => compact(pool.storage_mut::<bf16>(), lists, width),
        _ => compact(pool.storage_mut::<f32>(), lists, width),
    }
    pool
}

fn scatter_into<E: Element + Pod>(
    pool: FlexTensor,
    slots: FlexTensor,
    rows: FlexTensor,
) -> FlexTensor {
    let mut pool = owned(pool);
    let (slots, rows) = (slots.to_contiguous(), rows.to_contiguous());
    let rows = slice::<E>(&rows);
    let slots = slice::<i32>(&slots);
    let (start, _) = pool.layout().contiguous_offsets().unwrap_or((0, 0));
    let width = (rows.len() / slots.len().max(1)).max(1);
    scatter(&mut pool.storage_mut::<E>()[start..], slots, rows, width);
    pool
}

/// The tensor without gaps, to be written: `to_contiguous` would share the buffer with the original,
/// which then is copied on write.
fn owned(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// A contiguous tensor's elements.
fn slice<E: Element + Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice::<E>().unwrap_or(&[])
}
