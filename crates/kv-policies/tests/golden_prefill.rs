//! Scores and kept tokens of prompts, from the authors' own code.

use burn::tensor::Tensor;
use kv_core::{Selection, read_f32, top};
use kv_policies::{Pooling, RKv, Reduction, Scorer, SnapKv, pool_scores, window_attention};
use kv_testing::{Golden, exact_devices, golden_files, relative_error};

use super::support::{Prompt, same_but_for_ties, same_scores};

#[test]
fn golden_snapkv_official() {
    for golden in golden_files("golden_snapkv_official", "snapkv_official") {
        for tested in exact_devices("golden_prefill") {
            let keys = golden.tensor("k").on::<4>(&tested.device);
            let query = golden.tensor("q_window").on::<4>(&tested.device);
            let scorer = SnapKv {
                window: golden.number("window") as usize,
                kernel: golden.number("kernel") as usize,
                pooling: pooling(&golden),
                ..SnapKv::default()
            };
            let [_, _, tokens, _] = keys.dims();
            let prompt = Prompt::new(query, keys.clone(), keys);
            let capacity = golden.number("max_capacity_prompt") as usize;
            let scores = prompt.observed(|seen| scorer.prefill(seen, capacity)).unwrap();
            // Their scores are sums over the window, ours means.
            let past = tokens - scorer.window;
            let sums = scores.clone().narrow(2, 0, past).mul_scalar(scorer.window as f64);
            let context = format!("{} on {}", golden.name, tested.name);
            same_scores(&context, sums, &golden.tensor("score").values, 1e-5);
            let own = read_f32("scores", scores).unwrap();
            let theirs = golden.tensor("kept_in_output_order");
            let margins = golden.tensor("margin").values;
            for (head, order) in theirs.indices().chunks(capacity).enumerate() {
                let own = &own[head * tokens..][..tokens];
                let mut expected = order.to_vec();
                expected.sort_unstable();
                let actual = top(own, capacity);
                if margins[head] > 1e-6 {
                    assert_eq!(actual, expected, "{context} head {head}");
                }
                // Max-pooling ties: the scores kept must agree all the same.
                same_but_for_ties(&context, own, &actual, &expected);
            }
        }
    }
}

fn pooling(golden: &Golden) -> Pooling {
    match golden.parameter("pooling").unwrap().as_str().unwrap() {
        "avgpool" => Pooling::Avg,
        _ => Pooling::Max,
    }
}

#[test]
fn golden_adakv_official() {
    for golden in golden_files("golden_adakv_official", "adakv_official") {
        for tested in exact_devices("golden_prefill") {
            let keys = golden.tensor("k").on::<4>(&tested.device);
            let query = golden.tensor("q_window").on::<4>(&tested.device);
            let window = golden.number("window") as usize;
            let reduction = match golden.parameter("gqa_func").unwrap().as_str().unwrap() {
                "max" => Reduction::Max,
                _ => Reduction::Mean,
            };
            let scorer = SnapKv {
                window,
                kernel: golden.number("kernel") as usize,
                pooling: pooling(&golden),
                reduction,
                reduce_before_pooling: true,
                fit_window: false,
            };
            let prompt = Prompt::new(query, keys.clone(), keys);
            let [_, heads, tokens, _] = prompt.keys.dims();
            let scores = prompt.observed(|seen| scorer.prefill(seen, 0)).unwrap();
            let context = format!("{} on {}", golden.name, tested.name);
            let past = scores.clone().narrow(2, 0, tokens - window);
            same_scores(&context, past, &golden.tensor("score").values, 1e-5);
            let own = read_f32("scores", scores).unwrap();
            let normalize = golden.parameter("normalize").unwrap().as_bool().unwrap();
            let selection = Selection::ada_official(
                &own,
                tokens,
                heads,
                golden.number("base_capacity") as usize,
                window,
                golden.number("floor_alpha"),
                normalize,
            );
            let mask = golden.tensor("kept_mask").values;
            for (head, kept) in selection.kept().unwrap().iter().enumerate() {
                let expected: Vec<u32> = (0..tokens as u32)
                    .filter(|&t| mask[head * tokens + t as usize] == 1.0)
                    .collect();
                // Equal scores at the border may go either way.
                let own = &own[head * tokens..][..tokens];
                same_but_for_ties(&format!("{context} head {head}"), own, kept, &expected);
            }
        }
    }
}

#[test]
fn golden_rkv_official() {
    for golden in golden_files("golden_rkv_official", "rkv_official") {
        for tested in exact_devices("golden_prefill") {
            let keys = golden.tensor("k").on::<4>(&tested.device);
            let query = golden.tensor("q_window").on::<4>(&tested.device);
            let scorer = RKv {
                window: golden.number("window") as usize,
                kernel: golden.number("kernel") as usize,
                lambda: golden.number("mix_lambda"),
                threshold: golden.number("threshold") as f32,
                official: true,
                fit_window: false,
            };
            let [_, _, tokens, _] = keys.dims();
            let context = format!("{} on {}", golden.name, tested.name);
            let similarity = scorer.redundancy(&keys);
            let similarity = read_f32("similarity", similarity).unwrap();
            let expected = golden.tensor("similarity_last");
            let error = relative_error(&similarity[..expected.values.len()], &expected.values);
            assert!(error < 1e-5, "{context}: similarity off by {error}");

            let prompt = Prompt::new(query, keys.clone(), keys);
            let scores = prompt.observed(|seen| scorer.prefill(seen, 0)).unwrap();
            let past = scores.clone().narrow(2, 0, tokens - scorer.window);
            same_scores(&context, past, &golden.tensor("final_score").values, 1e-5);
            let own = read_f32("scores", scores).unwrap();
            let theirs = golden.tensor("kept_in_output_order");
            let budget = golden.number("budget") as usize;
            let margins = golden.tensor("margin").values;
            for (head, order) in theirs.indices().chunks(theirs.shape[2]).enumerate() {
                let mut expected = order.to_vec();
                expected.sort_unstable();
                if margins[head] > 1e-7 {
                    assert_eq!(top(&own[head * tokens..][..tokens], budget), expected, "{context}");
                }
            }
        }
    }
}

#[test]
fn golden_prhs_group_selection() {
    for golden in golden_files("golden_prhs_group_selection", "prhs_select_gqa") {
        for tested in exact_devices("golden_prefill") {
            let keys = golden.tensor("k").on::<4>(&tested.device);
            let query = golden.tensor("q").on::<3>(&tested.device);
            let [batch, kv_heads, tokens, _] = keys.dims();
            let attention = window_attention(&query.unsqueeze_dim(2), &keys).squeeze_dim(2);
            let error = relative_error(
                &read_f32("attention", attention.clone()).unwrap(),
                &golden.tensor("attn").values,
            );
            assert!(error < 1e-5, "{}: attention off by {error}", golden.name);
            let mean = Reduction::Mean.groups(attention, kv_heads);
            let mean = read_f32("mean", mean).unwrap();
            let (sinks, local) =
                (golden.number("C_sink") as usize, golden.number("C_local") as usize);
            let count = golden.number("k") as usize;
            let expected = golden.tensor("topk_group_mean");
            for range in 0..batch * kv_heads {
                let middle = &mean[range * tokens + sinks..(range + 1) * tokens - local];
                let chosen: Vec<u32> =
                    top(middle, count).iter().map(|index| index + sinks as u32).collect();
                let mut expected = expected.indices()[range * count..][..count].to_vec();
                expected.sort_unstable();
                assert_eq!(chosen, expected, "{} head {range}", golden.name);
            }
        }
    }
}

#[test]
fn pooling_pads_like_the_authors() {
    for tested in exact_devices("golden_prefill") {
        let scores = Tensor::<1>::from_data([1.0, 2.0, 6.0], &tested.device).reshape([1, 1, 3]);
        let average = pool_scores(scores.clone(), Pooling::Avg, 3).unwrap();
        assert_eq!(read_f32("average", average).unwrap(), [1.0, 3.0, 8.0 / 3.0]);
        let max = pool_scores(scores, Pooling::Max, 3).unwrap();
        assert_eq!(read_f32("max", max).unwrap(), [2.0, 6.0, 6.0]);
    }
}
