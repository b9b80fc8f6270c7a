use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{uniform, uniforms};
use kv_testing::devices;

/// Each (seed, draw) has one number, whatever draws it, and they spread evenly.
#[test]
fn uniforms_are_the_same_on_every_device() {
    let count = 4099;
    let seeds: Vec<i32> = (0..2 * count).map(|at| (at / 600) * 7919 - 20_000).collect();
    let draws: Vec<i32> = (0..count).collect();
    let expected: Vec<f32> = seeds
        .chunks(2)
        .zip(&draws)
        .map(|(seed, &draw)| uniform([seed[0] as u32, seed[1] as u32], draw as u32))
        .collect();
    let mean = expected.iter().sum::<f32>() / count as f32;
    assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
    assert!(expected.iter().all(|number| (0.0..1.0).contains(number)));
    for tested in devices() {
        let upload =
            |values: &[i32]| Tensor::<1, Int>::from_data(values, (&tested.device, DType::I32));
        let seeds = upload(&seeds).reshape([count as usize, 2]);
        let actual = uniforms(seeds, upload(&draws)).unwrap();
        assert_eq!(actual.try_into_vec_as::<f32>().unwrap(), expected, "{}", tested.name);
        let short = Tensor::<2, Int>::zeros([3, 2], (&tested.device, DType::I32));
        assert!(uniforms(short, upload(&draws)).is_err(), "{}", tested.name);
    }
}
