use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{KernelError, Reading};
use kv_testing::{devices, lacks};

/// What is read is what was there when the read began; work behind it goes on.
#[test]
fn reads_what_was_there() {
    for tested in devices() {
        let device = &tested.device;
        let values: Vec<i32> = (0..100).map(|i| 3 * i - 50).collect();
        let all = Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
        let reading = Reading::begin(all.clone()).unwrap();
        let doubled = all.clone().mul_scalar(2);
        assert_eq!(reading.wait().unwrap(), values, "{}", tested.name);
        let part = Reading::begin(doubled.narrow(0, 10, 3)).unwrap();
        assert_eq!(part.wait().unwrap(), [-40, -34, -28], "{}", tested.name);
        // One that nobody waits for leaves the device usable.
        drop(Reading::begin(all.clone()).unwrap());
        assert_eq!(Reading::begin(all).unwrap().wait().unwrap(), values, "{}", tested.name);
    }
}

#[test]
fn other_integers_are_refused() {
    for tested in devices() {
        let bytes = Tensor::<1, Int>::zeros([4], (&tested.device, DType::I64));
        if bytes.dtype() != DType::I64 {
            lacks(
                &format!("other_integers_are_refused on {}", tested.name),
                "it has no 64-bit integers",
            );
            continue;
        }
        let error = Reading::begin(bytes).unwrap_err();
        assert!(matches!(error, KernelError::Dtype { .. }), "{error}");
    }
}
