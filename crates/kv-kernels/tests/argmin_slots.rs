use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{Protected, SlotRanges, argmin_slots};
use kv_testing::{Numbers, devices};

#[test]
fn finds_the_lowest_and_breaks_ties_downwards() {
    for tested in devices() {
        let device = &tested.device;
        let lengths = [0usize, 1, 5, 128, 300, 1000];
        let mut offsets = Vec::new();
        let mut total = 0;
        for length in lengths {
            offsets.push(total as i32);
            total += length + 2;
        }
        // Whole numbers of a small range: many ties.
        let mut numbers = Numbers::new(3);
        let scores: Vec<f32> = (0..total).map(|_| numbers.below(50) as f32).collect();
        let expected: Vec<i32> = offsets
            .iter()
            .zip(lengths)
            .map(|(&offset, length)| {
                let range = offset as usize..offset as usize + length;
                range
                    .clone()
                    .min_by(|&a, &b| scores[a].total_cmp(&scores[b]))
                    .map_or(-1, |x| x as i32)
            })
            .collect();
        let upload = |values: Vec<i32>| {
            Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32)).reshape([3, 2])
        };
        let lengths = lengths.iter().map(|&length| length as i32).collect();
        let ranges = SlotRanges { offsets: upload(offsets), lengths: upload(lengths) };
        let scores = Tensor::from_data(scores.as_slice(), (device, DType::F32));
        let actual = argmin_slots(scores, &ranges, None).unwrap().try_into_vec_as::<i32>().unwrap();
        assert_eq!(actual, expected, "{}", tested.name);
    }
}

/// More ranges than a grid dimension takes.
#[test]
fn serves_more_ranges_than_a_grid_is_wide() {
    for tested in devices() {
        let device = &tested.device;
        let count = 65_535 + 11;
        let offsets: Vec<i32> = (0..count).map(|range| range % 7).collect();
        let upload = |values: &[i32]| {
            Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([count as usize, 1])
        };
        let lengths = vec![2; count as usize];
        let ranges = SlotRanges { offsets: upload(&offsets), lengths: upload(&lengths) };
        let scores = [5.0, 4.0, 3.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let scores = Tensor::<1>::from_data(scores, (device, DType::F32));
        let actual = argmin_slots(scores, &ranges, None).unwrap().try_into_vec_as::<i32>().unwrap();
        let expected = [1, 2, 3, 3, 4, 5, 6];
        let wrong = (0..count as usize).find(|&range| actual[range] != expected[range % 7]);
        assert_eq!(wrong, None, "{}", tested.name);
    }
}

/// Sinks and recents go behind all others, whatever their scores; among themselves by score.
#[test]
fn protected_slots_go_last() {
    for tested in devices() {
        let device = &tested.device;
        let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, (device, DType::I32));
        // Two sequences of two heads; every head has three slots.
        let ranges = SlotRanges {
            offsets: ints(&[0, 3, 6, 9]).reshape([2, 2]),
            lengths: ints(&[3; 4]).reshape([2, 2]),
        };
        let positions = ints(&[0, 5, 9, 1, 6, 9, 2, 3, 19, 18, 19, 0]);
        let newest = ints(&[9, 19]);
        let scores = [0.0, 3.0, 1.0, 0.0, f32::INFINITY, 1.0, 5.0, 4.0, 0.0, 2.0, 3.0, 9.0];
        let scores = Tensor::<1>::from_data(scores, (device, DType::F32));
        let choose = |sinks: i32, recents: i32| {
            let protected = Protected { positions: &positions, newest: &newest, sinks, recents };
            let slots = argmin_slots(scores.clone(), &ranges, Some(protected)).unwrap();
            slots.try_into_vec_as::<i32>().unwrap()
        };
        // Of the last head all are protected.
        assert_eq!(choose(2, 2), [1, 4, 7, 9], "{}", tested.name);
        assert_eq!(choose(0, 0), [0, 3, 8, 9], "{}", tested.name);
        assert_eq!(choose(0, 1), [0, 3, 7, 9], "{}", tested.name);
        assert_eq!(choose(1, 0), [2, 3, 8, 9], "{}", tested.name);
    }
}
