use burn::tensor::{DType, Tensor, TensorData};
use kv_kernels::{DecodeAttentionOptions, decode_attention};
use kv_testing::{devices, relative_error};

use super::problems::{catalog, exact};

fn everything() -> DecodeAttentionOptions {
    DecodeAttentionOptions { log_sum_exp: true, probabilities: true, ..Default::default() }
}

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            // Half precision differs in how rows are read; it need not meet every case on drivers
            // that compile on the CPU.
            let every = if dtype != DType::F32 && tested.name == "wgpu" { 3 } else { 1 };
            for (seed, problem) in catalog().into_iter().enumerate().step_by(every) {
                let inputs = problem.inputs(seed as u64);
                let (output, lse, probabilities) = exact(&problem, &inputs);
                let device = &tested.device;
                let (batch, slots, dim) = (problem.batch(), problem.slots(), problem.head_dim);
                let heads = problem.kv_heads * problem.group;
                let float = |values: &[f32]| {
                    Tensor::<1>::from_data(values, (device, DType::F32)).cast(dtype)
                };
                let result = decode_attention(
                    float(&inputs.query).reshape([batch, heads, dim]),
                    float(&inputs.keys).reshape([slots, dim]),
                    float(&inputs.values).reshape([slots, dim]),
                    inputs
                        .log_weights
                        .as_deref()
                        .map(|w| Tensor::from_data(w, (device, DType::F32))),
                    &problem.ranges(&inputs, device),
                    DecodeAttentionOptions {
                        numerator_weights: inputs
                            .numerators
                            .as_deref()
                            .map(|w| Tensor::from_data(w, (device, DType::F32))),
                        view: problem.view(&inputs, device),
                        ..everything()
                    },
                )
                .unwrap();
                let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
                let context = format!("{} {dtype:?} {problem:?}", tested.name);
                let error = relative_error(&read(result.output.reshape([-1])), &output);
                assert!(error < limit, "{context}: output off by {error}");
                let actual = read(result.probabilities.unwrap().reshape([-1]));
                let error = relative_error(&actual, &probabilities);
                assert!(error < limit, "{context}: probabilities off by {error}");
                for (actual, expected) in
                    read(result.log_sum_exp.unwrap().reshape([-1])).iter().zip(&lse)
                {
                    let close = (f64::from(*actual) - expected).abs() < 10.0 * limit;
                    assert!(
                        close || f64::from(*actual) == *expected,
                        "{context}: lse {actual} for {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn huge_logits_do_not_overflow() {
    for tested in devices() {
        let device = &tested.device;
        // Logits of +-200 and beyond: the softmax is one-hot.
        let query = Tensor::<3>::full([1, 1, 4], 100.0, (device, DType::F32));
        let keys = TensorData::new(vec![-2.0f32, 1.0, 2.0, 1.9], [4, 1]);
        let keys =
            Tensor::<2>::from_data(keys, (device, DType::F32)).expand([4, 4]).mul_scalar(1.0);
        let values = TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0], [4, 1]);
        let values =
            Tensor::<2>::from_data(values, (device, DType::F32)).expand([4, 4]).mul_scalar(1.0);
        let int = |value: i32| Tensor::full([1, 1], value, (device, DType::I32));
        let ranges = kv_kernels::SlotRanges { offsets: int(0), lengths: int(4) };
        let result = decode_attention(query, keys, values, None, &ranges, everything()).unwrap();
        let output = result.output.try_into_vec_as::<f32>().unwrap();
        assert!(output.iter().all(|x| (x - 3.0).abs() < 1e-3), "{}: {output:?}", tested.name);
    }
}

#[test]
fn nan_does_not_vanish() {
    for tested in devices() {
        let device = &tested.device;
        let query = Tensor::<3>::full([1, 1, 4], f32::NAN, (device, DType::F32));
        let rows = Tensor::<2>::ones([4, 4], (device, DType::F32));
        let int = |value: i32| Tensor::full([1, 1], value, (device, DType::I32));
        let ranges = kv_kernels::SlotRanges { offsets: int(0), lengths: int(4) };
        let result =
            decode_attention(query, rows.clone(), rows, None, &ranges, everything()).unwrap();
        let output = result.output.try_into_vec_as::<f32>().unwrap();
        assert!(output.iter().all(|x| !x.is_finite()), "{}: {output:?}", tested.name);
    }
}
