use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Seeded numbers, the same on every machine and device.
#[derive(Debug, Clone)]
pub struct Numbers(ChaCha8Rng);

impl Numbers {
    /// A stream of numbers.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Standard normal numbers.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                // Box-Muller.
                let radius = (-2.0 * (1.0 - self.0.random::<f64>()).ln()).sqrt();
                (radius * (std::f64::consts::TAU * self.0.random::<f64>()).cos()) as f32
            })
            .collect()
    }

    /// A whole number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    /// A standard normal f32 tensor.
    pub fn tensor<const D: usize>(&mut self, shape: [usize; D], device: &Device) -> Tensor<D> {
        let data = TensorData::new(self.normal(shape.iter().product()), shape);
        Tensor::from_data(data, (device, DType::F32))
    }
}

/// `‖actual − expected‖ / ‖expected‖`; infinite where a value is NaN or lengths differ.
pub fn relative_error(actual: &[f32], expected: &[f64]) -> f64 {
    if actual.len() != expected.len() || actual.iter().any(|x| x.is_nan()) {
        return f64::INFINITY;
    }
    let difference: f64 =
        actual.iter().zip(expected).map(|(a, e)| (f64::from(*a) - e).powi(2)).sum();
    let norm: f64 = expected.iter().map(|e| e * e).sum();
    (difference / norm.max(1e-300)).sqrt()
}

/// `Σ a_i b_i` in f64, summed in several lanes, which compilers compute together.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let chunks = a.chunks(LANES).zip(b.chunks(LANES));
    chunks.for_each(|(a, b)| {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| {
            *sum += f64::from(*a) * f64::from(*b);
        });
    });
    sums.iter().sum()
}
