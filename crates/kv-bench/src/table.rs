//! Tables of records, which the terminal and the report show as rows of numbers.

use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{Cell, CellAlignment};

use crate::format::{self, Kind};
use crate::interval::Estimate;
use crate::record::is_full;

/// Characters that a line of a table may have.
const WIDTH: usize = 110;
/// The legend of intervals.
const INTERVALS: &str = "± and brackets: 95 % confidence interval of the mean";

/// One row a case, one column a metric; the first key is the policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// The title.
    pub(crate) title: String,
    /// The samples that its numbers are means over; it may be empty.
    pub(crate) means_over: String,
    /// Lines that explain its columns.
    pub(crate) legend: Vec<String>,
    /// Headings of the columns that name a row.
    pub(crate) keys: Vec<String>,
    /// The columns of numbers.
    pub(crate) columns: Vec<Column>,
    /// The rows.
    pub(crate) rows: Vec<Row>,
}

/// A column of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    /// The heading; it may have two lines.
    pub(crate) head: String,
    /// How its numbers are written.
    pub(crate) kind: Kind,
    /// Whether more is better, where that can be said.
    pub(crate) higher_is_better: Option<bool>,
}

/// A row: the texts that name it, and a number (or none) for each column.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// The texts of the key columns.
    pub(crate) keys: Vec<String>,
    /// The numbers.
    pub(crate) cells: Vec<Option<Estimate>>,
}

/// Tables as lines of text.
pub(crate) fn text(tables: &[Table]) -> String {
    tables.iter().map(|table| table.to_text() + "\n").collect()
}

impl Table {
    /// Leaves out the columns and the rows that have no number.
    pub(crate) fn without_empty(mut self) -> Self {
        let filled = |i: usize| self.rows.iter().any(|row| row.cells[i].is_some());
        let keep: Vec<bool> = (0..self.columns.len()).map(filled).collect();
        let mut kept = keep.iter();
        self.columns.retain(|_| kept.next() == Some(&true));
        for row in &mut self.rows {
            let mut kept = keep.iter();
            row.cells.retain(|_| kept.next() == Some(&true));
        }
        self.rows.retain(|row| row.cells.iter().any(Option::is_some));
        self
    }

    /// Whether any number has an interval.
    fn has_intervals(&self) -> bool {
        let mut cells = self.rows.iter().flat_map(|row| &row.cells);
        cells.any(|cell| cell.is_some_and(|number| number.interval.is_some()))
    }

    /// The lines that explain its columns and its intervals.
    pub(crate) fn legend(&self) -> impl Iterator<Item = &str> {
        let intervals = self.has_intervals().then_some(INTERVALS);
        self.legend.iter().map(String::as_str).chain(intervals)
    }

    /// The text of one number.
    pub(crate) fn text(&self, row: usize, column: usize) -> String {
        let kind = self.columns[column].kind;
        self.rows[row].cells[column].map_or("–".into(), |number| format::value(kind, number.mean))
    }

    /// The text of one number's interval, if it has one.
    pub(crate) fn interval(&self, row: usize, column: usize) -> Option<String> {
        let interval = self.rows[row].cells[column]?.interval?;
        Some(format::interval(self.columns[column].kind, interval))
    }

    fn text_with_interval(&self, row: usize, column: usize) -> String {
        let interval = self.interval(row, column).map(|interval| format!(" {interval}"));
        self.text(row, column) + &interval.unwrap_or_default()
    }

    /// Whether a policy's number is the best of its column among rows that differ only in the
    /// policy, as far as it is shown. The full cache takes no part, and neither does a number that
    /// most others reach.
    pub(crate) fn is_best(&self, row: usize, column: usize) -> bool {
        let this = &self.rows[row];
        let Some(higher) = self.columns[column].higher_is_better else { return false };
        let rival = |other: &usize| {
            let keys = &self.rows[*other].keys;
            !is_full(&keys[0]) && keys[1..] == this.keys[1..]
        };
        let number =
            |row: usize| Some(self.rows[row].cells[column]?.mean).filter(|v| v.is_finite());
        let rivals: Vec<(f64, usize)> = (0..self.rows.len())
            .filter(rival)
            .filter_map(|other| Some((number(other)?, other)))
            .collect();
        let best = rivals.iter().max_by(|a, b| {
            let order = a.0.total_cmp(&b.0);
            if higher { order } else { order.reverse() }
        });
        let Some(best) = best.map(|best| self.text(best.1, column)) else { return false };
        let equals = rivals.iter().filter(|other| self.text(other.1, column) == best).count();
        rival(&row) && self.text(row, column) == best && 2 * equals <= rivals.len()
    }

    /// The table as lines of text; columns that do not fit follow in further tables below.
    pub(crate) fn to_text(&self) -> String {
        let lines = |text: &str| text.lines().map(|l| l.chars().count()).max().unwrap_or(0);
        let column_width = |i: usize| {
            let text = |row: usize| self.text_with_interval(row, i).chars().count();
            let texts = (0..self.rows.len()).map(text);
            texts.max().unwrap_or(0).max(lines(&self.columns[i].head)) + 2
        };
        let key_width = |i: usize| {
            self.rows
                .iter()
                .map(|row| lines(&row.keys[i]))
                .max()
                .unwrap_or(0)
                .max(lines(&self.keys[i]))
                + 2
        };
        let keys = (0..self.keys.len()).map(key_width).sum::<usize>() + 3;
        let mut chunks: Vec<Vec<usize>> = vec![Vec::new()];
        let mut width = keys;
        for i in 0..self.columns.len() {
            if width + column_width(i) > WIDTH && chunks.last().is_some_and(|c| !c.is_empty()) {
                chunks.push(Vec::new());
                width = keys;
            }
            width += column_width(i);
            chunks.last_mut().into_iter().for_each(|chunk| chunk.push(i));
        }
        let chunks: Vec<String> = chunks.iter().map(|chunk| self.chunk(chunk)).collect();
        let above = [self.title.as_str(), &self.means_over];
        let above = above.into_iter().filter(|text| !text.is_empty());
        let above: Vec<&str> = above.chain(self.legend()).collect();
        format!("{}\n{}\n", above.join("\n"), chunks.join("\n"))
    }

    fn chunk(&self, columns: &[usize]) -> String {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        // Only the policy is text; other keys are mostly numbers.
        let key = |(i, text): (usize, &String)| match i {
            0 => Cell::new(text),
            _ => right(text.clone()),
        };
        let mut table = comfy_table::Table::new();
        table.load_preset(UTF8_BORDERS_ONLY);
        let heads = columns.iter().map(|&i| right(self.columns[i].head.clone()));
        table.set_header(self.keys.iter().enumerate().map(key).chain(heads));
        let mut previous: Option<&Row> = None;
        for (i, row) in self.rows.iter().enumerate() {
            // A policy's name stands only on its first row.
            let repeated = previous.is_some_and(|p| p.keys[0] == row.keys[0]);
            let blank = String::new();
            let names = row
                .keys
                .iter()
                .enumerate()
                .map(|(k, text)| key((k, if k == 0 && repeated { &blank } else { text })));
            let numbers = columns.iter().map(|&c| right(self.text_with_interval(i, c)));
            table.add_row(names.chain(numbers).collect::<Vec<_>>());
            previous = Some(row);
        }
        let last = self.keys.len() + columns.len() - 1;
        for (i, column) in table.column_iter_mut().enumerate() {
            column.set_padding((1, (i == last) as u16));
        }
        table.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{FULL, metric};
    use crate::report::layouts::tables;
    use crate::report::test_records::{self, record};

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
                record(policy, budget, metric::LIVE_BYTES, bytes)
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
    fn intervals_stand_behind_their_means() {
        let of = |policy: &str, metric: &str, values: [f64; 4]| {
            let record = |(i, value): (usize, f64)| {
                let record = record(policy, Some(0.5), metric, value);
                test_records::of_prompt(record, &i.to_string())
            };
            values.into_iter().enumerate().map(record).collect::<Vec<_>>()
        };
        let records = [
            of("a", metric::EXACT_MATCH, [1.0, 1.0, 1.0, 0.0]),
            of("b", metric::EXACT_MATCH, [0.0, 0.0, 1.0, 0.0]),
            of("a", metric::KL_DIVERGENCE, [0.1, 0.2, 0.3, 0.4]),
        ];
        let table = &tables(&records.concat(), false)[0];
        let text = table.to_text();
        for number in ["75.0 % (19–99)", "25.0 % (1–81)", "0.250 ± 0.21", INTERVALS] {
            assert!(text.contains(number), "{number}: {text}");
        }
        // Means are compared, however they are written.
        assert!(table.is_best(0, 0) && !table.is_best(1, 0));
        let bare = tables(&[record("a", None, metric::LIVE_BYTES, 4.0)], false)[0].to_text();
        assert!(!bare.contains(INTERVALS));
    }

    #[test]
    fn tables_stay_narrow() {
        for table in tables(&test_records::records(), true) {
            for line in table.to_text().lines() {
                assert!(line.chars().count() <= WIDTH, "{}: {line}", table.title);
            }
        }
    }
}
