//! What `calibrate` takes.

use std::path::PathBuf;

use anyhow::ensure;
use clap::ValueEnum;
use kv_policies::ChannelStatistic;

use crate::options::{Common, positive};

/// Options of `calibrate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CalibrateArgs {
    /// Text to measure on, best of the kind that the model will read.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: PathBuf,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) window: usize,
    /// Windows, spread over the text.
    #[arg(long, default_value_t = 16, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) samples: usize,
    /// What says how much a channel matters.
    #[arg(long, value_enum, default_value_t = Statistic::Product)]
    pub(crate) statistic: Statistic,
    /// Where the channels go; by default channels.json in the model's folder. Policies find them by
    /// `"channels": "FILE.json"`.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
}

/// What says how much a channel matters: its mean over all tokens, after RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Statistic {
    /// |q k| of a token's own query and key.
    Product,
    /// |q|
    Query,
    /// |k|
    Key,
}

impl From<Statistic> for ChannelStatistic {
    fn from(statistic: Statistic) -> Self {
        match statistic {
            Statistic::Product => Self::Product,
            Statistic::Query => Self::Query,
            Statistic::Key => Self::Key,
        }
    }
}

impl CalibrateArgs {
    /// Refuses what only suites take.
    pub(crate) fn check(&self, common: &Common) -> anyhow::Result<()> {
        ensure!(common.policy.is_none(), "--policy: calibrate measures a model, not policies");
        ensure!(common.budget.is_none(), "--budget: calibrate measures a model, not policies");
        ensure!(common.json.is_none(), "--json: calibrate writes its channels to --output");
        ensure!(common.merge.is_empty(), "--merge: calibrate has no records");
        ensure!(common.report.is_none(), "--report: calibrate has none");
        ensure!(!common.quick, "--quick: give fewer --samples instead");
        Ok(())
    }
}
