use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{KernelError, group_priority_ranks, rankings};
use kv_testing::{Numbers, devices};

fn floats(values: &[f32], rows: usize, device: &Device) -> Tensor<2> {
    let columns = values.len() / rows;
    Tensor::<1>::from_data(values, (device, DType::F32)).reshape([rows, columns])
}

fn ints(values: &[i32], rows: usize, device: &Device) -> Tensor<2, Int> {
    let columns = values.len() / rows;
    Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([rows, columns])
}

/// Indices by score, highest first; the lower index among equals, NaN last.
fn sorted(scores: &[f32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    let rank = |&index: &i32| {
        let score = scores[index as usize];
        // `total_cmp` tells zeros apart.
        if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 }
    };
    order.sort_by(|a, b| {
        let nan = scores[*a as usize].is_nan().cmp(&scores[*b as usize].is_nan());
        nan.then(rank(b).total_cmp(&rank(a))).then(a.cmp(b))
    });
    order
}

/// Rows of many equal scores, of none but one, and of what is no number.
fn scores(columns: usize) -> (usize, Vec<f32>) {
    let rows = 4;
    let mut scores = Numbers::new(columns as u64).normal(rows * columns);
    scores[columns..2 * columns].iter_mut().for_each(|x| *x = x.round());
    scores[2 * columns..3 * columns].fill(0.25);
    for (i, score) in scores[3 * columns..].iter_mut().enumerate() {
        let special = [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::NAN, 1.0, -1.0];
        *score = special[i % special.len()];
    }
    (rows, scores)
}

#[test]
fn rows_are_ranked_as_sorting_ranks_them() {
    for tested in devices() {
        for columns in [1, 5, 256, 1000, 2500] {
            let (rows, scores) = scores(columns);
            let ranked = rankings(floats(&scores, rows, &tested.device)).unwrap();
            let ranked = ranked.try_into_vec_as::<i32>().unwrap();
            for (row, own) in scores.chunks(columns).enumerate() {
                let expected = sorted(own);
                let actual = &ranked[row * columns..][..columns];
                assert_eq!(actual, expected, "{} {columns} row {row}", tested.name);
            }
        }
    }
}

/// Groups in groups, over several tiles: a leader has what all below it handed on, and those who
/// joined another have their turns behind everybody else.
#[test]
fn groups_compete_with_what_joined_them() {
    for tested in devices() {
        for columns in [1, 5, 1000, 2500] {
            let (rows, scores) = scores(columns);
            let mut numbers = Numbers::new(7);
            let mut leaders = Vec::with_capacity(rows * columns);
            for _ in 0..rows {
                leaders.extend((0..columns).map(|place| {
                    // Near ones and far ones; the first has nobody before it.
                    match numbers.below(4) {
                        _ if place == 0 => -1,
                        0 => numbers.below(place) as i32,
                        1 => place as i32 - 1,
                        _ => -1,
                    }
                }));
            }
            let ranked: Vec<i32> = scores.chunks(columns).flat_map(sorted).collect();
            let device = &tested.device;
            let [ranks, to] = [&ranked, &leaders].map(|of| ints(of, rows, device));
            let turns =
                group_priority_ranks(floats(&scores, rows, device), ranks, to.clone()).unwrap();
            let turns = turns.try_into_vec_as::<f32>().unwrap();
            // What was given is left as it was.
            assert_eq!(to.try_into_vec_as::<i32>().unwrap(), leaders, "{}", tested.name);
            for row in 0..rows {
                let own = row * columns..(row + 1) * columns;
                let (scores, turns) = (&scores[own.clone()], &turns[own.clone()]);
                let (ranked, leaders) = (&ranked[own.clone()], &leaders[own]);
                let score = |place: usize| scores[ranked[place] as usize];
                let mut sums: Vec<f32> = (0..columns).map(score).collect();
                let joins = |place: usize| leaders[place] >= 0 && score(place).is_finite();
                for place in (0..columns).rev().filter(|&place| joins(place)) {
                    sums[leaders[place] as usize] += sums[place].max(0.0);
                }
                let (free, joined): (Vec<usize>, Vec<usize>) =
                    (0..columns).partition(|&place| !joins(place));
                let by_sum = |of: &[usize]| -> Vec<usize> {
                    let own: Vec<f32> = of.iter().map(|&place| sums[place]).collect();
                    sorted(&own).into_iter().map(|at| of[at as usize]).collect()
                };
                let order = [by_sum(&free), by_sum(&joined)].concat();
                for (turn, place) in order.into_iter().enumerate() {
                    let context = format!("{} {columns} row {row} turn {turn}", tested.name);
                    assert_eq!(turns[ranked[place] as usize], -(turn as f32), "{context}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        let scores = Tensor::<2>::zeros([2, 8], (device, DType::F32));
        let places = |columns: usize| ints(&vec![-1; 2 * columns], 2, device);
        let error = group_priority_ranks(scores.clone(), places(8), places(7)).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "leaders", .. }), "{error}");
        let error = rankings(Tensor::zeros([0, 8], (device, DType::F32))).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "scores", .. }), "{error}");
        if tested.name == "cpu" {
            let wide = places(8).cast(DType::I64);
            let error = group_priority_ranks(scores, wide, places(8)).unwrap_err();
            assert!(matches!(error, KernelError::Dtype { argument: "ranked", .. }), "{error}");
        }
    }
}
