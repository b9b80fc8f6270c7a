use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::record::{Record, metric};
use crate::suites::paper::testing::quick;
use crate::testing::ran;

/// The number of a policy whose task ends so, where there is one.
fn number(records: &[Record], policy: &str, task: &str, metric: &str) -> Option<f64> {
    let fits = |r: &&Record| {
        r.policy == policy
            && r.metric == metric
            && r.case.task.as_deref().is_some_and(|own| own.ends_with(task))
            && r.case.position.is_none()
    };
    records.iter().find(fits).map(|r| r.value)
}

#[test]
fn merges_made_for_a_query_keep_its_attention_and_those_of_d2o_sag() {
    let (records, report) = quick("keepkv-fig2");
    let of = |policy: &str, task: &str, metric: &str| {
        number(&records, policy, task, metric).unwrap_or_else(|| panic!("{policy} {task} {metric}"))
    };
    let apart = "made for the query, heads apart";
    for policy in ["keepkv(h2o)", "keepkv(h2o) key=additive", "keepkv(h2o) key=votes"] {
        for metric in [metric::SAG, metric::WORST_SAG, metric::QUERY_ERROR] {
            let value = of(policy, apart, metric);
            assert!(value.abs() < 1e-4, "{policy}: {metric} {value}");
        }
        let (own, others) =
            (of(policy, "default options", metric::SAG), of("d2o", "default options", metric::SAG));
        assert!(others < -0.05 && own.abs() < others.abs() / 2.0, "{policy}: {own}, D2O {others}");
    }
    assert!(of("h2o", apart, metric::SAG) < -0.05);
    // One factor for all heads of a group is right for none.
    assert!(of("keepkv(h2o)", "made for the query", metric::QUERY_ERROR) > 1e-3);
    for distance in ["1 step ahead", "8 steps ahead", "32 steps ahead"] {
        for predictor in ["moving average", "cumulative mean", "sliding mean", "last score"] {
            for metric in [metric::PREDICTION_MEDIAN, metric::PREDICTION_MEAN] {
                let value = of(predictor, distance, metric);
                assert!(value.is_finite() && value > 0.0, "{predictor}, {distance}: {value}");
            }
        }
    }
    for id in ["sag", "query-error", "prediction-median", "prediction-mean"] {
        assert!(report.contains(&format!(r#"<section id="paper-0-{id}">"#)), "{id}");
    }
    assert!(report.contains("<details open><summary>Paper · keepkv-fig2 predictors"));
}

#[test]
fn policies_around_others_are_chosen_by_the_names_of_both() {
    let (records, _) =
        ran(&["paper", "keepkv-table1", "--quick", "--policy", "full,keepkv(h2o)"]).unwrap();
    let policies: BTreeSet<&str> = records.iter().map(|r| r.policy.as_str()).collect();
    assert_eq!(policies, BTreeSet::from(["full", "keepkv(h2o)"]));
}

#[test]
fn batches_grow_until_memory_ends() {
    let (records, report) = quick("keepkv-table1");
    let largest = |policy: &str| {
        let task = "keepkv-table1 at each one's largest batch";
        let own = records.iter().filter(|r| r.policy == policy);
        own.filter(|r| r.case.task.as_deref() == Some(task)).collect::<Vec<_>>()
    };
    let batches = |policy: &str| -> Vec<usize> {
        let own = records.iter().filter(|r| r.policy == policy && r.metric == metric::TOTAL_BYTES);
        let own = own.filter(|r| r.case.task.as_deref() == Some("keepkv-table1 by batch"));
        own.filter_map(|r| r.case.batch).collect()
    };
    // The memory holds two full caches and a half.
    assert_eq!(batches("full"), [1, 2]);
    for policy in ["h2o", "recent-attention", "d2o", "keepkv(h2o)", "keepkv"] {
        let batches = batches(policy);
        // D2O holds all layers whole until it knows their budgets.
        let first: &[usize] = if policy == "d2o" { &[1, 2] } else { &[1, 2, 4] };
        assert!(batches.starts_with(first), "{policy}: {batches:?}");
        assert_eq!(largest(policy)[0].case.batch.as_ref(), batches.last(), "{policy}");
    }
    let speed_up = |policy: &str| {
        let own = largest(policy);
        own.iter().find(|r| r.metric == metric::SPEED_UP).map(|r| r.value)
    };
    assert_eq!(speed_up("full"), Some(1.0));
    assert!(speed_up("keepkv").is_some_and(|times| times > 0.0));
    for policy in ["d2o", "keepkv(h2o)", "keepkv"] {
        let share = number(&records, policy, "by batch", metric::MERGING_SHARE);
        assert!(share.is_some_and(|share| share < 1.0), "{policy}: {share:?}");
    }
    assert!(report.contains(r#"<section id="paper-0-speed-up">"#));
}

/// Perplexities by policy, as first seen, with all records and the report.
fn perplexities(figure: &str) -> (Vec<(String, f64)>, Vec<Record>, String) {
    let (records, report) = quick(figure);
    let whole = |r: &&Record| r.metric == metric::PERPLEXITY && r.case.position.is_none();
    let found = records.iter().filter(whole).map(|r| (r.policy.clone(), r.value)).collect();
    (found, records, report)
}

fn names(found: &[(String, f64)]) -> Vec<&str> {
    found.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn evictions_run_with_and_without_keepkv() {
    let (found, records, report) = perplexities("keepkv-fig5");
    for (name, within) in [
        ("h2o", "keepkv(h2o)"),
        ("snapkv", "keepkv(snapkv)"),
        ("recent-attention", "keepkv"),
        ("streaming-llm", "keepkv(streaming-llm)"),
        ("longflow", "keepkv(longflow)"),
    ] {
        let of = |name: &str| -> Vec<f64> {
            found.iter().filter(|(policy, _)| policy == name).map(|(_, value)| *value).collect()
        };
        let (alone, within) = (of(name), of(within));
        assert_eq!([alone.len(), within.len()], [2, 2], "{name}");
        assert!(alone.iter().zip(&within).all(|(a, b)| a != b && a.is_finite()), "{name}");
    }
    assert!(names(&found).contains(&"d2o") && names(&found)[0] == "full");
    assert!(number(&records, "keepkv", "", metric::EXACT_MATCH).is_some());
    assert!(report.contains("Alone and within KeepKV · perplexity"));
}

#[test]
fn orders_and_thresholds_are_told_apart() {
    let (orders, ..) = perplexities("keepkv-table3");
    let expected = ["full", "recent-attention", "keepkv order=evict-first", "keepkv", "h2o"];
    let more = ["keepkv(h2o) order=evict-first", "keepkv(h2o)"];
    assert_eq!(names(&orders), [&expected[..], &more].concat());
    assert!(orders[2].1 != orders[3].1, "{orders:?}");
    let (thresholds, _, report) = perplexities("keepkv-table4");
    let of = |name: &str| {
        [" threshold=0.6", " threshold=0.7", "", " threshold=0.9", " threshold=0.95"]
            .map(|option| format!("{name}{option}"))
    };
    let expected = [vec!["full".into(), "recent-attention".into()], of("keepkv").to_vec()];
    let more = [vec!["h2o".into()], of("keepkv(h2o)").to_vec()];
    assert_eq!(names(&thresholds), [expected, more].concat().concat());
    assert!(thresholds[2].1 != thresholds[6].1, "{thresholds:?}");
    assert!(report.contains(r#"<section id="quality-0-perplexity">"#));
}

#[test]
fn the_lossless_mode_runs_at_every_period() {
    let (found, records, _) = perplexities("keepkv-lossless");
    assert_eq!(names(&found)[0], "full");
    assert_eq!(names(&found).last(), Some(&"keepkv"));
    let error = records.iter().find(|r| r.policy == "keepkv" && r.metric == metric::RELATIVE_ERROR);
    assert!(error.is_some_and(|r| r.value > 0.0));
    let contender =
        Contender::of(&json!({"policy": "keepkv", "budget": BUDGET, "period": 4})).unwrap();
    assert!(names(&found).contains(&contender.label.as_str()), "{found:?}");
    assert_eq!(found.len(), 6);
}
