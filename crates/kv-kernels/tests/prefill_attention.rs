use kv_kernels::prefill_attention;
use kv_testing::{Numbers, exact_devices, relative_error};

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

#[test]
fn agrees_with_f64() {
    for tested in exact_devices("prefill_attention") {
        for (batch, kv_heads, group, tokens, dim) in
            [(1, 1, 1, 1, 32), (2, 2, 2, 37, 16), (1, 2, 4, 300, 32), (1, 1, 8, 257, 64)]
        {
            let device = &tested.device;
            let mut numbers = Numbers::new(tokens as u64);
            let q = numbers.tensor([batch, kv_heads * group, tokens, dim], device);
            let k = numbers.tensor([batch, kv_heads, tokens, dim], device);
            let v = numbers.tensor([batch, kv_heads, tokens, dim], device);
            let read =
                |tensor: &burn::tensor::Tensor<4>| tensor.clone().try_into_vec_as::<f32>().unwrap();
            let dims = [batch, kv_heads, group, tokens, dim];
            let (output, sums) = exact(&read(&q), &read(&k), &read(&v), dims);
            let result = prefill_attention(&q, &k, &v, true).unwrap();
            let error = relative_error(&read(&result.output), &output);
            assert!(error < 1e-5, "{} {dims:?}: output off by {error}", tested.name);
            let actual = result.column_sums.unwrap().try_into_vec_as::<f32>().unwrap();
            let error = relative_error(&actual, &sums);
            assert!(error < 1e-5, "{} {dims:?}: column sums off by {error}", tested.name);
        }
    }
}
