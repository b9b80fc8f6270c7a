//! Attention over slots and sketches against a cache that is rebuilt first.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_kernels::{
    ABSENT, DecodeAttentionOptions, HEAD_FIELDS, KernelError, SketchHashes, SketchSource,
    SketchStrategy, SketchedTokens, SlotRanges, decode_attention, sketch_attention, sketch_query,
};
use kv_testing::{Numbers, devices, relative_error, timed};

use super::strategies::force;

/// A cache of which a part is in sketches.
struct Problem {
    query: Tensor<3>,
    slots: [Tensor<2>; 2],
    offsets: Vec<i32>,
    lengths: Vec<i32>,
    sketch: [Tensor<2>; 2],
    heads: Vec<i32>,
    hashes: SketchHashes,
    signed_keys: bool,
    scores: Vec<f32>,
    newest: Vec<i32>,
}

#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    buckets: usize,
    entries: usize,
    slots: usize,
    tokens: usize,
    signed_keys: bool,
}

impl Problem {
    fn new(size: Size, dtype: DType, device: &Device) -> Self {
        let Size { batch, kv_heads, group, head_dim, buckets, entries, slots, tokens, signed_keys } =
            size;
        let mut numbers = Numbers::new((slots + 3 * tokens + buckets) as u64);
        let pairs = batch * kv_heads;
        // No two ranges alike: lengths, entries and tokens fall.
        let mut lengths: Vec<i32> =
            (0..pairs).map(|pair| (slots - slots * pair / (2 * pairs)) as i32).collect();
        // One without slots, and one without a sketch.
        let empty = (pairs > 3).then_some([1, 2]);
        if let Some([slotless, _]) = empty {
            lengths[slotless] = 0;
        }
        let offsets: Vec<i32> = (0..pairs).map(|pair| (pair * (slots + 3)) as i32).collect();
        let mut heads = Vec::new();
        let (mut first_entry, mut first_token) = (0, 0);
        for pair in 0..pairs {
            let without = tokens == 0 || empty.is_some_and(|[_, sketchless]| sketchless == pair);
            let own = if without { 0 } else { (entries - pair % entries.min(3)).max(1) };
            heads.extend([first_entry as i32, own as i32, first_token as i32, tokens as i32, 0, 0]);
            first_entry += own * buckets;
            first_token += tokens;
        }
        let newest: Vec<i32> =
            (0..batch).map(|row| (tokens as i32 - 1 - 2 * row as i32).max(-1)).collect();
        let scores =
            (0..first_token.max(1)).map(|_| if numbers.below(5) == 0 { ABSENT } else { 0.5 });
        let scores = scores.collect();
        let mut cast = |shape: [usize; 2]| numbers.tensor::<2>(shape, device);
        let mut sketch = [0, 1].map(|_| cast([first_entry.max(1), head_dim]));
        if buckets == 3 {
            // Medians of three pass over it, whatever is read in place of absent tokens.
            let infinite = Tensor::full([1, 1], f32::INFINITY, device);
            sketch[1] = sketch[1].clone().slice_assign([0..1, 0..1], infinite);
        }
        let mut pools = [0, 1].map(|_| cast([pairs * (slots + 3), head_dim]));
        // What is between ranges may be anything.
        for (pair, &length) in lengths.iter().enumerate() {
            let live = pair * (slots + 3) + length as usize;
            let dead = live..(pair + 1) * (slots + 3);
            let nothing = Tensor::full([dead.len(), head_dim], f32::NAN, device);
            pools =
                pools.map(|pool| pool.slice_assign([dead.clone(), 0..head_dim], nothing.clone()));
        }
        let slots = pools.map(|pool| pool.cast(dtype));
        let query =
            numbers.tensor([batch, kv_heads * group, head_dim], device).mul_scalar(2.0).cast(dtype);
        let seeds: Vec<[u32; 2]> = (0..pairs as u32).map(|pair| [5, pair]).collect();
        let hashes = SketchHashes::seeded(&seeds, buckets, device);
        Self { query, slots, offsets, lengths, sketch, heads, hashes, signed_keys, scores, newest }
    }

    fn ints<const D: usize>(&self, values: &[i32], shape: [usize; D]) -> Tensor<D, Int> {
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::from_data(data, (&self.query.device(), DType::I32))
    }

    fn heads(&self) -> Tensor<2, Int> {
        self.ints(&self.heads, [self.lengths.len(), HEAD_FIELDS])
    }

    fn ranges(&self, offsets: &[i32], lengths: &[i32]) -> SlotRanges {
        let batch = self.newest.len();
        let shape = [batch, lengths.len() / batch];
        SlotRanges { offsets: self.ints(offsets, shape), lengths: self.ints(lengths, shape) }
    }

    fn source<'a>(&'a self, heads: &'a Tensor<2, Int>) -> SketchSource<'a> {
        let entries = self.heads.chunks(HEAD_FIELDS).map(|head| head[1] as usize).max().unwrap();
        SketchSource {
            keys: &self.sketch[0],
            values: &self.sketch[1],
            heads,
            most_entries: entries * self.hashes.buckets(),
            hashes: &self.hashes,
            signed_keys: self.signed_keys,
        }
    }

    /// Output, log-sum-exp, logits of slots and of tokens where they are live.
    fn fused(&self, strategy: SketchStrategy) -> Result<[Vec<f32>; 4], KernelError> {
        let heads = self.heads();
        let device = self.query.device();
        let scores = Tensor::<1>::from_data(self.scores.as_slice(), (&device, DType::F32));
        let newest = self.ints(&self.newest, [self.newest.len()]);
        let tokens = SketchedTokens {
            sketch: self.source(&heads),
            scores: &scores,
            newest: &newest,
            longest: self.heads[3] as usize,
            strategy,
        };
        let ranges = self.ranges(&self.offsets, &self.lengths);
        let longest = self.lengths[0] as usize;
        let result =
            sketch_attention(self.query.clone(), self.slots.clone(), &ranges, longest, tokens)?;
        let slots = self
            .lengths
            .iter()
            .zip(&self.offsets)
            .flat_map(|(&length, &offset)| (offset..offset + length).collect::<Vec<_>>());
        let slots: Vec<i32> = slots.collect();
        let [logits, token_logits] = [result.slot_logits, result.token_logits].map(read);
        let group = self.query.dims()[1] * self.newest.len() / self.lengths.len();
        let pick = |logits: &[f32], rows: &[i32]| {
            rows.iter().flat_map(|&row| logits[row as usize * group..][..group].to_vec()).collect()
        };
        let tokens: Vec<i32> = self.sketched().into_iter().map(|(_, token)| token).collect();
        Ok([
            read(result.output),
            read(result.log_sum_exp),
            pick(&logits, &slots),
            pick(&token_logits, &tokens),
        ])
    }

    /// Every pair's tokens in its sketch, as places among all tokens.
    fn sketched(&self) -> Vec<(usize, i32)> {
        let pairs = self.lengths.len();
        let of_pair = |pair: usize| {
            let head = &self.heads[pair * HEAD_FIELDS..][..HEAD_FIELDS];
            let newest = self.newest[pair * self.newest.len() / pairs];
            let end = if head[1] == 0 { 0 } else { (newest + 1).clamp(0, head[3]) };
            (head[2]..head[2] + end).map(move |token| (pair, token))
        };
        (0..pairs)
            .flat_map(of_pair)
            .filter(|(_, token)| self.scores[*token as usize] >= 0.0)
            .collect()
    }

    /// The same by a cache of all tokens.
    fn rebuilt(&self) -> [Vec<f32>; 4] {
        let heads = self.heads();
        let dtype = self.query.dtype();
        let all = self.sketched();
        let pairs = self.lengths.len();
        let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
        let mut rows: [Vec<Tensor<2>>; 2] = [Vec::new(), Vec::new()];
        let mut total = 0;
        let (mut slot_rows, mut token_rows) = (Vec::new(), Vec::new());
        for pair in 0..pairs {
            offsets.push(total);
            let (offset, length) = (self.offsets[pair] as usize, self.lengths[pair] as usize);
            for (rows, slots) in rows.iter_mut().zip(&self.slots) {
                if length > 0 {
                    rows.push(slots.clone().narrow(0, offset, length));
                }
            }
            slot_rows.extend(total..total + length as i32);
            total += length as i32;
            let first = self.heads[pair * HEAD_FIELDS + 2];
            let tokens: Vec<i32> = all
                .iter()
                .filter(|(own, _)| *own == pair)
                .map(|(_, token)| token - first)
                .collect();
            if !tokens.is_empty() {
                let listed = tokens.repeat(pairs);
                let listed = self.ints(&listed, [pairs, tokens.len()]);
                let estimated = sketch_query(self.source(&heads), listed, dtype).unwrap();
                for (rows, estimated) in rows.iter_mut().zip(estimated) {
                    rows.push(estimated.narrow(0, pair, 1).squeeze_dim(0));
                }
            }
            token_rows.extend(total..total + tokens.len() as i32);
            total += tokens.len() as i32;
            lengths.push(total - offsets[pair]);
        }
        let [keys, values] = rows.map(|rows| Tensor::cat(rows, 0));
        let options =
            DecodeAttentionOptions { logits: true, log_sum_exp: true, ..Default::default() };
        let result = decode_attention(
            self.query.clone(),
            keys,
            values,
            None,
            &self.ranges(&offsets, &lengths),
            options,
        )
        .unwrap();
        let logits = result.logits.unwrap();
        let pick = |rows: &[i32]| {
            if rows.is_empty() {
                return Vec::new();
            }
            read(logits.clone().select(0, self.ints(rows, [rows.len()])))
        };
        let parts = [pick(&slot_rows), pick(&token_rows)];
        let [slots, tokens] = parts;
        [read(result.output), read(result.log_sum_exp.unwrap()), slots, tokens]
    }
}

/// Log-sum-exps with a number where a head attended to nothing.
fn finite(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| if x == f32::NEG_INFINITY { -1e3 } else { x }).collect()
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).try_into_vec_as::<f32>().unwrap()
}

#[test]
fn fused_attention_is_that_of_the_rebuilt_cache() {
    let size = |[batch, kv_heads, group, head_dim]: [usize; 4],
                [buckets, entries]: [usize; 2],
                slots,
                tokens,
                signed_keys| {
        Size { batch, kv_heads, group, head_dim, buckets, entries, slots, tokens, signed_keys }
    };
    let sizes = [
        size([1, 1, 1, 32], [3, 4], 10, 40, false),
        size([2, 2, 4, 128], [3, 13], 45, 300, true),
        size([1, 2, 8, 64], [2, 5], 33, 700, true),
        size([2, 1, 3, 256], [1, 1], 7, 65, false),
        size([1, 2, 2, 96], [5, 3], 1, 900, false),
        size([1, 1, 7, 192], [4, 5], 20, 600, true),
        size([1, 2, 5, 160], [3, 6], 20, 500, false),
        // Ranges in many parts, of many entries and of wide rows.
        size([2, 4, 4, 128], [3, 13], 200, 1_800, true),
        size([1, 1, 6, 64], [5, 9], 40, 2_000, true),
        size([1, 1, 2, 256], [3, 9], 30, 1_200, true),
        // More of them than a device has processors.
        size([20, 8, 4, 64], [3, 3], 20, 150, false),
        // Entries that no shared memory holds.
        size([1, 1, 4, 128], [3, 700], 100, 2_500, false),
        size([1, 1, 3, 96], [2, 1_500], 50, 700, true),
        // Nothing in the sketch, nothing but the sketch.
        size([2, 2, 1, 64], [3, 4], 50, 0, false),
        size([1, 1, 2, 64], [3, 4], 0, 50, false),
    ];
    // And those that are timed, up to as many tokens as are rebuilt in a moment.
    let fields =
        ["batch", "kv_heads", "query_heads", "head_dim", "buckets", "entries", "slots", "tokens"];
    let timed = timed("sketch_attention", fields).into_iter().filter_map(|sizes| {
        let [batch, kv_heads, query_heads, head_dim, buckets, entries, slots, tokens] = sizes;
        let heads = [batch, kv_heads, query_heads / kv_heads, head_dim];
        (batch * kv_heads * tokens <= 1 << 15)
            .then(|| size(heads, [buckets, entries], slots, tokens, true))
    });
    let sizes: Vec<Size> = sizes.into_iter().chain(timed).collect();
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let check = |strategy: SketchStrategy, size: &Size| {
                let problem = Problem::new(*size, dtype, &tested.device);
                let (actual, expected) = (problem.fused(strategy)?, problem.rebuilt());
                let bounds = match dtype {
                    DType::F32 => [1e-5; 4],
                    // The mean of two rounded entries is not their rounded mean.
                    _ if size.buckets.is_multiple_of(2) => [1e-2; 4],
                    _ => [1e-2, 1e-3, 1e-3, 1e-3],
                };
                for (part, bound) in bounds.into_iter().enumerate() {
                    if expected[part].is_empty() && actual[part].is_empty() {
                        continue;
                    }
                    let [actual, expected] =
                        [&actual[part], &expected[part]].map(|part| finite(part));
                    let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                    let error = relative_error(&actual, &expected);
                    assert!(
                        error < bound,
                        "{} {dtype:?} {strategy:?} group {} dim {} buckets {}: part {part} is off \
                         by {error}",
                        tested.name,
                        size.group,
                        size.head_dim,
                        size.buckets
                    );
                }
                Ok(())
            };
            for size in tested.some(&sizes, 2) {
                check(SketchStrategy::Auto, size).unwrap();
            }
            let some: Vec<Size> = tested.some(sizes.iter().copied(), 5).collect();
            let strategies = [
                SketchStrategy::Portable,
                SketchStrategy::TensorCore,
                SketchStrategy::TensorCoreCluster,
            ];
            force(&format!("sketch_attention in {dtype:?}"), &tested, &strategies, &some, check);
        }
    }
}
