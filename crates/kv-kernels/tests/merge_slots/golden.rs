//! Vectors of equation 7, singular cases among them.

use kv_kernels::merge_reference::MergedSlot;
use kv_kernels::{KeyRule, MergeOptions};
use kv_testing::{Golden, Numbers, devices, golden_files};

use super::{Group, attention, check_on_device, distance, dot, on_device};

/// A golden file's groups: the kept slot first.
fn of_golden(golden: &Golden) -> Vec<(Group, usize)> {
    let [heads, tokens, dim] = golden.tensor("k").dims();
    let [_, kept] = golden.tensor("keep").dims();
    let numbers = |name: &str| golden.tensor(name).values;
    let (keys, values, queries) = (numbers("k"), numbers("v"), numbers("q"));
    let (votes, logits) = (numbers("votes"), numbers("logit"));
    let (keep, target) = (numbers("keep"), numbers("target"));
    let row = |of: &[f64], at: usize| of[at * dim..][..dim].to_vec();
    let mut groups = Vec::new();
    for head in 0..heads {
        for place in 0..kept {
            let own = keep[head * kept + place] as usize;
            let goes = |token: &usize| target[head * tokens + token] == place as f64;
            let members: Vec<usize> = std::iter::once(own)
                .chain((0..tokens).filter(goes))
                .map(|token| head * tokens + token)
                .collect();
            let pick = |of: &[f64]| -> Vec<f64> { members.iter().map(|&at| of[at]).collect() };
            groups.push((
                Group {
                    query: row(&queries, head),
                    keys: members.iter().map(|&at| row(&keys, at)).collect(),
                    values: members.iter().map(|&at| row(&values, at)).collect(),
                    log_weights: pick(&votes).iter().map(|votes| votes.ln()).collect(),
                    log_scores: pick(&logits),
                },
                head * kept + place,
            ));
        }
    }
    groups
}

#[test]
fn golden_keepkv_eq7() {
    for golden in golden_files("golden_keepkv_eq7", "keepkv_eq7_") {
        if golden.find("target").is_none() {
            continue;
        }
        let [_, _, dim] = golden.tensor("k").dims();
        let (keys, values) = (golden.tensor("k_r").values, golden.tensor("v_r").values);
        let votes = golden.tensor("p_r").values;
        let groups = of_golden(&golden);
        for (group, at) in &groups {
            if group.keys.len() == 1 {
                continue;
            }
            let slot = group.merged(KeyRule::Paper, f64::INFINITY);
            let context = format!("{} group {at}", golden.name);
            let size = dot(&keys[at * dim..][..dim], &keys[at * dim..][..dim]).sqrt();
            let error = distance(&slot.key, &keys[at * dim..][..dim]) / (1.0 + size);
            assert!(error < 1e-9, "{context}: key off by {error}");
            let error = distance(&slot.value, &values[at * dim..][..dim]);
            assert!(error < 1e-12, "{context}: value off by {error}");
            assert!((slot.log_weight.exp() - votes[*at]).abs() < 1e-9, "{context}: votes");
        }
        let groups: Vec<Group> = groups.into_iter().map(|(group, _)| group).collect();
        let literal = MergeOptions { guard: f32::INFINITY, ..Default::default() };
        let exact: Vec<_> =
            groups.iter().map(|group| group.merged(KeyRule::Paper, f64::INFINITY)).collect();
        check_heads(&golden, &groups, &exact, 1e-12);
        for tested in devices() {
            check_heads(&golden, &groups, &on_device(&tested, &groups, literal.clone()), 1e-4);
            for rule in [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes] {
                check_on_device(&tested, &golden.name, &groups, rule);
            }
        }
    }
}

/// A golden file's heads, all of whose groups were merged by the paper's equation to the letter:
/// outputs are those of before, and the file's.
fn check_heads(golden: &Golden, groups: &[Group], slots: &[MergedSlot], limit: f64) {
    let [heads, dim] = golden.tensor("q").dims();
    let each = groups.len() / heads;
    let outputs = ["out_before", "out_after"].map(|name| golden.tensor(name).values);
    for (head, slots) in slots.chunks(each).enumerate() {
        let slots = slots.iter().map(|slot| (slot.log_weight, &slot.key[..], &slot.value[..]));
        let (output, _) = attention(&groups[head * each].query, slots);
        for expected in &outputs {
            let error = distance(&output, &expected[head * dim..][..dim]);
            assert!(error < limit, "{} head {head}: output off by {error}", golden.name);
        }
    }
}

/// Opposite signs, factors that diverge, logits of 0, scores of `exp(±95)`.
#[test]
fn golden_keepkv_singular() {
    for golden in golden_files("golden_keepkv_singular", "keepkv_eq7_singular") {
        let [cases, dim] = golden.tensor("k_e").dims();
        let numbers = |name: &str| golden.tensor(name).values;
        let query = numbers("q");
        let (evicted, kept) = (numbers("k_e"), numbers("k_c"));
        let mut random = Numbers::new(3);
        let groups: Vec<Group> = (0..cases)
            .map(|case| {
                let row = |of: &[f64]| of[case * dim..][..dim].to_vec();
                let mut value = || random.normal(dim).iter().map(|&x| f64::from(x)).collect();
                Group {
                    query: query.clone(),
                    keys: vec![row(&kept), row(&evicted)],
                    values: vec![value(), value()],
                    log_weights: vec![numbers("p_c")[case].ln(), numbers("p_e")[case].ln()],
                    log_scores: vec![numbers("logit_c")[case], numbers("logit_e")[case]],
                }
            })
            .collect();
        let (targets, means) = (numbers("a_ln_mean_score"), numbers("b_w_mean_logit"));
        for (case, group) in groups.iter().enumerate() {
            let (target, mean) = group.logits();
            let error = (target - targets[case]).abs() + (mean - means[case]).abs();
            assert!(error < 1e-10, "{} case {case}: logits off by {error}", golden.name);
            let slot = group.merged(KeyRule::Paper, 4.0);
            let (output, lse) = group.before();
            let (after, after_lse) = group.after(&slot);
            let error = distance(&output, &after).max((lse - after_lse).abs() / (1.0 + lse.abs()));
            assert!(error < 1e-12, "{} case {case}: off by {error}", golden.name);
            // Where all logits are the same, nothing is to be scaled.
            let factor = if target == mean { 1.0 } else { target / mean };
            assert_eq!(slot.guarded, !(0.25..=4.0).contains(&factor), "case {case}: {factor}");
        }
        for tested in devices() {
            for rule in [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes] {
                check_on_device(&tested, &golden.name, &groups, rule);
            }
        }
    }
}
