use std::sync::LazyLock;

use burn::tensor::{DType, Device, Tensor};
use kv_kernels::{KernelError, LinearOptions, LinearStrategy, RowNorm, largest_tensor, linear};
use kv_testing::{Numbers, TestDevice, devices, dot, lacks, relative_error, timed};

use super::strategies::force;

/// Rows, inputs, outputs: each side of every kernel's borders, sums longer than rings of stages,
/// and more outputs than processors take at once.
const CASES: [[usize; 3]; 14] = [
    [1, 64, 40],
    [2, 1096, 9000],
    [16, 1032, 4250],
    [20, 1544, 4300],
    [8, 2568, 40],
    [32, 2568, 40],
    [3, 200, 7],
    [8, 256, 130],
    [9, 96, 16],
    [17, 1056, 33],
    [32, 64, 50],
    [33, 64, 50],
    [150, 320, 260],
    [300, 72, 130],
];
/// As models have them: more rows than a band of tiles, outputs for wide tiles on every processor,
/// and for several units of products of few rows at a time.
const LARGE: [[usize; 3]; 4] =
    [[2_100, 256, 130], [300, 64, 12_000], [16, 256, 4_096], [16, 128, 28_672]];
/// What products do besides, beginning with a bias: norm, gate, residual.
const VARIANTS: [[bool; 3]; 6] = [
    [false, false, false],
    [false, true, false],
    [false, false, true],
    [false, true, true],
    [true, false, false],
    [true, true, true],
];

/// Normal numbers for weights, which are drawn once: a prime number of them, so that no two rows of
/// a matrix are equal.
static POOL: LazyLock<Vec<f32>> = LazyLock::new(|| Numbers::new(3).normal(1_048_583));

/// A weight matrix's numbers.
fn weights(count: usize) -> Vec<f32> {
    POOL.iter().copied().cycle().take(count).collect()
}

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
    let rows = x.chunks(inputs).flat_map(|x| {
        let products = w.chunks(inputs).zip(bias);
        let sums: Vec<f64> = products.map(|(w, bias)| dot(x, w) + f64::from(*bias)).collect();
        if !gated {
            return sums;
        }
        let (gates, ups) = sums.split_at(outputs / 2);
        gates.iter().zip(ups).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
    });
    let mut y: Vec<f64> = rows.collect();
    if adds {
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y += f64::from(*residual));
    }
    y
}

/// Rows over the root of their mean square, and times a gain, in f64.
fn normed(x: &[f32], gain: &[f32], epsilon: f32) -> Vec<f32> {
    let rows = x.chunks(gain.len()).flat_map(|row| {
        let sum: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let root = (sum / row.len() as f64 + f64::from(epsilon)).sqrt();
        row.iter().zip(gain).map(move |(x, gain)| (f64::from(*x) / root * f64::from(*gain)) as f32)
    });
    rows.collect()
}

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let variants: Vec<_> = tested.some(VARIANTS, 5).collect();
            agrees(&tested, dtype, &CASES, &variants);
            let strategies = [
                LinearStrategy::Portable,
                LinearStrategy::TensorCore,
                LinearStrategy::HopperSkinny,
                LinearStrategy::HopperSplit,
                LinearStrategy::HopperWide,
                LinearStrategy::Matmul,
            ];
            let test = format!("linear in {dtype:?}");
            force(&test, &tested, &strategies, &CASES, |strategy, case| {
                agree(&tested, dtype, strategy, *case, VARIANTS[5])
            });
        }
    }
}

/// The most multiplications of a timed product that is tested: the reference takes long over more.
const MOST_PRODUCTS: usize = 1 << 26;

/// Kernels for large products are those of half precision.
#[test]
fn large_products_agree_with_f64() {
    let timed = timed("linear", ["rows", "inputs", "outputs"]).into_iter();
    let timed = timed.filter(|sizes| sizes.iter().product::<usize>() <= MOST_PRODUCTS);
    let cases: Vec<[usize; 3]> = LARGE.into_iter().chain(timed).collect();
    for tested in devices() {
        // Weights are uploaded in f32.
        let most = largest_tensor(&tested.device).unwrap_or(usize::MAX);
        let held = |[_, inputs, outputs]: &[usize; 3]| inputs * outputs * size_of::<f32>() <= most;
        let cases: Vec<[usize; 3]> = cases.iter().copied().filter(held).collect();
        for dtype in tested.float_dtypes().into_iter().filter(|dtype| *dtype != DType::F32) {
            agrees(&tested, dtype, &cases, &[VARIANTS[0], VARIANTS[5]]);
        }
    }
}

fn agrees(tested: &TestDevice, dtype: DType, cases: &[[usize; 3]], variants: &[[bool; 3]]) {
    for &case in cases {
        for &variant in variants {
            agree(tested, dtype, LinearStrategy::Auto, case, variant).unwrap();
        }
    }
}

/// One case by a strategy, which may not serve it.
fn agree(
    tested: &TestDevice,
    dtype: DType,
    strategy: LinearStrategy,
    [rows, inputs, outputs]: [usize; 3],
    [norms, gated, adds]: [bool; 3],
) -> Result<(), KernelError> {
    // As large as the mean squares of every other case.
    const EPSILON: f32 = 1e-4;
    let gated = gated && outputs % 2 == 0;
    let mut numbers = Numbers::new(rows as u64);
    let width = if gated { outputs / 2 } else { outputs };
    // Small, so that gates stay where they bend.
    let scale = 1.0 / (inputs as f32).sqrt();
    let size = if norms { [0.01, 100.0][rows % 2] } else { scale };
    let x: Vec<f32> = numbers.normal(rows * inputs).iter().map(|x| x * size).collect();
    let gain: Vec<f32> = numbers.normal(inputs).iter().map(|x| x * scale).collect();
    let w = weights(outputs * inputs);
    let (bias, residual) = (numbers.normal(outputs), numbers.normal(rows * width));
    let factor = if norms { normed(&x, &gain, EPSILON) } else { x.clone() };
    let expected = expected([&factor, &w, &bias, &residual], inputs, gated, adds);
    let device = &tested.device;
    let vector =
        |values: &[f32]| upload(values, [1, values.len()], device, dtype).reshape([values.len()]);
    let norm = RowNorm { weight: vector(&gain), epsilon: EPSILON };
    let options = LinearOptions {
        norm: norms.then_some(norm),
        bias: Some(vector(&bias)),
        gated,
        residual: adds.then(|| upload(&residual, [rows, width], device, dtype)),
        strategy,
    };
    let x = upload(&x, [rows, inputs], device, dtype);
    let w = upload(&w, [outputs, inputs], device, dtype);
    let y = linear(x, w, options)?;
    let y = y.try_into_vec_as::<f32>().unwrap();
    let error = relative_error(&y, &expected);
    // Above 32 rows, CUDA's products of f32 are Burn's, in TF32.
    let burns = strategy == LinearStrategy::Matmul || rows > 32;
    let exact = dtype == DType::F32 && (tested.exact_products() || !burns);
    let limit = if exact { 1e-5 } else { 1e-2 };
    let context = format!(
        "{} {dtype:?} {strategy:?} {rows}x{inputs}x{outputs} norm {norms} gated {gated} adds {adds}",
        tested.name
    );
    assert!(error < limit, "{context}: off by {error}");
    Ok(())
}

/// A few rows are computed as each is alone, bit for bit, however many outputs a kernel takes at
/// once: on the CPU, and where matrix instructions sum in one order.
#[test]
fn rows_do_not_depend_on_each_other() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            if tested.name != "cpu" && (tested.name != "cuda" || dtype == DType::F32) {
                lacks(
                    &format!("rows_do_not_depend_on_each_other on {} in {dtype:?}", tested.name),
                    "its products sum in an order that depends on the number of rows",
                );
                continue;
            }
            for (outputs, gated, norms) in [(48, false, false), (4300, true, true)] {
                let inputs = 224;
                let mut numbers = Numbers::new(5);
                let device = &tested.device;
                let x = upload(&numbers.normal(32 * inputs), [32, inputs], device, dtype);
                let w = upload(&numbers.normal(outputs * inputs), [outputs, inputs], device, dtype);
                let gain = upload(&numbers.normal(inputs), [1, inputs], device, dtype);
                let product = |x: Tensor<2>| {
                    let norm = RowNorm { weight: gain.clone().reshape([inputs]), epsilon: 1e-5 };
                    let norm = norms.then_some(norm);
                    let options = LinearOptions { norm, gated, ..Default::default() };
                    linear(x, w.clone(), options).unwrap().try_into_vec_as::<f32>().unwrap()
                };
                let all = product(x.clone());
                let width = all.len() / 32;
                for rows in [1, 3, 9, 17] {
                    let part = product(x.clone().narrow(0, 4, rows));
                    let of_all = &all[4 * width..][..rows * width];
                    assert!(part == of_all, "{} {dtype:?}: {rows} rows of {outputs}", tested.name);
                }
            }
        }
    }
}

/// Rows may be strided, or begin anywhere.
#[test]
fn rows_may_lie_anywhere() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let (rows, inputs, outputs) = (5, 136, 24);
            let mut numbers = Numbers::new(9);
            let device = &tested.device;
            let w = upload(&numbers.normal(outputs * inputs), [outputs, inputs], device, dtype);
            let wide = upload(&numbers.normal(rows * 300), [rows, 300], device, dtype);
            for first in [0, 3, 8, 17] {
                let x = wide.clone().narrow(1, first, inputs);
                let values = x.clone().cast(DType::F32).try_into_vec_as::<f32>().unwrap();
                let packed = upload(&values, [rows, inputs], device, dtype);
                let read = |x: Tensor<2>| {
                    let y = linear(x, w.clone(), LinearOptions::default()).unwrap();
                    y.try_into_vec_as::<f32>().unwrap()
                };
                assert_eq!(read(x), read(packed), "{} {dtype:?} from {first}", tested.name);
            }
        }
    }
}

/// Stored numbers are used as they are: only their storage rounds.
#[test]
fn halves_go_with_rows_in_f32_on_a_cpu_alone() {
    for tested in devices() {
        for (dtype, [rows, inputs, outputs]) in
            [DType::F16, DType::BF16].into_iter().flat_map(|dtype| CASES.map(|case| (dtype, case)))
        {
            let x = Numbers::new((rows * inputs) as u64).tensor([rows, inputs], &tested.device);
            let whole = weights(outputs * inputs);
            let whole = upload(&whole, [outputs, inputs], &tested.device, DType::F32);
            if !tested.float_dtypes().contains(&dtype) {
                continue;
            }
            let stored = whole.cast(dtype);
            let result = linear(x.clone(), stored.clone(), LinearOptions::default());
            if tested.name != "cpu" {
                let error = result.unwrap_err();
                assert!(matches!(error, KernelError::Dtype { argument: "weight", .. }), "{error}");
                continue;
            }
            let wide = linear(x, stored.cast(DType::F32), LinearOptions::default()).unwrap();
            let read = |y: Tensor<2>| y.try_into_vec_as::<f32>().unwrap();
            assert_eq!(read(result.unwrap()), read(wide), "{dtype:?} {rows} {inputs} {outputs}");
        }
    }
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_refused() {
    let device = &devices()[0].device;
    let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (device, dtype));
    let x = zeros([2, 8], DType::F32);
    let none = LinearOptions::default;
    let w = || zeros([4, 8], DType::F32);
    let error = linear(x.clone(), zeros([4, 7], DType::F32), none()).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "weight", .. }), "{error}");
    let error = linear(zeros([2, 8], DType::F16), w(), none()).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { argument: "weight", .. }), "{error}");
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
