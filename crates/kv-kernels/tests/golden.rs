use burn::tensor::{DType, Int, Tensor};
use kv_kernels::{
    DecodeAttentionOptions, KernelError, NearestSlotsOptions, SlotLists, SlotRanges,
    decode_attention, nearest_slots,
};
use kv_testing::{devices, golden_files, relative_error};

/// `weighted_attention_*`: several queries a head, each a call of its own.
#[test]
fn golden_weighted_attention() {
    for golden in golden_files("golden_weighted_attention", "weighted_attention") {
        for tested in devices() {
            let device = &tested.device;
            let (query, lengths) = (golden.tensor("q"), golden.tensor("length"));
            let [batch, heads, queries, dim] = query.dims();
            let [_, kv_heads, slots, _] = golden.tensor("k").dims();
            let [.., value_dim] = golden.tensor("v").dims::<4>();
            let rows = |name: &str, dim: usize| {
                golden.tensor(name).on::<4>(device).reshape([batch * kv_heads * slots, dim])
            };
            let weights = golden.tensor("w").on::<3>(device);
            let log_weights = weights.clone().log();
            let numerators = golden
                .find("w_num_extra")
                .map(|extra| (weights * extra.on::<3>(device)).reshape([batch * kv_heads * slots]));
            let starts: Vec<i32> =
                (0..batch * kv_heads).map(|pair| (pair * slots) as i32).collect();
            let lengths: Vec<i32> = lengths.values.iter().map(|x| *x as i32).collect();
            let upload = |values: &[i32]| {
                Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([batch, kv_heads])
            };
            let ranges = SlotRanges { offsets: upload(&starts), lengths: upload(&lengths) };
            for index in 0..queries {
                let q = query.on::<4>(device).narrow(2, index, 1).reshape([batch, heads, dim]);
                let attend = |values: &Tensor<2>, numerator_weights| {
                    let options = DecodeAttentionOptions {
                        log_sum_exp: true,
                        numerator_weights,
                        ..Default::default()
                    };
                    let weights = log_weights.clone().reshape([batch * kv_heads * slots]);
                    let keys = rows("k", dim);
                    decode_attention(
                        q.clone(),
                        keys,
                        values.clone(),
                        Some(weights),
                        &ranges,
                        options,
                    )
                };
                // Values narrower than keys are refused by name. With columns of zeros they are
                // served.
                let mut values = rows("v", value_dim);
                if value_dim < dim {
                    let refused = attend(&values, None).unwrap_err();
                    let KernelError::Shape { argument, expected, actual, .. } = &refused else {
                        panic!("{}: {refused}", golden.name)
                    };
                    assert_eq!((*argument, expected[1], actual[1]), ("values", dim, value_dim));
                    let zeros = [batch * kv_heads * slots, dim - value_dim];
                    let zeros = Tensor::zeros(zeros, (device, DType::F32));
                    values = Tensor::cat(vec![values, zeros], 1);
                }
                let served = |output: Tensor<3>| {
                    let output = output.narrow(2, 0, value_dim);
                    output.try_into_vec_as::<f32>().unwrap()
                };
                let result = attend(&values, None).unwrap();
                let pick = |name: &str, width: usize| -> Vec<f64> {
                    let all = golden.tensor(name).values;
                    (0..batch * heads)
                        .flat_map(|head| all[(head * queries + index) * width..][..width].to_vec())
                        .collect()
                };
                let error = relative_error(&served(result.output), &pick("out", value_dim));
                assert!(error < 1e-5, "{} on {}: output off by {error}", golden.name, tested.name);
                if let Some(numerators) = &numerators {
                    let scaled = attend(&values, Some(numerators.clone())).unwrap().output;
                    let error = relative_error(&served(scaled), &pick("out_num_scaled", value_dim));
                    assert!(error < 1e-5, "{} on {}: off by {error}", golden.name, tested.name);
                }
                let lse = result.log_sum_exp.unwrap().try_into_vec_as::<f32>().unwrap();
                for (actual, expected) in lse.iter().zip(pick("lse", 1)) {
                    let equal = f64::from(*actual) == expected;
                    let close = (f64::from(*actual) - expected).abs() < 1e-4;
                    assert!(equal || close, "{}: lse {actual} for {expected}", golden.name);
                }
            }
        }
    }
}

/// `kvpress_merging`: dropped tokens go into the kept token of the greatest cosine, by weights that
/// the cosine and the values' norms give.
#[test]
fn golden_kvpress_merging() {
    const TEST: &str = "golden_kvpress_merging";
    let of = |prefix: &str| golden_files(TEST, prefix).into_iter().next();
    let (Some(merging), Some(inputs), Some(scores)) =
        (of("kvpress_merging"), of("kvpress_inputs"), of("kvpress_scores"))
    else {
        return;
    };
    let keys = inputs.tensor("k");
    let [_, heads, tokens, dim] = keys.dims();
    let [_, _, count, _] = merging.tensor("thr0.0_frac1.0.values").dims();
    // The kept tokens, from the highest score down.
    let scores = scores.tensor("knorm.score").values;
    let order = |scores: &[f64]| {
        let mut order: Vec<i32> = (0..tokens as i32).collect();
        order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
        order[..count].to_vec()
    };
    let kept: Vec<Vec<i32>> = scores.chunks(tokens).take(heads).map(order).collect();
    let kept: Vec<&[i32]> = kept.iter().map(Vec::as_slice).collect();
    let dropped: Vec<Vec<i32>> = kept
        .iter()
        .map(|kept| (0..tokens as i32).filter(|token| !kept.contains(token)).collect())
        .collect();
    let value = |head: usize, token: i32| {
        let from = (head * tokens + token as usize) * dim;
        inputs.tensor("v").values[from..from + dim].to_vec()
    };
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    for tested in devices() {
        let device = &tested.device;
        let list = |lists: &[&[i32]]| {
            let slots = lists.iter().enumerate().flat_map(|(head, list)| {
                list.iter().map(move |token| (head * tokens) as i32 + token)
            });
            let slots: Vec<i32> = slots.collect();
            let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, (device, DType::I32));
            SlotLists {
                slots: ints(&slots).reshape([heads, lists[0].len()]),
                counts: ints(&vec![lists[0].len() as i32; heads]),
            }
        };
        let rows = keys.on::<4>(device).narrow(0, 0, 1).reshape([heads * tokens, dim]);
        let of: Vec<&[i32]> = dropped.iter().map(Vec::as_slice).collect();
        let options = NearestSlotsOptions { earlier: false, ..NearestSlotsOptions::default() };
        let nearest = nearest_slots(rows, &list(&of), &list(&kept), options).unwrap();
        let places = nearest.places.try_into_vec_as::<i32>().unwrap();
        let cosines = nearest.cosines.try_into_vec_as::<f32>().unwrap();
        for (name, threshold, share) in [
            ("thr0.0_frac1.0.values", 0.0, 1.0),
            ("thr0.6_frac1.0.values", 0.6, 1.0),
            ("thr0.0_frac0.75.values", 0.0, 0.75),
        ] {
            let mut found = Vec::new();
            for head in 0..heads {
                let width = dropped[head].len();
                let own = &cosines[head * width..][..width];
                let passed: Vec<f64> = own
                    .iter()
                    .map(|&cosine| f64::from(cosine))
                    .map(|cosine| if cosine >= threshold { cosine } else { f64::NEG_INFINITY })
                    .collect();
                let bound = quantile(passed.clone(), 1.0 - share);
                let mut sums: Vec<Vec<f64>> =
                    kept[head].iter().map(|token| value(head, *token)).collect();
                let norms: Vec<f64> = sums.iter().map(|row| norm(row)).collect();
                let mut weights = vec![1.0; count];
                for (at, &cosine) in passed.iter().enumerate() {
                    if cosine == f64::NEG_INFINITY || (share < 1.0 && cosine < bound) {
                        continue;
                    }
                    let place = places[head * width + at] as usize;
                    let gone = value(head, dropped[head][at]);
                    let own = norm(&gone);
                    let weight = cosine.max(0.0) * own / (own + norms[place] + 1e-6);
                    weights[place] += weight;
                    sums[place].iter_mut().zip(&gone).for_each(|(sum, x)| *sum += weight * x);
                }
                for (row, weight) in sums.iter().zip(&weights) {
                    found.extend(row.iter().map(|sum| (sum / weight) as f32));
                }
            }
            let error = relative_error(&found, &merging.tensor(name).values);
            assert!(error < 1e-5, "{name} on {}: off by {error}", tested.name);
        }
    }
}

/// The quantile of a share, between neighbours by linear interpolation.
fn quantile(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let at = share * (numbers.len() - 1) as f64;
    let (low, part) = (at as usize, at.fract());
    match part > 0.0 {
        true => numbers[low] + part * (numbers[low + 1] - numbers[low]),
        false => numbers[low],
    }
}
