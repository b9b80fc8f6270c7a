//! The quantities that tables and figures measure here, the differences from the papers, and the
//! options that they take.

use kv_core::Budget;

use super::Figure;
use crate::prompts::Mode;

/// A table or figure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Definition {
    /// The measured quantity, as it stands behind the name in titles.
    pub(crate) measures: &'static str,
    /// What differs from the paper, as a note says it; empty where it is the paper's measurement on
    /// another device.
    pub(crate) differs: &'static str,
    /// What runs where no model is named.
    pub(super) model: ModelChoice,
    /// Whether it takes prompts.
    pub(super) prompts: bool,
    /// How the prompts' questions are asked, where they are.
    pub(super) mode: Option<Mode>,
    /// Whether it takes a text, and contexts in it.
    pub(super) text: bool,
    /// The budgets, which `--budget` replaces; empty where it is refused.
    pub(super) budgets: &'static [Budget],
    /// The budgets of `--quick`, where they differ.
    pub(super) quick_budgets: &'static [Budget],
    /// What `--policy` may name.
    pub(super) policies: PolicyChoice,
    /// Whether lengths and batches may be others than its own.
    pub(super) sized: bool,
    /// Whether it grows batches until memory ends.
    pub(super) climbs: bool,
    /// Whether its sizes are out of a CPU's reach.
    pub(super) wants_gpu: bool,
    /// Whether it is in f32 whatever the device.
    pub(super) single_precision: bool,
}

/// The model that a figure runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelChoice {
    /// No model, or its paper's with random weights, whatever is asked for.
    Own,
    /// Any model.
    Any,
}

/// What `--policy` may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PolicyChoice {
    /// Nothing.
    Fixed,
    /// Some of the figure's own.
    Names,
    /// Some of its own, and configurations besides.
    Configurations,
}

/// A figure of bare tensors that takes nothing.
const PLAIN: Definition = Definition {
    measures: "",
    differs: "",
    model: ModelChoice::Own,
    prompts: false,
    mode: None,
    text: false,
    budgets: &[],
    quick_budgets: &[],
    policies: PolicyChoice::Fixed,
    sized: false,
    climbs: false,
    wants_gpu: false,
    single_precision: false,
};

/// Retrieval, and perplexity behind compressed contexts.
const QUALITY: Definition = Definition {
    model: ModelChoice::Any,
    prompts: true,
    mode: Some(Mode::Both),
    text: true,
    policies: PolicyChoice::Configurations,
    ..PLAIN
};

/// Throughput and memory by batch.
const BY_BATCH: Definition = Definition {
    model: ModelChoice::Any,
    climbs: true,
    wants_gpu: true,
    policies: PolicyChoice::Names,
    ..PLAIN
};

const TENTH: &[Budget] = &[Budget::Ratio(0.1)];
const FIFTH: &[Budget] = &[Budget::Ratio(0.2)];
const QUARTER: &[Budget] = &[Budget::Ratio(0.25)];
const SHARES: &[Budget] =
    &[Budget::Ratio(0.5), Budget::Ratio(0.25), Budget::Ratio(0.1), Budget::Ratio(0.05)];
const QUICK_SHARES: &[Budget] = &[Budget::Ratio(0.25), Budget::Ratio(0.1)];

impl Figure {
    /// Its definition.
    pub(crate) fn definition(self) -> Definition {
        match self {
            Self::LongflowFig1 => Definition {
                measures: "time of a decode step's attention with an eviction",
                differs: "queries, keys and values are made up; all policies run in this project's \
                          kernels, on the device at hand",
                wants_gpu: true,
                ..PLAIN
            },
            Self::LongflowFig4 => Definition {
                measures: "throughput and memory of long outputs",
                differs: "weights are random; a short prompt is prefilled, the rest of the input \
                          is assumed, and a step's time at some lengths is integrated over the \
                          output; two batches a policy in place of a curve, and no memory \
                          fragments",
                policies: PolicyChoice::Names,
                wants_gpu: true,
                ..PLAIN
            },
            Self::BalancekvFig1 => Definition {
                measures: "attention error of single layers by rate",
                differs: "prompts are the retrieval prompts at hand in place of TriviaQA's, layers \
                          are all of the model's in place of 1, 2 and 5 of Llama 3.1 8B and \
                          Ministral 8B; the error is one ratio over all heads and last queries; \
                          rows named clustered are of made-up keys and values",
                model: ModelChoice::Any,
                prompts: true,
                ..PLAIN
            },
            Self::BalancekvFig3 => Definition {
                measures: "attention error and compression time of one layer by block and rate",
                differs: "without --model and --prompts, queries, keys and values are made-up \
                          clusters of the size of Llama 3.1 8B's layers, on which the error hardly \
                          depends on the block; with either, they are those of the prompts at hand \
                          in place of TriviaQA's",
                model: ModelChoice::Any,
                prompts: true,
                ..PLAIN
            },
            Self::BalancekvStream => Definition {
                measures: "precision of a stream's attention against the slots it holds",
                differs: "the paper states theorem 3.1 and measures nothing: the stream is made \
                          up, with keys and queries of the norm that the theorem assumes",
                single_precision: true,
                ..PLAIN
            },
            Self::BalancekvTable2 => Definition {
                measures: "prefill and decode speed at a quarter of the cache",
                differs: "weights are random, the prompt's tokens are made up; StreamingLLM evicts \
                          while decoding, where the paper keeps all decoded tokens",
                wants_gpu: true,
                ..PLAIN
            },
            Self::BalancekvTable3 => Definition {
                measures: "norms of queries, shifted keys and values",
                differs: "prompts are those at hand in place of TriviaQA's; keys are shifted by \
                          the mean of their head",
                model: ModelChoice::Any,
                prompts: true,
                ..PLAIN
            },
            Self::BalancekvNeedle => Definition {
                measures: "retrieval by share kept",
                differs: "exact match of short answers that are fed token by token, in place of \
                          the recall of an answer's words in 30 generated tokens; lengths are \
                          those of the prompts at hand in place of 4k to 100k tokens; StreamingLLM \
                          evicts while decoding, where the paper keeps all decoded tokens",
                text: false,
                budgets: &[
                    Budget::Ratio(0.95),
                    Budget::Ratio(0.8),
                    Budget::Ratio(0.5),
                    Budget::Ratio(0.25),
                ],
                ..QUALITY
            },
            Self::KeepkvTable1 => Definition {
                measures: "throughput and memory by batch",
                differs: "weights are random where no model is named, and the prompts' tokens are \
                          made up",
                ..BY_BATCH
            },
            Self::KeepkvFig2 => Definition {
                measures: "attention that merges lose, and errors of predicted scores",
                differs: "panels c and d of four, on the prompts and the one text at hand in place \
                          of the paper's data",
                model: ModelChoice::Any,
                prompts: true,
                text: true,
                ..PLAIN
            },
            Self::KeepkvFig5 => Definition {
                measures: "retrieval and perplexity of evictions with and without KeepKV",
                differs: "exact match of short answers and one text's perplexity in place of ROUGE \
                          on XSUM and CNN/DailyMail; recent-attention, PyramidInfer's tokens \
                          without its pruning, in place of PyramidInfer",
                budgets: SHARES,
                quick_budgets: QUICK_SHARES,
                ..QUALITY
            },
            Self::KeepkvTable3 => Definition {
                measures: "retrieval and perplexity of KeepKV by the order of merging and eviction",
                differs: "exact match of short answers and one text's perplexity in place of \
                          ROUGE-2, at the paper's budgets unless --budget says otherwise",
                budgets: &[Budget::Ratio(0.01), Budget::Ratio(0.1)],
                quick_budgets: TENTH,
                ..QUALITY
            },
            Self::KeepkvTable4 => Definition {
                measures: "retrieval and perplexity of KeepKV by the cosine that merged keys \
                          exceed",
                differs: "exact match of short answers and one text's perplexity in place of ROUGE \
                          on XSUM, at the paper's budget unless --budget says otherwise",
                budgets: &[Budget::Ratio(0.04)],
                ..QUALITY
            },
            Self::KeepkvLossless => Definition {
                measures: "retrieval, perplexity and attention error by the period of KeepKV's \
                          lossless mode",
                differs: "the paper describes the mode without numbers: budget and periods are \
                          ours",
                budgets: FIFTH,
                ..QUALITY
            },
            Self::KvreviverTable1 => Definition {
                measures: "throughput and memory by batch",
                differs: "weights are random where no model is named, and the prompts' tokens are \
                          made up; the rows without rebuild=true attend to the sketch without \
                          rebuilding the cache, which is ours",
                ..BY_BATCH
            },
            Self::KvreviverTable2 => Definition {
                measures: "retrieval and perplexity of KVReviver by the sketch's share",
                differs: "exact match of short answers and one text's perplexity in place of \
                          ROUGE-1 on XSum",
                mode: Some(Mode::QuestionAgnostic),
                budgets: TENTH,
                ..QUALITY
            },
            Self::KvreviverTable3 => Definition {
                measures: "retrieval and perplexity of KVReviver by the shares of candidates and \
                          recents",
                differs: "exact match of short answers and one text's perplexity in place of \
                          ROUGE-1 on XSum",
                mode: Some(Mode::QuestionAgnostic),
                budgets: TENTH,
                ..QUALITY
            },
            Self::KvreviverFig5 => Definition {
                measures: "retrieval by length and depth",
                differs: "exact match of short answers, in prompts as long as those at hand in \
                          place of 32k tokens; DuoAttention needs trained gates and runs where \
                          --policy names them, {\"policy\": \"duo-attention\", \"alpha\": \
                          \"GATES.tsv\"}",
                text: false,
                mode: Some(Mode::QuestionAgnostic),
                budgets: QUARTER,
                ..QUALITY
            },
            Self::KvreviverFig6 => Definition {
                measures: "retrieval and perplexity by budget",
                differs: "exact match of short answers and one text's perplexity in place of \
                          LongBench",
                mode: Some(Mode::QuestionAgnostic),
                budgets: SHARES,
                quick_budgets: QUICK_SHARES,
                ..QUALITY
            },
            Self::KvreviverAttention => Definition {
                measures: "time of a step's attention over the sketch",
                differs: "no figure of the paper; queries, keys and values are made up",
                sized: true,
                wants_gpu: true,
                ..PLAIN
            },
            Self::KvreviverBounds => Definition {
                measures: "variance of the sketch's estimates against the paper's bound",
                differs: "the paper proves the bound and measures nothing: tokens are drawn from \
                          the normal distribution that it assumes",
                single_precision: true,
                ..PLAIN
            },
            Self::PrhsTable2 => Definition {
                measures: "retrieval and perplexity, and how often heads retrieve",
                differs: "exact match of short answers and one text's perplexity in place of GSM8K \
                          and CoQA; retrieval ratio and tokens read are of the answers' steps, \
                          which end before a block of 8 steps is full, not of the text's; \
                          Double Sparsity takes the channels of the prompt's own keys unless \
                          --policy names a calibrated one, {\"policy\": \"double-sparsity\", \
                          \"channels\": \"FILE.json\"}; Quest and Double Sparsity read all tokens \
                          in their first two layers",
                mode: Some(Mode::QuestionAware),
                // The paper's for short prompts, and an eighth.
                budgets: &[Budget::Tokens(128), Budget::Ratio(0.125)],
                quick_budgets: &[Budget::Tokens(128)],
                ..QUALITY
            },
            Self::PrhsTable4 => Definition {
                measures: "time of a step's attention, choices included",
                differs: "one layer of made-up queries, keys and values, in which a fixed share of \
                          the heads retrieves; the layer is the last of 32, where CPE's window is \
                          narrowest; HShare's layers choose for themselves, in place of taking \
                          other layers' lists; H2O neither accumulates scores nor evicts",
                policies: PolicyChoice::Names,
                sized: true,
                wants_gpu: true,
                ..PLAIN
            },
            Self::PrhsLong => Definition {
                measures: "time of a step's attention, choices included, at long lengths",
                differs: "no table of the paper, which ends at 4k tokens; one layer of made-up \
                          queries, keys and values, in which a fixed share of the heads retrieves; \
                          the layer is the last of 32, where CPE's window is narrowest; HShare's \
                          layers choose for themselves, in place of taking other layers' lists; \
                          H2O neither accumulates scores nor evicts",
                policies: PolicyChoice::Names,
                sized: true,
                wants_gpu: true,
                ..PLAIN
            },
            Self::PrhsTable5 => Definition {
                measures: "decode throughput at an eighth of the tokens",
                differs: "weights are random where no model is named, so that queries are hardly \
                          alike: rows with threshold=-1.0 share as a trained model would; 3,968 \
                          tokens in place of 4k",
                model: ModelChoice::Any,
                policies: PolicyChoice::Names,
                sized: true,
                wants_gpu: true,
                ..PLAIN
            },
            Self::PrhsTable6 => Definition {
                measures: "retrieval, perplexity and prefill perplexity of CIS*, PSAW, ETF and CPE",
                differs: "exact match of short answers in place of GSM8K; prefill perplexity is of \
                          the one text at hand in place of WikiText, counts all of its tokens, \
                          frozen ones included, and is the full cache's for CIS*, which leaves \
                          prefill as it is; perplexity is of tokens decoded behind the text's \
                          context; CPE's sets are of CIS with a k of 88 in place of CIS*'s, and \
                          blocks are of 8 tokens alone, where table VII has 8 and 16",
                mode: Some(Mode::QuestionAware),
                budgets: &[Budget::Tokens(128)],
                ..QUALITY
            },
            Self::PrhsFig7 => Definition {
                measures: "attention that is read by how often heads retrieve",
                differs: "the right panel alone, without the left panel's accuracies, over the \
                          decode steps of the prompts at hand in place of GSM8K's",
                model: ModelChoice::Any,
                prompts: true,
                policies: PolicyChoice::Names,
                ..PLAIN
            },
            Self::PrhsFig8 => Definition {
                measures: "attention that is read by how many tokens bring their neighbours along",
                differs: "over the decode steps of the prompts at hand in place of NarrativeQA's",
                model: ModelChoice::Any,
                prompts: true,
                policies: PolicyChoice::Names,
                ..PLAIN
            },
        }
    }
}
