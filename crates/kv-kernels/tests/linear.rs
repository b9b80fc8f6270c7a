use burn::tensor::{DType, Device, Tensor};
use kv_kernels::{KernelError, linear};
use kv_testing::{Numbers, devices, relative_error};

/// Rows, inputs, outputs: each side of every kernel's borders.
const CASES: [[usize; 3]; 9] = [
    [1, 64, 40],
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

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let exact = dtype == DType::F32 && tested.exact_products();
            let limit = if exact { 1e-5 } else { 1e-2 };
            for [rows, inputs, outputs] in CASES {
                let mut numbers = Numbers::new(rows as u64);
                let (x, w) = (numbers.normal(rows * inputs), numbers.normal(outputs * inputs));
                let bias = numbers.normal(outputs);
                let expected: Vec<f64> = x
                    .chunks(inputs)
                    .flat_map(|x| {
                        w.chunks(inputs).zip(&bias).map(move |(w, bias)| {
                            let dot: f64 =
                                x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                            dot + f64::from(*bias)
                        })
                    })
                    .collect();
                let device = &tested.device;
                let bias = upload(&bias, [1, outputs], device, dtype).reshape([outputs]);
                let x = upload(&x, [rows, inputs], device, dtype);
                let w = upload(&w, [outputs, inputs], device, dtype);
                let y = linear(x, w, Some(bias)).unwrap();
                let y = y.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&y, &expected);
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
            let all = read(linear(x.clone(), w.clone(), None).unwrap());
            for rows in [1, 3] {
                let part = read(linear(x.clone().narrow(0, 4, rows), w.clone(), None).unwrap());
                let of_all = &all[4 * outputs..][..rows * outputs];
                // CUDA's planes share the sum otherwise above 8 rows.
                let limit = if tested.name == "cpu" { 0.0 } else { 1e-2 };
                let worst = part.iter().zip(of_all).map(|(a, b)| (a - b).abs() / b.abs().max(1.0));
                let worst = worst.fold(0.0, f32::max);
                assert!(worst <= limit, "{} {dtype:?}: {worst}", tested.name);
            }
        }
    }
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_refused() {
    let device = &devices()[0].device;
    let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (device, dtype));
    let x = zeros([2, 8], DType::F32);
    let error = linear(x.clone(), zeros([4, 7], DType::F32), None).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "weight", .. }), "{error}");
    let error = linear(x.clone(), zeros([4, 8], DType::F16), None).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { argument: "weight", .. }), "{error}");
    let bias = Tensor::<1>::zeros([3], (device, DType::F32));
    let error = linear(x, zeros([4, 8], DType::F32), Some(bias)).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "bias", .. }), "{error}");
}
