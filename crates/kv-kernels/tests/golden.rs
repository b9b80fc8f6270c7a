use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{DecodeAttentionOptions, KernelError, SlotRanges, decode_attention};
use kv_testing::{devices, golden_files, relative_error};

/// `weighted_attention_*`: several queries a head, each a call of its own.
#[test]
fn golden_weighted_attention() {
    for golden in golden_files("golden_weighted_attention", "weighted_attention") {
        for tested in devices() {
            let device = &tested.device;
            let (query, lengths) = (golden.tensor("q"), golden.tensor("length"));
            let [batch, heads, queries, dim] = query.dims();
            let [_, kv_heads, slots, _] = golden.tensor("k").dims();
            let [.., value_dim] = golden.tensor("v").dims::<4>();
            let rows = |name: &str, dim: usize| {
                golden.tensor(name).on::<4>(device).reshape([batch * kv_heads * slots, dim])
            };
            let weights = golden.tensor("w").on::<3>(device);
            let log_weights = weights.clone().log();
            let numerators = golden
                .find("w_num_extra")
                .map(|extra| (weights * extra.on::<3>(device)).reshape([batch * kv_heads * slots]));
            let starts: Vec<i32> =
                (0..batch * kv_heads).map(|pair| (pair * slots) as i32).collect();
            let lengths: Vec<i32> = lengths.values.iter().map(|x| *x as i32).collect();
            let upload = |values: &[i32]| {
                Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([batch, kv_heads])
            };
            let ranges = SlotRanges { offsets: upload(&starts), lengths: upload(&lengths) };
            for index in 0..queries {
                let q = query.on::<4>(device).narrow(2, index, 1).reshape([batch, heads, dim]);
                let attend = |values: &Tensor<2>, numerator_weights| {
                    let options = DecodeAttentionOptions {
                        log_sum_exp: true,
                        numerator_weights,
                        ..Default::default()
                    };
                    let weights = log_weights.clone().reshape([batch * kv_heads * slots]);
                    let keys = rows("k", dim);
                    decode_attention(
                        q.clone(),
                        keys,
                        values.clone(),
                        Some(weights),
                        &ranges,
                        options,
                    )
                };
                // Values narrower than keys are refused by name. With columns of zeros they are
                // served.
                let mut values = rows("v", value_dim);
                if value_dim < dim {
                    let refused = attend(&values, None).unwrap_err();
                    let KernelError::Shape { argument, expected, actual, .. } = &refused else {
                        panic!("{}: {refused}", golden.name)
                    };
                    assert_eq!((*argument, expected[1], actual[1]), ("values", dim, value_dim));
                    let zeros = [batch * kv_heads * slots, dim - value_dim];
                    let zeros = Tensor::zeros(zeros, (device, DType::F32));
                    values = Tensor::cat(vec![values, zeros], 1);
                }
                let served = |output: Tensor<3>| {
                    let output = output.narrow(2, 0, value_dim);
                    output.try_into_vec_as::<f32>().unwrap()
                };
                let result = attend(&values, None).unwrap();
                let pick = |name: &str, width: usize| -> Vec<f64> {
                    let all = golden.tensor(name).values;
                    (0..batch * heads)
                        .flat_map(|head| all[(head * queries + index) * width..][..width].to_vec())
                        .collect()
                };
                let error = relative_error(&served(result.output), &pick("out", value_dim));
                assert!(error < 1e-5, "{} on {}: output off by {error}", golden.name, tested.name);
                if let Some(numerators) = &numerators {
                    let scaled = attend(&values, Some(numerators.clone())).unwrap().output;
                    let error = relative_error(&served(scaled), &pick("out_num_scaled", value_dim));
                    assert!(error < 1e-5, "{} on {}: off by {error}", golden.name, tested.name);
                }
                let lse = result.log_sum_exp.unwrap().try_into_vec_as::<f32>().unwrap();
                for (actual, expected) in lse.iter().zip(pick("lse", 1)) {
                    let equal = f64::from(*actual) == expected;
                    let close = (f64::from(*actual) - expected).abs() < 1e-4;
                    assert!(equal || close, "{}: lse {actual} for {expected}", golden.name);
                }
            }
        }
    }
}
