//! Policies less the full cache, prompt by prompt.

use crate::format;
use crate::interval::Estimate;
use crate::record::{FULL, Record, by_setup, is_full, metric, mode};
use crate::table::{Column, Row, Table};

const METRICS: [(&str, &str); 4] = [
    (metric::EXACT_MATCH, "exact\nmatch"),
    (metric::SCORE, "score"),
    (metric::ANSWER_LOGPROB, "answer\nlogprob"),
    (metric::PERPLEXITY, "perplexity\nratio"),
];
const MODES: [(Option<&str>, &str); 3] =
    [(None, ""), (Some(mode::AWARE), "\naware"), (Some(mode::AGNOSTIC), "\nagnostic")];
const LEGEND: &str = "policy less full cache, prompt by prompt; perplexity: policy over full \
    cache, by position";

/// A row a policy and budget, a column a metric and mode. `None` where no prompt or text ran under
/// the full cache and another policy.
pub(super) fn table(records: &[&Record]) -> Option<Table> {
    let columns: Vec<_> = METRICS
        .into_iter()
        .flat_map(|(metric, head)| MODES.map(|(mode, of)| (metric, mode, head.to_string() + of)))
        .collect();
    let full: Vec<&Record> = records.iter().copied().filter(|r| r.policy == FULL).collect();
    let row = |(policy, budget, own): (&str, Option<f64>, Vec<&Record>)| {
        let cell = |(metric, mode, _): &(&str, Option<&str>, String)| {
            let fits = |r: &&&Record| r.case.mode.as_deref() == *mode;
            let [own, full] =
                [&own, &full].map(|all| all.iter().filter(fits).copied().collect::<Vec<_>>());
            Estimate::of_difference(&own, &full, metric)
        };
        let keys = vec![policy.into(), format::budget(budget)];
        Row { keys, cells: columns.iter().map(cell).collect() }
    };
    let setups = by_setup(records).into_iter().filter(|(policy, ..)| !is_full(policy));
    let column = |(metric, _, head): &(&str, Option<&str>, String)| {
        let info = metric::info(metric);
        Column { head: head.clone(), kind: info.kind, higher_is_better: info.higher_is_better }
    };
    let table = Table {
        title: "Differences from the full cache".into(),
        means_over: String::new(),
        legend: vec![LEGEND.into()],
        keys: ["policy", "budget"].map(Into::into).to_vec(),
        columns: columns.iter().map(column).collect(),
        rows: setups.map(row).collect(),
    };
    let table = table.without_empty();
    (!table.rows.is_empty()).then_some(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::{of_prompt, record};

    /// Each prompt is compared with itself: its own level does not widen the interval.
    #[test]
    fn prompts_are_paired() {
        let of = |policy: &str, budget, values: [f64; 3]| {
            let names = ["a", "b", "c"].into_iter().zip(values);
            let record = move |(name, value): (&str, f64)| {
                of_prompt(record(policy, budget, metric::ANSWER_LOGPROB, value), name)
            };
            names.map(record).collect::<Vec<_>>()
        };
        let mut records = of("full", None, [-1.0, -5.0, -9.0]);
        // In another order, and with a prompt that the full cache did not run.
        let mut own = of("h2o", Some(0.5), [-1.5, -5.75, -9.25]);
        own.reverse();
        records.extend(own);
        records.push(of_prompt(record("h2o", Some(0.5), metric::ANSWER_LOGPROB, -90.0), "d"));
        let records: Vec<&Record> = records.iter().collect();
        let table = table(&records).unwrap();
        assert_eq!((table.columns.len(), table.rows.len()), (1, 1));
        // A mean of -0.5, a deviation of 0.25 and 3 samples: 4.3027 · 0.25 / √3.
        assert!(table.to_text().contains("−0.500 ± 0.621"), "{}", table.to_text());
        assert!(super::table(&records[..3]).is_none());
    }

    #[test]
    fn perplexities_are_compared_as_a_ratio() {
        let at = |policy: &str, budget, position, value| {
            let mut record = record(policy, budget, metric::PERPLEXITY, value);
            record.case.position = position;
            record
        };
        let values = [(Some(0), 2.0, 3.0), (Some(64), 8.0, 16.0), (None, 4.0, 6.928)];
        let records: Vec<Record> = values
            .into_iter()
            .flat_map(|(position, full, own)| {
                [at("full", None, position, full), at("a", Some(0.5), position, own)]
            })
            .collect();
        let table = table(&records.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(table.text(0, 0), "1.73");
    }
}
