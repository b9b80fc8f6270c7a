//! LongFlow's figures in their quick forms.

use crate::record::metric;
use crate::suites::paper::testing::quick;

#[test]
fn steps_are_timed_beside_their_attention() {
    let (records, _) = quick("longflow-fig1");
    let times: Vec<f64> =
        records.iter().filter(|r| r.metric == metric::TIME_US).map(|r| r.value).collect();
    assert!(times.len() >= 4 && times.iter().all(|time| *time > 0.0), "{times:?}");
    for policy in ["full", "longflow", "h2o", "vatp"] {
        assert!(records.iter().any(|r| r.policy == policy), "{policy} ran");
    }
}

#[test]
fn long_outputs_keep_their_budget() {
    let (records, _) = quick("longflow-fig4");
    let of = |policy: &str, name: &str| -> Vec<f64> {
        let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
        own.map(|record| record.value).collect()
    };
    for policy in ["full", "longflow", "h2o", "vatp", "r-kv"] {
        let rates = of(policy, metric::DECODE_TOKENS_PER_SECOND);
        assert!(!rates.is_empty() && rates.iter().all(|rate| *rate > 0.0), "{policy}: {rates:?}");
    }
    let [full, own] = ["full", "longflow"].map(|policy| of(policy, metric::BYTES_ALLOCATED)[0]);
    assert!(own < 0.25 * full, "{own} of {full} bytes are allocated");
}
