use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{SlotRanges, argmin_slots};
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
        let actual = argmin_slots(scores, &ranges).unwrap().try_into_vec_as::<i32>().unwrap();
        assert_eq!(actual, expected, "{}", tested.name);
    }
}
