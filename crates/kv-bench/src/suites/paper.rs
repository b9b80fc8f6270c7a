//! Papers' tables and figures at their settings.

pub(crate) mod balancekv_end_to_end;
pub(crate) mod balancekv_fig1;
pub(crate) mod balancekv_fig3;
pub(crate) mod balancekv_stream;
mod by_batch;
mod keepkv;
pub(crate) mod kvreviver;
mod layer;
pub(crate) mod longflow_fig1;
pub(crate) mod longflow_fig4;
#[cfg(test)]
mod longflow_tests;
pub(crate) mod prhs;
#[cfg(test)]
mod testing;

use crate::args::{Figure, Paper};
use crate::run::Bench;

const SUITE: &str = "paper";

/// Runs what needs a model.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    match options.figure {
        Figure::BalancekvFig1 => balancekv_fig1::run(bench),
        Figure::BalancekvTable2 => balancekv_end_to_end::table2(bench),
        Figure::BalancekvNeedle => balancekv_end_to_end::needle(bench),
        Figure::LongflowFig4 => longflow_fig4::run(bench, options),
        Figure::KeepkvTable1 => keepkv::table1::run(bench, options),
        Figure::KeepkvFig2 => keepkv::fig2::run(bench, options),
        Figure::KeepkvFig5
        | Figure::KeepkvTable3
        | Figure::KeepkvTable4
        | Figure::KeepkvLossless => keepkv::quality::run(bench, options),
        Figure::KvreviverTable1 => kvreviver::table1::run(bench, options),
        Figure::KvreviverTable2
        | Figure::KvreviverTable3
        | Figure::KvreviverFig5
        | Figure::KvreviverFig6 => kvreviver::quality::run(bench, options),
        Figure::PrhsTable2 | Figure::PrhsTable6 => prhs::quality::run(bench, options),
        Figure::PrhsTable5 => prhs::throughput::run(bench, options),
        Figure::PrhsFig7 | Figure::PrhsFig8 => prhs::overlap::run(bench, options),
        // Those of bare tensors have run without a model.
        Figure::LongflowFig1
        | Figure::BalancekvFig3
        | Figure::BalancekvStream
        | Figure::KvreviverAttention
        | Figure::KvreviverBounds
        | Figure::PrhsTable4
        | Figure::PrhsLong => Ok(()),
    }
}
