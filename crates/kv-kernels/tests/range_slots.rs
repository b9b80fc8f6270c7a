use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{KernelError, range_slots};
use kv_testing::devices;

#[test]
fn slots_follow_their_offsets() {
    for tested in devices() {
        let offsets = [0, 40, 700, 100_000, 7, 9];
        let tensor = Tensor::<1, Int>::from_data(offsets.as_slice(), (&tested.device, DType::I32));
        let tensor = tensor.reshape([2, 3]);
        for width in [1, 5, 300] {
            let slots = range_slots(&tensor, width).unwrap();
            assert_eq!(slots.dims(), [6, width]);
            let expected: Vec<i32> = offsets
                .iter()
                .flat_map(|offset| (0..width as i32).map(move |place| offset + place))
                .collect();
            assert_eq!(slots.try_into_vec_as::<i32>().unwrap(), expected, "{}", tested.name);
        }
        let error = range_slots(&tensor, 0).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "width", .. }), "{error}");
        let none = Tensor::<2, Int>::zeros([0, 3], (&tested.device, DType::I32));
        assert!(range_slots(&none, 4).is_err());
    }
}
