//! Attention over quantised slots.

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kv_kernels::{
    AttendedSlots, KernelError, QuantizedAttentionOptions, QuantizedBits, QuantizedPool,
    QuantizedStrategy, SlotRanges, quantize_slots, quantized_attention,
};

use super::KernelBench;
use super::cases::{Attention, Quantized};
use super::clock::Clock;

/// Queries and pools of quantised slots.
pub(super) struct QuantizedStep {
    query: Tensor<3>,
    pub(super) pools: Vec<QuantizedPool>,
    ranges: SlotRanges,
    attended: AttendedSlots,
    longest: usize,
    /// Bytes of a pool, and operations.
    pub(super) work: [f64; 2],
}

impl QuantizedStep {
    pub(super) fn new(bench: &KernelBench<'_>, case: &Quantized) -> anyhow::Result<Self> {
        let Attention { batch, query_heads, kv_heads, tokens, head_dim } = case.attention;
        let bits = QuantizedBits { keys: case.key_bits, values: case.value_bits };
        let blocks = tokens.div_ceil(QuantizedPool::BLOCK);
        let (pairs, longest) = (case.attention.pairs(), blocks * QuantizedPool::BLOCK);
        let device = &bench.device;
        let normal = |rows: usize| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<2>::random([rows, head_dim], normal, (device, DType::F32)).cast(bench.dtype)
        };
        let ints = |values: Vec<i32>, shape: [usize; 2]| {
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), (device, DType::I32))
        };
        // All ranges have one range's rows: keys and values of all would not be small.
        let from: Vec<i32> = (0..pairs).flat_map(|_| 0..longest as i32).collect();
        let from = ints(from, [pairs, longest]);
        let first = |pair: usize| (pair * blocks) as i32;
        let to: Vec<i32> = (0..pairs).map(first).collect();
        let to = Tensor::<1, Int>::from_data(to.as_slice(), (device, DType::I32));
        let pool = || -> Result<QuantizedPool, KernelError> {
            let mut pool = QuantizedPool::new(pairs * blocks, head_dim, bits, device);
            let (keys, values) = (normal(longest), normal(longest));
            quantize_slots(&mut pool, keys, values, from.clone(), to.clone())?;
            Ok(pool)
        };
        let own = pool()?;
        let bytes = own.bytes();
        let mut pools = vec![own];
        for _ in 1..Clock::sets(bytes) {
            pools.push(pool()?);
        }
        let shape = [batch, kv_heads];
        let slots = QuantizedPool::BLOCK as i32;
        let operations = 4.0 * (batch * query_heads * tokens * head_dim) as f64;
        Ok(Self {
            query: normal(batch * query_heads).reshape([batch, query_heads, head_dim]),
            pools,
            ranges: SlotRanges {
                offsets: ints((0..pairs).map(|pair| first(pair) * slots).collect(), shape),
                lengths: ints(vec![tokens as i32; pairs], shape),
            },
            attended: AttendedSlots {
                output: normal(batch * query_heads).reshape([batch, query_heads, head_dim]),
                log_sum_exp: Tensor::zeros([batch, query_heads], (device, DType::F32)),
            },
            longest,
            work: [bytes as f64, operations],
        })
    }

    /// Attends to the `i`-th pool.
    pub(super) fn attend(
        &self,
        i: usize,
        strategy: QuantizedStrategy,
    ) -> Result<Tensor<3>, KernelError> {
        let options =
            QuantizedAttentionOptions { strategy, ..QuantizedAttentionOptions::new(self.longest) };
        let (query, attended) = (self.query.clone(), self.attended.clone());
        Ok(quantized_attention(query, &self.pools[i], &self.ranges, attended, options)?.output)
    }
}

/// By the kernel that the op chooses.
pub(super) fn attention(bench: &mut KernelBench<'_>, case: &Quantized) -> anyhow::Result<()> {
    let step = QuantizedStep::new(bench, case)?;
    let task = format!("quantized_attention {}", case.name());
    bench.measure(&task, "", step.pools.len(), step.work, |i| {
        Ok(step.attend(i, QuantizedStrategy::Auto)?)
    })
}
