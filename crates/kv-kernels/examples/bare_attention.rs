//! Decode attention over a ragged pool, with plain tensors: no cache, no policy, no model.
//!
//! Two sequences with two key-value heads share one pool of slots. Each head has a range of its own
//! length, and two query heads attend to it. The output is compared with a softmax in plain loops.
//!
//! ```sh
//! cargo run --release -p kv-kernels --example bare_attention
//! ```

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_kernels::{DecodeAttentionOptions, KernelError, SlotRanges, decode_attention};

const BATCH: usize = 2;
const KV_HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 16;
/// Slots of each (sequence, key-value head), in the order of the pool.
const LENGTHS: [usize; BATCH * KV_HEADS] = [40, 25, 7, 1];

fn main() -> Result<(), KernelError> {
    let device = Device::flex();
    let slots: usize = LENGTHS.iter().sum();
    let random = |slots| Tensor::<2>::random([slots, DIM], Distribution::Default, &device);
    let (keys, values) = (random(slots), random(slots));
    let queries = BATCH * KV_HEADS * GROUP;
    let query = random(queries).reshape([BATCH, KV_HEADS * GROUP, DIM]);

    // Ranges follow each other without gaps: short heads take little memory.
    let ints = |numbers: [i32; BATCH * KV_HEADS]| {
        Tensor::<1, Int>::from_data(numbers, (&device, DType::I32)).reshape([BATCH, KV_HEADS])
    };
    let mut firsts = [0; BATCH * KV_HEADS];
    for head in 1..firsts.len() {
        firsts[head] = firsts[head - 1] + LENGTHS[head - 1] as i32;
    }
    let ranges = SlotRanges { offsets: ints(firsts), lengths: ints(LENGTHS.map(|x| x as i32)) };
    ranges.validate(slots)?;

    // The last slot of every head stands for three tokens, as a merged slot does.
    let mut weights = vec![1.0f32; slots];
    for (first, length) in firsts.iter().zip(LENGTHS) {
        weights[*first as usize + length - 1] = 3.0;
    }
    let log_weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32)).log();

    let options = DecodeAttentionOptions { log_sum_exp: true, ..Default::default() };
    let (k, v) = (keys.clone(), values.clone());
    let attended = decode_attention(query.clone(), k, v, Some(log_weights), &ranges, options)?;

    println!("sequence  query head  slots  largest difference from plain loops");
    for row in 0..queries {
        let (sequence, head) = (row / (KV_HEADS * GROUP), row % (KV_HEADS * GROUP));
        let pair = row / GROUP;
        let live = firsts[pair] as usize..firsts[pair] as usize + LENGTHS[pair];
        let q = query.clone().slice([sequence..sequence + 1, head..head + 1, 0..DIM]);
        let (k, v) = (keys.clone().slice([live.clone(), 0..DIM]), values.clone());
        let logits = k.matmul(q.reshape([DIM, 1])).div_scalar((DIM as f32).sqrt());
        let terms = logits.exp() * column(&weights[live.clone()], &device);
        let expected =
            (terms.clone() * v.slice([live.clone(), 0..DIM])).sum_dim(0) / terms.sum_dim(0);
        let actual = attended.output.clone();
        let actual = actual.slice([sequence..sequence + 1, head..head + 1, 0..DIM]);
        let difference: f32 = (actual.reshape([1, DIM]) - expected).abs().max().into_scalar();
        println!("{sequence:8}  {head:10}  {:5}  {difference:.1e}", live.len());
        assert!(difference < 1e-5);
    }
    Ok(())
}

fn column(numbers: &[f32], device: &Device) -> Tensor<2> {
    Tensor::<1>::from_data(numbers, (device, DType::F32)).reshape([numbers.len(), 1])
}
