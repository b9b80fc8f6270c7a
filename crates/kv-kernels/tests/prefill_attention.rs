use burn::tensor::{DType, Tensor};
use kv_kernels::{
    KernelError, PrefillOptions, PrefillStrategy, PrefillWindow, Share, prefill_attention,
};
use kv_testing::{Numbers, STEP, devices, dot, lacks, relative_error, timed};

use super::strategies::force;

/// What is compared: output, log-sum-exp, column sums.
type Results = [Vec<f64>; 3];

/// Logits of the last queries and all keys in f64, `[heads, queries, tokens]`.
fn logits(q: &[f32], k: &[f32], dims: [usize; 6]) -> Vec<f64> {
    let [batch, kv_heads, group, queries, tokens, dim] = dims;
    let rows = (0..batch * kv_heads * group * queries).flat_map(|row| {
        let pair = row / queries / group;
        let query = &q[row * dim..][..dim];
        k[pair * tokens * dim..][..tokens * dim]
            .chunks(dim)
            .map(move |key| dot(query, key) / (dim as f64).sqrt())
    });
    rows.collect()
}

/// Causal attention of the last queries in f64, straight from its formula.
fn exact(all: &[f64], v: &[f32], dims: [usize; 6], options: &PrefillOptions) -> Results {
    let [batch, kv_heads, group, queries, tokens, dim] = dims;
    let heads = batch * kv_heads * group;
    let mut output = vec![0.0; heads * queries * dim];
    let mut log_sum_exp = vec![0.0; heads * queries];
    let mut sums = vec![0.0; heads * tokens];
    for head in 0..heads {
        let pair = head / group;
        for i in 0..queries {
            let at = tokens - queries + i;
            let within = |t: usize| match options.window {
                PrefillWindow::All => true,
                PrefillWindow::Last(window) => at - t < window,
                PrefillWindow::From(share) => t + 1 >= share.of(at + 1),
            };
            let seen: Vec<usize> = (0..=at).filter(|&t| within(t) || t < options.sinks).collect();
            let row = &all[(head * queries + i) * tokens..][..tokens];
            let logits: Vec<f64> = seen.iter().map(|&t| row[t]).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            log_sum_exp[head * queries + i] = max + total.ln();
            for (&t, logit) in seen.iter().zip(&logits) {
                let p = (logit - max).exp() / total;
                if queries - i <= options.column_sums.unwrap_or(0) {
                    sums[head * tokens + t] += p;
                }
                let sum = &mut output[(head * queries + i) * dim..][..dim];
                let value = &v[(pair * tokens + t) * dim..][..dim];
                sum.iter_mut().zip(value).for_each(|(sum, v)| *sum += p * f64::from(*v));
            }
        }
    }
    [output, log_sum_exp, sums]
}

/// Batch, key-value heads, group, queries, tokens, head dim: rows at borders, head dims with
/// kernels of their own, more queries than a tile, chunks of a longer prompt.
const CASES: [[usize; 6]; 7] = [
    [1, 1, 1, 1, 1, 32],
    [2, 2, 2, 37, 37, 16],
    [1, 1, 4, 140, 140, 32],
    [1, 1, 3, 257, 257, 64],
    [2, 1, 1, 130, 130, 128],
    [1, 2, 1, 50, 333, 128],
    [1, 1, 2, 140, 290, 64],
];

/// The most multiplications, for logits as for values, of a timed prompt that is tested: the
/// reference takes long over more.
const MOST_PRODUCTS: usize = 1 << 26;

/// [`CASES`], and prompts that are timed.
fn cases() -> Vec<[usize; 6]> {
    let fields = ["batch", "query_heads", "kv_heads", "tokens", "head_dim"];
    let timed = timed("prefill_attention", fields).into_iter().filter_map(|prompt| {
        let [batch, query_heads, kv_heads, tokens, dim] = prompt;
        (batch * query_heads * tokens * tokens * dim <= MOST_PRODUCTS).then_some([
            batch,
            kv_heads,
            query_heads / kv_heads,
            tokens,
            tokens,
            dim,
        ])
    });
    let small = [1, STEP.kv_heads, STEP.group, STEP.prompt, STEP.prompt, STEP.head_dim];
    CASES.into_iter().chain(timed).chain([small]).collect()
}

/// Window, sinks, counted queries.
fn options() -> Vec<(PrefillWindow, usize, Option<usize>)> {
    let (all, last) = (PrefillWindow::All, PrefillWindow::Last);
    let from = |share: f64| PrefillWindow::From(Share::new(share));
    vec![
        (all, 0, None),
        (all, 0, Some(usize::MAX)),
        (all, 0, Some(32)),
        (all, 0, Some(135)),
        (last(1), 0, Some(3)),
        (last(20), 5, Some(usize::MAX)),
        (last(130), 140, Some(64)),
        (last(30), usize::MAX, None),
        (last(u32::MAX as usize), 3, Some(usize::MAX)),
        (from(0.0), 0, None),
        (from(0.3), 16, Some(usize::MAX)),
        (from(0.71), 0, Some(40)),
        (from(0.95), 150, Some(usize::MAX)),
        // All but the own key and the one before are hidden.
        (from(1.0), 1, Some(usize::MAX)),
    ]
}

#[test]
fn agrees_with_f64() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if dtype == DType::F32 && !tested.exact_products() {
                lacks("prefill_attention in f32 on cuda", "its products are rounded to TF32");
                continue;
            }
            let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            for dims in cases() {
                let [batch, kv_heads, group, queries, tokens, dim] = dims;
                let mut numbers = Numbers::new(tokens as u64);
                let mut draw = |heads: usize, rows: usize| {
                    numbers.tensor([batch, heads, rows, dim], &tested.device).cast(dtype)
                };
                let q = draw(kv_heads * group, queries);
                let (k, v) = (draw(kv_heads, tokens), draw(kv_heads, tokens));
                let read = |tensor: &Tensor<4>| tensor.clone().try_into_vec_as::<f32>().unwrap();
                let (logits, values) = (logits(&read(&q), &read(&k), dims), read(&v));
                for (window, sinks, column_sums) in tested.some(options(), 3) {
                    let options = PrefillOptions {
                        window,
                        sinks,
                        column_sums,
                        log_sum_exp: true,
                        ..PrefillOptions::default()
                    };
                    let [output, log_sums, sums] = exact(&logits, &values, dims, &options);
                    let result = prefill_attention(&q, &k, &v, &options).unwrap();
                    let context = format!("{} {dtype:?} {dims:?} {options:?}", tested.name);
                    let error = relative_error(&read(&result.output), &output);
                    assert!(error < limit, "{context}: output off by {error}");
                    let actual = result.log_sum_exp.unwrap().try_into_vec_as::<f32>().unwrap();
                    let error = relative_error(&actual, &log_sums);
                    assert!(error < limit, "{context}: log-sum-exp off by {error}");
                    assert_eq!(result.column_sums.is_some(), column_sums.is_some());
                    if let Some(actual) = result.column_sums {
                        let actual = actual.try_into_vec_as::<f32>().unwrap();
                        let error = relative_error(&actual, &sums);
                        assert!(error < limit, "{context}: column sums off by {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_strategy_agrees_with_f64() {
    let cases: Vec<_> = cases().into_iter().zip(options().into_iter().cycle().skip(5)).collect();
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if dtype == DType::F32 && !tested.exact_products() {
                continue;
            }
            let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            let strategies = [PrefillStrategy::Blocks, PrefillStrategy::Hopper];
            let test = format!("prefill_attention in {dtype:?}");
            let cases: Vec<_> = tested.some(cases.iter().copied(), 3).collect();
            force(&test, &tested, &strategies, &cases, |strategy, (dims, options)| {
                let [batch, kv_heads, group, queries, tokens, dim] = *dims;
                let (window, sinks, column_sums) = *options;
                let mut numbers = Numbers::new(tokens as u64);
                let mut draw = |heads: usize, rows: usize| {
                    numbers.tensor([batch, heads, rows, dim], &tested.device).cast(dtype)
                };
                let q: Tensor<4> = draw(kv_heads * group, queries);
                let (k, v) = (draw(kv_heads, tokens), draw(kv_heads, tokens));
                let options =
                    PrefillOptions { window, sinks, column_sums, log_sum_exp: false, strategy };
                let result = prefill_attention(&q, &k, &v, &options)?;
                let read = |tensor: Tensor<4>| tensor.try_into_vec_as::<f32>().unwrap();
                let [output, ..] =
                    exact(&logits(&read(q), &read(k), *dims), &read(v), *dims, &options);
                let error = relative_error(&read(result.output), &output);
                let context = format!("{} {dtype:?} {dims:?} {options:?}", tested.name);
                assert!(error < limit, "{context}: off by {error}");
                Ok(())
            });
        }
    }
}

/// Logits of tens, of which halves have few digits left, and sums of more than halves hold: neither
/// is rounded to them.
#[test]
fn large_numbers_keep_their_digits() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if dtype == DType::F32 && !tested.exact_products() {
                lacks("prefill_attention in f32 on cuda", "its products are rounded to TF32");
                continue;
            }
            // With a kernel of its own, and in blocks.
            for dim in [128, 96] {
                let dims = [1, 1, 2, 300, 300, dim];
                let mut numbers = Numbers::new(dim as u64);
                let mut draw = |heads: usize, size: f32| {
                    let drawn: Tensor<4> = numbers.tensor([1, heads, 300, dim], &tested.device);
                    drawn.mul_scalar(size).cast(dtype)
                };
                let (q, k, v) = (draw(2, 8.0), draw(1, 1.0), draw(1, 1.0));
                let read = |tensor: &Tensor<4>| tensor.clone().try_into_vec_as::<f32>().unwrap();
                let options = PrefillOptions { log_sum_exp: true, ..PrefillOptions::default() };
                let logits = logits(&read(&q), &read(&k), dims);
                let [output, log_sums, _] = exact(&logits, &read(&v), dims, &options);
                let result = prefill_attention(&q, &k, &v, &options).unwrap();
                let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                let context = format!("{} {dtype:?} {dim}", tested.name);
                let error = relative_error(&read(&result.output), &output);
                assert!(error < limit, "{context}: output off by {error}");
                let actual = result.log_sum_exp.unwrap().try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &log_sums);
                assert!(error < limit, "{context}: log-sum-exp off by {error}");

                // Values that add up to more than f16 holds, all of one weight.
                let (q, v) = (q.zeros_like(), v.ones_like().mul_scalar(400.0));
                let result = prefill_attention(&q, &k, &v, &options).unwrap();
                let close = |x: &f32| (x - 400.0).abs() < 4.0;
                assert!(read(&result.output).iter().all(close), "{context}: sums overflow");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let zeros = |heads: usize, rows: usize| {
            Tensor::<4>::zeros([1, heads, rows, 32], (&tested.device, DType::F32))
        };
        let call = |q: &Tensor<4>, k: &Tensor<4>, options: PrefillOptions| {
            prefill_attention(q, k, k, &options).unwrap_err()
        };
        let plain = PrefillOptions::default();
        let error = call(&zeros(2, 5), &zeros(1, 4), plain);
        assert!(matches!(error, KernelError::Unsupported { argument: "queries", .. }), "{error}");
        let error = call(&zeros(2, 0), &zeros(1, 4), plain);
        assert!(matches!(error, KernelError::Unsupported { argument: "query", .. }), "{error}");
        let error = call(&zeros(3, 4), &zeros(2, 4), plain);
        assert!(matches!(error, KernelError::HeadGroups { .. }), "{error}");
        let window = PrefillWindow::Last(0);
        let error = call(&zeros(2, 4), &zeros(1, 4), PrefillOptions { window, ..plain });
        assert!(matches!(error, KernelError::Unsupported { argument: "window", .. }), "{error}");
    }
}
