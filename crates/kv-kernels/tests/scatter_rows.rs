use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    KernelError, assign, assign_int_rows, assign_ints, assign_rows, scatter_ints, scatter_rows,
    scatter_scalars,
};
use kv_testing::{Numbers, devices};

#[test]
fn writes_rows_and_skips_negative_slots() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for width in [1, 3, 32, 40] {
                let device = &tested.device;
                let mut numbers = Numbers::new(7);
                let mut pool = numbers.tensor([9, width], device).cast(dtype);
                let rows = numbers.tensor([3, width], device).cast(dtype);
                let mut expected = pool.clone().cast(DType::F32).try_into_vec_as::<f32>().unwrap();
                let written = rows.clone().cast(DType::F32).try_into_vec_as::<f32>().unwrap();
                expected[8 * width..9 * width].copy_from_slice(&written[..width]);
                expected[2 * width..3 * width].copy_from_slice(&written[2 * width..]);
                let slots = Tensor::<1, Int>::from_data([8, -1, 2], (device, DType::I32));
                scatter_rows(&mut pool, slots, rows).unwrap();
                let actual = pool.cast(DType::F32).try_into_vec_as::<f32>().unwrap();
                assert_eq!(actual, expected, "{} {dtype:?} {width}", tested.name);
            }
        }
    }
}

#[test]
fn writes_scalars_and_integers() {
    for tested in devices() {
        let device = &tested.device;
        let slots = || Tensor::<1, Int>::from_data([3, 0], (device, DType::I32));
        let mut floats = Tensor::<1>::zeros([4], (device, DType::F32));
        let values = Tensor::<1>::from_data([1.5, 2.5], (device, DType::F32));
        scatter_scalars(&mut floats, slots(), values).unwrap();
        assert_eq!(floats.try_into_vec_as::<f32>().unwrap(), [2.5, 0.0, 0.0, 1.5]);
        let mut ints = Tensor::<1, Int>::zeros([4], (device, DType::I32));
        let values = Tensor::<1, Int>::from_data([7, -9], (device, DType::I32));
        scatter_ints(&mut ints, slots(), values).unwrap();
        assert_eq!(ints.try_into_vec_as::<i32>().unwrap(), [-9, 0, 0, 7]);
    }
}

/// Whatever the shape; on GPUs clones see it, since the buffer is the same.
#[test]
fn assigns_whole_tensors_in_place() {
    for tested in devices() {
        let device = &tested.device;
        let mut numbers = Numbers::new(3);
        // CUDA pads the rows of some matrices.
        for shape in [[1, 5], [3, 64], [2, 1], [3, 2], [5, 33]] {
            let mut to = numbers.tensor(shape, device);
            let alias = to.clone();
            let from = numbers.tensor(shape, device);
            assign(&mut to, from.clone()).unwrap();
            let expected = from.try_into_vec_as::<f32>().unwrap();
            assert_eq!(to.try_into_vec_as::<f32>().unwrap(), expected, "{}", tested.name);
            let seen = alias.try_into_vec_as::<f32>().unwrap() == expected;
            assert_eq!(seen, tested.name != "cpu", "{} {shape:?}", tested.name);
            // Columns of a matrix.
            let columns = numbers.tensor([shape[1], shape[0]], device);
            let mut view = columns.clone().swap_dims(0, 1);
            assign(&mut view, numbers.tensor(shape, device)).unwrap();
            let same = view.swap_dims(0, 1).try_into_vec_as::<f32>().unwrap()
                == columns.try_into_vec_as::<f32>().unwrap();
            assert_eq!(same, tested.name != "cpu", "{} {shape:?}", tested.name);
        }
        let mut to = Tensor::<2, Int>::zeros([2, 3], (device, DType::I32));
        let from = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 5, -6]], (device, DType::I32));
        assign_ints(&mut to, from).unwrap();
        assert_eq!(to.clone().try_into_vec_as::<i32>().unwrap(), [1, 2, 3, 4, 5, -6]);
        let error = assign_ints(&mut to, Tensor::zeros([3, 2], (device, DType::I32))).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "from", .. }), "{error}");
    }
}

/// Other rows stay, and rows that are not there are refused.
#[test]
fn assigns_rows_in_place() {
    for tested in devices() {
        let device = &tested.device;
        let mut numbers = Numbers::new(5);
        let mut to = numbers.tensor([3, 2], device);
        let alias = to.clone();
        let mut expected = to.clone().try_into_vec_as::<f32>().unwrap();
        let rows = numbers.tensor([2, 2], device);
        expected[2..].copy_from_slice(&rows.clone().try_into_vec_as::<f32>().unwrap());
        assign_rows(&mut to, 1, rows.clone()).unwrap();
        assert_eq!(to.clone().try_into_vec_as::<f32>().unwrap(), expected, "{}", tested.name);
        let seen = alias.try_into_vec_as::<f32>().unwrap() == expected;
        assert_eq!(seen, tested.name != "cpu", "{}", tested.name);
        for first in [2, 3, usize::MAX] {
            let error = assign_rows(&mut to, first, rows.clone()).unwrap_err();
            assert!(matches!(error, KernelError::Shape { argument: "rows", .. }), "{error}");
        }
        let mut to = Tensor::<1, Int>::from_data([1, 2, 3], (device, DType::I32));
        assign_int_rows(&mut to, 2, Tensor::from_data([-4], (device, DType::I32))).unwrap();
        assert_eq!(to.try_into_vec_as::<i32>().unwrap(), [1, 2, -4], "{}", tested.name);
    }
}
