//! The options of suites, as the command line gives them.

use std::path::PathBuf;

use anyhow::ensure;
use burn::tensor::DType;
use clap::ValueEnum;
use kv_core::{Budget, DeviceChoice};
use kv_models::Sampling;
use kv_policies::ChannelStatistic;
use serde_json::Value;

use crate::prompts::{Mode, Wanted};

/// Prompts of `quality` in its quick form.
const QUICK_PROMPTS: usize = 16;
/// The embedded model.
const MODEL: &str = "needle-1m";

/// Options of all suites.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Common {
    /// A model folder, a GGUF file, a hub id, `random:PRESET`, or `needle-1m`. By default
    /// `needle-1m`; of some papers' figures, their default model.
    #[arg(long, global = true)]
    pub(crate) model: Option<String>,
    /// `auto`, `cpu`, `wgpu[:i]`, `vulkan[:i]`, `metal[:i]` or `cuda[:i]`.
    #[arg(long, global = true, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Weights, activations and cache; by default f32 on the CPU, the model's own elsewhere.
    #[arg(long, global = true, value_enum)]
    pub(crate) dtype: Option<Float>,
    /// The type in which matrices are stored, where it is not `--dtype`: f16 or bf16 of a model
    /// that computes in f32 on the CPU, where a decode step then reads half the bytes.
    #[arg(long, global = true, value_enum)]
    pub(crate) matrices: Option<Float>,
    /// Policies: names, a JSON configuration, or a JSON list of either; all by default. The full
    /// cache always runs along. Of a paper's table, where it takes any, names among its own.
    #[arg(long, global = true, value_name = "A,B")]
    pub(crate) policy: Option<String>,
    /// Budgets: shares to keep (0.25) or tokens (512).
    #[arg(long, global = true, value_delimiter = ',', value_name = "0.25,512")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) budget: Option<Vec<Budget>>,
    /// Writes this run's records here. A run that ends early leaves the records so
    /// far in `FILE.partial`, which `--merge` reads.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Adds records of other runs, such as another device's or a peer's, to tables and report.
    /// Where one holds a case again, its file's name stands behind the policy.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) merge: Vec<PathBuf>,
    /// The HTML report; target/kv-bench/SUITE.html by default.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Fewer cases, smaller sizes.
    #[arg(long, global = true)]
    pub(crate) quick: bool,
    /// Seed of everything that is drawn: by policies, and by `evaluate` for questions and tokens.
    #[arg(long, global = true, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
}

impl Common {
    /// The model that `--model` names; without it, the embedded one.
    pub(crate) fn model(&self) -> &str {
        self.model.as_deref().unwrap_or(MODEL)
    }
}

/// Options of `quality`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Quality {
    /// Something else than retrieval and perplexity behind a compressed prompt.
    #[arg(long, value_enum)]
    pub(crate) task: Option<Task>,
    /// Prompts: JSON lines with `task`, `length`, `depth` (optional), `context`, `question` and
    /// `answer`; or `prompt` in place of context and question.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// At most this many prompts, spread over tasks and lengths.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// Only prompts of these lengths.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lengths: Vec<usize>,
    /// Only these tasks.
    #[arg(long, value_delimiter = ',')]
    pub(crate) tasks: Vec<String>,
    /// When compression happens.
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    pub(crate) mode: Mode,
    /// Text whose perplexity to measure behind a compressed context.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: Option<PathBuf>,
    /// Tokens of the text that are the context, compressed once for each number; by default one
    /// context of 1,536 (512 with `--quick`), of at most half the text and 3/4 of the model's
    /// positions.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) contexts: Vec<usize>,
    /// Leave perplexity out.
    #[arg(long)]
    pub(crate) no_perplexity: bool,
}

impl Quality {
    /// The prompts that it asks for.
    pub(crate) fn wanted(&self, quick: bool) -> Wanted<'_> {
        Wanted {
            file: self.prompts.as_deref(),
            lengths: &self.lengths,
            tasks: &self.tasks,
            with_depth: false,
            limit: self.limit.or(quick.then_some(QUICK_PROMPTS)),
            // Conversations tell on their own which prompts they can have.
            mode: self.task.is_none().then_some(self.mode),
        }
    }

    /// Refuses options that do not go together.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let plain = self.contexts.is_empty()
            && self.tasks.is_empty()
            && !self.no_perplexity
            && self.mode == Mode::Both;
        match self.task {
            Some(Task::LongOutput) => ensure!(
                plain && self.prompts.is_none() && self.lengths.is_empty(),
                "--task long-output takes --text and --limit, none of the options of retrieval"
            ),
            Some(Task::Conversation) => ensure!(
                plain && self.text.is_none(),
                "--task conversation takes --prompts, --lengths and --limit, none of the other \
                 options"
            ),
            None => ensure!(
                !self.no_perplexity || (self.contexts.is_empty() && self.text.is_none()),
                "--text, --contexts: --no-perplexity reads no text"
            ),
        }
        Ok(())
    }
}

/// Options of `evaluate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Evaluate {
    /// Tasks: built-in names such as `ruler/niah_single_1`, files of questions (JSONL, JSON,
    /// Parquet or CSV, with `question`, `answers` and, if wanted, `context`), or tasks in TOML. The
    /// error of an unknown name tells the nearest one; `list` tells all of them.
    #[arg(long, value_delimiter = ',', value_name = "NAME|FILE", required = true)]
    pub(crate) task: Vec<String>,
    /// A local copy of the tasks' data sets; without it, the hub's. A folder in it that has a
    /// task's name, such as `FOLDER/gsm8k`, has that task's files.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) data: Option<PathBuf>,
    /// Tokens of prompt and answer, of tasks that are generated (RULER). Longer prompts of other
    /// tasks lose their middle.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) length: Option<usize>,
    /// At most this many questions of each task.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// The text in which RULER hides its needles.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Solved examples before each question, in place of the task's own number.
    #[arg(long)]
    pub(crate) few_shot: Option<usize>,
    /// The same of tasks that have examples: presets have one number for all of their tasks.
    #[arg(skip)]
    pub(crate) few_shot_where_taken: Option<usize>,
    /// When compression happens.
    #[arg(long, value_enum, default_value_t = Mode::QuestionAware)]
    pub(crate) mode: Mode,
    /// At most so many new tokens, in place of the task's own number.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) new_tokens: Option<usize>,
    /// A text that ends an answer, beside the task's own; may be repeated.
    #[arg(long)]
    pub(crate) stop: Vec<String>,
    /// Whether questions go through the model's chat template, in place of the task's own choice.
    #[arg(long, value_enum)]
    pub(crate) chat: Option<Chat>,
    /// A variable of the chat template, its value as JSON or text: `enable_thinking=false`. May be
    /// repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) chat_variable: Vec<(String, Value)>,
    /// The tokenizer.json to use, where the model has none: `random:PRESET`, to measure speed.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// The system message of chats.
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// Answers of each question, each drawn anew.
    #[arg(long, default_value_t = 1, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) samples: usize,
    /// 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Only the likeliest tokens that together reach this probability.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,
    /// Only so many of the likeliest tokens.
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Only tokens of at least this fraction of the likeliest one's probability.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,
    /// Makes tokens less likely that stood before; 1 changes nothing.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f64,
    /// Questions that generate together; 1 on a CPU and 8 elsewhere by default. Answers do not
    /// depend on it.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) batch: Option<usize>,
    /// The file of answers, a JSON line each. Answers that it has are not generated again, so that
    /// a stopped run goes on. By default target/kv-bench/evaluate-MODEL.jsonl.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) answers: Option<PathBuf>,
}

/// Whether a chat template is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Chat {
    /// The model's chat template.
    Template,
    /// The prompt as it is.
    Raw,
}

impl Chat {
    /// Whether there is a template.
    pub(crate) fn wanted(self) -> bool {
        self == Self::Template
    }
}

impl Evaluate {
    /// How tokens are chosen, but for the seed.
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            repetition_penalty: self.repetition_penalty,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: 0,
        }
    }
}

impl Attention {
    /// The prompts that it asks for.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        let (file, limit) = (self.prompts.as_deref(), Some(self.limit));
        Wanted { file, lengths: &self.lengths, limit, ..Wanted::default() }
    }
}

/// Tasks of `quality` that have a run of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Task {
    /// Thousands of tokens decoded under a fixed budget: perplexity, and retrieval in the end.
    /// Shares given as budgets are of prompt and output together, `--limit` takes fewer texts.
    LongOutput,
    /// Several questions about one context, which is compressed with the first of them in sight.
    Conversation,
}

/// Options of `attention`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Attention {
    /// Only prompts of these lengths.
    #[arg(long, value_delimiter = ',', value_parser = positive, allow_hyphen_values = true)]
    pub(crate) lengths: Vec<usize>,
    /// Layers, all by default.
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true)]
    pub(crate) layers: Vec<usize>,
    /// Prompts, as in `quality`.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// At most this many prompts, spread over tasks and lengths.
    #[arg(long, default_value_t = 4, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: usize,
    /// Decode steps behind each prompt.
    #[arg(long, default_value_t = 16, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) steps: usize,
    /// Also shows a row for each layer.
    #[arg(long)]
    pub(crate) by_layer: bool,
    /// Also shows bounds beside the bounded quantities: of LongFlow's measure of slots, of the
    /// attention that CIS drops, PSAW hides and ETF moves. Constants of the last two are fitted to
    /// one half of the prompts and checked on the other; slow.
    #[arg(long)]
    pub(crate) certificates: bool,
    /// Also shows a row for each query head: the attention that policies read which keep more than
    /// they read, and the bounds of CIS, PSAW and ETF.
    #[arg(long, requires = "certificates")]
    pub(crate) by_head: bool,
}

/// Steps before the clock starts.
pub(crate) const WARM_UP: usize = 8;

/// Options of `throughput`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Throughput {
    /// Prompt tokens.
    #[arg(long, value_delimiter = ',', default_value = "1000", value_parser = positive)]
    #[arg(allow_hyphen_values = true)]
    pub(crate) lengths: Vec<usize>,
    /// Sequences that decode together.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = positive)]
    #[arg(allow_hyphen_values = true)]
    pub(crate) batches: Vec<usize>,
    /// Decode steps that are timed.
    #[arg(long, default_value_t = 64, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) steps: usize,
    /// Decode steps before the clock starts: kernels are compiled and tuned at their first use, and
    /// steps that can be recorded are recorded. A policy's rare steps need more of them.
    #[arg(long, default_value_t = WARM_UP, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) warm_up: usize,
    /// Memory in GiB for which to say how large a batch would be, from the bytes measured.
    #[arg(long, value_name = "GIB", value_parser = gibibytes, allow_negative_numbers = true)]
    pub(crate) memory_cap: Option<f64>,
    /// Divides the model among so many processes, each with its own GPU. The bytes in the report
    /// are the bytes of one process. If torchrun, srun, mpirun or Kubernetes has started several
    /// processes, these are used and none are started.
    #[arg(long, value_name = "RANKS", value_parser = positive, allow_negative_numbers = true)]
    pub(crate) tensor_parallel: Option<usize>,
}

/// Options of `kernels`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Kernels {
    /// Only these.
    #[arg(long, value_delimiter = ',')]
    pub(crate) ops: Vec<Op>,
    /// Every kernel of the ops that have several, each forced at a few shapes, instead of the
    /// kernels that ops choose.
    #[arg(long)]
    pub(crate) strategies: bool,
}

/// Ops that the suite `kernels` times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Attention of a decode step, weighted, evicting, and over lists.
    DecodeAttention,
    /// Causal attention of prompts, with column sums and windows.
    PrefillAttention,
    /// Products with weights.
    Linear,
    /// Kept slots moved together.
    CompactSlots,
    /// The best scores.
    TopSlots,
    /// Lists halved by BalanceKV's walk.
    Balance,
    /// What KeepKV does behind a step's attention.
    MergeNearest,
    /// Attention over quantised slots.
    QuantizedAttention,
    /// Attention over archived slots, and their scores.
    ArchivedAttention,
    /// Attention over a sketch's tokens; with `--strategies` alone.
    SketchAttention,
    /// The nearest slot of every slot; with `--strategies` alone.
    NearestSlots,
    /// Steps of CIS; with `--strategies` alone.
    CisAttention,
}

/// Floating-point types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Float {
    /// 32 bits.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floats.
    Bf16,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::BF16,
        }
    }
}

/// A count of which none makes no sense.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number, at least 1".into()),
        Ok(number) => Ok(number),
    }
}

/// `NAME=VALUE`, the value as JSON, or as text where it is not.
pub(crate) fn variable(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_string(), value))
}

/// A memory size above 0.
pub(crate) fn gibibytes(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|gib: &f64| gib.is_finite() && *gib > 0.0);
    number.ok_or_else(|| "expected a number above 0".into())
}

/// Options of `paper` beside the figure.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct PaperOptions {
    /// Memory in GiB that a run may take; by default the memory of the paper's GPU.
    #[arg(long, value_name = "GIB", value_parser = gibibytes, allow_negative_numbers = true)]
    pub(crate) memory_cap: Option<f64>,
    /// Figures of prompts: a file, as in `quality`.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// Figures of prompts: at most this many, spread over tasks and lengths. Presets: at most this
    /// many questions of each task.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) limit: Option<usize>,
    /// Figures of retrieval, and presets: when compression happens, in place of the figure's own.
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
    /// The options of presets.
    #[command(flatten)]
    pub(crate) preset: PresetOptions,
}

/// Options of `paper` that presets take: figures that run the paper's own tasks.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Options of presets, which run a paper's own tasks")]
pub(crate) struct PresetOptions {
    /// Only these of the preset's tasks, such as `gsm8k`.
    #[arg(long, value_delimiter = ',')]
    pub(crate) tasks: Vec<String>,
    /// A local copy of the tasks' data sets; without it, the hub's. A folder in it that has a
    /// task's name, such as `FOLDER/gsm8k`, has that task's files.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) data: Option<PathBuf>,
    /// The paper's model whose numbers stand beside ours; by default the model itself where it is
    /// one of the paper's, else the first of the preset's file.
    #[arg(long, value_name = "NAME")]
    pub(crate) published: Option<String>,
    /// At most so many new tokens, in place of the preset's own number.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) new_tokens: Option<usize>,
    /// The most tokens of a prompt; longer ones lose their middle.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) length: Option<usize>,
    /// Solved examples before each question, in place of the preset's own number.
    #[arg(long)]
    pub(crate) few_shot: Option<usize>,
    /// Whether questions go through the model's chat template, in place of the preset's own choice.
    #[arg(long, value_enum)]
    pub(crate) chat: Option<Chat>,
    /// Answers of each question, each drawn anew where the preset draws tokens.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) samples: Option<usize>,
    /// Questions that generate together, as in `evaluate`.
    #[arg(long, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) batch: Option<usize>,
    /// The file of answers, as in `evaluate`.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) answers: Option<PathBuf>,
}

impl PresetOptions {
    /// The first option that is given, if any is.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let Self {
            tasks,
            data,
            published,
            new_tokens,
            length,
            few_shot,
            chat,
            samples,
            batch,
            answers,
        } = self;
        let all = [
            ("--tasks", !tasks.is_empty()),
            ("--data", data.is_some()),
            ("--published", published.is_some()),
            ("--new-tokens", new_tokens.is_some()),
            ("--length", length.is_some()),
            ("--few-shot", few_shot.is_some()),
            ("--chat", chat.is_some()),
            ("--samples", samples.is_some()),
            ("--batch", batch.is_some()),
            ("--answers", answers.is_some()),
        ];
        all.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

impl PaperOptions {
    /// The prompts of the file and lengths that it names; the number of prompts is the figure's.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        Wanted {
            file: self.prompts.as_deref(),
            lengths: &self.lengths,
            limit: self.limit,
            ..Wanted::default()
        }
    }

    /// Whether it says which prompts to take.
    pub(crate) fn names_prompts(&self) -> bool {
        self.prompts.is_some() || !self.lengths.is_empty() || self.limit.is_some()
    }
}

/// Windows of a text that a model is measured on.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TextSample {
    /// Text to measure on, best of the kind that the model will read.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: PathBuf,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) window: usize,
    /// Windows, spread over the text.
    #[arg(long, default_value_t = 16, value_parser = positive, allow_negative_numbers = true)]
    pub(crate) samples: usize,
}

/// Options of `fisher`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FisherOptions {
    /// The text.
    #[command(flatten)]
    pub(crate) sample: TextSample,
    /// Where the numbers go; by default fisher.json in the model's folder, where policies with
    /// `"layers": "fisher"` look for it.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
}

/// Options of `calibrate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CalibrateOptions {
    /// The text.
    #[command(flatten)]
    pub(crate) sample: TextSample,
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
