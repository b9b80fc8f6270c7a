//! Scores and kept tokens of prompts, from kvpress and the authors' own code.

use burn::tensor::Tensor;
use kv_core::{Selection, kvpress_pyramid, read_f32, top};
use kv_policies::{
    ExpectedAttention, H2o, KNorm, KeyDiff, Pooling, RKv, Reduction, Scorer, SnapKv, StreamingLlm,
    Tova, pool_scores, window_attention,
};
use kv_testing::{Golden, TestDevice, devices, golden_files, relative_error};
use serde_json::json;

use crate::support::{Prompt, kept, policy};

/// The inputs of all kvpress files, by the set that they belong to.
fn inputs(test: &str, suffix: &str, tested: &TestDevice) -> Prompt {
    let golden = golden_files(test, &format!("kvpress_inputs{suffix}")).remove(0);
    let device = &tested.device;
    let keys = golden.tensor("k").on::<4>(device);
    let query = golden.tensor("q").on::<4>(device);
    let [batch, _, tokens, dim] = keys.dims();
    let hidden = golden.tensor("hidden").on::<3>(device);
    let weights = golden.tensor("wq").on::<2>(device);
    let width = hidden.dims()[2];
    let raw = hidden.reshape([batch * tokens, width]).matmul(weights.transpose());
    let raw = raw.reshape([batch, tokens, query.dims()[1], dim]).swap_dims(1, 2);
    let theta = golden.number("rope_theta");
    let frequencies =
        (0..dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / dim as f64)).collect();
    let values = golden.tensor("v").on(device);
    Prompt { query, keys, values, raw_query: Some(raw), frequencies }
}

/// What follows `kvpress_KIND` in a file's name: sets of other seeds may carry a suffix.
fn suffix(golden: &Golden, kind: &str) -> String {
    golden.name[kind.len()..].to_string()
}

/// Compares scores where both are finite: protected tokens carry `max + 1` there, infinity here.
fn same_scores(context: &str, actual: Tensor<3>, expected: &[f64], limit: f64) {
    let actual = read_f32("scores", actual).unwrap();
    assert_eq!(actual.len(), expected.len(), "{context}");
    let (a, e): (Vec<f32>, Vec<f64>) =
        actual.iter().zip(expected).filter(|(a, _)| a.is_finite()).unzip();
    let error = relative_error(&a, &e);
    assert!(error < limit, "{context}: scores off by {error}");
}

#[test]
fn golden_kvpress_scores() {
    const TEST: &str = "golden_kvpress_scores";
    for golden in golden_files(TEST, "kvpress_scores") {
        for tested in devices() {
            let prompt = inputs(TEST, &suffix(&golden, "kvpress_scores"), &tested);
            let [batch, heads, tokens, _] = prompt.keys.dims();
            let share = 1.0 - golden.number("compression_ratio");
            let snapkv = SnapKv {
                window: golden.number("snapkv_window") as usize,
                kernel: golden.number("snapkv_kernel") as usize,
                ..SnapKv::default()
            };
            let expected_attention = ExpectedAttention::default();
            let plain = ExpectedAttention { covariance: false, value_norm: false, ..expected_attention };
            let scores: Vec<(&str, Tensor<3>)> = prompt.observed(|seen| {
                vec![
                    ("knorm", KNorm {}.prefill(seen, 0).unwrap()),
                    ("keydiff", KeyDiff {}.prefill(seen, 0).unwrap()),
                    ("snapkv", snapkv.prefill(seen, 0).unwrap()),
                    ("tova", Tova {}.prefill(seen, 0).unwrap()),
                    ("expected_attention", expected_attention.prefill(seen, 0).unwrap()),
                    ("expected_attention_nocov_novnorm", plain.prefill(seen, 0).unwrap()),
                ]
            });
            for (press, actual) in scores {
                let context = format!("{} {press} on {}", golden.name, tested.name);
                let mut expected = golden.tensor(&format!("{press}.score")).values;
                if press == "tova" {
                    // kvpress raises the last token; here it may go.
                    let own = read_f32("scores", actual.clone()).unwrap();
                    for head in 0..batch * heads {
                        let last = head * tokens + tokens - 1;
                        expected[last] = f64::from(own[last]);
                    }
                }
                same_scores(&context, actual.clone(), &expected, 1e-5);
                let own = read_f32("scores", actual).unwrap();
                let theirs = golden.tensor(&format!("{press}.kept_sorted"));
                let count = theirs.shape[2];
                assert_eq!(count, ((tokens as f64 * share) as usize).max(1), "{context}");
                let margins = golden.tensor(&format!("{press}.margin")).values;
                for (head, expected) in theirs.indices().chunks(count).enumerate() {
                    let mut own = own[head * tokens..][..tokens].to_vec();
                    if press == "tova" {
                        own[tokens - 1] = f32::INFINITY;
                    }
                    if margins[head] > 1e-5 {
                        assert_eq!(top(&own, count), expected, "{context} head {head}");
                    }
                }
            }
            let streaming = policy(json!({
                "policy": "streaming-llm",
                "budget": share,
                "sinks": golden.number("streaming_n_sink") as usize,
            }));
            let cache = prompt.compress(&*streaming, 0);
            let expected = golden.tensor("streaming_llm.kept_sorted");
            for (pair, expected) in expected.indices().chunks(expected.shape[2]).enumerate() {
                assert_eq!(kept(&cache, pair), expected, "{}", StreamingLlm::NAME);
            }
            // Observed attention divides H2O's column sums by the queries that see the token.
            let sums = prompt.observed(|seen| H2o::default().prefill(seen, 0).unwrap());
            let sums = read_f32("scores", sums).unwrap();
            let divided: Vec<f32> = sums
                .iter()
                .enumerate()
                .map(|(index, sum)| sum / (tokens - index % tokens) as f32)
                .collect();
            let error = relative_error(&divided, &golden.tensor("observed_attention.score").values);
            assert!(error < 1e-5, "column sums off by {error}");
        }
    }
}

#[test]
fn golden_kvpress_aux() {
    const TEST: &str = "golden_kvpress_aux";
    for golden in golden_files(TEST, "kvpress_aux") {
        for tested in devices() {
            let prompt = inputs(TEST, &suffix(&golden, "kvpress_aux"), &tested);
            let tokens = prompt.keys.dims()[2];
            let sums = prompt.observed(|seen| seen.column_sums.clone()).unwrap();
            let sums = read_f32("sums", sums).unwrap();
            let error = relative_error(&sums, &golden.tensor("attn_colsum").values);
            assert!(error < 1e-5, "column sums off by {error}");
            let last = prompt.query.clone().narrow(2, tokens - 1, 1);
            let row = read_f32("row", window_attention(&last, &prompt.keys)).unwrap();
            let error = relative_error(&row, &golden.tensor("attn_last_row").values);
            assert!(error < 1e-5, "last row off by {error}");
            let expected = golden.tensor("snapkv_window_attention");
            let [_, heads, window, past] = expected.dims();
            let queries = prompt.query.clone().narrow(2, tokens - window, window);
            let attention = window_attention(&queries, &prompt.keys);
            let attention = attention.narrow(0, 0, 1).narrow(1, 0, heads).narrow(3, 0, past);
            let error = relative_error(&read_f32("window", attention).unwrap(), &expected.values);
            assert!(error < 1e-5, "window attention off by {error}");
        }
    }
}

#[test]
fn golden_kvpress_adakv() {
    const TEST: &str = "golden_kvpress_adakv";
    for golden in golden_files(TEST, "kvpress_adakv") {
        let scores = golden_files(TEST, &format!("kvpress_scores{}", suffix(&golden, "kvpress_adakv")));
        let budget = golden.number("n_kept_per_head") as usize;
        for name in golden.names().iter().filter(|name| name.ends_with("pruned_mask")) {
            let mut parts = name.splitn(2, '.');
            let press = parts.next().unwrap();
            let alpha = parts.next().unwrap().trim_start_matches("alpha");
            let alpha: f64 = alpha.trim_end_matches(".pruned_mask").parse().unwrap();
            let score = scores[0].tensor(&format!("{press}.score"));
            let [_, heads, tokens] = score.dims();
            let reserved =
                if alpha == 0.0 { 0 } else { ((budget as f64 * alpha) as usize).max(1) };
            let selection = Selection::ada(&score.f32(), tokens, heads, budget, reserved);
            let pruned = golden.tensor(name).values;
            for (pair, kept) in selection.kept().iter().enumerate() {
                let expected: Vec<u32> =
                    (0..tokens as u32).filter(|&t| pruned[pair * tokens + t as usize] == 0.0).collect();
                assert_eq!(kept, &expected, "{} {name} head {pair}", golden.name);
            }
        }
    }
}

#[test]
fn golden_kvpress_pyramid_budget() {
    for golden in golden_files("golden_kvpress_pyramid_budget", "kvpress_pyramid_budget") {
        let (parameters, budgets) = (golden.tensor("params"), golden.tensor("budget"));
        let width = budgets.shape[1];
        for (row, parameters) in parameters.values.chunks(5).enumerate() {
            let &[layers, tokens, ratio, window, beta] = parameters else { unreachable!() };
            let layers = layers as usize;
            let actual =
                kvpress_pyramid(layers, tokens as usize, 1.0 - ratio, window as usize, beta);
            let expected: Vec<usize> =
                budgets.values[row * width..][..layers].iter().map(|b| *b as usize).collect();
            assert_eq!(actual, expected, "{} row {row}: {parameters:?}", golden.name);
        }
    }
}

#[test]
fn golden_snapkv_official() {
    for golden in golden_files("golden_snapkv_official", "snapkv_official") {
        for tested in devices() {
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
                let sorted = |kept: &[u32]| {
                    let mut scores: Vec<f32> = kept.iter().map(|&t| own[t as usize]).collect();
                    scores.sort_by(f32::total_cmp);
                    scores
                };
                let pairs = sorted(&actual).into_iter().zip(sorted(&expected));
                pairs.for_each(|(a, e)| assert!(a == e || (a - e).abs() < 1e-6, "{context}"));
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
        for tested in devices() {
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
            for (head, kept) in selection.kept().iter().enumerate() {
                let expected: Vec<u32> =
                    (0..tokens as u32).filter(|&t| mask[head * tokens + t as usize] == 1.0).collect();
                // Equal scores at the border may go either way.
                let of = |kept: &[u32]| {
                    let mut scores: Vec<f32> =
                        kept.iter().map(|&t| own[head * tokens + t as usize]).collect();
                    scores.sort_by(f32::total_cmp);
                    scores
                };
                assert_eq!(kept.len(), expected.len(), "{context} head {head}");
                let pairs = of(kept).into_iter().zip(of(&expected));
                pairs.for_each(|(a, e)| assert!(a == e || (a - e).abs() < 1e-7, "{context} head {head}"));
            }
        }
    }
}

#[test]
fn golden_rkv_official() {
    for golden in golden_files("golden_rkv_official", "rkv_official") {
        for tested in devices() {
            let keys = golden.tensor("k").on::<4>(&tested.device);
            let query = golden.tensor("q_window").on::<4>(&tested.device);
            let scorer = RKv {
                window: golden.number("window") as usize,
                kernel: golden.number("kernel") as usize,
                lambda: golden.number("mix_lambda"),
                threshold: golden.number("threshold") as f32,
                official: true,
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
        for tested in devices() {
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
            for pair in 0..batch * kv_heads {
                let middle = &mean[pair * tokens + sinks..(pair + 1) * tokens - local];
                let chosen: Vec<u32> =
                    top(middle, count).iter().map(|index| index + sinks as u32).collect();
                let mut expected = expected.indices()[pair * count..][..count].to_vec();
                expected.sort_unstable();
                assert_eq!(chosen, expected, "{} head {pair}", golden.name);
            }
        }
    }
}

#[test]
fn pooling_pads_like_the_authors() {
    for tested in devices() {
        let scores = Tensor::<1>::from_data([1.0, 2.0, 6.0], &tested.device).reshape([1, 1, 3]);
        let average = pool_scores(scores.clone(), Pooling::Avg, 3);
        assert_eq!(read_f32("average", average).unwrap(), [1.0, 3.0, 8.0 / 3.0]);
        let max = pool_scores(scores, Pooling::Max, 3);
        assert_eq!(read_f32("max", max).unwrap(), [2.0, 6.0, 6.0]);
    }
}
