//! The report: one HTML file that needs nothing else, with a table and figures for every suite.

mod answers;
mod axis;
mod bars;
mod charts;
mod differences;
mod evaluation;
mod figure;
mod heatmap;
pub(crate) mod layouts;
mod leaderboard;
mod lines;
pub(crate) mod overview;
mod page;
mod policies;
mod questions;
pub(crate) mod samples;
mod side_by_side;
mod suites;
mod svg;
#[cfg(test)]
pub(crate) mod test_records;
mod tradeoff;

pub(crate) use page::Page;
pub(crate) use questions::{ShownAnswer, ShownQuestion};

#[cfg(test)]
mod tests;
