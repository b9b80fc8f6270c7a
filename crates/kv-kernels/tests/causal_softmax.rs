use burn::tensor::{DType, Tensor};
use kv_kernels::{KernelError, causal_softmax};
use kv_testing::{Numbers, devices};

/// Rows of any widths, one key and one query among them, with logits far from 0 and some of −∞.
#[test]
fn agrees_with_sums_in_f64() {
    for tested in devices() {
        for [rows, queries, tokens] in
            [[1, 1, 1], [2, 3, 3], [3, 1, 7], [2, 5, 259], [4, 2, 1000], [1, 2, 5000]]
        {
            let mut logits = Numbers::new(tokens as u64).normal(rows * queries * tokens);
            for (at, logit) in logits.iter_mut().enumerate() {
                *logit = *logit * 4.0 + [300.0, -300.0][at / tokens % 2];
                // Not the first key, which every query sees.
                if at % tokens % 11 == 5 {
                    *logit = f32::NEG_INFINITY;
                }
            }
            let device = &tested.device;
            let flat = Tensor::<1>::from_data(logits.as_slice(), (device, DType::F32));
            let (weights, log_sums) =
                causal_softmax(flat.reshape([rows, queries, tokens])).unwrap();
            assert_eq!(
                (weights.dims(), log_sums.dims()),
                ([rows, queries, tokens], [rows, queries])
            );
            let weights = weights.try_into_vec_as::<f32>().unwrap();
            let log_sums = log_sums.try_into_vec_as::<f32>().unwrap();
            let each = logits.chunks(tokens).zip(weights.chunks(tokens)).zip(&log_sums);
            for (row, ((logits, weights), log_sum)) in each.enumerate() {
                let seen = tokens - queries + row % queries + 1;
                let context = format!("{} [{rows}, {queries}, {tokens}] {row}", tested.name);
                let top = logits[..seen].iter().copied().fold(f32::MIN, f32::max);
                let exp = |logit: &f32| f64::from(logit - top).exp();
                let sum: f64 = logits[..seen].iter().map(exp).sum();
                let expected = f64::from(top) + sum.ln();
                assert!((f64::from(*log_sum) - expected).abs() < 1e-4, "{context}: {log_sum}");
                for (logit, weight) in logits[..seen].iter().zip(weights) {
                    let error = f64::from(*weight) - exp(logit) / sum;
                    assert!(error.abs() < 1e-6, "{context}: {weight}");
                }
                assert!(weights[seen..].iter().all(|weight| *weight == 0.0), "{context}");
            }
        }
    }
}

/// A NaN shows in all weights of its row, and in no other row's. Hidden NaNs do not count.
#[test]
fn numbers_that_are_none_show_in_their_row() {
    for tested in devices() {
        let (queries, tokens) = (3, 8);
        let mut logits = vec![0.5; queries * tokens];
        logits[tokens + 2] = f32::NAN;
        // Behind the first query's own key, which is the sixth.
        logits[6] = f32::NAN;
        let flat = Tensor::<1>::from_data(logits.as_slice(), (&tested.device, DType::F32));
        let (weights, log_sums) = causal_softmax(flat.reshape([1, queries, tokens])).unwrap();
        let weights = weights.try_into_vec_as::<f32>().unwrap();
        let rows: Vec<&[f32]> = weights.chunks(tokens).collect();
        assert_eq!(
            rows[0],
            [1.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0, 0.0, 0.0]
        );
        assert!(rows[1][..7].iter().all(|weight| weight.is_nan()), "{}", tested.name);
        assert_eq!(rows[2], [0.125; 8], "{}", tested.name);
        let log_sums = log_sums.try_into_vec_as::<f32>().unwrap();
        assert!(log_sums[1].is_nan() && log_sums[0].is_finite(), "{}", tested.name);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let zeros = |shape: [usize; 3], dtype| Tensor::<3>::zeros(shape, (&tested.device, dtype));
        for (logits, name) in
            [(zeros([1, 3, 2], DType::F32), "queries"), (zeros([1, 0, 2], DType::F32), "logits")]
        {
            let error = causal_softmax(logits).unwrap_err();
            let KernelError::Unsupported { argument, .. } = error else { panic!("{error}") };
            assert_eq!(argument, name);
        }
        if tested.float_dtypes().contains(&DType::F16) {
            let error = causal_softmax(zeros([1, 1, 2], DType::F16)).unwrap_err();
            assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
        }
    }
}
