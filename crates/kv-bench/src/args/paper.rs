//! Papers' tables and figures, and the options that each of them takes.

mod definition;

use std::path::PathBuf;

use anyhow::ensure;
use clap::ValueEnum;
use kv_core::Budget;

use crate::options::{Common, MODEL, gibibytes, positive};
use crate::prompts::{Mode, Wanted};
use definition::{ModelChoice, PolicyChoice};

/// The CPU's name as a device.
const CPU: &str = "cpu";
/// Prompts of the quick forms of figures that take many.
const QUICK_PROMPTS: usize = 4;

/// Options of `paper`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Paper {
    /// Which one; `--quick` takes sizes for small machines.
    #[arg(value_enum)]
    pub(crate) figure: Figure,
    /// Memory in GiB that a run may take; by default the memory of the paper's GPU.
    #[arg(long, value_name = "GIB", value_parser = gibibytes, allow_negative_numbers = true)]
    pub(crate) memory_cap: Option<f64>,
    /// Figures of prompts: a file, as in `quality`.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// Figures of prompts: at most this many, spread over tasks and lengths.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// Figures of retrieval: when compression happens, in place of the figure's own.
    #[arg(long, value_enum)]
    pub(crate) mode: Option<Mode>,
    /// Figures of perplexity: held-out text, as in `quality`.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: Option<PathBuf>,
    /// Figures of perplexity: tokens of the text that are contexts, as in `quality`.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) contexts: Vec<usize>,
    /// Figures of prompts: only those of these lengths. `kvreviver-attention`, `prhs-table4`,
    /// `prhs-long` and `prhs-table5`: tokens, in place of the figure's own.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lengths: Vec<usize>,
    /// `kvreviver-attention`, `prhs-table4`, `prhs-long` and `prhs-table5`: sequences at once, in
    /// place of the figure's own; `keepkv-table1` and `kvreviver-table1`: in place of batches that
    /// grow until memory ends.
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
    /// Norms of queries, shifted keys and values, prompt by prompt.
    BalancekvTable3,
    /// Retrieval by share dropped: full, SnapKV, PyramidKV, StreamingLLM, BalanceKV and its
    /// augmented form, uniform sampling.
    BalancekvNeedle,
    /// Throughput and memory by batch, and what merging costs of a step: full, H2O, D2O, KeepKV.
    KeepkvTable1,
    /// Attention that merges lose, and how well scores are predicted.
    KeepkvFig2,
    /// Retrieval and perplexity of evictions with and without KeepKV.
    KeepkvFig5,
    /// Retrieval and perplexity of KeepKV that merges before and behind the eviction.
    KeepkvTable3,
    /// Retrieval and perplexity of KeepKV by the cosine that merged keys must exceed.
    KeepkvTable4,
    /// Retrieval, perplexity and attention error by the period of KeepKV's lossless mode.
    KeepkvLossless,
    /// Throughput and memory by batch: full, and KVReviver that attends to its sketch or rebuilds.
    KvreviverTable1,
    /// Retrieval and perplexity of KVReviver by the sketch's share.
    KvreviverTable2,
    /// Retrieval and perplexity of KVReviver by the shares of candidates and recents.
    KvreviverTable3,
    /// Retrieval by length and depth at 25 %: KVReviver and others.
    KvreviverFig5,
    /// Retrieval and perplexity by budget: KVReviver and others.
    KvreviverFig6,
    /// Time of a step's attention over the sketch, over the cache rebuilt, and over a full cache.
    KvreviverAttention,
    /// Variance of the sketch's estimates against the paper's bound.
    KvreviverBounds,
    /// Retrieval and perplexity, and how often heads retrieve: CIS, HShare, Quest, Double Sparsity,
    /// H2O.
    PrhsTable2,
    /// Time of a step's attention, choices included: CIS, CPE, HShare, Quest, Double Sparsity, H2O,
    /// the oracle.
    PrhsTable4,
    /// Time of a step's attention at lengths beyond the paper's: 8k to 128k tokens, groups of 4
    /// and 8.
    PrhsLong,
    /// Decode throughput at 1/8: CIS, CPE, HShare, Quest, Double Sparsity, H2O, the full cache.
    PrhsTable5,
    /// Retrieval and perplexity of CIS*, PSAW, ETF and CPE with other parameters.
    PrhsTable6,
    /// Attention that is read of real prompts, by how often heads retrieve; bounds on what is
    /// dropped.
    PrhsFig7,
    /// Attention that is read of real prompts, by how many tokens bring their neighbours along.
    PrhsFig8,
}

impl Paper {
    /// Refuses options that the figure does not take.
    pub(crate) fn check(&self, common: &Common) -> anyhow::Result<()> {
        let name = self.figure.name();
        let takes = self.figure.definition();
        ensure!(
            common.model == MODEL || takes.model == ModelChoice::Any,
            "--model: {name} runs at its paper's size"
        );
        ensure!(
            common.budget.is_none() || !takes.budgets.is_empty(),
            "--budget: {name} has its paper's budgets"
        );
        let policy = common.policy.as_deref();
        ensure!(
            policy.is_none() || takes.policies != PolicyChoice::Fixed,
            "--policy: {name} runs all of its own"
        );
        let json = policy.is_some_and(|text| text.trim_start().starts_with(['{', '[']));
        ensure!(
            !json || takes.policies == PolicyChoice::Configurations,
            "--policy: {name} has its own configurations, expected names of them"
        );
        if !takes.climbs && self.figure != Figure::LongflowFig4 {
            ensure!(self.memory_cap.is_none(), "--memory-cap: {name} has one size");
        }
        if !takes.prompts {
            ensure!(self.prompts.is_none(), "--prompts: {name} has none");
            ensure!(self.limit.is_none(), "--limit: {name} has no prompts");
        }
        ensure!(self.mode.is_none() || takes.mode.is_some(), "--mode: {name} asks no questions");
        if !takes.text {
            ensure!(self.text.is_none(), "--text: {name} reads no text");
            ensure!(self.contexts.is_empty(), "--contexts: {name} reads no text");
        }
        if !takes.sized || common.quick {
            let one = common.quick && takes.sized;
            let why = if one { "--quick has one size" } else { "it has the paper's sizes" };
            ensure!(self.lengths.is_empty() || takes.prompts, "--lengths: {name}: {why}");
            let grows = takes.climbs && !common.quick;
            ensure!(grows || self.batches.is_empty(), "--batches: {name}: {why}");
        }
        if takes.single_precision {
            ensure!(common.dtype.is_none(), "--dtype: {name} is in f32");
        }
        ensure!(
            self.memory_cap.is_none() || !common.quick || takes.climbs,
            "--memory-cap: with --quick no batch is the largest"
        );
        Ok(())
    }

    /// Refuses what would take a CPU hours.
    pub(crate) fn check_device(&self, device_name: &str, quick: bool) -> anyhow::Result<()> {
        let takes = self.figure.definition();
        // Whole models are beyond it at any length.
        let sized = !self.lengths.is_empty() && takes.model == ModelChoice::Own;
        let on_cpu = device_name == CPU && !quick && !sized;
        ensure!(
            !(on_cpu && takes.wants_gpu),
            "{} has the paper's sizes, for GPUs; on the CPU, add --quick",
            self.figure.name()
        );
        Ok(())
    }

    /// Whether it is BalanceKV's figure 3 on a made-up layer: neither a model nor prompts are asked
    /// for.
    pub(crate) fn is_made_up(&self, common: &Common) -> bool {
        let asked = self.prompts.is_some() || !self.lengths.is_empty() || self.limit.is_some();
        self.figure == Figure::BalancekvFig3 && common.model == MODEL && !asked
    }

    /// The prompts that it asks for, if it takes any.
    pub(crate) fn wanted(&self, quick: bool) -> Option<Wanted<'_>> {
        let takes = self.figure.definition();
        takes.prompts.then(|| Wanted {
            file: self.prompts.as_deref(),
            lengths: &self.lengths,
            tasks: &[],
            // Its rows and columns are lengths and depths.
            with_depth: self.figure == Figure::KvreviverFig5,
            limit: self.limit.or((quick && takes.mode.is_some()).then_some(QUICK_PROMPTS)),
            mode: self.mode(quick),
        })
    }

    /// How its prompts' questions are asked, where they are.
    pub(crate) fn mode(&self, quick: bool) -> Option<Mode> {
        let own = self.figure.definition().mode?;
        let quick_own = if own == Mode::Both { Mode::QuestionAware } else { own };
        Some(self.mode.unwrap_or(if quick { quick_own } else { own }))
    }

    /// The budgets of `--budget`; without it the figure's own budgets.
    pub(crate) fn budgets(&self, common: &Common) -> Vec<Budget> {
        let takes = self.figure.definition();
        let small = common.quick && !takes.quick_budgets.is_empty();
        let own = if small { takes.quick_budgets } else { takes.budgets };
        common.budget.clone().unwrap_or_else(|| own.to_vec())
    }

    /// Whether it measures perplexity.
    pub(crate) fn reads_text(&self) -> bool {
        self.figure.definition().text
    }

    /// Notes for readers of its numbers.
    pub(crate) fn notes(&self, quick: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let differs = self.figure.definition().differs;
        if !differs.is_empty() {
            notes.push(format!("{} differs from the paper: {differs}", self.figure.name()));
        }
        if quick {
            notes.push("--quick: small sizes and few cases, a first look and no comparison".into());
        }
        notes
    }
}

impl Figure {
    /// As the command line has it.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
    }

    /// The model that it runs, given the one that was asked for.
    pub(crate) fn model(self, asked: &str, quick: bool) -> &str {
        match (self, quick) {
            (Self::LongflowFig4, false) => "random:qwen3-1.7b",
            (Self::BalancekvTable2, false) => "random:llama-3.1-8b",
            (Self::PrhsTable5, false) if asked == MODEL => "random:llama-2-7b",
            (figure, false) if figure.definition().climbs && asked == MODEL => "random:llama-2-7b",
            _ => asked,
        }
    }
}
