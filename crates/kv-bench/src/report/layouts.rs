//! Which table each suite shows.

use super::{differences, samples, side_by_side};
use crate::format;
use crate::interval::Estimate;
use crate::record::{Case, Record, by_setup, group_by, metric, mode};
use crate::table::{Column, Row, Table};

/// A column that names a row beside the policy.
#[derive(Clone, Copy, Debug)]
enum Key {
    Budget,
    Task,
    Mode,
    Length,
    Depth,
    Layer,
    Head,
    Position,
    Batch,
}

/// A column: its heading, its metric, and which records it takes.
struct Pick<'a> {
    head: String,
    metric: &'a str,
    takes: Box<dyn Fn(&Record) -> bool + 'a>,
}

impl<'a> Pick<'a> {
    fn all(metric: &'a str) -> Self {
        let head = metric::info(metric).label.replacen(' ', "\n", 1);
        Self { head, metric, takes: Box::new(|_| true) }
    }

    fn when(head: String, metric: &'a str, takes: impl Fn(&Record) -> bool + 'a) -> Self {
        Self { head, metric, takes: Box::new(takes) }
    }
}

/// The legend of columns of the quality suite that do not count steps of the text.
const OF_ANSWERS: &str = "retrieval ratio and tokens read are of the steps of answers; steps of \
    the text are not counted";

/// The tables of some records, suite by suite and model by model.
pub(crate) fn tables(records: &[Record], by_layer: bool) -> Vec<Table> {
    let setting = |r: &Record| (r.suite.clone(), r.model.clone(), r.device.clone());
    let groups = group_by(records, setting);
    let one_setting =
        groups.iter().all(|(key, _)| (&key.1, &key.2) == (&groups[0].0.1, &groups[0].0.2));
    let mut all = Vec::new();
    for ((suite, model, device), records) in groups {
        for mut table in of_suite(&suite, &records, by_layer) {
            if !one_setting {
                table.title = format!("{} · {model} · {device}", table.title);
            }
            all.push(table);
        }
    }
    all
}

/// The tables of one suite's records.
pub(super) fn of_suite(suite: &str, records: &[&Record], by_layer: bool) -> Vec<Table> {
    let mut tables = match suite {
        "quality" => quality(records),
        "evaluate" => evaluate(records),
        "attention" => attention(records, by_layer),
        "throughput" => vec![throughput(records)],
        "kernels" => kernels(records),
        "paper" => paper(records),
        _ => vec![generic(suite, records)],
    };
    // The first table sums up; the others say it of each number.
    if let Some(first) = tables.first_mut() {
        first.means_over = samples::samples(records);
    }
    tables.retain(|table| !table.rows.is_empty());
    tables
}

fn quality(records: &[&Record]) -> Vec<Table> {
    let modes = [("", None), ("\naware", Some(mode::AWARE)), ("\nagnostic", Some(mode::AGNOSTIC))];
    let mut picks = Vec::new();
    let metrics = [
        (metric::EXACT_MATCH, "exact\nmatch"),
        (metric::ANSWER_LOGPROB, "answer\nlogprob"),
        (metric::KL_DIVERGENCE, "KL\nnats"),
        (metric::AGREEMENT, "agree-\nment"),
    ];
    for (metric, head) in metrics {
        for (suffix, mode) in modes {
            let head = head.to_string() + suffix;
            picks.push(Pick::when(head, metric, move |r| r.case.mode.as_deref() == mode));
        }
    }
    let more = [
        metric::PERPLEXITY,
        metric::PREFILL_PERPLEXITY,
        metric::TEXT_KL_DIVERGENCE,
        metric::RETRIEVAL_RATIO,
        metric::TOKENS_READ,
        metric::DROPPED_VOTES,
        metric::LIVE_BYTES,
    ];
    picks.extend(more.map(Pick::all));
    let mut first = build("Quality".into(), records, &[Key::Budget], &picks);
    let has = |metric: &str| records.iter().any(|r| r.metric == metric);
    if has(metric::RETRIEVAL_RATIO) && has(metric::PERPLEXITY) {
        first.legend.push(OF_ANSWERS.into());
    }
    let mut tables = vec![first];
    tables.extend(differences::table(records));
    tables.extend(side_by_side::tables(records));

    tables.extend(by_task(records, metric::EXACT_MATCH, "Exact match by task"));
    tables
}

/// Scores of generated answers: all tasks together, and task by task.
fn evaluate(records: &[&Record]) -> Vec<Table> {
    let modes = [("\naware", mode::AWARE), ("\nagnostic", mode::AGNOSTIC)];
    let picks = modes.into_iter().map(|(suffix, mode)| {
        let takes = move |r: &Record| r.case.mode.as_deref() == Some(mode);
        Pick::when("score".to_string() + suffix, metric::SCORE, takes)
    });
    let more = [metric::NEW_TOKENS, metric::LIVE_BYTES].map(Pick::all);
    let picks: Vec<_> = picks.chain(more).collect();
    let mut tables = vec![build("Evaluation".into(), records, &[Key::Budget], &picks)];
    tables.extend(differences::table(records));
    tables.extend(by_task(records, metric::SCORE, "Score by task"));
    tables
}

/// A table of a metric for each mode, with a column for each task.
fn by_task(records: &[&Record], metric: &'static str, title: &str) -> Vec<Table> {
    let mut tables = Vec::new();
    let own = records.iter().copied().filter(|r| r.metric == metric);
    for (mode, records) in group_by(own, |r| r.case.mode.as_deref()) {
        let tasks = group_by(records.iter().copied(), |r| r.case.task.as_deref());
        let picks: Vec<_> = tasks
            .into_iter()
            .filter_map(|(task, records)| Some((task?, samples::count(&records))))
            .map(|(task, count)| {
                let takes = move |r: &Record| r.case.task.as_deref() == Some(task);
                let of = count.map(|count| format!("\n{count} {}", samples::unit(&count)));
                let head = task.to_string() + &of.unwrap_or_default();
                Pick::when(head, metric, takes)
            })
            .collect();
        let suffix = mode.map(|mode| format!(" · {mode}")).unwrap_or_default();
        let title = format!("{title}{suffix}");
        tables.push(build(title, &records, &[Key::Budget], &picks));
    }
    tables
}

fn attention(records: &[&Record], by_layer: bool) -> Vec<Table> {
    let metrics = [metric::RELATIVE_ERROR, metric::RETAINED_MASS];
    let reading = [
        metric::OVERLAP,
        metric::RETRIEVAL_RATIO,
        metric::TOKENS_READ,
        metric::QUERY_COSINE,
        metric::QUERIES_ALIKE,
    ];
    let picks: Vec<_> = metrics.into_iter().chain(reading).map(Pick::all).collect();
    let mut tables = vec![build("Attention".into(), records, &[Key::Budget], &picks)];
    let certificates = [
        metric::DROPPED_MASS,
        metric::DROPPED_BOUND,
        metric::BOUND_GT_1_SHARE,
        metric::ODDS_BOUND,
        metric::ORACLE_GAP_IN_SET,
        metric::ORACLE_GAP_IN_SET_BOUND,
        metric::ORACLE_GAP,
        metric::INFORMATION_LOSS,
        metric::WINDOW_DROPPED_MASS,
        metric::WINDOW_DROPPED_BOUND,
        metric::FROZEN_KEY_TV,
        metric::FROZEN_KEY_TV_BOUND,
        metric::RUN_FROZEN_KEY_TV,
        metric::EVICTION_RESIDUAL,
        metric::EVICTION_RESIDUAL_BOUND,
        metric::LOGIT_CHANGE,
        metric::LOGIT_CHANGE_BOUND,
        metric::OBSERVED_ERROR,
        metric::ERROR_BOUND,
        metric::BROKEN,
    ];
    let certified: Vec<&Record> =
        records.iter().copied().filter(|r| certificates.contains(&r.metric.as_str())).collect();
    if !certified.is_empty() {
        let picks: Vec<_> = certificates.into_iter().map(Pick::all).collect();
        let title = "Attention · certificates".into();
        let mut table = build(title, &certified, &[Key::Budget], &picks);
        let constants = [metric::WINDOW_DROPPED_BOUND, metric::FROZEN_KEY_TV_BOUND];
        let checked = certified.iter().filter(|r| constants.contains(&r.metric.as_str()));
        if let Some(checked) = checked.filter_map(|r| r.case.samples).max() {
            let unit = samples::unit(&checked.to_string());
            table.means_over = format!(
                "all prompts; masses outside the window, TV and their bounds, each at most 1, over \
                 {checked} {unit} that constants are checked on"
            );
        }
        tables.push(table);
    }
    let seen = |metric: &&str| records.iter().any(|record| record.metric == **metric);
    let certified = certificates.into_iter().filter(|metric| seen(metric));
    for metric in metrics.into_iter().chain(certified).filter(|_| by_layer) {
        let mut layers: Vec<usize> = records.iter().filter_map(|r| r.case.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        let pick = |layer: usize| {
            Pick::when(format!("layer\n{layer}"), metric, move |r| r.case.layer == Some(layer))
        };
        let picks: Vec<_> = layers.into_iter().map(pick).collect();
        let title = format!("Attention · {} by layer", metric::info(metric).label);
        tables.push(build(title, records, &[Key::Budget], &picks));
    }
    let heads: Vec<&Record> = records.iter().copied().filter(|r| r.case.head.is_some()).collect();
    if !heads.is_empty() {
        let metrics = [metric::RETAINED_MASS, metric::OVERLAP];
        let picks: Vec<_> = metrics.into_iter().chain(certificates).map(Pick::all).collect();
        let keys = [Key::Budget, Key::Layer, Key::Head];
        tables.push(build("Attention · by head".into(), &heads, &keys, &picks));
    }
    tables
}

fn throughput(records: &[&Record]) -> Table {
    let metrics = [
        metric::PREFILL_TOKENS_PER_SECOND,
        metric::DECODE_TOKENS_PER_SECOND,
        metric::TIME_TO_FIRST_TOKEN,
        metric::SLOWEST_STEP,
        metric::PEAK_BYTES,
        metric::LARGEST_BATCH,
        metric::RETRIEVAL_RATIO,
        metric::TOKENS_READ,
        metric::LIVE_BYTES,
        metric::HOST_BYTES,
        metric::COPY_TIME,
        metric::COPY_WAIT,
    ];
    let mut keys = vec![Key::Budget, Key::Length, Key::Batch];
    if group_by(records.iter().copied(), |r| r.case.length).len() < 2 {
        keys.retain(|key| !matches!(key, Key::Length));
    }
    build("Throughput".into(), records, &keys, &metrics.map(Pick::all))
}

/// One table for each op; a case's rows, one for each project that measured it, stand together.
fn kernels(records: &[&Record]) -> Vec<Table> {
    fn of(record: &Record) -> (&str, &str) {
        let task = record.case.task.as_deref().unwrap_or_default();
        task.split_once(' ').unwrap_or((task, ""))
    }
    let metrics = [
        metric::TIME_US,
        metric::MOVED_BYTES,
        metric::BANDWIDTH,
        metric::BANDWIDTH_FRACTION,
        metric::TERAFLOPS,
    ];
    let picks = metrics.map(Pick::all);
    let tables = group_by(records.iter().copied(), |r| of(r).0).into_iter().map(|(op, records)| {
        let rows = group_by(records.iter().copied(), |r| (of(r).1, r.policy.as_str()));
        // As first seen, but cases together.
        let cases = group_by(records.iter().copied(), |r| of(r).1);
        let rows = cases.iter().flat_map(|(case, _)| {
            rows.iter().filter(move |((of, _), _)| of == case).map(|((case, policy), records)| {
                Row {
                    keys: vec![policy.to_string(), case.to_string()],
                    cells: metrics.iter().map(|metric| Estimate::of(records, metric)).collect(),
                }
            })
        });
        let table = build(format!("Kernels · {op}"), &records, &[], &picks);
        Table { keys: vec!["by".into(), "case".into()], rows: rows.collect(), ..table }
    });
    tables.map(Table::without_empty).collect()
}

/// A table for each figure, whose name begins the task.
fn paper(records: &[&Record]) -> Vec<Table> {
    fn of(record: &Record) -> (&str, Option<&str>) {
        let task = record.case.task.as_deref().unwrap_or_default();
        task.split_once(", ").map_or((task, None), |(figure, part)| (figure, Some(part)))
    }
    let tables = group_by(records.iter().copied(), |r| of(r).0).into_iter();
    let table = |(figure, records): (&str, Vec<&Record>)| {
        let part = |record: &&Record| {
            let task = of(record).1.map(Into::into);
            Record { case: Case { task, ..record.case.clone() }, ..Record::clone(record) }
        };
        let parts: Vec<Record> = records.iter().map(part).collect();
        let table = generic("paper", &parts.iter().collect::<Vec<_>>());
        Table { title: format!("{} · {figure}", table.title), ..table }
    };
    tables.map(table).collect()
}

/// Every case a row and every metric a column.
fn generic(suite: &str, records: &[&Record]) -> Table {
    use Key::{Batch, Budget, Depth, Head, Layer, Length, Mode, Position, Task};
    let metrics = group_by(records.iter().copied(), |r| (r.metric.as_str(), r.unit.as_str()));
    let mut picks = Vec::new();
    for ((metric, unit), _) in metrics {
        // Known metrics carry their unit in their name or their numbers.
        let bare = metric::info(metric).label != metric || unit.is_empty();
        let head = if bare { Pick::all(metric).head } else { format!("{metric}\n({unit})") };
        picks.push(Pick::when(head, metric, move |r| r.unit == unit));
    }
    let title: String = suite.chars().take(1).flat_map(char::to_uppercase).collect();
    let title = title + &suite.chars().skip(1).collect::<String>();
    build(
        title,
        records,
        &[Budget, Task, Mode, Length, Depth, Layer, Head, Position, Batch],
        &picks,
    )
}

/// Builds a table; keys and columns that no record has are left out.
fn build(title: String, records: &[&Record], keys: &[Key], picks: &[Pick]) -> Table {
    let has = |key: &Key| records.iter().any(|r| key.text(r).is_some());
    let keys: Vec<Key> = keys.iter().copied().filter(has).collect();
    let ordered = by_setup(records).into_iter().flat_map(|(.., records)| records);
    let texts = |r: &Record| {
        let texts = keys.iter().map(|key| key.text(r).unwrap_or_else(|| "–".into()));
        [r.policy.clone()].into_iter().chain(texts).collect::<Vec<_>>()
    };
    let row = |(keys, records): (Vec<String>, Vec<&Record>)| {
        let cell = |pick: &Pick| {
            let taken: Vec<_> = records.iter().copied().filter(|r| (pick.takes)(r)).collect();
            Estimate::of(&taken, pick.metric)
        };
        Row { keys, cells: picks.iter().map(cell).collect() }
    };
    let column = |pick: &Pick| {
        let info = metric::info(pick.metric);
        let head = pick.head.clone();
        Column { head, kind: info.kind, higher_is_better: info.higher_is_better }
    };
    let seen = |pick: &&Pick| records.iter().any(|r| r.metric == pick.metric && (pick.takes)(r));
    let legend = picks.iter().filter(seen).filter_map(|pick| metric::legend(pick.metric));
    let mut legend: Vec<String> = legend.map(Into::into).collect();
    legend.dedup();
    Table {
        title,
        means_over: String::new(),
        legend,
        keys: ["policy"].into_iter().chain(keys.iter().map(Key::head)).map(Into::into).collect(),
        columns: picks.iter().map(column).collect(),
        rows: group_by(ordered, texts).into_iter().map(row).collect(),
    }
    .without_empty()
}

impl Key {
    fn head(&self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Task => "task",
            Self::Mode => "mode",
            Self::Length => "length",
            Self::Depth => "depth",
            Self::Layer => "layer",
            Self::Head => "head",
            Self::Position => "position",
            Self::Batch => "batch",
        }
    }

    fn text(&self, record: &Record) -> Option<String> {
        let case = &record.case;
        match self {
            Self::Budget => record.budget.map(|_| format::budget(record.budget)),
            Self::Task => case.task.clone(),
            Self::Mode => case.mode.clone(),
            Self::Length => case.length.map(format::tokens),
            Self::Depth => case.depth.map(format::percent),
            Self::Layer => case.layer.map(|layer| layer.to_string()),
            Self::Head => case.head.map(|head| head.to_string()),
            Self::Position => case.position.map(|position| position.to_string()),
            Self::Batch => case.batch.map(|batch| batch.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::record;

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
    fn columns_that_do_not_explain_themselves_have_a_legend() {
        let table = |metrics: &[&str]| {
            let records: Vec<_> =
                metrics.iter().map(|metric| record("a", Some(0.5), metric, 0.5)).collect();
            tables(&records, false).remove(0)
        };
        let all = [metric::LIVE_BYTES, metric::DROPPED_VOTES, metric::RETRIEVAL_RATIO];
        let legend = table(&all).legend;
        let begins = |line: &str| legend.iter().filter(|own| own.starts_with(line)).count();
        assert_eq!(legend.len(), 3, "{legend:?}");
        for name in ["live memory: ", "dropped votes: ", "retrieval ratio: "] {
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

    /// A case's rows stand together, op by op.
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
}
