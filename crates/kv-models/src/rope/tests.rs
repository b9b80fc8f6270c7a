use burn::tensor::{Device, Tensor};

use serde_json::Value;

use super::{inverse_frequencies, inverse_frequencies_of, rotary_table};
use crate::config::{ModelConfig, RopeScaling};
use crate::presets::preset;

fn config(theta: f64, dim: usize, scaling: RopeScaling) -> ModelConfig {
    let llama = preset("llama-3.1-8b").unwrap();
    ModelConfig { rope_theta: theta, head_dim: dim, rope_scaling: scaling, ..llama }
}

#[test]
fn unscaled_and_linear_frequencies() {
    let plain = inverse_frequencies(&config(1e4, 8, RopeScaling::None));
    for (frequency, expected) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
        assert!((frequency - expected).abs() < 1e-15 * expected, "{plain:?}");
    }
    let linear = inverse_frequencies(&config(1e4, 8, RopeScaling::Linear { factor: 4.0 }));
    assert!(linear.iter().zip(&plain).all(|(linear, plain)| linear * 4.0 == *plain));
}

/// The published form: three cases by wavelength.
#[test]
fn llama3_frequencies() {
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 8192.0);
    let config = preset("llama-3.1-8b").unwrap();
    let scaled = inverse_frequencies(&config);
    assert_eq!(scaled.len(), 64);
    let mut cases = [0; 3];
    for (i, scaled) in scaled.iter().enumerate() {
        let frequency = 1.0 / 500_000f64.powf(2.0 * i as f64 / 128.0);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let (case, expected) = if wavelength < original / high {
            (0, frequency)
        } else if wavelength > original / low {
            (1, frequency / factor)
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (2, (1.0 - smooth) * frequency / factor + smooth * frequency)
        };
        cases[case] += 1;
        assert!((scaled - expected).abs() <= 1e-14 * expected, "{i}: {scaled} {expected}");
    }
    assert!(cases.iter().all(|n| *n > 0), "{cases:?}");
}

#[test]
fn angles_of_every_position() {
    let config = config(1e4, 6, RopeScaling::None);
    let table = rotary_table(&config, 40, &Device::flex());
    let read = |table: Tensor<2>| table.into_data().try_to_vec::<f32>().unwrap();
    let (cos, sin) = (read(table.cos), read(table.sin));
    for position in 0..40 {
        for (pair, frequency) in inverse_frequencies(&config).iter().enumerate() {
            let angle = position as f64 * frequency;
            let at = position * 3 + pair;
            assert!((f64::from(cos[at]) - angle.cos()).abs() < 1e-7);
            assert!((f64::from(sin[at]) - angle.sin()).abs() < 1e-7);
        }
    }
}

/// Numbers of transformers: `fixtures/rope.py` made them.
const GOLDEN: [(&str, &str); 5] = [
    ("yarn", include_str!("../../../../fixtures/rope-yarn.json")),
    ("yarn-options", include_str!("../../../../fixtures/rope-yarn-options.json")),
    ("yarn-attention-factor", include_str!("../../../../fixtures/rope-yarn-attention-factor.json")),
    ("yarn-qwen", include_str!("../../../../fixtures/rope-yarn-qwen.json")),
    ("dynamic", include_str!("../../../../fixtures/rope-dynamic.json")),
];

#[test]
fn frequencies_and_factors_are_those_of_transformers() {
    for (name, text) in GOLDEN {
        let golden: Value = serde_json::from_str(text).unwrap();
        let config = ModelConfig::from_json(&golden["config"].to_string()).unwrap();
        let (actual, expected) =
            (config.rope_scaling.attention_factor(), golden["attention_factor"].as_f64().unwrap());
        assert!((actual - expected).abs() < 1e-12, "{name}: {actual} {expected}");
        for (tokens, expected) in golden["inverse_frequencies"].as_object().unwrap() {
            let actual = inverse_frequencies_of(&config, tokens.parse().unwrap());
            let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
            assert_eq!(actual.len(), expected.len());
            for (pair, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                let difference = (actual / expected - 1.0).abs();
                assert!(difference < 1e-5, "{name}, {tokens} tokens, pair {pair}: {difference}");
            }
        }
    }
}
