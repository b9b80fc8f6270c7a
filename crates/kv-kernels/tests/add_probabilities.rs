use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{GroupReduction, SlotRanges, add_probabilities};
use kv_testing::{Numbers, devices, relative_error};

#[test]
fn probabilities_add_up_over_live_slots() {
    for tested in devices() {
        let device = &tested.device;
        let (lengths, group) = ([300usize, 0, 7, 129], 3);
        let mut numbers = Numbers::new(1);
        let offsets: Vec<usize> = vec![0, 301, 302, 310];
        let slots = 441;
        let logits: Vec<f32> = numbers.normal(slots * group).iter().map(|x| 50.0 * x).collect();
        let before = numbers.normal(slots);
        let mut totals = vec![f32::NEG_INFINITY; 4 * group];
        for (pair, (&offset, &length)) in offsets.iter().zip(&lengths).enumerate() {
            for g in 0..group {
                let own = (offset..offset + length).map(|slot| f64::from(logits[slot * group + g]));
                let top = own.clone().fold(f64::MIN, f64::max);
                totals[pair * group + g] =
                    (top + own.map(|logit| (logit - top).exp()).sum::<f64>().ln()) as f32;
            }
        }
        let ints = |values: &[usize]| {
            let values: Vec<i32> = values.iter().map(|&x| x as i32).collect();
            Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32)).reshape([2, 2])
        };
        let floats = |values: &[f32]| Tensor::<1>::from_data(values, (device, DType::F32));
        let ranges = SlotRanges { offsets: ints(&offsets), lengths: ints(&lengths) };
        for reduction in [GroupReduction::Mean, GroupReduction::Max, GroupReduction::Sum] {
            let mut sums = floats(&before);
            let given = floats(&logits).reshape([slots, group]);
            let totals_of = floats(&totals).reshape([2, 2 * group]);
            add_probabilities(&mut sums, given, totals_of, &ranges, reduction).unwrap();
            let mut expected: Vec<f64> = before.iter().map(|&x| x.into()).collect();
            for (pair, (&offset, &length)) in offsets.iter().zip(&lengths).enumerate() {
                for slot in offset..offset + length {
                    let own = (0..group).map(|g| {
                        let total = f64::from(totals[pair * group + g]);
                        (f64::from(logits[slot * group + g]) - total).exp()
                    });
                    expected[slot] += match reduction {
                        GroupReduction::Mean => own.sum::<f64>() / group as f64,
                        GroupReduction::Max => own.fold(0.0, f64::max),
                        GroupReduction::Sum => own.sum(),
                    };
                }
            }
            let actual = sums.try_into_vec_as::<f32>().unwrap();
            let error = relative_error(&actual, &expected);
            assert!(error < 1e-5, "{} {reduction:?}: off by {error}", tested.name);
        }
    }
}
