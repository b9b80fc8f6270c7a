use super::operator;
use crate::record::metric;
use crate::suites::paper::testing::quick;
use crate::testing::ran;

#[test]
fn shared_sets_read_almost_what_the_oracle_does() {
    let (records, report) = quick("prhs-fig7");
    let mean = |policy: &str, name: &str| {
        let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
        let values: Vec<f64> = own.map(|record| record.value).collect();
        assert!(!values.is_empty(), "{policy} has no {name}");
        values.iter().sum::<f64>() / values.len() as f64
    };
    let oracle = mean("top-k-oracle", metric::RETAINED_MASS);
    assert!(mean("cis block=8", metric::RETAINED_MASS) > 0.9 * oracle);
    // Sets of exactly the budget's size, shared by ever more steps.
    let shared = |block: usize, name: &str| match block {
        16 => mean("cis dilated=0.0 threshold=-1.0", name),
        _ => mean(&format!("cis block={block} dilated=0.0 threshold=-1.0"), name),
    };
    let often = [4, 6, 12, 16].map(|block| shared(block, metric::RETRIEVAL_RATIO));
    assert!(often.is_sorted_by(|a, b| a > b), "{often:?}");
    for name in [metric::RETAINED_MASS, metric::OVERLAP] {
        assert!(shared(4, name) > shared(16, name), "{name}");
    }
    assert!(mean("top-k-oracle", metric::OVERLAP) > mean("hshare", metric::OVERLAP));
    assert_eq!(mean("cis", metric::BROKEN), 0.0);
    assert!(report.contains("top-k-oracle"), "the report shows who ran");
}

/// Bounds of the attention that PrHS drops, hides and moves, beside the measured attention.
#[test]
fn certificates_hold() {
    let policies = r#"["cis", {"policy": "cis", "sets": "query-heads"},
        {"policy": "psaw", "start": 0, "phi": 0.5}, {"policy": "etf", "start": 1},
        {"policy": "cpe", "threshold": -1.0, "psaw": {"start": 0, "phi": 0.3},
         "etf": {"start": 1}}]"#;
    let line = "attention --certificates --budget 64 --limit 4 --steps 24 --policy";
    let words: Vec<&str> = line.split(' ').chain([policies]).collect();
    let (records, _) = ran(&words).unwrap();
    let of = |policy: &str, name: &str| -> Vec<f64> {
        let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
        own.map(|record| record.value).collect()
    };
    for (policy, observed, bound) in [
        ("cis", metric::DROPPED_MASS, metric::ODDS_BOUND),
        ("cis", metric::SET_GAP, metric::SET_GAP_BOUND),
        ("psaw", metric::HIDDEN_MASS, metric::HIDDEN_BOUND),
        ("etf", metric::MOVED_MASS, metric::MOVED_BOUND),
        ("cpe", metric::DROPPED_MASS, metric::ODDS_BOUND),
        ("cpe", metric::HIDDEN_MASS, metric::HIDDEN_BOUND),
        ("cpe", metric::MOVED_MASS, metric::MOVED_BOUND),
    ] {
        let (observed, bound) = (of(policy, observed), of(policy, bound));
        // The first of them has no window yet, and nothing frozen.
        assert!(observed.len() >= 2 && observed.len() == bound.len(), "{policy}: {observed:?}");
        assert!(observed.iter().any(|observed| *observed > 0.0), "{policy}: nothing is seen");
        let holds = observed.iter().zip(&bound).all(|(observed, bound)| observed <= bound);
        assert!(holds, "{policy}: {observed:?} above {bound:?}");
        assert!(of(policy, metric::BROKEN).iter().all(|broken| *broken == 0.0), "{policy}");
        let vacuous = of(policy, metric::VACUOUS);
        assert!(!vacuous.is_empty() && vacuous.iter().all(|share| (0.0..=1.0).contains(share)));
    }
    // Not all of them for want of anything to say.
    assert!(of("psaw", metric::HIDDEN_BOUND).iter().any(|bound| *bound < 0.9));
    // A cosine a layer, of some queries that are alike and some that are not.
    let (cosines, alike) = (of("full", metric::QUERY_COSINE), of("full", metric::QUERIES_ALIKE));
    assert!(cosines.len() > 1 && cosines.iter().all(|cosine| (-1.0..1.0).contains(cosine)));
    assert!(alike.len() == cosines.len() && alike.iter().all(|share| (0.0..1.0).contains(share)));
    // Budgets that leave fewer recents than a block has tokens are measured without.
    let line = "attention --certificates --budget 0.05,64 --limit 1 --steps 8 --policy cis";
    let (small, _) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
    let certified = |budget: f64| {
        small.iter().any(|r| r.budget == Some(budget) && r.metric == metric::ODDS_BOUND)
    };
    assert!(certified(64.0) && !certified(0.05));
    // What a window hides is in no bound on what is dropped of the rest, and shows beside it.
    assert!(of("cpe", metric::HIDDEN_MASS).iter().any(|hidden| *hidden > 0.05));
}

#[test]
fn hidden_states_are_not_compared_without_a_whole_model() {
    let policy = r#"{"policy": "cis", "budget": 64, "similarity": "hidden"}"#;
    let line = "attention --limit 1 --steps 8 --policy";
    let words: Vec<&str> = line.split(' ').chain([policy]).collect();
    let error = ran(&words).map(drop).unwrap_err().to_string();
    assert!(error.contains("hidden states") && error.contains("quality"), "{error}");
}

#[test]
fn operators_are_timed_over_what_they_read() {
    let (records, _) = quick("prhs-table4");
    let of = |policy: &str, name: &str| {
        records.iter().find(|r| r.policy.starts_with(policy) && r.metric == name).map(|r| r.value)
    };
    assert!(of("full", metric::TIME_US).unwrap() > 0.0);
    let ratio = of("cis", metric::RETRIEVAL_RATIO).unwrap();
    assert!(ratio > 0.0 && ratio < 0.5, "{ratio} of the heads retrieve");
}

#[test]
fn tables_run_those_that_are_named() {
    let ran = |line: &str| -> anyhow::Result<Vec<String>> {
        let (records, _) = ran(&line.split(' ').collect::<Vec<_>>())?;
        let mut names: Vec<String> = records.into_iter().map(|record| record.policy).collect();
        names.dedup();
        Ok(names)
    };
    let table4 = "paper prhs-table4 --quick --policy";
    let named = ran(&format!("{table4} cpe,h2o")).unwrap();
    assert_eq!(named, ["full", "h2o", "cpe block=8", "cpe"]);
    let error = ran(&format!("{table4} cpe,snapkv")).unwrap_err().to_string();
    assert!(error.contains("no `snapkv`") && error.contains("quest"), "{error}");
    let error = ran(&format!("{table4} ,")).unwrap_err().to_string();
    assert!(error.contains("quest"), "{error}");
    let error = ran(&format!("{table4} cpe --lengths 64")).unwrap_err().to_string();
    assert!(error.contains("--quick has one size"), "{error}");
    let error = ran("paper prhs-long --lengths 99999999").unwrap_err();
    assert!(error.to_string().contains("times up to 16777216 tokens"), "{error}");
    let error = ran("paper prhs-table5 --lengths 64").unwrap_err().to_string();
    assert!(error.contains("for GPUs"), "whole models are for them at any length: {error}");
    let other = "paper balancekv-fig3 --quick --policy cis";
    let error = ran(other).unwrap_err().to_string();
    assert!(error.contains("runs all of its own"), "{error}");
}

#[test]
fn operators_have_the_sizes_asked_for() {
    let sizes = |long: bool, lengths: &[usize], batches: &[usize]| {
        let cases = operator::cases(long, false, lengths, batches).unwrap();
        cases.all.iter().map(|(_, length, batch)| (*length, *batch)).collect::<Vec<_>>()
    };
    assert_eq!(sizes(false, &[128, 160], &[1]), [(128, 1), (160, 1)]);
    let error = operator::cases(false, false, &[160, 96], &[1]).map(drop).unwrap_err();
    assert!(error.to_string().contains("96 tokens") && error.to_string().contains("expected 128"));
    assert_eq!(sizes(false, &[2_048], &[]), [(2_048, 8), (2_048, 16)]);
    // Of 32 heads, so many tokens are too many.
    let million = 1 << 20;
    assert_eq!(sizes(true, &[million], &[1, 2]), [(million, 1), (million, 2)].repeat(2));
}
