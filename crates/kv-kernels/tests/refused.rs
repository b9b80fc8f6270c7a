//! Arguments that must be refused before anything is launched.

use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    DecodeAttentionOptions, KernelError, SlotRanges, SlotView, argmin_slots, decode_attention,
    scatter_rows,
};
use kv_testing::devices;

#[test]
fn decode_attention_refuses_what_does_not_fit() {
    for tested in devices() {
        let device = &tested.device;
        let query =
            |heads: usize, dim: usize| Tensor::<3>::zeros([1, heads, dim], (device, DType::F32));
        let pool = |dim: usize| Tensor::<2>::zeros([8, dim], (device, DType::F32));
        let ranges = |batch: usize, heads: usize| {
            let zeros = || Tensor::<2, Int>::zeros([batch, heads], (device, DType::I32));
            SlotRanges { offsets: zeros(), lengths: zeros() }
        };
        let call = |q, k, v, w, ranges: &SlotRanges| {
            decode_attention(q, k, v, w, ranges, DecodeAttentionOptions::default()).unwrap_err()
        };
        let error = call(query(4, 32), pool(32), pool(16), None, &ranges(1, 2));
        assert!(matches!(error, KernelError::Shape { argument: "values", .. }), "{error}");
        let error = call(query(3, 32), pool(32), pool(32), None, &ranges(1, 2));
        assert!(matches!(error, KernelError::HeadGroups { .. }), "{error}");
        let error = call(query(9, 32), pool(32), pool(32), None, &ranges(1, 1));
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
        let error = call(query(1, 30), pool(30), pool(30), None, &ranges(1, 1));
        assert!(matches!(error, KernelError::Unsupported { argument: "head dim", .. }), "{error}");
        let error = call(query(1, 32), pool(32), pool(32), None, &ranges(2, 1));
        assert!(matches!(error, KernelError::Shape { argument: "offsets", .. }), "{error}");
        let weights = Tensor::<1>::zeros([7], (device, DType::F32));
        let error = call(query(1, 32), pool(32), pool(32), Some(weights), &ranges(1, 1));
        assert!(matches!(error, KernelError::Shape { argument: "log_weights", .. }), "{error}");

        let halves = |tensor: Tensor<2>| tensor.cast(DType::F16);
        let error = call(query(1, 32), halves(pool(32)), halves(pool(32)), None, &ranges(1, 1));
        assert!(matches!(error, KernelError::Dtype { argument: "keys", .. }), "{error}");
        let error = call(query(1, 32), pool(32), halves(pool(32)), None, &ranges(1, 1));
        assert!(matches!(error, KernelError::Dtype { argument: "values", .. }), "{error}");
        let wide = Tensor::<2, Int>::zeros([1, 1], (device, DType::I64));
        let of_64_bits = SlotRanges { offsets: wide.clone(), lengths: wide };
        let error = call(query(1, 32), pool(32), pool(32), None, &of_64_bits);
        assert!(matches!(error, KernelError::Dtype { argument: "offsets", .. }), "{error}");
    }
}

#[test]
fn ranges_and_lists_are_within_the_pool() {
    for tested in devices() {
        let device = &tested.device;
        let ints = |values: [i32; 2]| {
            Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([1, 2])
        };
        let ranges =
            |offsets, lengths| SlotRanges { offsets: ints(offsets), lengths: ints(lengths) };
        ranges([0, 5], [5, 3]).validate(8).unwrap();
        // What is empty may begin anywhere.
        ranges([0, 9], [8, 0]).validate(8).unwrap();
        let error = ranges([0, 5], [5, 4]).validate(8).unwrap_err();
        let expected = "slot_ranges: `lengths` names 8, expected at least 0 and less than 8";
        assert_eq!(error.to_string(), expected);
        let error = ranges([0, -1], [5, 1]).validate(8).unwrap_err();
        assert!(
            matches!(error, KernelError::OutOfRange { argument: "offsets", actual: -1, .. }),
            "{error}"
        );
        let error = ranges([0, 5], [5, -2]).validate(8).unwrap_err();
        assert!(
            matches!(error, KernelError::OutOfRange { argument: "lengths", actual: -2, .. }),
            "{error}"
        );

        let view = |slots: [i32; 6], counts| {
            let slots = Tensor::<1, Int>::from_data(slots, (device, DType::I32));
            SlotView::List { slots: slots.reshape([1, 2, 3]), counts: ints(counts) }
        };
        // Behind the counts anything may stand.
        view([0, 1, 99, 7, 7, 0], [2, 3]).validate(8).unwrap();
        SlotView::All.validate(8).unwrap();
        let error = view([0, 1, 8, 7, 7, 0], [3, 3]).validate(8).unwrap_err();
        assert!(
            matches!(error, KernelError::OutOfRange { argument: "slots", actual: 8, .. }),
            "{error}"
        );
        let error = view([0; 6], [2, 4]).validate(8).unwrap_err();
        assert!(
            matches!(error, KernelError::OutOfRange { argument: "counts", actual: 4, .. }),
            "{error}"
        );
    }
}

#[test]
fn scatter_and_argmin_refuse_and_leave_the_pool() {
    for tested in devices() {
        let device = &tested.device;
        let mut pool = Tensor::<2>::ones([4, 8], (device, DType::F32));
        let slots = Tensor::<1, Int>::zeros([2], (device, DType::I32));
        let rows = Tensor::<2>::zeros([3, 8], (device, DType::F32));
        let error = scatter_rows(&mut pool, slots, rows).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "rows", .. }), "{error}");
        assert_eq!(pool.try_into_vec_as::<f32>().unwrap(), vec![1.0; 32]);

        let zeros = || Tensor::<2, Int>::zeros([1, 2], (device, DType::I32));
        let ranges =
            SlotRanges { offsets: zeros(), lengths: Tensor::zeros([2, 1], (device, DType::I32)) };
        let scores = Tensor::<1>::zeros([4], (device, DType::F32));
        let error = argmin_slots(scores, &ranges, None).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "lengths", .. }), "{error}");
    }
}
