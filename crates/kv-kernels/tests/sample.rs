use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{DrawSettings, DrawState, KernelError, draw};
use kv_testing::{Numbers, TestDevice, devices};

const GREEDY: DrawSettings =
    DrawSettings { temperature: 0.0, top_k: None, top_p: None, min_p: None, seed: 1 };
const ONE: DrawSettings = DrawSettings { temperature: 1.0, ..GREEDY };

fn upload(logits: &[f32], rows: usize, device: &Device) -> Tensor<2> {
    let flat = Tensor::<1>::from_data(logits, (device, DType::F32));
    flat.reshape([rows, logits.len() / rows])
}

/// `n` draws of each row's tokens.
fn draws(logits: &Tensor<2>, settings: &[DrawSettings], n: usize) -> Vec<Vec<i32>> {
    let positions = vec![0; settings.len()];
    let mut state = DrawState::new(settings, &positions, &logits.device()).unwrap();
    let mut all = vec![Vec::new(); settings.len()];
    for _ in 0..n {
        let drawn = draw(logits.clone(), &mut state).unwrap().try_into_vec_as::<i32>().unwrap();
        all.iter_mut().zip(drawn).for_each(|(all, token)| all.push(token));
    }
    all
}

/// How often each token comes up: many rows, each with a seed of its own.
fn frequencies(tested: &TestDevice, settings: DrawSettings, logits: &[f32], n: usize) -> Vec<f64> {
    let rows: Vec<DrawSettings> =
        (0..n as u64).map(|seed| DrawSettings { seed: seed << 20, ..settings }).collect();
    let logits_of_all: Vec<f32> = (0..n).flat_map(|_| logits.iter().copied()).collect();
    let drawn = draws(&upload(&logits_of_all, n, &tested.device), &rows, 1);
    let mut counts = vec![0.0; logits.len()];
    drawn.iter().for_each(|row| counts[row[0] as usize] += 1.0 / n as f64);
    counts
}

#[track_caller]
fn assert_near(frequencies: &[f64], expected: &[f64]) {
    for (frequency, expected) in frequencies.iter().zip(expected) {
        assert!((frequency - expected).abs() < 0.02, "{frequencies:?}");
        assert!(*expected > 0.0 || *frequency == 0.0, "{frequencies:?}");
    }
}

fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() + 3.0).collect()
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    for tested in devices() {
        let greedy = |logits: &[f32]| draws(&upload(logits, 1, &tested.device), &[GREEDY], 1)[0][0];
        assert_eq!(greedy(&[0.0, 3.0, -1.0, 3.0]), 1);
        assert_eq!(greedy(&[-5.0, -5.0]), 0);
        assert_eq!(greedy(&[f32::MAX, f32::MIN]), 0);
        assert_eq!(greedy(&[f32::MIN]), 0);
        let mut long = Numbers::new(4).normal(5000);
        (long[4321], long[4990]) = (9.0, 9.0);
        assert_eq!(greedy(&long), 4321);
    }
}

#[test]
fn frequencies_follow_the_softmax() {
    for tested in devices() {
        let p = [0.1, 0.6, 0.3];
        assert_near(&frequencies(&tested, ONE, &logits(&p), 5_000), &[0.1, 0.6, 0.3]);
        let hot = DrawSettings { temperature: 2.0, ..ONE };
        let roots = p.map(|p| f64::from(p).sqrt());
        let sum: f64 = roots.iter().sum();
        let expected = roots.map(|root| root / sum);
        assert_near(&frequencies(&tested, hot, &logits(&p), 5_000), &expected);
        // No overflow: a maximum is subtracted.
        let far = frequencies(&tested, ONE, &[1e38, -1e38, 1e38], 5_000);
        assert_near(&far, &[0.5, 0.0, 0.5]);
        let cold = DrawSettings { temperature: 1e-30, ..ONE };
        assert_near(&frequencies(&tested, cold, &logits(&p), 100), &[0.0, 1.0, 0.0]);
    }
}

#[test]
fn restrictions_keep_what_they_should() {
    for tested in devices() {
        let p = logits(&[0.1, 0.4, 0.2, 0.3]);
        let restricted = |top_k, top_p, min_p| {
            let settings = DrawSettings { top_k, top_p, min_p, ..ONE };
            frequencies(&tested, settings, &p, 5_000)
        };
        let two = [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0];
        assert_near(&restricted(Some(2), None, None), &two);
        assert_near(&restricted(None, None, Some(0.7)), &two);
        // The token that reaches the threshold belongs to the nucleus.
        let three = [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0];
        assert_near(&restricted(None, Some(0.75), None), &three);
        let one = [0.0, 1.0, 0.0, 0.0];
        assert_near(&restricted(None, Some(1e-9), None), &one);
        // top_p applies to what top_k left.
        assert_near(&restricted(Some(2), Some(0.5), None), &one);
        assert_near(&restricted(Some(9), Some(1.0), Some(0.0)), &[0.1, 0.4, 0.2, 0.3]);
        let settings = DrawSettings { top_k: Some(2), ..ONE };
        let equals = frequencies(&tested, settings, &[1.0; 4], 5_000);
        assert_near(&equals, &[0.5, 0.5, 0.0, 0.0]);
        let settings = DrawSettings { top_p: Some(0.6), ..ONE };
        let equals = frequencies(&tested, settings, &[1.0; 4], 5_000);
        assert_near(&equals, &[1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
    }
}

/// All devices draw what the CPU draws, over a large vocabulary and all restrictions: what the
/// plain sorting of the reference keeps, the kernel's thresholds keep.
#[test]
fn devices_agree() {
    const VOCABULARY: usize = 6007;
    let mut settings = Vec::new();
    for seed in 0..24 {
        let top_k = [None, Some(1), Some(7), Some(600)][seed % 4];
        let top_p = [None, Some(0.5), Some(0.95)][seed % 3];
        let min_p = [None, Some(0.02)][seed / 12];
        let temperature = [0.0, 0.3, 1.0, 3.0, 1.5][seed % 5];
        settings.push(DrawSettings { temperature, top_k, top_p, min_p, seed: seed as u64 });
    }
    let mut numbers = Numbers::new(12).normal(settings.len() * VOCABULARY);
    numbers.iter_mut().for_each(|x| *x = (*x * 20.0).round() / 8.0);
    let mut expected: Option<Vec<Vec<i32>>> = None;
    for tested in devices() {
        let logits = upload(&numbers, settings.len(), &tested.device);
        let actual = draws(&logits, &settings, 12);
        let expected = expected.get_or_insert_with(|| actual.clone());
        let pairs = actual.iter().flatten().zip(expected.iter().flatten());
        let different = pairs.filter(|(a, b)| a != b).count();
        // Sums differ by rounding, and so may a draw at a border.
        assert!(different <= 2, "{}: {different} draws differ", tested.name);
    }
}

#[test]
fn a_seed_is_a_sequence_whatever_the_batch() {
    for tested in devices() {
        let p = logits(&[0.25, 0.25, 0.25, 0.25]);
        let row = |seed| DrawSettings { seed, ..ONE };
        let alone = draws(&upload(&p, 1, &tested.device), &[row(3)], 64);
        let both = [p.clone(), p].concat();
        let two = draws(&upload(&both, 2, &tested.device), &[row(4), row(3)], 64);
        assert_eq!(alone[0], two[1]);
        assert_ne!(two[0], two[1]);
    }
}

#[test]
fn draws_move_the_state_and_broken_rows_say_so() {
    for tested in devices() {
        for settings in [GREEDY, ONE] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let rows = [settings; 3];
                let mut state = DrawState::new(&rows, &[5, 9, 2], &tested.device).unwrap();
                let read =
                    |tensor: &Tensor<1, Int>| tensor.clone().try_into_vec_as::<i32>().unwrap();
                let certain = [0.0, 900.0, 0.0, bad, 0.0, 0.0, 900.0, 0.0, 0.0];
                let logits = upload(&certain, 3, &tested.device);
                let drawn = draw(logits.clone(), &mut state).unwrap();
                assert_eq!(read(&drawn), [1, -1, 0], "{}", tested.name);
                assert_eq!(read(state.tokens()), [1, 0, 0]);
                assert_eq!(read(state.positions()), [5, 9, 2]);
                state.end(1, 8).unwrap();
                draw(logits, &mut state).unwrap();
                assert_eq!(read(state.positions()), [6, 8, 3]);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        assert!(DrawState::new(&[ONE; 2], &[1], device).is_err());
        assert!(DrawState::new(&[], &[], device).is_err());
        for bad in [
            DrawSettings { temperature: -1.0, ..ONE },
            DrawSettings { temperature: f32::NAN, ..ONE },
            DrawSettings { top_k: Some(0), ..ONE },
            DrawSettings { top_p: Some(1.5), ..ONE },
            DrawSettings { min_p: Some(-0.1), ..ONE },
        ] {
            assert!(DrawState::new(&[bad], &[0], device).is_err(), "{bad:?}");
        }
        let mut state = DrawState::new(&[ONE; 2], &[1, 1], device).unwrap();
        let error = draw(Tensor::zeros([3, 8], device), &mut state).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "logits", .. }), "{error}");
        let error = draw(Tensor::zeros([2, 0], device), &mut state).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        assert!(state.end(2, 0).is_err());
    }
}

/// Tokens of the caller's take the place of drawn ones, and skipped tokens count as drawn.
#[test]
fn forced_and_skipped_tokens_move_the_state() {
    for tested in devices() {
        let device = &tested.device;
        let state = || DrawState::new(&[ONE, ONE], &[5, 9], device).unwrap();
        let logits = || upload(&Numbers::new(3).normal(2 * 50), 2, device);
        let read = |tensor: &Tensor<1, Int>| tensor.clone().try_into_vec_as::<i32>().unwrap();
        let mut skipping = state();
        draw(logits(), &mut skipping).unwrap();
        skipping.force(&[7, 8]).unwrap();
        assert_eq!(read(skipping.tokens()), [7, 8], "{}", tested.name);
        skipping.skip(3).unwrap();
        assert_eq!(read(skipping.positions()), [8, 12], "{}", tested.name);
        // The fifth draw is the same, however the state came to it.
        let mut drawing = state();
        (0..4).for_each(|_| drop(draw(logits(), &mut drawing).unwrap()));
        let [one, other] =
            [&mut skipping, &mut drawing].map(|state| read(&draw(logits(), state).unwrap()));
        assert_eq!(one, other, "{}", tested.name);
        skipping.end(0, 4).unwrap();
        skipping.skip(2).unwrap();
        assert_eq!(read(skipping.positions()), [4, 15], "{}", tested.name);
        let wrong = skipping.force(&[1, 2, 3]).unwrap_err();
        assert!(matches!(wrong, KernelError::Shape { .. }), "{wrong}");
    }
}
