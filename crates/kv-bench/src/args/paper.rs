//! Papers' tables and figures, and what each of them takes.

use std::path::PathBuf;

use anyhow::ensure;
use clap::ValueEnum;

use super::{Common, MODEL, gibibytes, positive};

/// The CPU's name as a device.
const CPU: &str = "cpu";

/// Options of `paper`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Paper {
    /// Which one; `--quick` takes sizes for small machines.
    #[arg(value_enum)]
    pub(crate) figure: Figure,
    /// Memory in GiB that a run may take; by default that of the paper's GPU.
    #[arg(long, value_name = "GIB", value_parser = gibibytes, allow_negative_numbers = true)]
    pub(crate) memory_cap: Option<f64>,
    /// Figures of KeepKV, KVReviver and PrHS: prompts, as in `quality`.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// Figures of KeepKV, KVReviver and PrHS: at most this many prompts, spread over tasks and lengths.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// Figures of KeepKV, KVReviver and PrHS: held-out text, as in `quality`.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: Option<PathBuf>,
    /// Figures of KeepKV, KVReviver and PrHS: tokens of the text that are contexts, as in `quality`.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) contexts: Vec<usize>,
    /// `kvreviver-attention`, `prhs-table4`, `prhs-long` and `prhs-table5`: tokens, in place of the figure's own.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lengths: Vec<usize>,
    /// The same figures: sequences at once, in place of the figure's own; `keepkv-table1` and `kvreviver-table1`: in place
    /// of batches that grow until memory ends.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) batches: Vec<usize>,
}

/// Tables and figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Figure {
    /// Attention with an eviction: LongFlow, H2O, VATP, and attention alone.
    LongflowFig1,
    /// Throughput and memory of long outputs: full, H2O, VATP, R-KV, LongFlow.
    LongflowFig4,
    /// Attention error by layer and rate: BalanceKV and uniform sampling.
    BalancekvFig1,
    /// Error and run time of BalanceKV by block and rate.
    BalancekvFig3,
    /// Precision of streams against slots (theorem 3.1).
    BalancekvStream,
    /// Prefill and decode speed: full, SnapKV, PyramidKV, StreamingLLM, BalanceKV.
    BalancekvTable2,
    /// Retrieval by share dropped: the same, the augmented form and uniform sampling.
    BalancekvNeedle,
    /// Throughput and memory by batch, and what merging costs of a step: full, H2O, D2O, KeepKV.
    KeepkvTable1,
    /// Attention that merges lose, and how well scores are predicted.
    KeepkvFig2,
    /// Retrieval and perplexity of evictions with and without KeepKV.
    KeepkvFig5,
    /// The same of KeepKV that merges before and behind the eviction.
    KeepkvTable3,
    /// The same of KeepKV by the cosine that merged keys must exceed.
    KeepkvTable4,
    /// The same, and attention error, by the period of KeepKV's lossless mode.
    KeepkvLossless,
    /// Throughput and memory by batch: full, and KVReviver that attends to its sketch or rebuilds.
    KvreviverTable1,
    /// Retrieval and perplexity of KVReviver by the sketch's share.
    KvreviverTable2,
    /// The same by the shares of candidates and recents.
    KvreviverTable3,
    /// Retrieval by length and depth at 25 %: KVReviver and others.
    KvreviverFig5,
    /// Retrieval and perplexity by budget: KVReviver and others.
    KvreviverFig6,
    /// Time of a step's attention over the sketch, over the cache rebuilt, and over a full cache.
    KvreviverAttention,
    /// Variance of the sketch's estimates against the paper's bound.
    KvreviverBounds,
    /// Retrieval and perplexity, and how often heads retrieve: CIS, HShare, Quest, Double Sparsity, H2O.
    PrhsTable2,
    /// Time of a step's attention, choices included: CIS, CPE, HShare, Quest, Double Sparsity, H2O, the oracle.
    PrhsTable4,
    /// The same beyond the paper: 8k to 128k tokens, groups of 4 and 8.
    PrhsLong,
    /// Decode throughput at 1/8: the same.
    PrhsTable5,
    /// Retrieval and perplexity of CIS*, PSAW, ETF and CPE with other parameters.
    PrhsTable6,
    /// Attention that is read of real prompts, by how often heads retrieve; bounds on what is dropped.
    PrhsFig7,
    /// The same by how many tokens bring their neighbours along.
    PrhsFig8,
}

impl Paper {
    /// Refuses what the figure does not take.
    pub(crate) fn check(&self, common: &Common) -> anyhow::Result<()> {
        let name = self.figure.name();
        ensure!(
            common.model == MODEL || self.figure.takes_models(),
            "--model: {name} runs at its paper's size"
        );
        ensure!(common.budget.is_none(), "--budget: {name} has its paper's budgets");
        ensure!(
            common.policy.is_none() || self.figure.chooses(),
            "--policy: {name} runs all of its own"
        );
        if !self.figure.climbs() && self.figure != Figure::LongflowFig4 {
            ensure!(self.memory_cap.is_none(), "--memory-cap: {name} has one size");
        }
        if !self.figure.reads() {
            ensure!(self.prompts.is_none(), "--prompts: {name} has its own");
            ensure!(self.limit.is_none(), "--limit: {name} has its own prompts");
        }
        if !self.figure.reads_text() {
            ensure!(self.text.is_none(), "--text: {name} reads no text");
            ensure!(self.contexts.is_empty(), "--contexts: {name} reads no text");
        }
        if !self.figure.sized() || common.quick {
            let one = common.quick && self.figure.sized();
            let why = if one { "--quick has one size" } else { "it has the paper's sizes" };
            ensure!(self.lengths.is_empty(), "--lengths: {name}: {why}");
            let grows = self.figure.climbs() && !common.quick;
            ensure!(grows || self.batches.is_empty(), "--batches: {name}: {why}");
        }
        if matches!(self.figure, Figure::BalancekvStream | Figure::KvreviverBounds) {
            ensure!(common.dtype.is_none(), "--dtype: {name} is in f32");
        }
        ensure!(
            self.memory_cap.is_none() || !common.quick || self.figure.climbs(),
            "--memory-cap: with --quick no batch is the largest"
        );
        Ok(())
    }
}

impl Paper {
    /// Refuses what would take a CPU hours.
    pub(crate) fn check_device(&self, device_name: &str, quick: bool) -> anyhow::Result<()> {
        // Whole models are beyond it at any length.
        let sized = !self.lengths.is_empty() && !self.figure.takes_models();
        let on_cpu = device_name == CPU && !quick && !sized;
        ensure!(
            !(on_cpu && self.figure.wants_gpu()),
            "{} has the paper's sizes, for GPUs; on the CPU, add --quick",
            self.figure.name()
        );
        Ok(())
    }
}

impl Figure {
    /// As the command line has it.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
    }

    /// Whether any model may run it.
    fn takes_models(self) -> bool {
        let more = [Self::BalancekvFig1, Self::BalancekvNeedle, Self::PrhsTable5];
        self.reads() || self.climbs() || more.contains(&self)
    }

    /// Whether it measures perplexity.
    fn reads_text(self) -> bool {
        let prompts_alone = [Self::KvreviverFig5, Self::PrhsFig7, Self::PrhsFig8];
        self.reads() && !prompts_alone.contains(&self)
    }

    /// Whether it takes prompts.
    fn reads(self) -> bool {
        use Figure::{
            KeepkvFig2, KeepkvFig5, KeepkvLossless, KeepkvTable3, KeepkvTable4, KvreviverFig5,
            KvreviverFig6, KvreviverTable2, KvreviverTable3, PrhsFig7, PrhsFig8, PrhsTable2,
            PrhsTable6,
        };
        [
            KeepkvFig2,
            KeepkvFig5,
            KeepkvTable3,
            KeepkvTable4,
            KeepkvLossless,
            KvreviverTable2,
            KvreviverTable3,
            KvreviverFig5,
            KvreviverFig6,
            PrhsTable2,
            PrhsTable6,
            PrhsFig7,
            PrhsFig8,
        ]
        .contains(&self)
    }

    /// Whether `--policy` chooses among those that it runs.
    fn chooses(self) -> bool {
        self.climbs() || self == Self::LongflowFig4 || self.name().starts_with("prhs")
    }

    /// Whether lengths and batches may be others than its own.
    fn sized(self) -> bool {
        matches!(
            self,
            Self::KvreviverAttention | Self::PrhsTable4 | Self::PrhsLong | Self::PrhsTable5
        )
    }

    /// Whether its sizes are out of a CPU's reach.
    fn wants_gpu(self) -> bool {
        let times = [Self::LongflowFig1, Self::LongflowFig4, Self::BalancekvTable2];
        self.climbs() || self.sized() || times.contains(&self)
    }

    /// Whether it grows batches until memory ends.
    fn climbs(self) -> bool {
        matches!(self, Self::KeepkvTable1 | Self::KvreviverTable1)
    }

    /// The model that it runs, given the one that was asked for.
    pub(crate) fn model(self, asked: &str, quick: bool) -> &str {
        match (self, quick) {
            (Self::LongflowFig4, false) => "random:qwen3-1.7b",
            (Self::BalancekvTable2, false) => "random:llama-3.1-8b",
            (Self::PrhsTable5, false) if asked == MODEL => "random:llama-2-7b",
            (figure, false) if figure.climbs() && asked == MODEL => "random:llama-2-7b",
            _ => asked,
        }
    }
}
