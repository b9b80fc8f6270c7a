//! Attention over archived slots, and the scores that choose the slots to read from host memory.

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kv_kernels::{
    ArchivePool, ArchivedAttentionOptions, AttendedSlots, KernelError, SignatureScoresOptions,
    SignatureStrategy, SlotRanges, archive_slots, archived_attention, signature_scores,
};

use super::KernelBench;
use super::cases::{Archived, Attention};

/// A query, and an archive. Its slots are in host memory, which caches do not hold; its signatures
/// stay in the L2 cache. Archives enough to rotate among would take 10 GB of page-locked memory.
pub(super) struct ArchivedStep {
    query: Tensor<3>,
    pool: ArchivePool,
    ranges: SlotRanges,
    attended: AttendedSlots,
    longest: usize,
    revived: usize,
    /// Bytes that scores read: signatures and statistics.
    scored_bytes: usize,
    /// Bytes that attention reads: slots over the bus, statistics and means.
    attended_bytes: usize,
}

impl ArchivedStep {
    pub(super) fn new(bench: &KernelBench<'_>, case: &Archived) -> anyhow::Result<Self> {
        let Archived { attention, revived } = *case;
        let Attention { batch, query_heads, kv_heads, tokens, head_dim } = attention;
        let blocks = tokens.div_ceil(ArchivePool::BLOCK);
        let (pairs, longest) = (attention.pairs(), blocks * ArchivePool::BLOCK);
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
        let first = |pair: usize| (pair * blocks) as i32;
        let to: Vec<i32> = (0..pairs).map(first).collect();
        let to = Tensor::<1, Int>::from_data(to.as_slice(), (device, DType::I32));
        let mut pool = ArchivePool::new(pairs * blocks, head_dim, bench.dtype, true, device);
        let (keys, values) = (normal(longest), normal(longest));
        archive_slots(&mut pool, keys, values, ints(from, [pairs, longest]), to)?;
        let shape = [batch, kv_heads];
        let slots = ArchivePool::BLOCK as i32;
        Ok(Self {
            query: normal(batch * query_heads).reshape([batch, query_heads, head_dim]),
            pool,
            ranges: SlotRanges {
                offsets: ints((0..pairs).map(|pair| first(pair) * slots).collect(), shape),
                lengths: ints(vec![longest as i32; pairs], shape),
            },
            attended: AttendedSlots {
                output: normal(batch * query_heads).reshape([batch, query_heads, head_dim]),
                log_sum_exp: Tensor::zeros([batch, query_heads], (device, DType::F32)),
            },
            longest,
            revived,
            scored_bytes: pairs * (longest / 8 + blocks * 4) * head_dim,
            attended_bytes: pairs * (2 * revived * bench.dtype.size() + blocks * 6) * head_dim,
        })
    }

    /// The bytes that scores read, and no operations: what counts is how many bits a device sums.
    pub(super) fn scored(&self) -> [f64; 2] {
        [self.scored_bytes as f64, 0.0]
    }

    /// Scores the archive's slots.
    pub(super) fn score(&self, strategy: SignatureStrategy) -> Result<Tensor<2>, KernelError> {
        let Self { longest, revived, .. } = *self;
        let options = SignatureScoresOptions { scale: None, longest, wanted: revived, strategy };
        let sums = &self.attended.log_sum_exp;
        Ok(signature_scores(&self.query, &self.pool, &self.ranges, sums, options)?.scores)
    }

    /// Scores the slots, chooses some of them, and attends.
    fn attend(&self) -> Result<Tensor<3>, KernelError> {
        let Self { longest, revived, .. } = *self;
        let options = ArchivedAttentionOptions { scale: None, longest, revived };
        let (query, attended) = (self.query.clone(), self.attended.clone());
        Ok(archived_attention(query, &self.pool, &self.ranges, attended, options)?.output)
    }
}

/// By the kernels that the ops choose.
pub(super) fn attention(bench: &mut KernelBench<'_>, case: &Archived) -> anyhow::Result<()> {
    let step = ArchivedStep::new(bench, case)?;
    let task = format!("archived_attention {}", case.name());
    let bytes = (step.scored_bytes + step.attended_bytes) as f64;
    bench.measure(&task, "", 1, [bytes, 0.0], |_| Ok(step.attend()?))?;
    let task = format!("signature_scores {}", case.name());
    bench.measure(&task, "", 1, step.scored(), |_| Ok(step.score(SignatureStrategy::Auto)?))
}
