//! Products with weight matrices.

use burn::tensor::{DType, Distribution, Tensor};
use kv_kernels::{LinearOptions, linear};

use super::KernelBench;
use super::cases::Product;
use super::clock::Clock;

/// `x Wᵀ` with `W` kept `[out, in]`.
pub(super) fn product(bench: &mut KernelBench<'_>, case: &Product) -> anyhow::Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
            .cast(dtype)
    };
    let weight_bytes = case.inputs * case.outputs * dtype.size();
    let sets = Clock::sets(weight_bytes);
    let weights: Vec<Tensor<2>> = (0..sets).map(|_| random([case.outputs, case.inputs])).collect();
    let x = random([case.rows, case.inputs]);
    let bytes = weight_bytes + case.rows * (case.inputs + case.outputs) * dtype.size();
    let operations = 2.0 * case.rows as f64 * (case.inputs * case.outputs) as f64;
    let task = format!("linear {}", case.name());
    bench.measure(&task, "", sets, [bytes as f64, operations], |i| {
        Ok(linear(x.clone(), weights[i].clone(), LinearOptions::default())?)
    })
}
