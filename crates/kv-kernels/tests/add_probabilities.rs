use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{GroupReduction, KernelError, SlotRanges, add_contributions, add_probabilities};
use kv_testing::{Numbers, devices, relative_error};

const LENGTHS: [usize; 4] = [300, 0, 7, 129];
const OFFSETS: [usize; 4] = [0, 301, 302, 310];
const GROUP: usize = 3;
const SLOTS: usize = 441;

/// Logits of a step, and what each head's come to.
struct Step {
    logits: Vec<f32>,
    totals: Vec<f32>,
    before: Vec<f32>,
}

impl Step {
    fn new() -> Self {
        let mut numbers = Numbers::new(1);
        let logits: Vec<f32> = numbers.normal(SLOTS * GROUP).iter().map(|x| 50.0 * x).collect();
        let before = numbers.normal(SLOTS);
        let mut totals = vec![f32::NEG_INFINITY; 4 * GROUP];
        for (pair, (&offset, &length)) in OFFSETS.iter().zip(&LENGTHS).enumerate() {
            for g in 0..GROUP {
                let own = (offset..offset + length).map(|slot| f64::from(logits[slot * GROUP + g]));
                let top = own.clone().fold(f64::MIN, f64::max);
                totals[pair * GROUP + g] =
                    (top + own.map(|logit| (logit - top).exp()).sum::<f64>().ln()) as f32;
            }
        }
        Self { logits, totals, before }
    }

    fn tensors(&self, device: &Device) -> (Tensor<2>, Tensor<2>, SlotRanges) {
        let ints = |values: &[usize]| {
            let values: Vec<i32> = values.iter().map(|&x| x as i32).collect();
            Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32)).reshape([2, 2])
        };
        let ranges = SlotRanges { offsets: ints(&OFFSETS), lengths: ints(&LENGTHS) };
        let logits = floats(&self.logits, device).reshape([SLOTS, GROUP]);
        (logits, floats(&self.totals, device).reshape([2, 2 * GROUP]), ranges)
    }

    /// What the live slots get, each times its factor.
    fn expected(&self, reduction: GroupReduction, factors: &[f64]) -> Vec<f64> {
        let mut expected: Vec<f64> = self.before.iter().map(|&x| x.into()).collect();
        for (pair, (&offset, &length)) in OFFSETS.iter().zip(&LENGTHS).enumerate() {
            for slot in offset..offset + length {
                let own = (0..GROUP).map(|g| {
                    let total = f64::from(self.totals[pair * GROUP + g]);
                    (f64::from(self.logits[slot * GROUP + g]) - total).exp()
                });
                expected[slot] += factors[slot]
                    * match reduction {
                        GroupReduction::Mean => own.sum::<f64>() / GROUP as f64,
                        GroupReduction::Max => own.fold(0.0, f64::max),
                        GroupReduction::Sum => own.sum(),
                    };
            }
        }
        expected
    }
}

fn floats(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(values, (device, DType::F32))
}

const REDUCTIONS: [GroupReduction; 3] =
    [GroupReduction::Mean, GroupReduction::Max, GroupReduction::Sum];

#[test]
fn probabilities_add_up_over_live_slots() {
    let step = Step::new();
    for tested in devices() {
        let (logits, totals, ranges) = step.tensors(&tested.device);
        for reduction in REDUCTIONS {
            let mut sums = floats(&step.before, &tested.device);
            add_probabilities(&mut sums, logits.clone(), totals.clone(), &ranges, reduction)
                .unwrap();
            let actual = sums.try_into_vec_as::<f32>().unwrap();
            let error = relative_error(&actual, &step.expected(reduction, &[1.0; SLOTS]));
            assert!(error < 1e-5, "{} {reduction:?}: off by {error}", tested.name);
        }
    }
}

/// The norms of the slots before a range's last one are taken from the track, whatever it holds;
/// the last one's is found.
#[test]
fn contributions_are_weighed_by_values() {
    let step = Step::new();
    for tested in devices() {
        let (logits, totals, ranges) = step.tensors(&tested.device);
        for dtype in tested.float_dtypes() {
            for (head_dim, reduction) in [32, 128, 256].into_iter().zip(REDUCTIONS) {
                let drawn = Numbers::new(2).normal(SLOTS * head_dim);
                let values = floats(&drawn, &tested.device).cast(dtype).reshape([SLOTS, head_dim]);
                let rounded: Vec<f32> =
                    values.clone().cast(DType::F32).try_into_vec_as::<f32>().unwrap();
                let mut known: Vec<f32> = (0..SLOTS).map(|slot| slot as f32 * 0.25).collect();
                let (mut sums, mut norms) =
                    (floats(&step.before, &tested.device), floats(&known, &tested.device));
                let (logits, totals) = (logits.clone(), totals.clone());
                add_contributions(
                    &mut sums, &mut norms, &values, logits, totals, &ranges, reduction,
                )
                .unwrap();
                for (offset, length) in OFFSETS.iter().zip(LENGTHS) {
                    if length > 0 {
                        let last = offset + length - 1;
                        let value = &rounded[last * head_dim..][..head_dim];
                        known[last] = value.iter().map(|x| x.abs()).sum();
                    }
                }
                let factors: Vec<f64> = known.iter().map(|&norm| norm.into()).collect();
                let found = norms.try_into_vec_as::<f32>().unwrap();
                let what = format!("{} {dtype:?} {reduction:?}", tested.name);
                let error = relative_error(&found, &factors);
                assert!(error < 1e-6, "{what}: norms are off by {error}");
                let actual = sums.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &step.expected(reduction, &factors));
                assert!(error < 1e-5, "{what}: off by {error}");
            }
        }
    }
}

#[test]
fn contributions_refuse_what_does_not_fit() {
    let step = Step::new();
    for tested in devices() {
        let device = &tested.device;
        let (logits, totals, ranges) = step.tensors(device);
        let call = |norms: usize, values: usize| {
            let mut sums = floats(&step.before, device);
            let mut norms = Tensor::zeros([norms], (device, DType::F32));
            let values = Tensor::zeros([values, 32], (device, DType::F32));
            let (logits, totals) = (logits.clone(), totals.clone());
            let mean = GroupReduction::Mean;
            let error =
                add_contributions(&mut sums, &mut norms, &values, logits, totals, &ranges, mean);
            assert_eq!(sums.try_into_vec_as::<f32>().unwrap(), step.before);
            error.unwrap_err()
        };
        let error = call(SLOTS - 1, SLOTS);
        assert!(matches!(error, KernelError::Shape { argument: "norms", .. }), "{error}");
        let error = call(SLOTS, SLOTS + 1);
        assert!(matches!(error, KernelError::Shape { argument: "values", .. }), "{error}");
    }
}
