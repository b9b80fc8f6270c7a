use crate::record::metric;
use crate::suites::paper::testing::quick;

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
    assert!(mean("cis block=4", metric::RETAINED_MASS) > 0.9 * oracle);
    assert!(
        mean("cis block=32", metric::RETRIEVAL_RATIO)
            < mean("cis block=4", metric::RETRIEVAL_RATIO)
    );
    assert_eq!(mean("cis", metric::BROKEN), 0.0);
    assert!(report.contains("top-k-oracle"), "the report shows who ran");
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
