use crate::record::metric;
use crate::suites::paper::testing::quick;

#[test]
fn variances_stay_below_the_bound() {
    let (records, _) = quick("kvreviver-bounds");
    let of = |metric: &str| -> Vec<f64> {
        records.iter().filter(|r| r.metric == metric).map(|r| r.value).collect()
    };
    let [variances, bounds, above, predicted] = [
        metric::VARIANCE,
        metric::VARIANCE_BOUND,
        metric::ABOVE_BOUND,
        metric::ABOVE_BOUND_PREDICTED,
    ]
    .map(of);
    assert_eq!(variances.len(), 6);
    for at in 0..variances.len() {
        let share = variances[at] / bounds[at];
        assert!(share > 0.0 && share < 0.5, "{share} of the bound");
        // Where entries hold many tokens, 0.448 of an entry's: pi a / N is 1.05 of that. The mean
        // of three would have a third, 0.32 of the bound.
        let many = bounds[at] > 10.0;
        assert!(!many || (share - 0.43).abs() < 0.06, "{share} of the bound");
        assert!(above[at] <= predicted[at], "{} above, {}", above[at], predicted[at]);
    }
}

#[test]
fn sketches_attend_and_rebuild_at_growing_batches() {
    let (records, _) = quick("kvreviver-table1");
    for policy in ["full", "kvreviver", "kvreviver rebuild=true"] {
        let largest = records.iter().filter(|r| {
            r.policy == policy && r.metric == metric::DECODE_TOKENS_PER_SECOND && r.value > 0.0
        });
        let largest = largest.filter_map(|r| r.case.batch).max().unwrap();
        assert!(policy == "full" || largest >= 4, "{policy}: batch {largest}");
    }
}

#[test]
fn every_share_is_asked_the_same_questions() {
    for (figure, policies) in [("kvreviver-table2", 6), ("kvreviver-fig5", 7)] {
        let (records, _) = quick(figure);
        let mut names: Vec<&str> = records.iter().map(|r| r.policy.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), policies, "{figure}: {names:?}");
        let asked = |policy: &str| {
            records.iter().filter(|r| r.policy == policy && r.metric == metric::EXACT_MATCH).count()
        };
        assert!(names.iter().all(|name| asked(name) == asked("full") && asked(name) > 0));
    }
}
