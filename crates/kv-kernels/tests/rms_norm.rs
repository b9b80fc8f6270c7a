use burn::tensor::{DType, Tensor};
use kv_kernels::{KernelError, add_rms_norm, rms_norm, swiglu};
use kv_testing::{Numbers, devices, relative_error};

const EPSILON: f32 = 1e-5;

#[test]
fn norms_agree_with_f64() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for [rows, width] in [[1, 32], [3, 7], [5, 1000], [70, 4096]] {
                let device = &tested.device;
                let mut numbers = Numbers::new(width as u64);
                let x = numbers.tensor([rows, width], device).cast(dtype);
                let delta = numbers.tensor([rows, width], device).cast(dtype);
                let weight = numbers.tensor([1, width], device).cast(dtype).reshape([width]);
                let read = |x: Tensor<2>| -> Vec<f64> {
                    let x = x.try_into_vec_as::<f32>().unwrap();
                    x.into_iter().map(f64::from).collect()
                };
                let weights = read(weight.clone().unsqueeze());
                let expected = |x: &[f64]| -> Vec<f64> {
                    let rows = x.chunks(width).flat_map(|row| {
                        let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                        let root = (mean + f64::from(EPSILON)).sqrt();
                        row.iter().zip(&weights).map(move |(x, weight)| x / root * weight)
                    });
                    rows.collect()
                };
                let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                let context = format!("{} {dtype:?} {rows}x{width}", tested.name);
                let normed = rms_norm(x.clone(), weight.clone(), EPSILON).unwrap();
                let normed = normed.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&normed, &expected(&read(x.clone())));
                assert!(error < limit, "{context}: off by {error}");

                let (normed, sum) =
                    add_rms_norm(x.clone(), delta.clone(), weight.clone(), EPSILON).unwrap();
                let sums: Vec<f64> =
                    read(x.clone()).iter().zip(read(delta)).map(|(x, delta)| x + delta).collect();
                let error = relative_error(&sum.try_into_vec_as::<f32>().unwrap(), &sums);
                assert!(error < limit, "{context}: sum off by {error}");
                let normed = normed.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&normed, &expected(&sums));
                assert!(error < limit, "{context}: norm of the sum off by {error}");
            }
        }
    }
}

/// Far ends too: nothing overflows, nothing is NaN.
#[test]
fn gates_agree_with_f64() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for [rows, width] in [[1, 4], [3, 7], [40, 300]] {
                let mut x = Numbers::new(3).normal(2 * rows * width);
                x[0] = 200.0;
                x[1] = -200.0;
                let device = &tested.device;
                let flat = Tensor::<1>::from_data(x.as_slice(), (device, DType::F32));
                let tensor = flat.reshape([rows, 2 * width]).cast(dtype);
                let x = tensor.clone().try_into_vec_as::<f32>().unwrap();
                let expected: Vec<f64> = x
                    .chunks(2 * width)
                    .flat_map(|row| {
                        let (gates, ups) = row.split_at(width);
                        gates.iter().zip(ups).map(|(gate, up)| {
                            let (gate, up) = (f64::from(*gate), f64::from(*up));
                            gate / (1.0 + (-gate).exp()) * up
                        })
                    })
                    .collect();
                let y = swiglu(tensor).unwrap().try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&y, &expected);
                let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                assert!(error < limit, "{} {dtype:?} {rows}x{width}: {error}", tested.name);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (device, DType::F32));
        let weight = |width| Tensor::<1>::ones([width], (device, DType::F32));
        let error = rms_norm(zeros([2, 8]), weight(7), EPSILON).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "weight", .. }), "{error}");
        let error = rms_norm(zeros([0, 8]), weight(8), EPSILON).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "x", .. }), "{error}");
        let error = add_rms_norm(zeros([2, 8]), zeros([1, 8]), weight(8), EPSILON).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "delta", .. }), "{error}");
        let error = swiglu(zeros([2, 5])).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "columns", .. }), "{error}");
    }
}
