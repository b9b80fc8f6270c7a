use burn::tensor::{DType, Tensor};
use kv_kernels::prefill_attention;
use kv_testing::{Numbers, devices, relative_error, skip};

/// Causal attention in f64, straight from its formula; output and column sums.
fn exact(q: &[f32], k: &[f32], v: &[f32], dims: [usize; 5]) -> (Vec<f64>, Vec<f64>) {
    let [batch, kv_heads, group, tokens, dim] = dims;
    let mut output = vec![0.0; q.len()];
    let mut sums = vec![0.0; batch * kv_heads * group * tokens];
    for pair in 0..batch * kv_heads {
        for g in 0..group {
            let head = pair * group + g;
            for i in 0..tokens {
                let query = &q[(head * tokens + i) * dim..][..dim];
                let logits: Vec<f64> = (0..=i)
                    .map(|t| {
                        let key = &k[(pair * tokens + t) * dim..][..dim];
                        let dot: f64 =
                            query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        dot / (dim as f64).sqrt()
                    })
                    .collect();
                let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
                for (t, logit) in logits.iter().enumerate() {
                    let p = (logit - max).exp() / total;
                    sums[head * tokens + t] += p;
                    for d in 0..dim {
                        output[(head * tokens + i) * dim + d] +=
                            p * f64::from(v[(pair * tokens + t) * dim + d]);
                    }
                }
            }
        }
    }
    (output, sums)
}

/// Rows borders, head dims with kernels of their own, more queries than a tile.
const CASES: [[usize; 5]; 6] = [
    [1, 1, 1, 1, 32],
    [2, 2, 2, 37, 16],
    [1, 2, 4, 300, 32],
    [1, 1, 8, 257, 64],
    [2, 1, 2, 130, 128],
    [1, 2, 1, 384, 128],
];

#[test]
fn agrees_with_f64() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if dtype == DType::F32 && !tested.exact_products() {
                skip("prefill_attention in f32 on cuda", "its products are rounded to TF32");
                continue;
            }
            let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            for dims in CASES {
                let [batch, kv_heads, group, tokens, dim] = dims;
                let mut numbers = Numbers::new(tokens as u64);
                let mut draw = |heads: usize| {
                    numbers.tensor([batch, heads, tokens, dim], &tested.device).cast(dtype)
                };
                let (q, k, v) = (draw(kv_heads * group), draw(kv_heads), draw(kv_heads));
                let read = |tensor: &Tensor<4>| tensor.clone().try_into_vec_as::<f32>().unwrap();
                let (output, sums) = exact(&read(&q), &read(&k), &read(&v), dims);
                let context = format!("{} {dtype:?} {dims:?}", tested.name);
                let alone = prefill_attention(&q, &k, &v, false).unwrap();
                assert!(alone.column_sums.is_none());
                let both = prefill_attention(&q, &k, &v, true).unwrap();
                for result in [&alone.output, &both.output] {
                    let error = relative_error(&read(result), &output);
                    assert!(error < limit, "{context}: output off by {error}");
                }
                let actual = both.column_sums.unwrap().try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &sums);
                assert!(error < limit, "{context}: column sums off by {error}");
            }
        }
    }
}
