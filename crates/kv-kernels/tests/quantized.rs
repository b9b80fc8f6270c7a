//! Quantised slots, read back by the layout's description, and attention to them.

use burn::tensor::{DType, Device, Int, Tensor};
use half::{bf16, f16};
use kv_kernels::{
    AttendedSlots, DecodeAttentionOptions, KernelError, NO_SLOT, QuantizedAttentionOptions,
    QuantizedBits, QuantizedPool, QuantizedStrategy, SlotRanges, decode_attention, quantize_slots,
    quantized_attention,
};
use kv_testing::{Numbers, devices, relative_error};

use super::strategies::force;

const BLOCK: usize = QuantizedPool::BLOCK;
const BITS: [QuantizedBits; 5] = [
    QuantizedBits { keys: 2, values: 2 },
    QuantizedBits { keys: 3, values: 2 },
    QuantizedBits { keys: 4, values: 4 },
    QuantizedBits { keys: 8, values: 8 },
    QuantizedBits { keys: 1, values: 5 },
];

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

fn rows(values: &[f32], head_dim: usize, dtype: DType, device: &Device) -> Tensor<2> {
    let flat = Tensor::<1>::from_data(values, (device, DType::F32));
    flat.reshape([values.len() / head_dim, head_dim]).cast(dtype)
}

fn rounded(numbers: &[f32], dtype: DType) -> Vec<f32> {
    let round = |number: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*number).to_f32(),
        DType::F16 => f16::from_f32(*number).to_f32(),
        _ => *number,
    };
    numbers.iter().map(round).collect()
}

/// Keys with a few channels of large numbers, as models have them, and values.
fn made_up(slots: usize, head_dim: usize, dtype: DType) -> [Vec<f32>; 2] {
    let mut numbers = Numbers::new(slots as u64);
    let (mut keys, values) = (numbers.normal(slots * head_dim), numbers.normal(slots * head_dim));
    for row in keys.chunks_mut(head_dim) {
        row[1] = row[1] * 0.5 + 9.0;
        row[head_dim - 1] *= 5.0;
    }
    [rounded(&keys, dtype), rounded(&values, dtype)]
}

/// What a pool stands for, by the description of its layout: keys and values, and their steps.
struct Decoded {
    keys: Vec<f64>,
    values: Vec<f64>,
    key_steps: Vec<f64>,
    value_steps: Vec<f64>,
}

fn decode(pool: &QuantizedPool, head_dim: usize) -> Decoded {
    let [key_codes, key_scales, value_codes, value_scales] =
        pool.tensors().map(|tensor| tensor.clone().try_into_vec_as::<i32>().unwrap());
    let half = |bits: u32| f64::from(f32::from_bits(bits << 16));
    // The `i`-th code of a word, half of whose codes are in each half of it.
    let code = |word: i32, i: usize, bits: usize| {
        let half = 16 / bits;
        f64::from(word as u32 >> (i % half * bits + i / half * 16) & ((1 << bits) - 1))
    };
    let words = |count: usize, bits: usize| count.div_ceil(2 * (16 / bits));
    let QuantizedBits { keys, values } = pool.bits;
    let key = |slot: usize, channel: usize| {
        let (block, each) = (slot / BLOCK, 2 * (16 / keys));
        let at = (block * words(head_dim, keys) + channel / each) * BLOCK + slot % BLOCK;
        code(key_codes[at], channel % each, keys)
    };
    let value = |slot: usize, channel: usize| {
        let (block, at, each) = (slot / BLOCK, slot % BLOCK, 2 * (16 / values));
        let word = (block * words(BLOCK, values) + at / each) * head_dim + channel;
        code(value_codes[word], at % each, values)
    };
    let mut decoded =
        Decoded { keys: vec![], values: vec![], key_steps: vec![], value_steps: vec![] };
    for (slot, &value_scale) in value_scales.iter().enumerate() {
        for channel in 0..head_dim {
            let scale = key_scales[slot / BLOCK * head_dim + channel] as u32;
            let (step, low) = (half(scale >> 16), half(scale & 0xffff));
            decoded.keys.push(low + step * key(slot, channel));
            decoded.key_steps.push(step);
            let (step, low) = (half(value_scale as u32 >> 16), half(value_scale as u32 & 0xffff));
            decoded.values.push(low + step * value(slot, channel));
            decoded.value_steps.push(step);
        }
    }
    decoded
}

/// Numbers are within half a step of what stands for them; minima and steps are rounded to 8 bits.
#[test]
fn numbers_are_within_half_a_step() {
    for tested in devices() {
        let device = &tested.device;
        for (head_dim, dtype) in [64, 80, 128]
            .into_iter()
            .flat_map(|dim| tested.float_dtypes().into_iter().map(move |d| (dim, d)))
        {
            for bits in BITS {
                let slots = 3 * BLOCK;
                let [keys, values] = made_up(slots, head_dim, dtype);
                let mut pool = QuantizedPool::new(5, head_dim, bits, device);
                // Two lists: slots in reverse order into block 3 and 4, and into block 1.
                let list: Vec<i32> = (0..slots as i32).rev().collect();
                let from = [&list[..2 * BLOCK], &list[2 * BLOCK..], &vec![NO_SLOT; BLOCK]].concat();
                quantize_slots(
                    &mut pool,
                    rows(&keys, head_dim, dtype, device),
                    rows(&values, head_dim, dtype, device),
                    ints(&from, device).reshape([2, 2 * BLOCK]),
                    ints(&[3, 0], device),
                )
                .unwrap();
                let decoded = decode(&pool, head_dim);
                let at = (3 * BLOCK..5 * BLOCK).chain(0..BLOCK);
                for (slot, to) in list.iter().zip(at) {
                    for channel in 0..head_dim {
                        let from = *slot as usize * head_dim + channel;
                        let to = to * head_dim + channel;
                        let close = |x: f32, kept: f64, step: f64, name: &str| {
                            // Half a step, and the rounding of the minimum and of all steps.
                            let most =
                                0.501 * step + 0.005 * (f64::from(x).abs() + kept.abs()) + 1e-6;
                            let off = (f64::from(x) - kept).abs();
                            assert!(
                                off <= most,
                                "{} {name} {x} {kept} {step} {bits:?}",
                                tested.name
                            );
                        };
                        close(keys[from], decoded.keys[to], decoded.key_steps[to], "key");
                        close(values[from], decoded.values[to], decoded.value_steps[to], "value");
                    }
                }
                // A list of nothing stands for zeros.
                assert!(
                    decoded.keys[BLOCK * head_dim..2 * BLOCK * head_dim].iter().all(|x| *x == 0.0)
                );
            }
        }
    }
}

/// Heads, their size, and the bits of their numbers.
#[derive(Clone, Copy)]
struct Case {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    bits: QuantizedBits,
}

/// The attention over exact slots, continued over quantised ones, is the attention over both, by
/// every kernel.
#[test]
fn attention_agrees_with_f64_over_what_codes_stand_for() {
    let case = |kv_heads, group, head_dim, [keys, values]: [usize; 2]| Case {
        kv_heads,
        group,
        head_dim,
        bits: QuantizedBits { keys, values },
    };
    let cases = [
        case(2, 1, 64, [2, 2]),
        case(2, 4, 64, [3, 2]),
        case(1, 3, 80, [4, 4]),
        case(2, 2, 128, [8, 8]),
        case(1, 8, 32, [1, 5]),
        case(2, 4, 128, [3, 2]),
        case(1, 6, 96, [7, 3]),
        case(1, 1, 256, [5, 6]),
        case(1, 5, 64, [6, 1]),
    ];
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let check = |strategy, case: &Case| {
                check_attention(&tested.device, tested.name, dtype, case, strategy)
            };
            tested.some(&cases, 2).for_each(|case| check(QuantizedStrategy::Auto, case).unwrap());
            let strategies = [QuantizedStrategy::Portable, QuantizedStrategy::TensorCore];
            let test = format!("quantized_attention in {dtype:?}");
            let some: Vec<Case> = tested.some(cases.iter().copied(), 4).collect();
            force(&test, &tested, &strategies, &some, check);
        }
    }
}

fn check_attention(
    device: &Device,
    device_name: &str,
    dtype: DType,
    case: &Case,
    strategy: QuantizedStrategy,
) -> Result<(), KernelError> {
    let Case { kv_heads, group, head_dim, bits } = *case;
    let options = QuantizedAttentionOptions { strategy, ..QuantizedAttentionOptions::new(1_000) };
    let lengths: Vec<usize> =
        [0, 1, 63, 64, 200, 1_000].into_iter().take(6 / kv_heads * kv_heads).collect();
    let batch = lengths.len() / kv_heads;
    let blocks: usize = lengths.iter().map(|length| length.div_ceil(BLOCK)).sum();
    let [keys, values] = made_up(blocks * BLOCK, head_dim, dtype);
    let mut pool = QuantizedPool::new(blocks, head_dim, bits, device);
    let all: Vec<i32> = (0..(blocks * BLOCK) as i32).collect();
    quantize_slots(
        &mut pool,
        rows(&keys, head_dim, dtype, device),
        rows(&values, head_dim, dtype, device),
        ints(&all, device).reshape([1, blocks * BLOCK]),
        ints(&[0], device),
    )
    .unwrap();
    let exact = 5;
    let [own_keys, own_values] = made_up(exact * lengths.len(), head_dim, dtype);
    let queries = Numbers::new(9).normal(lengths.len() * group * head_dim);
    let queries = rounded(&queries, dtype);
    let query = rows(&queries, head_dim, dtype, device);
    let query = query.reshape([batch, kv_heads * group, head_dim]);
    let grid = |values: Vec<usize>| {
        let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
        ints(&values, device).reshape([batch, kv_heads])
    };
    let before = decode_attention(
        query.clone(),
        rows(&own_keys, head_dim, dtype, device),
        rows(&own_values, head_dim, dtype, device),
        None,
        &SlotRanges {
            offsets: grid((0..lengths.len()).map(|range| range * exact).collect()),
            lengths: grid(vec![exact; lengths.len()]),
        },
        DecodeAttentionOptions { log_sum_exp: true, ..Default::default() },
    )
    .unwrap();
    let mut first = 0;
    let offsets: Vec<usize> = lengths
        .iter()
        .map(|length| {
            let own = first;
            first += length.div_ceil(BLOCK) * BLOCK;
            own
        })
        .collect();
    let ranges = SlotRanges { offsets: grid(offsets.clone()), lengths: grid(lengths.clone()) };
    let attended =
        AttendedSlots { output: before.output, log_sum_exp: before.log_sum_exp.unwrap() };
    let found = quantized_attention(query, &pool, &ranges, attended, options)?;
    let output = found.output.cast(DType::F32).try_into_vec_as::<f32>().unwrap();
    let log_sums = found.log_sum_exp.try_into_vec_as::<f32>().unwrap();
    let decoded = decode(&pool, head_dim);
    let wide = |rows: &[f32]| rows.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let (own_keys, own_values) = (wide(&own_keys), wide(&own_values));
    let (mut expected, mut expected_sums) = (Vec::new(), Vec::new());
    for (head, query) in queries.chunks(head_dim).enumerate() {
        let range = head / group;
        let of = |rows: &[f64], from: usize, count: usize| {
            rows[from * head_dim..(from + count) * head_dim].to_vec()
        };
        let (from, count) = (offsets[range], lengths[range]);
        let keys = [of(&own_keys, range * exact, exact), of(&decoded.keys, from, count)];
        let values = [of(&own_values, range * exact, exact), of(&decoded.values, from, count)];
        let (keys, values) = (keys.concat(), values.concat());
        let logits: Vec<f64> = keys
            .chunks(head_dim)
            .map(|key| {
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
                dot / (head_dim as f64).sqrt()
            })
            .collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - top).exp()).sum();
        expected_sums.push(top + sum.ln());
        let mut row = vec![0.0; head_dim];
        for (logit, value) in logits.iter().zip(values.chunks(head_dim)) {
            let weight = (logit - top).exp() / sum;
            row.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
        }
        expected.extend(row);
    }
    let name =
        format!("{device_name} {kv_heads}x{group}x{head_dim} {bits:?} {dtype:?} {strategy:?}");
    let (most, most_sum) = match (dtype, strategy) {
        // The result, and the exact part that is continued, are rounded.
        (DType::BF16, _) => (8e-3, 2e-3),
        (DType::F16, _) => (1e-3, 1e-3),
        // Factors are two bf16 numbers each, of 16 bits together.
        (_, QuantizedStrategy::TensorCore) => (1e-4, 1e-4),
        _ => (1e-5, 1e-5),
    };
    let error = relative_error(&output, &expected);
    assert!(error < most, "{name}: {error}");
    let error = relative_error(&log_sums, &expected_sums);
    assert!(error < most_sum, "{name}: log-sum-exp {error}");
    Ok(())
}

/// Without slots before, and without quantised ones.
#[test]
fn either_part_may_be_empty() {
    for tested in devices() {
        let device = &tested.device;
        let head_dim = 64;
        let [keys, values] = made_up(BLOCK, head_dim, DType::F32);
        let mut pool = QuantizedPool::new(1, head_dim, BITS[3], device);
        let all: Vec<i32> = (0..BLOCK as i32).collect();
        let [keys, values] = [keys, values].map(|own| rows(&own, head_dim, DType::F32, device));
        let from = ints(&all, device).reshape([1, BLOCK]);
        quantize_slots(&mut pool, keys, values.clone(), from, ints(&[0], device)).unwrap();
        let query = Numbers::new(3).tensor([1, 2, head_dim], device);
        let ranges = |length: i32| SlotRanges {
            offsets: ints(&[0], device).reshape([1, 1]),
            lengths: ints(&[length], device).reshape([1, 1]),
        };
        let before = |log_sum_exp: f32| AttendedSlots {
            output: Tensor::full([1, 2, head_dim], 0.25, (device, DType::F32)),
            log_sum_exp: Tensor::full([1, 2], log_sum_exp, (device, DType::F32)),
        };
        let attend = |length, log_sum_exp| {
            let query = query.clone();
            let options = QuantizedAttentionOptions::new(BLOCK);
            quantized_attention(query, &pool, &ranges(length), before(log_sum_exp), options)
        };
        // One slot alone is its value.
        let alone = attend(1, f32::NEG_INFINITY).unwrap().output;
        let alone = alone.try_into_vec_as::<f32>().unwrap();
        let decoded = decode(&pool, head_dim);
        let expected = [&decoded.values[..head_dim], &decoded.values[..head_dim]].concat();
        assert!(relative_error(&alone, &expected) < 1e-5, "{}", tested.name);
        let unchanged = attend(0, 1.5).unwrap();
        let output = unchanged.output.try_into_vec_as::<f32>().unwrap();
        assert!(output.iter().all(|x| (x - 0.25).abs() < 1e-6), "{}", tested.name);
        let sums = unchanged.log_sum_exp.try_into_vec_as::<f32>().unwrap();
        assert!(sums.iter().all(|x| (x - 1.5).abs() < 1e-6), "{} {sums:?}", tested.name);
        let nothing = attend(0, f32::NEG_INFINITY).unwrap();
        let output = nothing.output.try_into_vec_as::<f32>().unwrap();
        assert!(output.iter().all(|x| *x == 0.0), "{}", tested.name);
    }
}

/// A NaN is not lost among codes.
#[test]
fn nan_shows_in_the_output() {
    for tested in devices() {
        let device = &tested.device;
        let head_dim = 32;
        for of_keys in [true, false] {
            let [mut keys, mut values] = made_up(BLOCK, head_dim, DType::F32);
            let spoilt = if of_keys { &mut keys } else { &mut values };
            spoilt[7 * head_dim + 3] = f32::NAN;
            let mut pool = QuantizedPool::new(1, head_dim, BITS[0], device);
            let all: Vec<i32> = (0..BLOCK as i32).collect();
            let [keys, values] = [keys, values].map(|own| rows(&own, head_dim, DType::F32, device));
            let from = ints(&all, device).reshape([1, BLOCK]);
            quantize_slots(&mut pool, keys, values, from, ints(&[0], device)).unwrap();
            let attended = AttendedSlots {
                output: Tensor::zeros([1, 1, head_dim], (device, DType::F32)),
                log_sum_exp: Tensor::zeros([1, 1], (device, DType::F32)),
            };
            let ranges = SlotRanges {
                offsets: ints(&[0], device).reshape([1, 1]),
                lengths: ints(&[BLOCK as i32], device).reshape([1, 1]),
            };
            let query = Numbers::new(4).tensor([1, 1, head_dim], device);
            let strategies = [QuantizedStrategy::Portable, QuantizedStrategy::TensorCore];
            force("NaN among codes", &tested, &strategies, &[()], |strategy, ()| {
                let options =
                    QuantizedAttentionOptions { strategy, ..QuantizedAttentionOptions::new(BLOCK) };
                let (query, attended) = (query.clone(), attended.clone());
                let found = quantized_attention(query, &pool, &ranges, attended, options)?;
                let output = found.output.try_into_vec_as::<f32>().unwrap();
                assert!(output.iter().any(|x| x.is_nan()), "{} keys {of_keys}", tested.name);
                Ok(())
            });
        }
    }
}

/// Blocks go where their list says, and the others stay.
#[test]
fn blocks_are_copied_in_place() {
    const HEAD_DIM: usize = 20;
    for tested in devices() {
        let device = &tested.device;
        let filled = |blocks: usize, seed: usize, bits: QuantizedBits| {
            let mut pool = QuantizedPool::new(blocks, HEAD_DIM, bits, device);
            let [keys, values] = made_up(blocks * BLOCK + seed, HEAD_DIM, DType::F32);
            let [keys, values] =
                [keys, values].map(|numbers| rows(&numbers, HEAD_DIM, DType::F32, device));
            let slots: Vec<i32> = (0..blocks * BLOCK).map(|slot| (slot + seed) as i32).collect();
            let slots = ints(&slots, device).unsqueeze_dim(0);
            quantize_slots(&mut pool, keys, values, slots, ints(&[0], device)).unwrap();
            pool
        };
        for bits in BITS {
            let (mut own, from) = (filled(4, 0, bits), filled(3, 5, bits));
            let slots = |pool: &QuantizedPool| {
                let Decoded { keys, values, .. } = decode(pool, HEAD_DIM);
                let blocks = |numbers: Vec<f64>| {
                    numbers.chunks(BLOCK * HEAD_DIM).map(<[f64]>::to_vec).collect::<Vec<_>>()
                };
                [blocks(keys), blocks(values)]
            };
            let (before, other) = (slots(&own), slots(&from));
            own.copy_blocks(&ints(&[3, NO_SLOT, 1], device), &from).unwrap();
            let after = slots(&own);
            for ((after, before), other) in after.iter().zip(before).zip(other) {
                let expected = [&before[0], &other[2], &before[2], &other[0]];
                let blocks = after.iter().zip(expected);
                assert!(blocks.into_iter().all(|(a, b)| a == b), "{} {bits:?}", tested.name);
            }
        }
        let mut own = filled(2, 0, BITS[0]);
        let error = own.copy_blocks(&ints(&[0], device), &filled(1, 0, BITS[1])).unwrap_err();
        assert!(error.to_string().contains("`from`"), "{error}");
        let error = own.copy_blocks(&ints(&[0, 1], device), &filled(1, 0, BITS[0])).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "to", .. }), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        let pool = |bits| QuantizedPool::new(1, 64, bits, device);
        let own = Tensor::<2>::zeros([BLOCK, 64], (device, DType::F32));
        let quantize = |mut pool: QuantizedPool, count: usize| {
            let from = Tensor::<2, Int>::zeros([1, count], (device, DType::I32));
            quantize_slots(&mut pool, own.clone(), own.clone(), from, ints(&[0], device))
        };
        assert!(quantize(pool(BITS[0]), BLOCK).is_ok());
        let error = quantize(pool(BITS[0]), BLOCK + 1).unwrap_err().to_string();
        assert!(error.contains("65") && error.contains("multiples of 64"), "{error}");
        let mut other = pool(BITS[0]);
        other.bits.keys = 4;
        assert!(matches!(quantize(other, BLOCK), Err(KernelError::Shape { .. })));
        let mut other = pool(BITS[0]);
        other.bits.values = 9;
        let error = quantize(other, BLOCK).unwrap_err().to_string();
        assert!(error.contains('9') && error.contains("1 to 8"), "{error}");
    }
}
