//! What `fisher` takes.

use std::path::PathBuf;

use anyhow::ensure;

use crate::options::{Common, positive};

/// Options of `fisher`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FisherArgs {
    /// Text to measure on, best of the kind that the model will read.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: PathBuf,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) window: usize,
    /// Windows, spread over the text.
    #[arg(long, default_value_t = 16, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) samples: usize,
    /// Where the numbers go; by default fisher.json in the model's folder, where policies with
    /// `"layers": "fisher"` look for it.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
}

impl FisherArgs {
    /// Refuses what only suites take.
    pub(crate) fn check(&self, common: &Common) -> anyhow::Result<()> {
        ensure!(common.policy.is_none(), "--policy: fisher measures a model, not policies");
        ensure!(common.budget.is_none(), "--budget: fisher measures a model, not policies");
        ensure!(common.json.is_none(), "--json: fisher writes its numbers to --output");
        ensure!(common.merge.is_empty(), "--merge: fisher has no records");
        ensure!(common.report.is_none(), "--report: fisher has none");
        ensure!(!common.quick, "--quick: give fewer --samples instead");
        Ok(())
    }
}
