use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_kernels::{
    AttentionOutput, DecodeAttentionOptions, DecodeStrategy, KernelError, SlotRanges,
    decode_attention,
};
use kv_testing::{devices, relative_error};

use super::problems::{Inputs, Problem, catalog, exact};
use super::strategies::force;

fn everything() -> DecodeAttentionOptions {
    DecodeAttentionOptions { log_sum_exp: true, probabilities: true, ..Default::default() }
}

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            // Inputs are rounded before the reference sees them. Logits are summed in f32; outputs
            // and probabilities are rounded in half precision.
            let [limit, lse_limit] = if dtype == DType::F32 { [1e-5, 1e-4] } else { [1e-2, 5e-3] };
            // Half precision differs in how rows are read alone.
            let every = if dtype == DType::F32 { 2 } else { 5 };
            for (seed, problem) in tested.some(catalog().into_iter().enumerate(), every) {
                let inputs = problem.inputs(seed as u64).rounded(&tested.device, dtype);
                let (output, lse, probabilities) = exact(&problem, &inputs);
                let device = &tested.device;
                let attend = |options: DecodeAttentionOptions| {
                    attend(&problem, &inputs, (device, dtype), options).unwrap()
                };
                let result = attend(everything());
                let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
                let context = format!("{} {dtype:?} {problem:?}", tested.name);
                let error = relative_error(&read(result.output.reshape([-1])), &output);
                assert!(error < limit, "{context}: output off by {error}");
                let actual = read(result.probabilities.unwrap().reshape([-1]));
                let error = relative_error(&actual, &probabilities);
                assert!(error < limit, "{context}: probabilities off by {error}");
                let actual = read(result.log_sum_exp.unwrap().reshape([-1]));
                assert_eq!(actual.len(), lse.len(), "{context}");
                for (actual, expected) in actual.iter().zip(&lse) {
                    let close = (f64::from(*actual) - expected).abs() < lse_limit;
                    assert!(
                        close || f64::from(*actual) == *expected,
                        "{context}: lse {actual} for {expected}"
                    );
                }
                // Where nothing but the output is wanted, as in a model's steps.
                if tested.runs_everything() || seed % 4 == 0 {
                    let alone = attend(DecodeAttentionOptions::default());
                    let error = relative_error(&read(alone.output.reshape([-1])), &output);
                    assert!(error < limit, "{context}: output alone off by {error}");
                }
            }
        }
    }
}

/// Attends as a case says.
fn attend(
    problem: &Problem,
    inputs: &Inputs,
    (device, dtype): (&Device, DType),
    options: DecodeAttentionOptions,
) -> Result<AttentionOutput, KernelError> {
    let (batch, slots, dim) = (problem.batch(), problem.slots(), problem.head_dim);
    let heads = problem.kv_heads * problem.group;
    let float = |values: &[f32]| Tensor::<1>::from_data(values, (device, DType::F32));
    decode_attention(
        float(&inputs.query).cast(dtype).reshape([batch, heads, dim]),
        float(&inputs.keys).cast(dtype).reshape([slots, dim]),
        float(&inputs.values).cast(dtype).reshape([slots, dim]),
        inputs.log_weights.as_deref().map(float),
        &problem.ranges(inputs, device),
        DecodeAttentionOptions {
            numerator_weights: inputs.numerators.as_deref().map(float),
            view: problem.view(inputs, device),
            ..options
        },
    )
}

#[test]
fn every_strategy_agrees_with_f64() {
    use DecodeStrategy::{Portable, TensorCore, TensorCoreCluster};
    for tested in devices() {
        let device = &tested.device;
        let problems: Vec<_> = tested.some((0u64..).zip(catalog()), 5).collect();
        for dtype in tested.float_dtypes() {
            let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            let test = format!("decode_attention in {dtype:?}");
            let strategies = [Portable, TensorCore, TensorCoreCluster];
            force(&test, &tested, &strategies, &problems, |strategy, (seed, problem)| {
                let inputs = problem.inputs(*seed).rounded(device, dtype);
                let options = DecodeAttentionOptions { strategy, ..Default::default() };
                let attended = attend(problem, &inputs, (device, dtype), options)?;
                let output = attended.output.reshape([-1]).try_into_vec_as::<f32>().unwrap();
                let (expected, ..) = exact(problem, &inputs);
                let error = relative_error(&output, &expected);
                let context = format!("{} {dtype:?} {strategy:?} {problem:?}", tested.name);
                assert!(error < limit, "{context}: off by {error}");
                Ok(())
            });
        }
        // What cannot be forced says so by name.
        let (_, problem) = &problems[0];
        let inputs = problem.inputs(0);
        let forced = |strategy| {
            let options = DecodeAttentionOptions { strategy, ..Default::default() };
            let refused = attend(problem, &inputs, (device, DType::F32), options).err();
            refused.map(|error| error.to_string())
        };
        let why = "strategy TensorCore is not available";
        assert!(forced(TensorCore).is_some_and(|error| error.contains(why)), "{}", tested.name);
        assert_eq!(forced(Portable).is_some(), tested.name == "cpu", "{}", tested.name);
    }
}

#[test]
fn huge_logits_do_not_overflow() {
    for tested in devices() {
        for (dtype, dim) in tested.float_dtypes().into_iter().zip([4, 64, 64]) {
            let device = &tested.device;
            // Logits of +-200 and beyond: the softmax is one-hot.
            let query = Tensor::<3>::full([1, 1, dim], 100.0, (device, DType::F32)).cast(dtype);
            let rows = |values: [f32; 4]| {
                let column = TensorData::new(values.to_vec(), [4, 1]);
                let column = Tensor::<2>::from_data(column, (device, DType::F32));
                column.expand([4, dim]).mul_scalar(1.0).cast(dtype)
            };
            let (keys, values) = (rows([-2.0, 1.0, 2.0, 1.5]), rows([1.0, 2.0, 3.0, 4.0]));
            let result =
                decode_attention(query, keys, values, None, &one_range(4, device), everything());
            let output = result.unwrap().output.try_into_vec_as::<f32>().unwrap();
            let right = output.iter().all(|x| (x - 3.0).abs() < 1e-3);
            assert!(right, "{} {dtype:?}: {output:?}", tested.name);
        }
    }
}

#[test]
fn nan_does_not_vanish() {
    for tested in devices() {
        for (dtype, dim) in tested.float_dtypes().into_iter().zip([4, 64, 64]) {
            let device = &tested.device;
            let query = Tensor::<3>::full([1, 1, dim], f32::NAN, (device, DType::F32)).cast(dtype);
            let rows = Tensor::<2>::ones([4, dim], (device, DType::F32)).cast(dtype);
            let ranges = one_range(4, device);
            let result = decode_attention(query, rows.clone(), rows, None, &ranges, everything());
            let output = result.unwrap().output.try_into_vec_as::<f32>().unwrap();
            let bad = output.iter().all(|x| !x.is_finite());
            assert!(bad, "{} {dtype:?}: {output:?}", tested.name);
        }
    }
}

/// Values that count over a denominator of nothing: zeros.
#[test]
fn numerators_alone_are_nothing() {
    for tested in devices() {
        // A range in one part, and one in several.
        for ((dtype, dim), slots) in tested
            .float_dtypes()
            .into_iter()
            .zip([32, 64, 64])
            .flat_map(|form| [(form, 4), (form, 3_000)])
        {
            let device = &tested.device;
            let query = Tensor::<3>::ones([1, 1, dim], (device, DType::F32)).cast(dtype);
            let rows = Tensor::<2>::ones([slots, dim], (device, DType::F32)).cast(dtype);
            let never = Tensor::<1>::full([slots], f32::NEG_INFINITY, (device, DType::F32));
            let options = DecodeAttentionOptions {
                numerator_weights: Some(Tensor::ones([slots], (device, DType::F32))),
                ..DecodeAttentionOptions::default()
            };
            let ranges = one_range(slots, device);
            let result = decode_attention(query, rows.clone(), rows, Some(never), &ranges, options);
            let output = result.unwrap().output.try_into_vec_as::<f32>().unwrap();
            let zeros = output.iter().all(|x| *x == 0.0);
            assert!(zeros, "{} {dtype:?} {slots} slots: {output:?}", tested.name);
        }
    }
}

/// One sequence of one head.
fn one_range(length: i32, device: &Device) -> SlotRanges {
    let int = |value: i32| Tensor::full([1, 1], value, (device, DType::I32));
    SlotRanges { offsets: int(0), lengths: int(length) }
}
