use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{Choice, KernelError, top_slots};
use kv_testing::{Numbers, devices, timed};

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

fn floats(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(values, (device, DType::F32))
}

/// Chosen indices of every row, checked to be padded.
fn choose(
    scores: &[f32],
    rows: usize,
    lengths: &[usize],
    choice: Choice,
    most: usize,
    device: &Device,
) -> Vec<Vec<i32>> {
    let lengths: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
    let scores = floats(scores, device).reshape([rows, scores.len() / rows]);
    let chosen = top_slots(scores, Some(ints(&lengths, device)), choice, most).unwrap();
    let indices = chosen.indices.try_into_vec_as::<i32>().unwrap();
    let counts = chosen.counts.try_into_vec_as::<i32>().unwrap();
    let rows = indices.chunks(most).zip(counts);
    rows.map(|(row, count)| {
        let (own, free) = row.split_at(count as usize);
        assert!(free.iter().all(|index| *index == -1), "{free:?}");
        own.to_vec()
    })
    .collect()
}

/// By plain sorting: scores descending, then index ascending; NaN last.
fn expected(scores: &[f32], count: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    let key = |index: i32| {
        let score = scores[index as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    order.sort_by(|&a, &b| {
        let nan = scores[a as usize].is_nan().cmp(&scores[b as usize].is_nan());
        nan.then(key(b).partial_cmp(&key(a)).unwrap()).then(a.cmp(&b))
    });
    order.truncate(count);
    order.sort_unstable();
    order
}

/// Rows of every length and count, many equal scores, infinities of protected tokens, NaN.
#[test]
fn the_highest_scores_are_found() {
    for tested in devices() {
        for columns in [1, 5, 64, 1000, 4097] {
            let rows = 6;
            let mut scores = Numbers::new(columns as u64).normal(rows * columns);
            // Rows of few different values, of none but one, and of extremes.
            scores[columns..2 * columns].iter_mut().for_each(|x| *x = x.round());
            scores[2 * columns..3 * columns].fill(0.25);
            for (i, score) in scores[3 * columns..4 * columns].iter_mut().enumerate() {
                *score = match i % 5 {
                    0 => f32::INFINITY,
                    1 => f32::NEG_INFINITY,
                    2 => 0.0,
                    3 => -0.0,
                    _ => f32::NAN,
                };
            }
            let part = |share: usize| columns * share / 10;
            let lengths = [columns, columns, columns, columns, part(7), 0];
            let counts = [part(3), part(5), part(9), part(7), part(2), 0].map(|n| n as i32);
            let choice = Choice::Top(ints(&counts, &tested.device));
            let actual = choose(&scores, rows, &lengths, choice, columns, &tested.device);
            for (row, actual) in actual.iter().enumerate() {
                let own = &scores[row * columns..][..lengths[row]];
                let expected = expected(own, counts[row] as usize);
                assert_eq!(*actual, expected, "{} {columns} row {row}", tested.name);
            }
        }
    }
}

#[test]
fn scores_from_a_bound_on_are_found() {
    for tested in devices() {
        let (rows, columns) = (3, 1037);
        let scores: Vec<f32> = Numbers::new(2)
            .normal(rows * columns)
            .iter()
            .map(|x| (x * 4.0).round() / 4.0)
            .collect();
        let bounds = [0.5, -9.0, f32::NAN];
        let lengths = [columns, 900, columns];
        for most in [columns, 70] {
            let choice = Choice::Above(floats(&bounds, &tested.device));
            let actual = choose(&scores, rows, &lengths, choice, most, &tested.device);
            for (row, actual) in actual.iter().enumerate() {
                let own = &scores[row * columns..][..lengths[row]];
                let above = (0..).zip(own).filter(|(_, score)| **score >= bounds[row]);
                let expected: Vec<i32> = above.map(|(index, _)| index).take(most).collect();
                assert_eq!(*actual, expected, "{} row {row}", tested.name);
            }
        }
    }
}

#[test]
fn long_rows_are_searched_whole() {
    for tested in devices() {
        let columns = 131_072;
        let scores = Numbers::new(7).normal(columns);
        let choice = Choice::Top(ints(&[16_384], &tested.device));
        let actual = choose(&scores, 1, &[columns], choice, 16_384, &tested.device);
        assert_eq!(actual[0], expected(&scores, 16_384), "{}", tested.name);
    }
}

/// Rows that are timed, up to as many numbers as are sorted in a second.
#[test]
fn timed_rows_are_searched() {
    for tested in devices() {
        for [rows, columns, kept] in timed("top_slots", ["rows", "tokens", "kept"]) {
            if rows * columns > 1 << 22 {
                continue;
            }
            let scores = Numbers::new(kept as u64).normal(rows * columns);
            let choice = Choice::Top(ints(&vec![kept as i32; rows], &tested.device));
            let actual = choose(&scores, rows, &vec![columns; rows], choice, kept, &tested.device);
            for (row, actual) in actual.iter().enumerate() {
                let expected = expected(&scores[row * columns..][..columns], kept);
                assert_eq!(*actual, expected, "{} {columns} row {row}", tested.name);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let device = &tested.device;
        let scores = || Tensor::<2>::zeros([2, 8], (device, DType::F32));
        let top = |rows: usize| Choice::Top(ints(&vec![1; rows], device));
        let error = top_slots(scores(), None, top(3), 4).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "counts", .. }), "{error}");
        let error = top_slots(scores(), None, top(2), 0).unwrap_err();
        assert!(matches!(error, KernelError::Unsupported { argument: "most", .. }), "{error}");
        let error = top_slots(scores(), Some(ints(&[1], device)), top(2), 4).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "lengths", .. }), "{error}");
    }
}
