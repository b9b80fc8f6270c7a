//! KeepKV, figure 2: attention that merges lose (c), and how well scores are predicted (d).

use super::{predictors, sag};
use crate::args::Paper;
use crate::bench::ModelBench;

/// The prompts and tokens that attention and predicted scores are measured on.
pub(super) struct Size {
    /// Prompts.
    pub(super) prompts: usize,
    /// Tokens of the text; its second half is decoded.
    pub(super) tokens: usize,
    /// Steps of the second half at which scores are predicted.
    pub(super) steps: usize,
}

const PAPER: Size = Size { prompts: 8, tokens: 2_048, steps: 32 };
const QUICK: Size = Size { prompts: 2, tokens: 384, steps: 8 };

/// Runs both parts.
///
/// # Errors
/// For texts that are too short, and where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let size = if bench.common.quick { QUICK } else { PAPER };
    sag::run(bench, options, &size)?;
    predictors::run(bench, options, &size)
}
