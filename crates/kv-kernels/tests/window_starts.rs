use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{KernelError, Share, SlotRanges, window_starts};
use kv_testing::{Numbers, devices};

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

/// Ranges of any lengths, full and empty ones among them, of positions with gaps.
#[test]
fn agrees_with_a_search_slot_by_slot() {
    for tested in devices() {
        let device = &tested.device;
        for (batch, kv_heads) in [(1, 1), (3, 2), (5, 8)] {
            let mut numbers = Numbers::new(batch as u64);
            let (mut positions, mut offsets, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
            let newest: Vec<i32> = (0..batch).map(|row| [0, 700, 40_000, 3, 99][row]).collect();
            for pair in 0..batch * kv_heads {
                let newest = newest[pair / kv_heads] as usize;
                let held = match pair % 5 {
                    0 => newest.min(60) + 1,
                    4 => 0,
                    _ => 1 + numbers.below(newest.min(50) + 1),
                };
                let mut own: Vec<i32> =
                    (0..held).map(|_| numbers.below(newest + 1) as i32).collect();
                own.sort_unstable();
                offsets.push(positions.len() as i32);
                lengths.push(held as i32);
                positions.extend(own);
                // Free slots hold anything.
                positions.extend([7, -1]);
            }
            let grid = |values: &[i32]| ints(values, device).reshape([batch, kv_heads]);
            let ranges = SlotRanges { offsets: grid(&offsets), lengths: grid(&lengths) };
            for share in [0.0, 0.3, 0.5, 0.99, 1.0].map(Share::new) {
                let starts = window_starts(
                    &ints(&positions, device),
                    &ranges,
                    &ints(&newest, device),
                    share,
                );
                let starts = starts.unwrap().try_into_vec_as::<i32>().unwrap();
                for (pair, start) in starts.iter().enumerate() {
                    let from = share.of(newest[pair / kv_heads] as usize + 1);
                    let own = &positions[offsets[pair] as usize..][..lengths[pair] as usize];
                    let hidden = own.iter().filter(|&&p| (p as usize + 1) < from).count();
                    assert_eq!(*start as usize, hidden, "{} {share:?} range {pair}", tested.name);
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        let one = ints(&[0, 1], device);
        let grid = one.clone().reshape([2, 1]);
        let ranges = SlotRanges { offsets: grid.clone(), lengths: grid };
        let newest = ints(&[1], device);
        let error = window_starts(&one, &ranges, &newest, Share::default()).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "newest", .. }), "{error}");
        let wide = one.clone().cast(DType::I64);
        if tested.name == "cpu" {
            let error = window_starts(&wide, &ranges, &one, Share::default()).unwrap_err();
            assert!(matches!(error, KernelError::Dtype { argument: "positions", .. }), "{error}");
        }
    }
}
