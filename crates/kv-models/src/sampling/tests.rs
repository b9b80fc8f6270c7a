use super::{Sampler, Sampling};
use crate::error::ModelError;

/// How often each token comes up.
fn frequencies(sampling: Sampling, logits: &[f32], n: usize) -> Vec<f64> {
    let mut sampler = Sampler::new(sampling).unwrap();
    let mut counts = vec![0.0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(logits).unwrap() as usize] += 1.0 / n as f64;
    }
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

const ONE: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, min_p: None, seed: 1 };

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    assert_eq!(sampler.sample(&[0.0, 3.0, -1.0, 3.0]).unwrap(), 1);
    assert_eq!(sampler.sample(&[-5.0, -5.0]).unwrap(), 0);
    assert_eq!(sampler.sample(&[f32::MAX, f32::MIN]).unwrap(), 0);
}

#[test]
fn frequencies_follow_the_softmax() {
    let p = [0.1, 0.6, 0.3];
    assert_near(&frequencies(ONE, &logits(&p), 20_000), &[0.1, 0.6, 0.3]);
    let hot = Sampling { temperature: 2.0, ..ONE };
    let roots = p.map(|p| f64::from(p).sqrt());
    let sum: f64 = roots.iter().sum();
    assert_near(&frequencies(hot, &logits(&p), 20_000), &roots.map(|root| root / sum));
    // No overflow: a maximum is subtracted.
    assert_near(&frequencies(ONE, &[3e38, -3e38, 3e38], 5_000), &[0.5, 0.0, 0.5]);
    let cold = Sampling { temperature: 1e-300, ..ONE };
    assert_near(&frequencies(cold, &logits(&p), 100), &[0.0, 1.0, 0.0]);
}

#[test]
fn restrictions_keep_what_they_should() {
    let p = logits(&[0.1, 0.4, 0.2, 0.3]);
    let two = [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0];
    let restricted = |top_k, top_p, min_p| {
        let sampling = Sampling { top_k, top_p, min_p, ..ONE };
        frequencies(sampling, &p, 20_000)
    };
    assert_near(&restricted(Some(2), None, None), &two);
    assert_near(&restricted(None, None, Some(0.7)), &two);
    // The token that reaches the threshold belongs to the nucleus.
    let three = [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0];
    assert_near(&restricted(None, Some(0.75), None), &three);
    let one = [0.0, 1.0, 0.0, 0.0];
    assert_near(&restricted(None, Some(1e-9), None), &one);
    // top_p applies to what top_k left.
    assert_near(&restricted(Some(2), Some(0.5), None), &one);
    let all = [0.1, 0.4, 0.2, 0.3];
    assert_near(&restricted(Some(9), Some(1.0), Some(0.0)), &all);
    let top_k = Some(2);
    let equals = frequencies(Sampling { top_k, ..ONE }, &[1.0; 4], 20_000);
    assert_near(&equals, &[0.5, 0.5, 0.0, 0.0]);
}

/// Against a nucleus by plain sorting.
#[test]
fn nucleus_of_a_long_tail() {
    let weights: Vec<f32> = (0..500u32).map(|i| 1.0 / (1.0 + (i * 7 % 500) as f32)).collect();
    let total: f32 = weights.iter().sum();
    let mut sorted: Vec<_> = weights.iter().enumerate().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(a.1));
    let mut reached = 0.0;
    let mut nucleus = vec![false; 500];
    for (id, weight) in sorted {
        nucleus[id] = true;
        reached += weight / total;
        if reached >= 0.5 {
            break;
        }
    }
    let sampling = Sampling { top_p: Some(0.5), ..ONE };
    let frequencies = frequencies(sampling, &logits(&weights), 20_000);
    let seen: Vec<bool> = frequencies.iter().map(|f| *f > 0.0).collect();
    assert_eq!(seen, nucleus);
}

#[test]
fn a_seed_is_a_sequence() {
    let p = logits(&[0.25, 0.25, 0.25, 0.25]);
    let run = |seed| -> Vec<u32> {
        let mut sampler = Sampler::new(Sampling { seed, ..ONE }).unwrap();
        (0..64).map(|_| sampler.sample(&p).unwrap()).collect()
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn no_token_from_nan() {
    for temperature in [0.0, 1.0] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut sampler = Sampler::new(Sampling { temperature, ..ONE }).unwrap();
            sampler.sample(&[1.0, 2.0]).unwrap();
            let error = sampler.sample(&[1.0, bad]).unwrap_err();
            assert!(matches!(error, ModelError::NonFinite { step: 1 }), "{error}");
        }
    }
    let error = Sampler::new(ONE).unwrap().sample(&[]).unwrap_err();
    assert!(matches!(error, ModelError::EmptyLogits));
}

#[test]
fn ranges_are_checked() {
    for (json, name) in [
        (r#"{"temperature": -1.0}"#, "temperature"),
        (r#"{"top_k": 0}"#, "top_k"),
        (r#"{"top_p": 0.0}"#, "top_p"),
        (r#"{"top_p": 1.1}"#, "top_p"),
        (r#"{"min_p": -0.1}"#, "min_p"),
    ] {
        match Sampler::new(serde_json::from_str(json).unwrap()) {
            Err(ModelError::InvalidSampling { parameter, .. }) => assert_eq!(parameter, name),
            other => panic!("{json}: {other:?}"),
        }
    }
    for bad in [f64::NAN, f64::INFINITY] {
        let (temperature, top_p, min_p) = (bad, Some(bad), Some(bad));
        assert!(Sampler::new(Sampling { temperature, ..ONE }).is_err());
        assert!(Sampler::new(Sampling { top_p, ..ONE }).is_err());
        assert!(Sampler::new(Sampling { min_p, ..ONE }).is_err());
    }
}

#[test]
fn settings_are_serde() {
    let sampling: Sampling = serde_json::from_str(r#"{"temperature": 0.7, "top_k": 40}"#).unwrap();
    assert_eq!(sampling, Sampling { temperature: 0.7, top_k: Some(40), ..Sampling::default() });
    assert!(serde_json::from_str::<Sampling>(r#"{"temprature": 0.7}"#).is_err());
}
