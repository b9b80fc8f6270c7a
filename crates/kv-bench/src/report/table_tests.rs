use super::*;
use crate::record::{FULL, metric, mode};
use crate::report::sample::{self, record};

#[test]
fn the_full_cache_comes_first_and_empty_columns_are_left_out() {
    let mut records = vec![
        record("snapkv", Some(0.25), metric::EXACT_MATCH, 0.5),
        record("snapkv", Some(0.25), metric::EXACT_MATCH, 1.0),
        record("full", None, metric::EXACT_MATCH, 1.0),
    ];
    records.iter_mut().for_each(|r| r.case.mode = Some(mode::AWARE.into()));
    let tables = tables(&records, false);
    assert_eq!(tables.len(), 1);
    let table = &tables[0];
    assert_eq!(table.keys, ["policy", "budget"]);
    let heads: Vec<_> = table.columns.iter().map(|c| c.head.as_str()).collect();
    assert_eq!(heads, ["exact\nmatch\naware"]);
    assert_eq!(table.rows[0].keys, ["full", "–"]);
    assert_eq!(table.rows[1].keys, ["snapkv", "25 %"]);
    assert_eq!(table.text(1, 0), "75.0 %");
}

#[test]
fn the_best_of_a_budget_is_marked() {
    let records = [
        record("full", None, metric::PERPLEXITY, 1.0),
        record("full · other", None, metric::PERPLEXITY, 1.0),
        record("a", Some(0.5), metric::PERPLEXITY, 3.0),
        record("b", Some(0.5), metric::PERPLEXITY, 2.0),
        record("b", Some(0.1), metric::PERPLEXITY, 9.0),
    ];
    let table = &tables(&records, false)[0];
    let best: Vec<_> = (0..5).map(|row| table.is_best(row, 0)).collect();
    assert_eq!(best, [false, false, false, true, false]);
}

#[test]
fn what_most_policies_reach_is_not_marked() {
    let best = |bytes: [f64; 4]| {
        let policies = ["full", "a", "b", "c"].into_iter().zip(bytes);
        let record = |(policy, bytes): (&str, f64)| {
            let budget = (policy != FULL).then_some(0.5);
            record(policy, budget, metric::HELD_BYTES, bytes)
        };
        let table = tables(&policies.map(record).collect::<Vec<_>>(), false).remove(0);
        [1, 2, 3].map(|row| table.is_best(row, 0))
    };
    assert_eq!(best([4096.0, 1024.0, 1024.0, 1024.0]), [false; 3]);
    assert_eq!(best([4096.0, 1024.0, 1024.0, 2048.0]), [false; 3]);
    assert_eq!(best([4096.0, 1024.0, 2048.0, 2048.0]), [true, false, false]);
    // Both are shown as 1.00 MiB.
    assert_eq!(best([4e6, 1_048_576.0, 1_048_577.0, 4e6]), [false; 3]);
}

#[test]
fn agreement_is_told_apart_by_mode() {
    let mut records = [1.0, 0.5].map(|value| record("a", Some(0.5), metric::AGREEMENT, value));
    records[0].case.mode = Some(mode::AWARE.into());
    records[1].case.mode = Some(mode::AGNOSTIC.into());
    let text = record("a", Some(0.5), metric::TEXT_AGREEMENT, 0.0);
    let table = tables(&[&records[..], &[text]].concat(), false).remove(0);
    assert_eq!((table.text(0, 0), table.text(0, 1)), ("100.0 %".into(), "50.0 %".into()));
    assert_eq!(table.columns.len(), 2);
}

#[test]
fn tables_stay_narrow() {
    for table in tables(&sample::records(), true) {
        for line in table.to_text().lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", table.title);
        }
    }
}

#[test]
fn columns_that_do_not_explain_themselves_have_a_legend() {
    let table = |metrics: &[&str]| {
        let records: Vec<_> =
            metrics.iter().map(|metric| record("a", Some(0.5), metric, 0.5)).collect();
        tables(&records, false).remove(0)
    };
    let all = [metric::HELD_BYTES, metric::DROPPED_VOTES, metric::RETRIEVAL_RATIO];
    let legend = table(&all).legend;
    let begins = |line: &str| legend.iter().filter(|own| own.starts_with(line)).count();
    assert_eq!(legend.len(), 3, "{legend:?}");
    for name in ["memory held: ", "dropped votes: ", "retrieval ratio: "] {
        assert_eq!(begins(name), 1, "{legend:?}");
    }
    assert!(table(&[metric::PERPLEXITY]).legend.is_empty());
    // Beside columns of a text.
    let text = table(&[metric::RETRIEVAL_RATIO, metric::PERPLEXITY]).to_text();
    assert!(
        text.contains("\nretrieval ratio and tokens read are of the steps of answers;"),
        "{text}"
    );
}

#[test]
fn other_suites_have_a_row_a_case() {
    let mut records = vec![record("full", None, "launches", 3.0)];
    records[0].suite = "other".into();
    records[0].unit = "count".into();
    records[0].case.task = Some("attend".into());
    let table = &tables(&records, false)[0];
    assert_eq!(table.keys, ["policy", "task"]);
    assert_eq!(table.columns[0].head, "launches\n(count)");
}

#[test]
fn papers_have_a_table_a_figure() {
    let rate = |task: &str| {
        let mut record = record("full", None, metric::DECODE_TOKENS_PER_SECOND, 3.0);
        record.suite = "paper".into();
        record.case.task = Some(task.into());
        record
    };
    let tables = tables(&[rate("fig1"), rate("fig2, largest batch"), rate("fig1")], false);
    let titles: Vec<&str> = tables.iter().map(|table| table.title.as_str()).collect();
    assert_eq!(titles, ["Paper · fig1", "Paper · fig2"]);
    assert_eq!([&tables[0].keys[..], &tables[1].keys], [&["policy"][..], &["policy", "task"]]);
    assert_eq!(tables[1].rows[0].keys, ["full", "largest batch"]);
}

/// Whoever measured a case stands beside the others, op by op.
#[test]
fn kernels_have_a_table_an_op() {
    let time = |policy: &str, task: &str, value: f64| {
        let mut record = record(policy, None, metric::TIME_US, value);
        record.suite = "kernels".into();
        record.case.task = Some(task.into());
        record
    };
    let records =
        [time("ours", "a 1x2", 1.0), time("ours", "b 3", 2.0), time("theirs", "a 1x2", 3.0)];
    let tables = tables(&records, false);
    assert_eq!(tables.len(), 2);
    let rows: Vec<_> = tables[0].rows.iter().map(|row| row.keys.clone()).collect();
    assert_eq!(rows, [["ours", "1x2"], ["theirs", "1x2"]]);
}
