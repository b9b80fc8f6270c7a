//! The extension's methods on the CPU: the references, on the tensors' own buffers.

use burn::backend::{DType, Element, Flex, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use crate::argmin_slots::reference::argmin;
use crate::decode_attention::reference::{Problem, Solution, View, solve};
use crate::decode_attention::{DecodeConfig, ViewKind};
use crate::extension::SlotOps;
use crate::linear::reference::product;
use crate::scatter_rows::reference::scatter;

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
        match args.query.dtype() {
            DType::F16 => args.run::<f16>(f16::to_f32, f16::from_f32),
            DType::BF16 => args.run::<bf16>(bf16::to_f32, bf16::from_f32),
            _ => args.run::<f32>(|x| x, |x| x),
        }
    }

    fn skinny_product(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        match x.dtype() {
            DType::F16 => product_of::<f16>(x, weight, f16::to_f32, f16::from_f32),
            DType::BF16 => product_of::<bf16>(x, weight, bf16::to_f32, bf16::from_f32),
            _ => product_of::<f32>(x, weight, |x| x, |x| x),
        }
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
    fn run<E: Element + Pod>(
        self,
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
        let Solution { output, log_sum_exp, probabilities } =
            solve(&problem, features.probabilities, load);

        let output = TensorData::new(output.into_iter().map(store).collect::<Vec<E>>(), shape);
        let rows = log_sum_exp.len() / query_heads;
        let log_sum_exp = TensorData::new(log_sum_exp, Shape::from([rows, query_heads]));
        let slots = probabilities.len() / group;
        let probabilities = TensorData::new(probabilities, Shape::from([slots, group]));
        (
            FlexTensor::from_data(output),
            FlexTensor::from_data(log_sum_exp),
            FlexTensor::from_data(probabilities),
        )
    }
}

fn product_of<E: Element + Pod + Sync>(
    x: FlexTensor,
    weight: FlexTensor,
    load: impl Fn(E) -> f32 + Copy + Sync,
    store: impl Fn(f32) -> E,
) -> FlexTensor {
    let (rows, outputs) = (x.layout().shape()[0], weight.layout().shape()[0]);
    let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
    let wide: Vec<f32> = slice::<E>(&x).iter().map(|x| load(*x)).collect();
    let y = product(&wide, slice::<E>(&weight), wide.len() / rows.max(1), load);
    let y: Vec<E> = y.into_iter().map(store).collect();
    FlexTensor::from_data(TensorData::new(y, Shape::from([rows, outputs])))
}

fn scatter_into<E: Element + Pod>(
    pool: FlexTensor,
    slots: FlexTensor,
    rows: FlexTensor,
) -> FlexTensor {
    // A view would hide the pool's own order; `to_contiguous` returns a contiguous pool as it is,
    // but shares its buffer, so that the original must go before the write.
    let mut pool = if pool.is_contiguous() { pool } else { pool.to_contiguous() };
    let (slots, rows) = (slots.to_contiguous(), rows.to_contiguous());
    let rows = slice::<E>(&rows);
    let slots = slice::<i32>(&slots);
    let (start, _) = pool.layout().contiguous_offsets().unwrap_or((0, 0));
    let width = (rows.len() / slots.len().max(1)).max(1);
    scatter(&mut pool.storage_mut::<E>()[start..], slots, rows, width);
    pool
}

/// A contiguous tensor's elements.
fn slice<E: Element + Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice::<E>().unwrap_or(&[])
}
