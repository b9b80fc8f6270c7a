//! Papers' tables and figures.

pub(crate) mod balancekv_end_to_end;
pub(crate) mod balancekv_fig1;
pub(crate) mod balancekv_fig3;
pub(crate) mod balancekv_stream;
pub(crate) mod balancekv_table3;
mod by_batch;
mod keepkv;
pub(crate) mod kvreviver;
mod layer;
pub(crate) mod longflow_fig1;
pub(crate) mod longflow_fig4;
#[cfg(test)]
mod longflow_tests;
pub(crate) mod prhs;
mod quality;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use crate::args::{Figure, Paper};
use crate::bench::{Bench, ModelBench};

const SUITE: &str = "paper";

/// Runs a figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench, options: &Paper) -> anyhow::Result<()> {
    match options.figure {
        Figure::LongflowFig1 => return longflow_fig1::run(bench),
        Figure::BalancekvFig3 if options.is_made_up(&bench.common) => {
            return balancekv_fig3::run(bench);
        }
        Figure::BalancekvStream => return balancekv_stream::run(bench),
        Figure::KvreviverAttention => return kvreviver::attention::run(bench, options),
        Figure::KvreviverBounds => return kvreviver::bounds::run(bench),
        Figure::PrhsTable4 | Figure::PrhsLong => return prhs::operator::run(bench, options),
        _ => {}
    }
    let name = options.figure.model(&bench.common.model, bench.common.quick).to_string();
    let bench = &mut ModelBench::load(bench, &name)?;
    match options.figure {
        Figure::BalancekvFig1 => balancekv_fig1::run(bench, options),
        Figure::BalancekvFig3 => balancekv_fig3::run_on_prompts(bench, options),
        Figure::BalancekvTable2 => balancekv_end_to_end::table2(bench),
        Figure::BalancekvTable3 => balancekv_table3::run(bench, options),
        Figure::BalancekvNeedle => balancekv_end_to_end::needle(bench, options),
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
        | Figure::BalancekvStream
        | Figure::KvreviverAttention
        | Figure::KvreviverBounds
        | Figure::PrhsTable4
        | Figure::PrhsLong => Ok(()),
    }
}
