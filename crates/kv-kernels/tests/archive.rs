//! Archived slots: rows that come back as they were, scores by signatures, and attention, beside
//! loops in f64 over the definitions.

use burn::tensor::{DType, Device, Int, Tensor};
use half::{bf16, f16};
use kv_kernels::{
    ArchivePool, ArchivedAttentionOptions, AttendedSlots, HostWords, KernelError,
    SignatureScoresOptions, SignatureStrategy, SlotRanges, archive_slots, archived_attention,
    signature_scores,
};
use kv_testing::{Numbers, TestDevice, devices, relative_error};

use super::strategies::force;

const BLOCK: usize = ArchivePool::BLOCK;

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

fn rows(values: &[f32], head_dim: usize, dtype: DType, device: &Device) -> Tensor<2> {
    let flat = Tensor::<1>::from_data(values, (device, DType::F32));
    flat.reshape([values.len() / head_dim, head_dim]).cast(dtype)
}

fn rounded(numbers: Vec<f32>, dtype: DType) -> Vec<f32> {
    let round = |number: f32| match dtype {
        DType::BF16 => bf16::from_f32(number).to_f32(),
        DType::F16 => f16::from_f32(number).to_f32(),
        _ => number,
    };
    numbers.into_iter().map(round).collect()
}

/// The bf16 number in a half of a word.
fn half_of(word: i32, upper: bool) -> f32 {
    let word = word as u32;
    f32::from_bits(if upper { word & 0xffff_0000 } else { word << 16 })
}

/// Ranges of archived slots, one behind the other, and their contents.
struct Archived {
    pool: ArchivePool,
    ranges: SlotRanges,
    /// Slots of each range.
    lengths: Vec<usize>,
    keys: Vec<f32>,
    values: Vec<f32>,
    head_dim: usize,
}

/// Archives `blocks` blocks of each of a batch's key-value heads. A first write of other numbers is
/// written over.
fn archived(
    device: &Device,
    dtype: DType,
    [batch, kv_heads, head_dim]: [usize; 3],
    blocks: &[usize],
    keeps_slots: bool,
) -> Archived {
    let total: usize = blocks.iter().sum();
    let slots = total * BLOCK;
    let mut numbers = Numbers::new(total as u64);
    let [mut keys, values] = [(); 2].map(|()| numbers.normal(slots * head_dim));
    // As in models, a few channels of keys are large in all tokens.
    keys.chunks_mut(head_dim).for_each(|row| row[1] = row[1] * 0.5 + 6.0);
    let [keys, values] = [keys, values].map(|own| rounded(own, dtype));
    let mut pool = ArchivePool::new(total, head_dim, dtype, keeps_slots, device);
    // A list for each block, and one that is not written.
    let from: Vec<i32> = (0..slots as i32).chain(0..BLOCK as i32).collect();
    let to: Vec<i32> = (0..total as i32).chain([-1]).collect();
    for sign in [-1.0, 1.0] {
        let [keys, values] =
            [&keys, &values].map(|own| rows(own, head_dim, dtype, device).mul_scalar(sign));
        let from = ints(&from, device).reshape([total + 1, BLOCK]);
        archive_slots(&mut pool, keys, values, from, ints(&to, device)).unwrap();
    }
    let lengths: Vec<usize> = blocks.iter().map(|count| count * BLOCK).collect();
    let mut next = 0;
    let offsets: Vec<i32> = lengths
        .iter()
        .map(|length| {
            next += length;
            (next - length) as i32
        })
        .collect();
    let counts: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
    let ranges = SlotRanges {
        offsets: ints(&offsets, device).reshape([batch, kv_heads]),
        lengths: ints(&counts, device).reshape([batch, kv_heads]),
    };
    Archived { pool, ranges, lengths, keys, values, head_dim }
}

impl Archived {
    /// A slot's row of keys or values.
    fn row<'a>(&self, of: &'a [f32], slot: usize) -> &'a [f32] {
        &of[slot * self.head_dim..][..self.head_dim]
    }

    /// The first slot of a range.
    fn first(&self, range: usize) -> usize {
        self.lengths[..range].iter().sum()
    }

    /// The means of a block's rows of keys or values, in bf16.
    fn mean(&self, of: &[f32], block: usize) -> Vec<f64> {
        (0..self.head_dim)
            .map(|channel| {
                let slots = block * BLOCK..(block + 1) * BLOCK;
                let sum: f32 = slots.map(|slot| self.row(of, slot)[channel]).sum();
                f64::from(bf16::from_f32(sum / BLOCK as f32).to_f32())
            })
            .collect()
    }

    /// The mean distances of a block's keys from their means, in bf16.
    fn spreads(&self, block: usize) -> Vec<f64> {
        let means = self.mean(&self.keys, block);
        let spread = |channel: usize| {
            let key = |slot| f64::from(self.row(&self.keys, slot)[channel]);
            let slots = block * BLOCK..(block + 1) * BLOCK;
            let distances: f64 = slots.map(|slot| (key(slot) - means[channel]).abs()).sum();
            f64::from(bf16::from_f32((distances / BLOCK as f64) as f32).to_f32())
        };
        (0..self.head_dim).map(spread).collect()
    }

    /// The estimated logit of a slot: in each channel the mean and, on its key's side of it, the
    /// mean distance from it.
    fn estimate(&self, query: &[f32], slot: usize) -> f64 {
        let block = slot / BLOCK;
        let (means, spreads) = (self.mean(&self.keys, block), self.spreads(block));
        let estimate = |channel: usize| {
            let (key, spread) = (self.row(&self.keys, slot)[channel], spreads[channel]);
            let side = if f64::from(key) > means[channel] { spread } else { -spread };
            f64::from(query[channel]) * (means[channel] + side)
        };
        (0..self.head_dim).map(estimate).sum::<f64>() / (self.head_dim as f64).sqrt()
    }
}

fn each_dtype(mut test: impl FnMut(&TestDevice, DType)) {
    for tested in devices() {
        tested.float_dtypes().into_iter().for_each(|dtype| test(&tested, dtype));
    }
}

#[test]
fn rows_and_statistics_are_those_of_the_slots() {
    each_dtype(|tested, dtype| {
        let odd = if dtype == DType::F32 { 33 } else { 34 };
        let cases = [(64, true), (80, true), (128, true), (odd, true), (48, false)];
        for (head_dim, keeps) in tested.some(cases, 2) {
            let archived = archived(&tested.device, dtype, [1, 2, head_dim], &[2, 3], keeps);
            let data = archived.pool.to_data().unwrap();
            let [words, signatures, statistics, means] =
                data.map(|data| data.try_into_vec::<i32>().unwrap());
            let size = dtype.size();
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let numbers: Vec<f32> = bytes
                .chunks(size)
                .map(|own| match dtype {
                    DType::BF16 => bf16::from_le_bytes([own[0], own[1]]).to_f32(),
                    DType::F16 => f16::from_le_bytes([own[0], own[1]]).to_f32(),
                    _ => f32::from_le_bytes([own[0], own[1], own[2], own[3]]),
                })
                .collect();
            let words = head_dim.div_ceil(32);
            assert_eq!(numbers.is_empty(), !keeps, "{}", numbers.len());
            for slot in 0..5 * BLOCK {
                let (block, at) = (slot / BLOCK, slot % BLOCK);
                let key = archived.row(&archived.keys, slot);
                if keeps {
                    let row = &numbers[slot * 2 * head_dim..][..2 * head_dim];
                    assert_eq!(row[..head_dim], *key, "{}", tested.name);
                    assert_eq!(row[head_dim..], *archived.row(&archived.values, slot));
                }
                let (key_means, spreads) =
                    (archived.mean(&archived.keys, block), archived.spreads(block));
                let value_means = archived.mean(&archived.values, block);
                for channel in 0..head_dim {
                    let word = statistics[block * head_dim + channel];
                    let (mean, spread) = (half_of(word, false), half_of(word, true));
                    assert_eq!(f64::from(mean), key_means[channel], "{} {channel}", tested.name);
                    let off = (f64::from(spread) / spreads[channel] - 1.0).abs();
                    assert!(off < 5e-3, "{} {channel}: {spread}", tested.name);
                    let word = means[block * head_dim.div_ceil(2) + channel / 2];
                    assert_eq!(f64::from(half_of(word, channel % 2 == 1)), value_means[channel]);
                    if keeps {
                        let word = (block * words + channel / 32) * BLOCK + at;
                        let sign = signatures[word] >> (channel % 32) & 1;
                        assert_eq!(sign == 1, key[channel] > mean, "{} {slot}", tested.name);
                    }
                }
            }
        }
    });
}

/// The usual factor, and the kernel that the op chooses, for ranges of up to 192 slots.
fn scores_of(wanted: usize) -> SignatureScoresOptions {
    let strategy = SignatureStrategy::Auto;
    SignatureScoresOptions { scale: None, longest: 192, wanted, strategy }
}

/// Scores are the logarithm of the sum of the heads' odds, by the estimated logits, by every
/// kernel.
#[test]
fn scores_are_those_of_estimated_keys() {
    let cases = [(2, 1, 64), (1, 4, 128), (2, 3, 80), (1, 3, 96), (2, 8, 32), (1, 2, 256)];
    each_dtype(|tested, dtype| {
        let check = |strategy, case: &_| check_scores(tested, dtype, *case, strategy);
        tested.some(&cases, 2).for_each(|case| check(SignatureStrategy::Auto, case).unwrap());
        let strategies = [SignatureStrategy::Portable, SignatureStrategy::TensorCore];
        let some: Vec<_> = tested.some(cases, 3).collect();
        force(&format!("signature_scores in {dtype:?}"), tested, &strategies, &some, check);
    });
}

fn check_scores(
    tested: &TestDevice,
    dtype: DType,
    (kv_heads, group, head_dim): (usize, usize, usize),
    strategy: SignatureStrategy,
) -> Result<(), KernelError> {
    let device = &tested.device;
    let blocks = [[1, 2], [3, 1]].concat()[..2 * kv_heads].to_vec();
    let archived = archived(device, dtype, [2, kv_heads, head_dim], &blocks, true);
    let heads = kv_heads * group;
    let queries = rounded(Numbers::new(5).normal(2 * heads * head_dim), dtype);
    let query = rows(&queries, head_dim, dtype, device).reshape([2, heads, head_dim]);
    let sums: Vec<f32> = (0..2 * heads).map(|head| head as f32 * 0.3 - 1.0).collect();
    let log_sums = Tensor::<1>::from_data(&sums[..], device).reshape([2, heads]);
    let (pool, ranges) = (&archived.pool, &archived.ranges);
    let options = SignatureScoresOptions { strategy, ..scores_of(7) };
    let scored = signature_scores(&query, pool, ranges, &log_sums, options)?;
    let scores = scored.scores.try_into_vec_as::<f32>().unwrap();
    let counts: Vec<i32> = archived.lengths.iter().map(|length| *length as i32).collect();
    assert_eq!(scored.candidates.try_into_vec_as::<i32>().unwrap(), counts);
    assert_eq!(scored.wanted.try_into_vec_as::<i32>().unwrap(), vec![7; 2 * kv_heads]);
    for range in 0..2 * kv_heads {
        for at in 0..archived.lengths[range] {
            let odds = (range * group..(range + 1) * group).map(|head| {
                let query = &queries[head * head_dim..][..head_dim];
                let logit = archived.estimate(query, archived.first(range) + at);
                (logit - f64::from(sums[head])).exp()
            });
            let (expected, found) = (odds.sum::<f64>().ln(), scores[range * 192 + at]);
            let off = (expected - f64::from(found)).abs();
            let name = format!("{} {strategy:?} {kv_heads}x{group}x{head_dim}", tested.name);
            assert!(off < 2e-4, "{name}: {expected} {found}");
        }
    }
    Ok(())
}

/// Attention to the chosen slots and to the blocks' means, beside loops in f64; with as many slots
/// as there are, attention to all of them.
#[test]
fn attention_is_that_over_chosen_slots_and_means() {
    each_dtype(|tested, dtype| {
        let cases = [(2, 1, 64), (1, 4, 128), (2, 3, 80), (1, 8, 32), (1, 2, 34)];
        for (kv_heads, group, head_dim) in tested.some(cases, 2) {
            for revived in [0, 1, 10, 64, 1_000] {
                check_attention(tested, dtype, [kv_heads, group, head_dim], revived);
            }
        }
    });
}

fn check_attention(
    tested: &TestDevice,
    dtype: DType,
    [kv_heads, group, head_dim]: [usize; 3],
    revived: usize,
) {
    let device = &tested.device;
    let blocks = [1, 0, 3, 2][..2 * kv_heads].to_vec();
    // A pool that sums up has no slots that could come back.
    let keeps = revived > 0;
    let archived = archived(device, dtype, [2, kv_heads, head_dim], &blocks, keeps);
    let heads = kv_heads * group;
    let queries = rounded(Numbers::new(6).normal(2 * heads * head_dim), dtype);
    let query = rows(&queries, head_dim, dtype, device).reshape([2, heads, head_dim]);
    let before = AttendedSlots {
        output: Tensor::full([2, heads, head_dim], 0.25, (device, dtype)),
        log_sum_exp: Tensor::full([2, heads], 2.0, (device, DType::F32)),
    };
    let options = ArchivedAttentionOptions { scale: None, longest: 192, revived };
    let (pool, ranges) = (&archived.pool, &archived.ranges);
    let scores = match keeps {
        true => {
            let sums = &before.log_sum_exp;
            let scored = signature_scores(&query, pool, ranges, sums, scores_of(1)).unwrap();
            scored.scores.try_into_vec_as::<f32>().unwrap()
        }
        false => Vec::new(),
    };
    let found = archived_attention(query, pool, ranges, before, options).unwrap();
    let output = found.output.cast(DType::F32).try_into_vec_as::<f32>().unwrap();
    let log_sums = found.log_sum_exp.try_into_vec_as::<f32>().unwrap();
    let (mut expected, mut expected_sums) = (Vec::new(), Vec::new());
    for (head, query) in queries.chunks(head_dim).enumerate() {
        let range = head / group;
        let (first, length) = (archived.first(range), archived.lengths[range]);
        let mut order: Vec<usize> = (0..length).collect();
        if keeps {
            order.sort_by(|a, b| scores[range * 192 + b].total_cmp(&scores[range * 192 + a]));
        }
        order.truncate(revived);
        let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let logit = |key: &[f64]| {
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
            dot / (head_dim as f64).sqrt()
        };
        // Logits and values of all terms, the first being the attention before.
        let mut terms = vec![(2.0, vec![0.25; head_dim])];
        for slot in order.iter().map(|at| first + at) {
            let key = wide(archived.row(&archived.keys, slot));
            terms.push((logit(&key), wide(archived.row(&archived.values, slot))));
        }
        for block in first / BLOCK..(first + length) / BLOCK {
            let back = order.iter().filter(|at| (first + **at) / BLOCK == block).count();
            if back < BLOCK {
                let others = ((BLOCK - back) as f64).ln();
                let key = archived.mean(&archived.keys, block);
                terms.push((logit(&key) + others, archived.mean(&archived.values, block)));
            }
        }
        let top = terms.iter().map(|term| term.0).fold(f64::MIN, f64::max);
        let sum: f64 = terms.iter().map(|term| (term.0 - top).exp()).sum();
        expected_sums.push(top + sum.ln());
        let of = |channel: usize| {
            terms.iter().map(|(x, value)| (x - top).exp() * value[channel]).sum::<f64>() / sum
        };
        expected.extend((0..head_dim).map(of));
    }
    let name = format!("{} {dtype:?} {kv_heads}x{group}x{head_dim}, {revived}", tested.name);
    let most = match dtype {
        DType::BF16 => 6e-3,
        DType::F16 => 1e-3,
        _ => 1e-5,
    };
    let error = relative_error(&output, &expected);
    assert!(error < most, "{name}: {error}");
    let error = relative_error(&log_sums, &expected_sums);
    assert!(error < 1e-5, "{name}: log-sum-exp {error}");
}

#[test]
fn words_come_back_from_host_memory() {
    for tested in devices() {
        let data = burn::tensor::TensorData::from([3i32, -7, 1 << 30]);
        let words = HostWords::of(data.clone(), &tested.device);
        assert_eq!(words.to_data().unwrap(), data);
        assert_eq!(words.length(), 3);
        // A GPU's own memory is none of the host's, unless its kernels reach the host's.
        let host = matches!(tested.name, "cpu" | "cuda");
        assert_eq!(words.are_in_host_memory(), host, "{}", tested.name);
    }
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    for tested in devices() {
        let device = &tested.device;
        let archived = archived(device, DType::F32, [1, 1, 64], &[1], true);
        let query = Tensor::<3>::zeros([1, 2, 64], (device, DType::F32));
        let before = |heads: usize| AttendedSlots {
            output: Tensor::zeros([1, 2, 64], (device, DType::F32)),
            log_sum_exp: Tensor::zeros([1, heads], (device, DType::F32)),
        };
        let call = |heads, longest, revived| {
            let options = ArchivedAttentionOptions { scale: None, longest, revived };
            let (pool, ranges) = (&archived.pool, &archived.ranges);
            archived_attention(query.clone(), pool, ranges, before(heads), options).unwrap_err()
        };
        assert!(matches!(call(3, 64, 8), KernelError::Shape { argument: "log_sum_exp", .. }));
        assert!(matches!(call(2, 0, 8), KernelError::Unsupported { argument: "longest", .. }));
        // A pool that sums up has no slots that could come back.
        let summary = ArchivePool::new(1, 64, DType::F32, false, device);
        let options = ArchivedAttentionOptions { scale: None, longest: 64, revived: 1 };
        let attended =
            archived_attention(query.clone(), &summary, &archived.ranges, before(2), options);
        assert!(matches!(attended, Err(KernelError::Unsupported { argument: "pool", .. })));
        let mut pool = ArchivePool::new(1, 64, DType::F32, true, device);
        let keys = Tensor::<2>::zeros([64, 32], (device, DType::F32));
        let from = Tensor::<2, Int>::zeros([1, 64], (device, DType::I32));
        let to = ints(&[0], device);
        let wrong = archive_slots(&mut pool, keys.clone(), keys, from, to).unwrap_err();
        assert!(matches!(wrong, KernelError::Unsupported { .. }), "{wrong}");
    }
}
