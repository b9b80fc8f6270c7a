use burn::tensor::{DType, Device, Tensor};
use kv_kernels::{KernelError, LinearOptions, RowNorm, linear};
use kv_testing::{Numbers, devices, relative_error};

/// Rows, inputs, outputs: each side of every kernel's borders.
const CASES: [[usize; 3]; 12] = [
    [1, 64, 40],
    [2, 1096, 9000],
    [16, 1032, 4250],
    [20, 96, 4300],
    [3, 200, 7],
    [8, 256, 130],
    [9, 96, 16],
    [17, 1056, 33],
    [32, 64, 50],
    [33, 64, 50],
    [150, 320, 260],
    [300, 72, 130],
];

fn upload(values: &[f32], shape: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<1>::from_data(values, (device, DType::F32)).reshape(shape).cast(dtype)
}

/// `x Wᵀ + b`, gated or not, plus a residual, in f64.
fn expected(
    [x, w, bias, residual]: [&[f32]; 4],
    inputs: usize,
    gated: bool,
    adds: bool,
) -> Vec<f64> {
    let outputs = w.len() / inputs;
    let wide = |x: &f32| f64::from(*x);
    let rows = x.chunks(inputs).flat_map(|x| {
        let sums: Vec<f64> = w
            .chunks(inputs)
            .zip(bias)
            .map(|(w, bias)| {
                x.iter().zip(w).map(|(x, w)| wide(x) * wide(w)).sum::<f64>() + wide(bias)
            })
            .collect();
        if !gated {
            return sums;
        }
        let (gates, ups) = sums.split_at(outputs / 2);
        gates.iter().zip(ups).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
    });
    let mut y: Vec<f64> = rows.collect();
    if adds {
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y += wide(residual));
    }
    y
}

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for [rows, inputs, outputs] in CASES {
                for (gated, adds) in [(false, false), (true, false), (false, true), (true, true)] {
                    if gated && outputs % 2 == 1 {
                        continue;
                    }
                    let mut numbers = Numbers::new(rows as u64);
                    let width = if gated { outputs / 2 } else { outputs };
                    // Small, so that gates stay where they bend.
                    let scale = 1.0 / (inputs as f32).sqrt();
                    let x: Vec<f32> =
                        numbers.normal(rows * inputs).iter().map(|x| x * scale).collect();
                    let w = numbers.normal(outputs * inputs);
                    let (bias, residual) = (numbers.normal(outputs), numbers.normal(rows * width));
                    let expected = expected([&x, &w, &bias, &residual], inputs, gated, adds);
                    let device = &tested.device;
                    let options = LinearOptions {
                        norm: None,
                        bias: Some(upload(&bias, [1, outputs], device, dtype).reshape([outputs])),
                        gated,
                        residual: adds.then(|| upload(&residual, [rows, width], device, dtype)),
                    };
                    let x = upload(&x, [rows, inputs], device, dtype);
                    let w = upload(&w, [outputs, inputs], device, dtype);
                    let y = linear(x, w, options).unwrap();
                    let y = y.try_into_vec_as::<f32>().unwrap();
                    let error = relative_error(&y, &expected);
                    // Above 32 rows, CUDA's products of f32 are Burn's, in TF32.
                    let exact = dtype == DType::F32 && (tested.exact_products() || rows <= 32);
                    let limit = if exact { 1e-5 } else { 1e-2 };
                    let context = format!(
                        "{} {dtype:?} {rows}x{inputs}x{outputs} gated {gated} adds {adds}",
                        tested.name
                    );
                    assert!(error < limit, "{context}: off by {error}");
                }
            }
        }
    }
}

/// Rows may be normalised on their way into the product, or before it: few and many, of every dtype, as in f64.
#[test]
fn normalises_rows_on_every_device_and_dtype() {
    const EPSILON: f32 = 0.5;
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for [rows, inputs, outputs] in CASES {
                let mut numbers = Numbers::new(7);
                let device = &tested.device;
                // Larger than f16 takes times the gain.
                let x: Vec<f32> = numbers.normal(rows * inputs).iter().map(|x| 1e4 * x).collect();
                let gain: Vec<f32> = numbers.normal(inputs).iter().map(|x| 4.0 * x).collect();
                let scale = 1.0 / (inputs as f32).sqrt();
                let w: Vec<f32> =
                    numbers.normal(outputs * inputs).iter().map(|w| scale * w).collect();
                let normed: Vec<f32> = x
                    .chunks(inputs)
                    .flat_map(|row| {
                        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                        let root = (mean / inputs as f64 + f64::from(EPSILON)).sqrt();
                        row.iter()
                            .zip(&gain)
                            .map(move |(x, gain)| (f64::from(*x) / root * f64::from(*gain)) as f32)
                    })
                    .collect();
                let bias = vec![0.0; outputs];
                let expected = expected([&normed, &w, &bias, &[]], inputs, false, false);
                let x = upload(&x, [rows, inputs], device, dtype);
                let weight = upload(&gain, [1, inputs], device, dtype).reshape([inputs]);
                let w = upload(&w, [outputs, inputs], device, dtype);
                let norm = Some(RowNorm { weight, epsilon: EPSILON });
                let y = linear(x, w, LinearOptions { norm, ..Default::default() }).unwrap();
                let error = relative_error(&y.try_into_vec_as::<f32>().unwrap(), &expected);
                let exact = dtype == DType::F32 && (tested.exact_products() || rows <= 32);
                let limit = if exact { 1e-5 } else { 1e-2 };
                let context = format!("{} {dtype:?} {rows}x{inputs}x{outputs}", tested.name);
                assert!(error < limit, "{context}: off by {error}");
            }
        }
    }
}

/// A few rows are computed as each is alone, bit for bit: on the CPU, and where matrix instructions
/// sum in one order.
#[test]
fn rows_do_not_depend_on_each_other() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if tested.name != "cpu" && (tested.name != "cuda" || dtype == DType::F32) {
                continue;
            }
            let (inputs, outputs) = (224, 48);
            let mut numbers = Numbers::new(5);
            let device = &tested.device;
            let x = upload(&numbers.normal(20 * inputs), [20, inputs], device, dtype);
            let w = upload(&numbers.normal(outputs * inputs), [outputs, inputs], device, dtype);
            let read = |y: Tensor<2>| y.try_into_vec_as::<f32>().unwrap();
            let all = read(linear(x.clone(), w.clone(), LinearOptions::default()).unwrap());
            for rows in [1, 3] {
                let part = x.clone().narrow(0, 4, rows);
                let part = read(linear(part, w.clone(), LinearOptions::default()).unwrap());
                let of_all = &all[4 * outputs..][..rows * outputs];
                assert_eq!(part, of_all, "{} {dtype:?}: {rows} rows", tested.name);
            }
        }
    }
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_refused() {
    let device = &devices()[0].device;
    let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (device, dtype));
    let x = zeros([2, 8], DType::F32);
    let none = LinearOptions::default;
    let error = linear(x.clone(), zeros([4, 7], DType::F32), none()).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "weight", .. }), "{error}");
    let error = linear(x.clone(), zeros([4, 8], DType::F16), none()).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { argument: "weight", .. }), "{error}");
    let w = || zeros([4, 8], DType::F32);
    let bias = Some(Tensor::<1>::zeros([3], (device, DType::F32)));
    let error = linear(x.clone(), w(), LinearOptions { bias, ..none() }).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "bias", .. }), "{error}");
    let weight = Tensor::<1>::zeros([7], (device, DType::F32));
    let norm = Some(RowNorm { weight, epsilon: 0.0 });
    let error = linear(x.clone(), w(), LinearOptions { norm, ..none() }).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "norm", .. }), "{error}");
    let gated = LinearOptions { gated: true, ..none() };
    let error = linear(x.clone(), zeros([5, 8], DType::F32), gated.clone()).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    let residual = Some(zeros([2, 4], DType::F32));
    let error = linear(x, w(), LinearOptions { residual, ..gated }).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "residual", .. }), "{error}");
    for [rows, inputs, outputs] in [[1, 0, 4], [2, 8, 0]] {
        let x = zeros([rows, inputs], DType::F32);
        let error = linear(x, zeros([outputs, inputs], DType::F32), none()).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "weight", .. }), "{error}");
    }
}
