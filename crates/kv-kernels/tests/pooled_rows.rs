use burn::tensor::{DType, Tensor};
use kv_kernels::{KernelError, RowPool, pool_rows};
use kv_testing::{Numbers, TestDevice, devices};

fn pooled(tested: &TestDevice, scores: &[f32], shape: [usize; 2], size: usize) -> [Vec<f32>; 2] {
    [RowPool::Average, RowPool::Maximum].map(|pool| {
        let flat = Tensor::<1>::from_data(scores, (&tested.device, DType::F32));
        let pooled = pool_rows(flat.reshape(shape), size, pool).unwrap();
        assert_eq!(pooled.dims(), shape);
        pooled.try_into_vec_as::<f32>().unwrap()
    })
}

/// Rows narrower than a window and windows of one column among them.
#[test]
fn agrees_with_plain_loops() {
    for tested in devices() {
        for ([rows, columns], size) in
            [([1, 1], 1), ([2, 1], 7), ([3, 4], 5), ([2, 40], 3), ([5, 1001], 7), ([1, 30], 99)]
        {
            let scores = Numbers::new(columns as u64).normal(rows * columns);
            let [averages, maxima] = pooled(&tested, &scores, [rows, columns], size);
            for at in 0..rows * columns {
                let (row, column) = (at / columns, at % columns);
                let side = size / 2;
                let near = |other: &usize| column.abs_diff(*other) <= side;
                let window: Vec<f32> =
                    (0..columns).filter(near).map(|other| scores[row * columns + other]).collect();
                let sum: f64 = window.iter().copied().map(f64::from).sum();
                let context = format!("{} {size} of {columns} at {at}", tested.name);
                let error = f64::from(averages[at]) - sum / size as f64;
                assert!(error.abs() < 1e-6, "{context}: {error}");
                let expected = window.into_iter().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(maxima[at], expected, "{context}");
            }
        }
    }
}

/// NaN shows in the windows that have it, and in no other row's; −∞ is a score like others.
#[test]
fn numbers_that_are_none_show() {
    for tested in devices() {
        let mut scores = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, f32::NEG_INFINITY];
        scores[1] = f32::NAN;
        let [averages, maxima] = pooled(&tested, &scores, [2, 5], 3);
        for pooled in [&averages, &maxima] {
            assert!(pooled[..3].iter().all(|own| own.is_nan()), "{}: {pooled:?}", tested.name);
            assert!(!pooled[3..].iter().any(|own| own.is_nan()), "{}: {pooled:?}", tested.name);
        }
        assert_eq!(maxima[3..], [5.0, 5.0, 7.0, 8.0, 9.0, 9.0, 9.0], "{}", tested.name);
        assert_eq!(averages[9], f32::NEG_INFINITY);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let zeros = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (&tested.device, dtype));
        let refused = |scores, size| pool_rows(scores, size, RowPool::Average).unwrap_err();
        let error = refused(zeros([1, 4], DType::F32), 2);
        assert!(matches!(error, KernelError::Unsupported { argument: "size", .. }), "{error}");
        let error = refused(zeros([0, 4], DType::F32), 3);
        assert!(matches!(error, KernelError::Unsupported { argument: "scores", .. }), "{error}");
        let error = refused(zeros([1, 4], DType::F16), 3);
        assert!(matches!(error, KernelError::Dtype { argument: "scores", .. }), "{error}");
    }
}
