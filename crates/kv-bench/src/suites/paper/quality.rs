//! What figures of quality share: who runs answers prompts and is scored on texts.

use kv_core::Budget;

use crate::args::Paper;
use crate::bench::ModelBench;
use crate::contenders::Contender;
use crate::prompts::Prompts;
use crate::suites::perplexity::{self, Text};
use crate::suites::quality;

/// Runs a figure's own contenders, the full cache first, as far as `--policy` names them, and those
/// that it adds. Returns who ran, and the texts.
///
/// # Errors
/// Where a policy or the device refuses.
pub(super) fn run(
    bench: &mut ModelBench<'_>,
    options: &Paper,
    own: Vec<Contender>,
    budgets: &[Budget],
) -> anyhow::Result<(Vec<Contender>, Vec<Text>)> {
    let contenders = bench.common.chosen_or_added(own, budgets)?;
    let quick = bench.common.quick;
    let wanted = options.wanted(quick).unwrap_or_default();
    let prompts = Prompts::read(&wanted)?;
    // Read first: a text that is too short must not cost a finished retrieval.
    let texts = match options.reads_text() {
        true => Text::read(bench, options.text.as_deref(), &options.contexts)?,
        false => Vec::new(),
    };
    quality::retrieval(bench, &contenders, prompts, options.mode(quick).unwrap_or_default())?;
    perplexity::run(bench, &contenders, texts.clone())?;
    Ok((contenders, texts))
}
