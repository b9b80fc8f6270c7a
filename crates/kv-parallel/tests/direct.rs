//! Sums by kernels that write into other ranks' memory, on CUDA devices.

use burn::tensor::{DType, Device, DeviceType, Tensor, TensorData};
use kv_kernels::{LinearOptions, MOST_PEER_BYTES, Recording};
use kv_parallel::{Collective, Direct, Ranks};

/// Inputs of the products.
const INPUTS: usize = 64;

/// Sums by kernels that write into the other ranks' memory, launched and recorded, of fewer numbers
/// than a line has and of more than an inbox has.
pub(crate) fn sums(ranks: &Ranks) {
    let device = Device::enumerate(DeviceType::Cuda).into_vec()[0].clone();
    let meeting = ranks.meeting().unwrap();
    let collective = Direct::new(meeting, &device).unwrap();
    let own = meeting.shard().rank() as f32;
    let expected = |round: f32| 3.0 + 3.0 * round;
    let read = |sum: Tensor<2>| sum.cast(DType::F32).into_data().try_into_vec::<f32>().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for numbers in [1, 7, 4096, 4097, MOST_PEER_BYTES / dtype.size() + 1] {
            for round in 0..3 {
                let x = Tensor::<2>::full([1, numbers], own + round as f32, (&device, dtype));
                let sum = read(collective.all_reduce(x).unwrap());
                assert_eq!(sum, vec![expected(round as f32); numbers], "{numbers} of {dtype:?}");
            }
        }
    }
    let x = Tensor::<2>::full([1, 512], own, (&device, DType::BF16));
    let recording = Recording::begin(&device).unwrap();
    let chain = || {
        let sum = collective.all_reduce(x.clone()).unwrap();
        collective.all_reduce(sum.mul_scalar(0.5)).unwrap()
    };
    chain();
    let (sum, graph) = recording.record(chain).unwrap();
    for _ in 0..5 {
        // SAFETY: the recorded tensors live as long as the graph.
        unsafe { graph.replay().unwrap() };
        // Three times half of 0 + 1 + 2.
        assert_eq!(read(sum.clone()), [4.5; 512]);
    }
    for dtype in [DType::F16, DType::BF16] {
        // Grids of different sizes, one after the other: all go on with the same turns.
        for [rows, outputs] in [[1, 4096], [3, 64], [1, 80], [32, 512], [8, 4096], [1, 4096]] {
            products(&collective, [rows, outputs], &device, dtype);
        }
    }
    replayed_products(&collective, &device);
}

/// A rank's part of a product whose sums are whole numbers: output `o` is input `o % INPUTS`. The
/// first rank adds a bias and a residual.
fn product(
    collective: &Direct,
    [rows, outputs]: [usize; 2],
    device: &Device,
    dtype: DType,
) -> (Tensor<2>, Tensor<2>, LinearOptions) {
    let rank = collective.shard().rank();
    let tensor = |width: usize, number: &dyn Fn(usize, usize) -> usize, height: usize| {
        let numbers = (0..height * width).map(|i| number(i / width, i % width) as f32);
        let data = TensorData::new(numbers.collect::<Vec<_>>(), [height, width]);
        Tensor::<2>::from_data(data, (device, dtype))
    };
    let x = tensor(INPUTS, &|row, k| (row + 2 * k + 3 * rank) % 64, rows);
    let weight = tensor(INPUTS, &|output, k| usize::from(k == output % INPUTS), outputs);
    let first = collective.shard().is_first();
    let bias = first.then(|| tensor(outputs, &|_, output| output % 8, 1).squeeze_dim(0));
    let residual = first.then(|| tensor(outputs, &|row, output| (row + output) % 16, rows));
    let options = LinearOptions { bias, residual, ..Default::default() };
    (x, weight, options)
}

/// The sum of all three ranks' [`product`]s.
fn sum_of_products(rows: usize, outputs: usize) -> Vec<f32> {
    let number = |row: usize, output: usize| {
        let inputs = (0..3).map(|rank| (row + 2 * (output % INPUTS) + 3 * rank) % 64);
        (inputs.sum::<usize>() + output % 8 + (row + output) % 16) as f32
    };
    (0..rows * outputs).map(|i| number(i / outputs, i % outputs)).collect()
}

/// Sums at the end of products, where the device has a kernel for them.
fn products(collective: &Direct, shape: [usize; 2], device: &Device, dtype: DType) {
    for _ in 0..3 {
        let (x, weight, options) = product(collective, shape, device, dtype);
        let sum = collective.linear_all_reduce(x, weight, options).unwrap();
        let sum: Vec<f32> = sum.cast(DType::F32).into_data().try_into_vec().unwrap();
        assert_eq!(sum, sum_of_products(shape[0], shape[1]), "{shape:?} of {dtype:?}");
    }
}

fn replayed_products(collective: &Direct, device: &Device) {
    let parts = product(collective, [1, 512], device, DType::BF16);
    let recording = Recording::begin(device).unwrap();
    let sum = || {
        let (x, weight, options) = parts.clone();
        collective.linear_all_reduce(x, weight, options).unwrap()
    };
    sum();
    let (sum, graph) = recording.record(sum).unwrap();
    for _ in 0..5 {
        // SAFETY: the recorded tensors live as long as the graph.
        unsafe { graph.replay().unwrap() };
        let read: Vec<f32> = sum.clone().cast(DType::F32).into_data().try_into_vec().unwrap();
        assert_eq!(read, sum_of_products(1, 512));
    }
}
