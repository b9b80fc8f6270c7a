use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    KernelError, NearestSlotsOptions, NearestSlotsStrategy, SlotLists, nearest_slots,
};
use kv_testing::{Numbers, STEP, TestDevice, devices};

use super::strategies::force;

/// Lists of random lengths over one pool.
struct Case {
    dim: usize,
    keys: Vec<f32>,
    of: Vec<Vec<i32>>,
    among: Vec<Vec<i32>>,
}

impl Case {
    fn random(seed: u64, dim: usize, sizes: &[(usize, usize)]) -> Self {
        let mut numbers = Numbers::new(seed);
        let slots = 400;
        let mut keys = numbers.normal(slots * dim);
        // One key of zeros.
        keys[..dim].fill(0.0);
        let mut list = |count: usize| -> Vec<i32> {
            (0..count).map(|_| numbers.below(slots) as i32).collect()
        };
        let (of, among) = sizes.iter().map(|&(of, among)| (list(of), list(among))).unzip();
        Self { dim, keys, of, among }
    }

    /// Keys as they are in a dtype.
    fn rounded(&self, tested: &TestDevice, dtype: DType) -> Tensor<1> {
        Tensor::<1>::from_data(self.keys.as_slice(), (&tested.device, DType::F32)).cast(dtype)
    }

    fn run(&self, tested: &TestDevice, dtype: DType) -> (Vec<i32>, Vec<f32>) {
        self.run_by(tested, dtype, all()).unwrap()
    }

    fn run_by(
        &self,
        tested: &TestDevice,
        dtype: DType,
        options: NearestSlotsOptions,
    ) -> Result<(Vec<i32>, Vec<f32>), KernelError> {
        let device = &tested.device;
        let lists = |lists: &[Vec<i32>]| {
            let width = lists.iter().map(Vec::len).max().unwrap().max(1);
            // What is behind a list's end is no slot.
            let padded = lists.iter().flat_map(|list| {
                list.iter().copied().chain(std::iter::repeat(-7)).take(width).collect::<Vec<_>>()
            });
            let padded: Vec<i32> = padded.collect();
            let counts: Vec<i32> = lists.iter().map(|list| list.len() as i32).collect();
            let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, (device, DType::I32));
            SlotLists { slots: ints(&padded).reshape([lists.len(), width]), counts: ints(&counts) }
        };
        let keys = self.rounded(tested, dtype).reshape([self.keys.len() / self.dim, self.dim]);
        let nearest = nearest_slots(keys, &lists(&self.of), &lists(&self.among), options)?;
        let places = nearest.places.try_into_vec_as::<i32>().unwrap();
        Ok((places, nearest.cosines.try_into_vec_as::<f32>().unwrap()))
    }

    /// Compares what was found with all pairs.
    fn check(
        &self,
        tested: &TestDevice,
        dtype: DType,
        earlier: bool,
        (places, cosines): (&[i32], &[f32]),
        context: &str,
    ) {
        let keys = self.rounded(tested, dtype).try_into_vec_as::<f32>().unwrap();
        let key = |slot: i32| &keys[slot as usize * self.dim..][..self.dim];
        let width = places.len() / self.of.len();
        for (row, of) in self.of.iter().enumerate() {
            for (place, &slot) in of.iter().enumerate() {
                let at = row * width + place;
                let context = format!("{context} row {row} place {place}");
                let among = &self.among[row];
                let seen = if earlier { place.min(among.len()) } else { among.len() };
                let others = (0..seen).filter(|&other| among[other] != slot);
                let all: Vec<(usize, f64)> =
                    others.map(|other| (other, cosine(key(slot), key(among[other])))).collect();
                let best = all.iter().map(|(_, cosine)| *cosine).reduce(f64::max);
                let Some(best) = best else {
                    assert_eq!((places[at], cosines[at]), (-1, -2.0), "{context}");
                    continue;
                };
                let error = (f64::from(cosines[at]) - best).abs();
                assert!(error < 2e-6, "{context}: {} for {best}", cosines[at]);
                let found = all.iter().find(|(other, _)| *other as i32 == places[at]);
                let own = found.expect(&context).1;
                assert!(best - own < 4e-6, "{context}: {own} below {best}");
            }
        }
    }
}

/// Pairs with any other slot.
fn all() -> NearestSlotsOptions {
    NearestSlotsOptions::default()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
    };
    let norms = (dot(a, a) * dot(b, b)).sqrt();
    if norms > 0.0 { dot(a, b) / norms } else { 0.0 }
}

#[test]
fn the_most_similar_is_found() {
    let cases = [
        Case::random(1, 64, &[(5, 130), (70, 64), (0, 3), (3, 0)]),
        Case::random(2, 20, &[(1, 1), (129, 200)]),
        Case::random(3, 128, &[(65, 65), (300, 150)]),
        Case::random(4, 32, &[(0, 9), (17, 0), (257, 70)]),
        Case::random(5, 256, &[(130, 66), (8, 8)]),
        // As it is timed.
        Case::random(6, STEP.head_dim, &[(STEP.slots * 7 / 8, STEP.slots / 8); STEP.pairs()]),
    ];
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let check = |strategy: NearestSlotsStrategy, case: &Case| {
                for earlier in [false, true] {
                    let options = NearestSlotsOptions { earlier, strategy };
                    let (places, cosines) = case.run_by(&tested, dtype, options)?;
                    let context = format!("{} {dtype:?} {strategy:?}", tested.name);
                    case.check(&tested, dtype, earlier, (&places, &cosines), &context);
                }
                Ok::<(), KernelError>(())
            };
            cases.iter().for_each(|case| check(NearestSlotsStrategy::Auto, case).unwrap());
            let strategies = [NearestSlotsStrategy::Portable, NearestSlotsStrategy::TensorCore];
            force(&format!("nearest_slots in {dtype:?}"), &tested, &strategies, &cases, check);
        }
    }
}

#[test]
fn the_first_of_equals_wins_and_zeros_are_like_nothing() {
    // Of a direction of their own, and of none.
    let lengths = [1.0, 2.0, 0.0, 3.0];
    for dim in [4, 64] {
        let keys = lengths
            .iter()
            .flat_map(|&length| std::iter::once(length).chain(std::iter::repeat(0.0)).take(dim));
        let case = Case {
            dim,
            keys: keys.collect(),
            of: vec![vec![0, 2, 3]],
            among: vec![vec![2, 3, 1, 0]],
        };
        for tested in devices() {
            for dtype in tested.float_dtypes() {
                let (places, cosines) = case.run(&tested, dtype);
                assert_eq!(places, [1, 1, 2], "{} {dtype:?}", tested.name);
                for (actual, expected) in cosines.iter().zip([1.0, 0.0, 1.0]) {
                    assert!(
                        (actual - expected).abs() < 1e-6,
                        "{} {dtype:?}: {actual}",
                        tested.name
                    );
                }
            }
        }
    }
}

/// Equals lie in different tiles, chunks and units' columns; another key is in between.
#[test]
fn the_first_of_equals_wins_wherever_they_are() {
    let dim = 64;
    let key = |direction: usize| (0..dim).map(move |at| f32::from(at == direction));
    let keys: Vec<f32> = [0, 0, 0, 1].into_iter().flat_map(key).collect();
    for (places, first) in [([6, 8, 70], 6), ([9, 14, 64], 9), ([63, 64, 127], 63)] {
        let mut among = vec![3; 130];
        for (slot, &place) in [1, 2, 1].into_iter().zip(&places) {
            among[place] = slot;
        }
        let case = Case { dim, keys: keys.clone(), of: vec![vec![0; 300]], among: vec![among] };
        for tested in devices() {
            for dtype in tested.float_dtypes() {
                let (found, _) = case.run(&tested, dtype);
                assert_eq!(found, [first; 300], "{} {dtype:?} {places:?}", tested.name);
            }
        }
    }
}

/// Where all keys point away from each other, the least different is found all the same.
#[test]
fn unlike_keys_are_paired_too() {
    let dim = 64;
    let key = |first: f32, second: f32| {
        let mut key = vec![0.0; dim];
        key[..2].copy_from_slice(&[first, second]);
        key
    };
    let case = Case {
        dim,
        keys: [key(50.0, 0.0), key(-3.0, 1.0), key(-1.0, 1.0)].concat(),
        of: vec![vec![0]],
        among: vec![vec![1, 2]],
    };
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let (places, cosines) = case.run(&tested, dtype);
            assert_eq!(places, [1], "{} {dtype:?}", tested.name);
            let error = (cosines[0] + 0.5f32.sqrt()).abs();
            assert!(error < 1e-6, "{} {dtype:?}: {}", tested.name, cosines[0]);
        }
    }
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    for tested in devices() {
        let device = &tested.device;
        let keys = Tensor::<2>::ones([4, 8], (device, DType::F32));
        let lists = |rows: usize, counts: usize| SlotLists {
            slots: Tensor::zeros([rows, 2], (device, DType::I32)),
            counts: Tensor::ones([counts], (device, DType::I32)),
        };
        let refused = nearest_slots(keys.clone(), &lists(2, 2), &lists(3, 3), all()).unwrap_err();
        assert!(matches!(refused, KernelError::Shape { argument: "among", .. }), "{refused}");
        let refused = nearest_slots(keys, &lists(2, 3), &lists(2, 2), all()).unwrap_err();
        assert!(matches!(refused, KernelError::Shape { argument: "counts", .. }), "{refused}");
    }
}
