//! A layer's own work: products, norms, heads, and the tokens that are drawn.

use burn::backend::{DType, Element, Flex, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use super::buffers::{owned, rounded, rounding, slice, wide};
use crate::evicting_attention::reference::log_norm;
use crate::extension::{
    Drawn, Epilogue, EpilogueConfig, LayerOps, Places, Projection, SampleTensors, SlotOps,
    SlotPools, Written,
};
use crate::heads::reference::Tokens;
use crate::heads::{HeadConfig, Place};
use crate::linear::reference::{finish, product};
use crate::random::uniform;
use crate::rms_norm::reference::rms_norm;
use crate::sample::reference::{Settings, sample};
use crate::sample::{DrawConfig, FLOATS, INTS};
use crate::swiglu::reference::swiglu;

impl LayerOps for Flex {
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

    fn uniforms(seeds: FlexTensor, draws: FlexTensor) -> FlexTensor {
        let shape = draws.layout().shape().clone();
        let (seeds, draws) = (seeds.to_contiguous(), draws.to_contiguous());
        let seeds = slice::<i32>(&seeds).chunks(2);
        let numbers = seeds
            .zip(slice::<i32>(&draws))
            .map(|(seed, &draw)| uniform([seed[0] as u32, seed[1] as u32], draw as u32));
        FlexTensor::from_data(TensorData::new(numbers.collect::<Vec<f32>>(), shape))
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
