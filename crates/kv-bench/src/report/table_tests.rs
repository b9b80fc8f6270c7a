use super::*;
use crate::record::{metric, mode};
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
        record("a", Some(0.5), metric::PERPLEXITY, 3.0),
        record("b", Some(0.5), metric::PERPLEXITY, 2.0),
        record("b", Some(0.1), metric::PERPLEXITY, 9.0),
    ];
    let table = &tables(&records, false)[0];
    let best: Vec<_> = (0..4).map(|row| table.is_best(row, 0)).collect();
    assert_eq!(best, [false, false, true, false]);
}

#[test]
fn tables_stay_narrow() {
    for table in tables(&sample::records(), true) {
        for line in table.to_text().lines() {
            assert!(line.chars().count() < 110, "{}: {line}", table.title);
        }
    }
}

#[test]
fn other_suites_have_a_row_a_case() {
    let mut records = vec![record("full", None, "launches", 3.0)];
    records[0].suite = "kernels".into();
    records[0].unit = "count".into();
    records[0].case.task = Some("attend".into());
    let table = &tables(&records, false)[0];
    assert_eq!(table.keys, ["policy", "task"]);
    assert_eq!(table.columns[0].head, "launches\n(count)");
}
