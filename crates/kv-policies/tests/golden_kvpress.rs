//! Scores and kept tokens of prompts, from kvpress.

use burn::tensor::Tensor;
use kv_core::{LayerAllocation, Selection, read_f32, top};
use kv_policies::{
    ExpectedAttention, H2o, KNorm, KeyDiff, Scorer, SnapKv, StreamingLlm, Tova, window_attention,
};
use kv_testing::{Golden, TestDevice, exact_devices, golden_files, relative_error};
use serde_json::json;

use super::support::{Prompt, kept, policy, same_scores};

/// The inputs of all kvpress files, by the set that they belong to.
fn inputs(test: &str, suffix: &str, tested: &TestDevice) -> Prompt {
    let golden = golden_files(test, &format!("kvpress_inputs{suffix}")).remove(0);
    let device = &tested.device;
    let keys = golden.tensor("k").on::<4>(device);
    let [batch, _, tokens, dim] = keys.dims();
    let hidden = golden.tensor("hidden").on::<3>(device);
    let weights = golden.tensor("wq").on::<2>(device);
    let (width, query_heads) = (hidden.dims()[2], weights.dims()[0] / dim);
    let raw = hidden.reshape([batch * tokens, width]).matmul(weights.transpose());
    let raw = raw.reshape([batch, tokens, query_heads, dim]).swap_dims(1, 2);
    let theta = golden.number("rope_theta");
    let frequencies: Vec<f64> =
        (0..dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / dim as f64)).collect();
    // The file of the tree holds no rotated queries, which these make.
    let query = rotated(&raw, &frequencies);
    let values = golden.tensor("v").on(device);
    Prompt { query, keys, values, raw_query: Some(raw), frequencies }
}

/// RoPE of `[B, H, T, D]` at positions from 0 on, whose halves are rotated.
fn rotated(tensor: &Tensor<4>, frequencies: &[f64]) -> Tensor<4> {
    let [_, _, tokens, dim] = tensor.dims();
    let half = dim / 2;
    let table = |function: fn(f64) -> f64| {
        let angles = (0..tokens).flat_map(|at| frequencies.iter().map(move |f| at as f64 * f));
        let numbers: Vec<f32> = angles.map(|angle| function(angle) as f32).collect();
        let table = Tensor::<1>::from_data(numbers.as_slice(), &tensor.device());
        table.reshape([1, 1, tokens, half])
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let (first, second) = (tensor.clone().narrow(3, 0, half), tensor.clone().narrow(3, half, half));
    let turned =
        [first.clone() * cos.clone() - second.clone() * sin.clone(), second * cos + first * sin];
    Tensor::cat(turned.to_vec(), 3)
}

/// What follows `kvpress_KIND` in a file's name: sets of other seeds may carry a suffix.
fn suffix(golden: &Golden, kind: &str) -> String {
    golden.name[kind.len()..].to_string()
}

#[test]
fn golden_kvpress_scores() {
    const TEST: &str = "golden_kvpress_scores";
    for golden in golden_files(TEST, "kvpress_scores") {
        for tested in exact_devices("golden_kvpress") {
            let prompt = inputs(TEST, &suffix(&golden, "kvpress_scores"), &tested);
            let [batch, heads, tokens, _] = prompt.keys.dims();
            let share = 1.0 - golden.number("compression_ratio");
            let snapkv = SnapKv {
                window: golden.number("snapkv_window") as usize,
                kernel: golden.number("snapkv_kernel") as usize,
                ..SnapKv::default()
            };
            let expected_attention = ExpectedAttention::default();
            let plain =
                ExpectedAttention { covariance: false, value_norm: false, ..expected_attention };
            let scores: Vec<(&str, Tensor<3>)> = prompt.observed(|seen| {
                vec![
                    ("knorm", KNorm {}.prefill(seen, 0).unwrap()),
                    ("keydiff", KeyDiff {}.prefill(seen, 0).unwrap()),
                    ("snapkv", snapkv.prefill(seen, seen.tokens()).unwrap()),
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
            for (range, expected) in expected.indices().chunks(expected.shape[2]).enumerate() {
                assert_eq!(kept(&cache, range), expected, "{}", StreamingLlm::NAME);
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
        for tested in exact_devices("golden_kvpress") {
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
        let scores =
            golden_files(TEST, &format!("kvpress_scores{}", suffix(&golden, "kvpress_adakv")));
        let budget = golden.number("n_kept_per_head") as usize;
        for name in golden.names().iter().filter(|name| name.ends_with("pruned_mask")) {
            let mut parts = name.splitn(2, '.');
            let press = parts.next().unwrap();
            let alpha = parts.next().unwrap().trim_start_matches("alpha");
            let alpha: f64 = alpha.trim_end_matches(".pruned_mask").parse().unwrap();
            let score = scores[0].tensor(&format!("{press}.score"));
            let [_, heads, tokens] = score.dims();
            let reserved = if alpha == 0.0 { 0 } else { ((budget as f64 * alpha) as usize).max(1) };
            let selection = Selection::ada(&score.f32(), tokens, heads, budget, reserved);
            let pruned = golden.tensor(name).values;
            for (range, kept) in selection.kept().unwrap().iter().enumerate() {
                let expected: Vec<u32> = (0..tokens as u32)
                    .filter(|&t| pruned[range * tokens + t as usize] == 0.0)
                    .collect();
                assert_eq!(kept, &expected, "{} {name} head {range}", golden.name);
            }
        }
    }
}

/// Where kvpress's budgets fall along a line, and ours do too, each is within a slot of ours:
/// kvpress rounds each by itself, and its share of a prompt need not be whole. kvpress's budgets
/// leave out the window.
#[test]
fn golden_kvpress_pyramid_budget() {
    for golden in golden_files("golden_kvpress_pyramid_budget", "kvpress_pyramid_budget") {
        let (parameters, budgets) = (golden.tensor("params"), golden.tensor("budget"));
        let width = budgets.shape[1];
        let mut lines = 0;
        for (row, parameters) in parameters.values.chunks(5).enumerate() {
            let &[layers, tokens, ratio, window, beta] = parameters else { unreachable!() };
            let (layers, kept) = (layers as usize, tokens * (1.0 - ratio));
            let expected = &budgets.values[row * width..][..layers];
            let falls = expected.windows(2).any(|pair| pair[0] != pair[1]);
            if !falls || tokens < 2.0 * kept {
                continue;
            }
            lines += 1;
            let budget = (window + kept).round_ties_even() as usize;
            let actual = LayerAllocation::Pyramid { beta }
                .spread(layers, budget, window as usize, tokens as usize)
                .unwrap();
            for (own, budget) in actual.iter().zip(expected) {
                let off = (*own as f64 - window - budget).abs();
                assert!(off <= 1.0, "{} row {row}: {parameters:?}: off by {off}", golden.name);
            }
        }
        assert!(lines > 50, "{}: {lines} lines", golden.name);
    }
}

#[test]
fn golden_kvpress_rerotation() {
    const TEST: &str = "golden_kvpress_rerotation";
    for golden in golden_files(TEST, "kvpress_rerotation") {
        for tested in exact_devices("golden_kvpress") {
            let mut prompt = inputs(TEST, &suffix(&golden, "kvpress_rerotation"), &tested);
            prompt.frequencies = golden.tensor("inv_freq").values;
            let share = 1.0 - golden.number("compression_ratio");
            for (press, name) in [("knorm", "knorm"), ("streaming", "streaming-llm")] {
                let config =
                    json!({"policy": name, "budget": share, "rerotate": true, "decode": false});
                let cache = prompt.compress(&*policy(config), 0);
                // Their file holds the first sequence.
                let expected = golden.tensor(&format!("{press}_keys"));
                let [_, heads, count, dim] = expected.dims();
                let keys = cache.keys().clone().narrow(0, 0, heads * count);
                let keys = read_f32("keys", keys).unwrap();
                assert_eq!(keys.len(), expected.values.len(), "{press} {dim}");
                let error = relative_error(&keys, &expected.values);
                assert!(error < 1e-5, "{} {press}: keys off by {error}", golden.name);
                assert_eq!(kept(&cache, 0), (0..count as u32).collect::<Vec<_>>());
            }
        }
    }
}
