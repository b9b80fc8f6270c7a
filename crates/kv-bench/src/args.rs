//! The command line: a suite, and its options.

use clap::{Parser, Subcommand};

use crate::figures::Paper;
use crate::options::{
    Attention, CalibrateOptions, Common, Evaluate, FisherOptions, Kernels, Quality, Throughput,
};

/// Measures the cost and the quality of KV-cache compression policies.
///
/// Without a suite: a quick comparison of all policies on the embedded model and prompts.
#[derive(Debug, Parser)]
#[command(name = "kv-bench", version)]
pub(crate) struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub(crate) suite: Option<Suite>,
    /// Without a suite: shows all tables of the overview rather than the best policy of each
    /// family.
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// The suites.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Suite {
    /// Retrieval and perplexity: exact match, the answer's log-probability, agreement with the full
    /// cache, by task, length and depth.
    Quality(Quality),
    /// Free generation on tasks (RULER, LongBench, GSM8K and others, or a file of questions),
    /// graded.
    Evaluate(Evaluate),
    /// Relative output error and retained attention mass on real queries, keys and values.
    Attention(Attention),
    /// Prefill and decode speed, time to the first token, bytes.
    Throughput(Throughput),
    /// Kernels on bare tensors, on GPUs: time, bandwidth, rate.
    Kernels(Kernels),
    /// A paper's table or figure; its notes list the differences from the paper.
    Paper(Paper),
    /// Measures the Fisher information of a model's keys and values, layer by layer. Policies with
    /// `"layers": "fisher"` share their budget in proportion to it.
    Fisher(FisherOptions),
    /// Finds the channels of queries and keys that matter most, head by head. Policies with
    /// `"channels": "FILE.json"` approximate attention by these channels.
    Calibrate(CalibrateOptions),
    /// Lists policies, models and devices.
    List,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_say_what_is_expected() {
        let whole = "expected a whole number, at least 1";
        for (line, part) in [
            ("quality --limit 0", whole),
            ("quality --limit -3", whole),
            ("quality --lengths 512,-1", whole),
            ("attention --limit 0", whole),
            ("attention --steps 0", whole),
            ("attention --layers -1,2", "invalid digit"),
            ("throughput --steps 0", whole),
            ("throughput --lengths -5,8", whole),
            ("throughput --batches 0", whole),
            ("throughput --memory-cap -1", "expected a number above 0"),
            ("fisher --text t --samples 0", whole),
            ("fisher --text t --window -5", whole),
            ("--budget -0.5", "a share must be above 0"),
            ("--budget -0.5,0.25", "a share must be above 0"),
            ("--seed -1", "invalid digit"),
        ] {
            let words = std::iter::once("kv-bench").chain(line.split(' '));
            let error = Args::try_parse_from(words).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
