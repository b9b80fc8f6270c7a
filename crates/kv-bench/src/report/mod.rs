//! The report: one HTML file that needs nothing else, with a table and figures for every suite.

mod axis;
mod bars;
mod charts;
mod differences;
mod figure;
mod heatmap;
pub(crate) mod layouts;
mod lines;
pub(crate) mod overview;
mod page;
mod policies;
pub(crate) mod samples;
mod side_by_side;
mod suites;
mod svg;
#[cfg(test)]
pub(crate) mod test_records;

use std::path::Path;

use anyhow::Context;

use crate::files::replace;
use crate::record::Record;
use crate::table::Table;

/// Writes the report of some records.
///
/// Notes are shown above the numbers, and the table `first`, if there is one, before all others.
/// The folder of `path` must exist.
///
/// # Errors
/// If a figure cannot be drawn or the file cannot be written.
pub(crate) fn write_html(
    path: &Path,
    title: &str,
    notes: &[String],
    records: &[Record],
    first: Option<&Table>,
) -> anyhow::Result<()> {
    let html = page::page(title, notes, records, first)?;
    replace(path, |file| file.write_all(html.as_bytes()))
        .with_context(|| format!("writing the report to {}", path.display()))
}

#[cfg(test)]
mod tests;
