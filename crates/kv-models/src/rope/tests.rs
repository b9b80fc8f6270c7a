use burn::tensor::{DType, Device, Int, Tensor, TensorData, Tolerance};

use super::{RopeTable, inverse_frequencies};
use crate::config::{ModelConfig, RopeScaling};
use crate::presets::preset;

fn config(theta: f64, dim: usize, scaling: RopeScaling) -> ModelConfig {
    let llama = preset("llama-3.1-8b").unwrap();
    ModelConfig { rope_theta: theta, head_dim: dim, rope_scaling: scaling, ..llama }
}

/// Distinct values, deterministic.
fn ramp(shape: [usize; 4], device: &Device) -> Tensor<4> {
    let values = (0..shape.iter().product()).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
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
fn rotates_each_pair_by_its_angle() {
    let device = Device::flex();
    let config = config(1e4, 6, RopeScaling::None);
    let frequencies = inverse_frequencies(&config);
    let table = RopeTable::new(&config, 40, &device);
    let x = ramp([2, 3, 5, 6], &device);
    let values: Vec<f32> = x.to_data().try_to_vec().unwrap();
    let mut expected = values.clone();
    for (row, out) in expected.chunks_mut(6).enumerate() {
        let position = (row % 5 + 30) as f64;
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position * frequency).sin_cos();
            let (a, b) = (f64::from(values[row * 6 + pair]), f64::from(values[row * 6 + pair + 3]));
            out[pair] = (a * cos - b * sin) as f32;
            out[pair + 3] = (b * cos + a * sin) as f32;
        }
    }
    let expected = TensorData::new(expected, [2, 3, 5, 6]);
    let rotated = table.apply(x, 30).into_data();
    rotated.assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-6));
}

#[test]
fn rows_at_their_own_positions() {
    let device = Device::flex();
    let table = RopeTable::new(&config(1e4, 4, RopeScaling::None), 20, &device);
    let x = ramp([2, 2, 3, 4], &device);
    let positions = Tensor::<2, Int>::from_data([[4, 5, 6], [17, 18, 19]], &device);
    let together = table.apply_at(x.clone(), positions);
    for (row, start) in [(0, 4), (1, 17)] {
        let alone = table.apply(x.clone().slice_dim(0, row..row + 1), start);
        together.clone().slice_dim(0, row..row + 1).into_data().assert_eq(&alone.into_data(), true);
    }
}

#[test]
fn half_precision_comes_back_in_its_own_type() {
    let device = Device::flex();
    let table = RopeTable::new(&config(5e5, 8, RopeScaling::None), 2000, &device);
    let x = ramp([1, 2, 4, 8], &device);
    let exact = table.apply(x.clone(), 1990);
    let half = table.apply(x.cast(DType::F16), 1990);
    assert_eq!(half.dtype(), DType::F16);
    let (half, exact) = (half.cast(DType::F32).into_data(), exact.into_data());
    half.assert_approx_eq::<f32>(&exact, Tolerance::absolute(2e-3));
}

#[test]
#[should_panic(expected = "rotation up to position 9 of 8")]
fn positions_beyond_the_table_are_refused() {
    let device = Device::flex();
    let table = RopeTable::new(&config(1e4, 4, RopeScaling::None), 8, &device);
    table.apply(ramp([1, 1, 2, 4], &device), 7);
}

#[test]
#[should_panic(expected = "applied to")]
fn another_head_dim_is_refused() {
    let device = Device::flex();
    let table = RopeTable::new(&config(1e4, 4, RopeScaling::None), 8, &device);
    table.apply(ramp([1, 1, 2, 6], &device), 0);
}
