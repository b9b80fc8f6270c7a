//! Policies with and without KeepKV around them.

use kv_policies::KeepKv;

use crate::families;
use crate::format;
use crate::interval::Estimate;
use crate::policy_runs::inner_label;
use crate::record::{Record, group_by, is_full, metric};
use crate::table::{Column, Row, Table};

const METRICS: [&str; 5] = [
    metric::EXACT_MATCH,
    metric::ANSWER_LOGPROB,
    metric::KL_DIVERGENCE,
    metric::PERPLEXITY,
    metric::TEXT_KL_DIVERGENCE,
];

/// A table a metric and mode, where at least two policies ran alone and inside KeepKV: a row a
/// policy, two columns a budget. Other methods, which ran alone only, stand below them.
pub(super) fn tables(records: &[&Record]) -> Vec<Table> {
    let names = group_by(records.iter().copied(), |r| r.policy.as_str());
    let names: Vec<&str> = names.into_iter().map(|(name, _)| name).collect();
    let around = |name: &str| {
        names
            .iter()
            .copied()
            .find(|other| inner_label(KeepKv::NAME, other).as_deref() == Some(name))
    };
    let pairs: Vec<(&str, Option<&str>)> = names.iter().map(|&name| (name, around(name))).collect();
    let wrapped = |name: &str| pairs.iter().any(|(_, around)| *around == Some(name));
    // KeepKV's other options have rows in other tables.
    let alone =
        |(name, _): &(&str, _)| !wrapped(name) && families::first_policy(name) != KeepKv::NAME;
    let rows: Vec<_> = pairs.iter().copied().filter(alone).collect();
    if rows.iter().filter(|(_, around)| around.is_some()).count() < 2 {
        return Vec::new();
    }
    let mut tables = Vec::new();
    for metric in METRICS {
        let taken = records.iter().copied().filter(|r| r.metric == metric);
        for (mode, records) in group_by(taken, |r| r.case.mode.as_deref()) {
            tables.push(table(metric, mode, &records, &rows));
        }
    }
    tables
}

fn table(
    metric: &str,
    mode: Option<&str>,
    records: &[&Record],
    policies: &[(&str, Option<&str>)],
) -> Table {
    let mut budgets: Vec<f64> = records.iter().filter_map(|r| r.budget).collect();
    budgets.sort_by(|a, b| b.total_cmp(a));
    budgets.dedup();
    let info = metric::info(metric);
    let column =
        |head: String| Column { head, kind: info.kind, higher_is_better: info.higher_is_better };
    let heads = budgets.iter().map(|&budget| format::budget(Some(budget)));
    let heads = heads.flat_map(|budget| [format!("{budget}\nalone"), format!("{budget}\nwithin")]);
    let cell = |policy: Option<&str>, budget: f64| {
        // The full cache holds at every budget.
        let of = |r: &&Record| {
            Some(r.policy.as_str()) == policy && (r.budget == Some(budget) || is_full(&r.policy))
        };
        Estimate::of(&records.iter().copied().filter(of).collect::<Vec<_>>(), metric)
    };
    let row = |&(policy, around): &(&str, Option<&str>)| {
        let cells = budgets.iter().flat_map(|&b| [cell(Some(policy), b), cell(around, b)]);
        Row { keys: vec![policy.into()], cells: cells.collect() }
    };
    let mode = mode.map(|mode| format!(" · {mode}")).unwrap_or_default();
    Table {
        title: format!("Alone and within KeepKV · {}{mode}", info.label),
        means_over: String::new(),
        legend: Vec::new(),
        keys: vec!["policy".into()],
        columns: heads.map(column).collect(),
        rows: policies.iter().map(row).collect(),
    }
    .without_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::record;

    fn perplexities(list: &[(&str, Option<f64>, f64)]) -> Vec<Table> {
        let records: Vec<Record> = list
            .iter()
            .map(|&(policy, budget, value)| record(policy, budget, metric::PERPLEXITY, value))
            .collect();
        tables(&records.iter().collect::<Vec<_>>())
    }

    #[test]
    fn policies_stand_beside_themselves_within_keepkv() {
        let (half, tenth) = (Some(0.5), Some(0.1));
        let found = perplexities(&[
            ("full", None, 3.0),
            ("h2o", half, 4.0),
            ("h2o", tenth, 5.0),
            ("keepkv(h2o)", half, 6.0),
            ("recent-attention", tenth, 7.0),
            ("keepkv", tenth, 8.0),
            ("keepkv threshold=0.9", tenth, 8.5),
            ("d2o", half, 9.0),
        ]);
        let [table] = &found[..] else { panic!("{found:?}") };
        let heads: Vec<&str> = table.columns.iter().map(|column| column.head.as_str()).collect();
        assert_eq!(heads, ["50 %\nalone", "50 %\nwithin", "10 %\nalone", "10 %\nwithin"]);
        let rows: Vec<(&str, Vec<Option<i64>>)> = table
            .rows
            .iter()
            .map(|row| {
                let cells =
                    row.cells.iter().map(|cell| cell.map(|number| number.mean.round() as i64));
                (row.keys[0].as_str(), cells.collect())
            })
            .collect();
        let expected = [
            ("full", vec![Some(3), None, Some(3), None]),
            ("h2o", vec![Some(4), Some(6), Some(5), None]),
            ("recent-attention", vec![None, None, Some(7), Some(8)]),
            ("d2o", vec![Some(9), None, None, None]),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn one_pair_is_no_table() {
        let (half, pair) = (Some(0.5), ["recent-attention", "keepkv"]);
        assert!(perplexities(&pair.map(|policy| (policy, half, 4.0))).is_empty());
    }
}
