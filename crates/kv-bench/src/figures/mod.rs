//! Tables and figures of papers. Each is an entry in its paper's file: a name, the measured
//! quantity, the inputs that it needs, its sizes and policies, and the measurement that it runs.
//!
//! A preset runs the paper's own tasks and shows the paper's numbers beside ours. Other figures may
//! have something that stands in for the paper's model or data, which their titles say.
//!
//! A new figure is a new entry. Most run one of the measurements of [`Measurement`] on policies of
//! their own; a measurement that no other figure has is a function of [`crate::studies`].

mod balancekv;
mod keepkv;
mod kvreviver;
mod longflow;
mod preset;
mod prhs;
mod runners;
#[cfg(test)]
mod tests;

use anyhow::{Context, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::bench::{Bench, CPU, ModelBench};
use crate::options::{Common, PaperOptions};
use crate::prompts::Wanted;
use crate::studies::by_batch::{self, ByBatch};
use crate::studies::op_time::{self, OpTime};
use preset::Preset;
use runners::{Quality, ReadAttention, Throughput};

/// What stands in for a paper's data in figures of prompts.
const NEEDLES: &str = "needles, not the paper's workload";

/// Prompts of the quick forms of figures that ask questions.
const QUICK_PROMPTS: usize = 4;

/// All figures, paper by paper.
const FIGURES: [&[Figure]; 5] =
    [longflow::FIGURES, balancekv::FIGURES, keepkv::FIGURES, kvreviver::FIGURES, prhs::FIGURES];

/// A table or figure of a paper.
#[derive(Debug)]
pub(crate) struct Figure {
    /// The name on the command line, in titles and in records: the paper, and the number there.
    pub(crate) name: &'static str,
    /// The line of `--help`.
    about: &'static str,
    /// The measured quantity, as it stands behind the name in titles.
    measures: &'static str,
    /// What stands in for the paper's model or data, as it stands in brackets in titles; empty
    /// where nothing does.
    stands_in: &'static str,
    /// The differences from the paper, as a note says them; empty where this is the paper's
    /// measurement on another device.
    differs: &'static str,
    /// The paper's results, as a note says them; it may be empty.
    published: &'static str,
    /// The model that runs.
    model: ModelChoice,
    /// The policies that `--policy` may name.
    policies: PolicyChoice,
    /// Whether it takes prompts.
    prompts: bool,
    /// Whether it takes a text, and contexts in it.
    text: bool,
    /// Whether `--lengths` and `--batches` may replace its sizes.
    sized: bool,
    /// Memory in GiB of the paper's GPU, where the largest batch in it is measured.
    memory_gib: Option<f64>,
    /// Whether its sizes are out of a CPU's reach.
    wants_gpu: bool,
    /// Whether the figure is measured in f32 on every device.
    single_precision: bool,
    /// How it is measured.
    measurement: Measurement,
}

/// How a figure is measured.
#[derive(Debug)]
enum Measurement {
    /// Answers to prompts, and perplexity of a text, behind compressed contexts.
    Quality(Quality),
    /// The attention that policies read of real prompts.
    ReadAttention(ReadAttention),
    /// Prefill and decode speed at fixed lengths and batches.
    Throughput(Throughput),
    /// Decode speed and memory at growing batches, up to the largest that fits.
    ByBatch(ByBatch),
    /// The time of one layer's attention in a decode step, on bare tensors.
    OpTime(OpTime),
    /// The paper's own tasks, with the paper's numbers beside ours.
    Preset(Preset),
    /// A measurement of its own on bare tensors, given the figure's name.
    Tensors(fn(&mut Bench, &str, &PaperOptions) -> anyhow::Result<()>),
    /// A measurement of its own on a model, given the figure's name.
    Model(fn(&mut ModelBench<'_>, &str, &PaperOptions) -> anyhow::Result<()>),
}

/// The model that a figure runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelChoice {
    /// No model: the figure measures bare tensors.
    None,
    /// The model that `--model` names.
    Any,
    /// The model that `--model` names. Without `--model` it is this model; in the quick form, the
    /// default model.
    AnyOr(&'static str),
    /// This model; in the quick form, the default model. `--model` is refused.
    Only(&'static str),
}

/// The policies that `--policy` may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyChoice {
    /// No policies: `--policy` is refused.
    Fixed,
    /// Some of the figure's own policies.
    Names,
    /// Some of the figure's own policies, and other configurations.
    Configurations,
}

/// A figure of bare tensors that takes no options.
const TENSORS: Figure = Figure {
    name: "",
    about: "",
    measures: "",
    stands_in: "",
    differs: "",
    published: "",
    model: ModelChoice::None,
    policies: PolicyChoice::Fixed,
    prompts: false,
    text: false,
    sized: false,
    memory_gib: None,
    wants_gpu: false,
    single_precision: false,
    measurement: Measurement::Tensors(|_, _, _| Ok(())),
};

/// A figure of single layers of prompts.
const LAYERS: Figure =
    Figure { stands_in: NEEDLES, model: ModelChoice::Any, prompts: true, ..TENSORS };

/// A figure of answers to prompts and perplexity behind compressed contexts.
const QUALITY: Figure = Figure {
    stands_in: NEEDLES,
    model: ModelChoice::Any,
    prompts: true,
    text: true,
    policies: PolicyChoice::Configurations,
    ..TENSORS
};

/// A figure of speed and memory by batch.
const BY_BATCH: Figure = Figure {
    stands_in: "random weights unless --model names a model, made-up prompts",
    model: ModelChoice::AnyOr("random:llama-2-7b"),
    memory_gib: Some(80.0),
    wants_gpu: true,
    policies: PolicyChoice::Names,
    ..TENSORS
};

/// A preset: the paper's tasks, policies and settings.
const PRESET: Figure =
    Figure { wants_gpu: true, policies: PolicyChoice::Configurations, ..TENSORS };

/// A figure, and the options given to it.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Paper {
    /// Which one; `--quick` takes sizes for small machines.
    #[arg(value_parser = parser())]
    pub(crate) figure: &'static Figure,
    /// The options.
    #[command(flatten)]
    pub(crate) options: PaperOptions,
}

/// All figures.
pub(crate) fn all() -> impl Iterator<Item = &'static Figure> {
    FIGURES.into_iter().flatten()
}

/// Reads a figure's name, and lists all of them in the help with what stands in for the paper's
/// model or data.
fn parser() -> impl TypedValueParser<Value = &'static Figure> {
    let help = |figure: &Figure| match figure.stands_in {
        "" => figure.about.to_string(),
        other => format!("{} ({other})", figure.about),
    };
    let values = all().map(|figure| PossibleValue::new(figure.name).help(help(figure)));
    PossibleValuesParser::new(values)
        .try_map(|name| all().find(|figure| figure.name == name).ok_or("expected a figure's name"))
}

/// Runs a figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench, paper: &Paper) -> anyhow::Result<()> {
    let Paper { figure, options } = paper;
    let name = figure.name;
    match &figure.measurement {
        Measurement::Tensors(run) => return run(bench, name, options),
        Measurement::OpTime(ops) => return op_time::run(bench, name, ops, options),
        _ => {}
    }
    let quick = bench.common.quick;
    let asked = bench.common.model.clone();
    let model = figure.model(asked.as_deref(), quick).unwrap_or(bench.common.model()).to_string();
    let loaded = ModelBench::load(bench, &model);
    let bench = &mut match &asked {
        None => loaded.with_context(|| {
            format!("{name} runs {model}; --model FOLDER names a local copy, or another model")
        }),
        Some(_) => loaded,
    }?;
    // Times of quick forms compare with no published time.
    let mut comparable = !quick;
    match &figure.measurement {
        Measurement::Quality(quality) => {
            let wanted = paper.wanted(quick).unwrap_or_default();
            runners::quality(bench, quality, options, &wanted, figure.text)?;
            comparable = true;
        }
        Measurement::ReadAttention(read) => runners::read_attention(bench, read, options)?,
        Measurement::Throughput(speed) => runners::throughput(bench, speed, options)?,
        Measurement::ByBatch(by_batch) => {
            let gib = figure.memory_gib.unwrap_or(f64::INFINITY);
            let own = figure.model(None, quick) == Some(&*model);
            by_batch::run(bench, name, by_batch, options, gib, own)?;
            comparable &= own;
        }
        Measurement::Preset(preset) => {
            preset.run(bench, name, &model, options)?;
            comparable = true;
        }
        Measurement::Model(run) => run(bench, name, options)?,
        Measurement::Tensors(_) | Measurement::OpTime(_) => {}
    }
    if comparable && !figure.published.is_empty() {
        bench.note(figure.published.into());
    }
    Ok(())
}

impl Paper {
    /// Refuses options that the figure does not take.
    ///
    /// # Errors
    /// For the first such option; the error names it.
    pub(crate) fn check(&self, common: &Common) -> anyhow::Result<()> {
        let (takes, options, name) = (self.figure, &self.options, self.figure.name);
        ensure!(
            common.model.is_none() || takes.takes_models(),
            "--model: {name} runs at its paper's size"
        );
        ensure!(
            common.budget.is_none() || takes.quality().is_some() || takes.preset().is_some(),
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
        ensure!(
            options.memory_cap.is_none() || takes.memory_gib.is_some(),
            "--memory-cap: {name} has one size"
        );
        let preset = takes.preset();
        match preset {
            Some(preset) => preset.check(&options.preset)?,
            None => {
                let given = options.preset.given();
                let option = given.unwrap_or_default();
                ensure!(given.is_none(), "{option}: {name} does not run its paper's tasks");
            }
        }
        if !takes.prompts {
            ensure!(options.prompts.is_none(), "--prompts: {name} has none");
            let asks = options.limit.is_none() || preset.is_some();
            ensure!(asks, "--limit: {name} has no prompts");
        }
        ensure!(
            options.mode.is_none() || takes.quality().is_some() || preset.is_some(),
            "--mode: {name} asks no questions"
        );
        if !takes.text {
            ensure!(options.text.is_none(), "--text: {name} reads no text");
            ensure!(options.contexts.is_empty(), "--contexts: {name} reads no text");
        }
        ensure!(
            options.contexts.is_empty() || options.text.is_some() || preset.is_none(),
            "--contexts: {name} measures perplexity only of a text that --text names"
        );
        let grows = matches!(takes.measurement, Measurement::ByBatch(_));
        if !takes.sized || common.quick {
            let one = common.quick && takes.sized;
            let why = if one { "--quick has one size" } else { "it has the paper's sizes" };
            ensure!(options.lengths.is_empty() || takes.prompts, "--lengths: {name}: {why}");
            let grows = grows && !common.quick;
            ensure!(grows || options.batches.is_empty(), "--batches: {name}: {why}");
        }
        if takes.single_precision {
            ensure!(common.dtype.is_none(), "--dtype: {name} is in f32");
        }
        ensure!(
            options.memory_cap.is_none() || !common.quick || grows,
            "--memory-cap: with --quick no batch is the largest"
        );
        Ok(())
    }

    /// Refuses figures that would take a CPU hours.
    ///
    /// # Errors
    /// For the sizes of the paper on the CPU.
    pub(crate) fn check_device(&self, device_name: &str, common: &Common) -> anyhow::Result<()> {
        let Self { figure, options } = self;
        let name = figure.name;
        let on_cpu = device_name == CPU && !common.quick && figure.wants_gpu;
        if figure.preset().is_some() {
            // A CPU runs every model in reasonable time but the paper's.
            let model = figure.model(None, false).unwrap_or_default();
            ensure!(
                !on_cpu || common.model.is_some(),
                "{name} runs {model}, for GPUs; on the CPU, name a smaller model by --model, or \
                 add --quick"
            );
            return Ok(());
        }
        // Whole models are beyond it at any length.
        let sized = !options.lengths.is_empty() && !figure.takes_models();
        ensure!(
            !on_cpu || sized,
            "{name} has the paper's sizes, for GPUs; on the CPU, add --quick"
        );
        Ok(())
    }

    /// The prompts that it asks for, if it takes any.
    pub(crate) fn wanted(&self, quick: bool) -> Option<Wanted<'_>> {
        let wanted = self.options.wanted();
        self.figure.prompts.then(|| match self.figure.quality() {
            None => wanted,
            Some(quality) => Wanted {
                with_depth: quality.with_depth,
                limit: wanted.limit.or(quick.then_some(QUICK_PROMPTS)),
                mode: Some(quality.mode(&self.options, quick)),
                ..wanted
            },
        })
    }

    /// The title: the name, the measured quantity, and in brackets what stands in for the paper's
    /// model or data.
    pub(crate) fn title(&self, common: &Common) -> String {
        let Figure { name, measures, stands_in, .. } = self.figure;
        let mut brackets: Vec<String> = Vec::new();
        if let Some(preset) = self.figure.preset() {
            let model = self.figure.model(common.model.as_deref(), common.quick);
            brackets.extend(preset.other_model(model.unwrap_or(common.model())));
        }
        let file = self.options.prompts.as_deref().and_then(|path| path.file_name());
        brackets.extend(match (file, *stands_in) {
            (_, "") => None,
            (Some(file), NEEDLES) => {
                Some(format!("prompts of {}, not the paper's workload", file.to_string_lossy()))
            }
            (_, other) => Some(other.into()),
        });
        match brackets.is_empty() {
            true => format!("{name}: {measures}"),
            false => format!("{name}: {measures} ({})", brackets.join("; ")),
        }
    }

    /// Notes for readers of its numbers.
    pub(crate) fn notes(&self, quick: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let Figure { name, differs, .. } = self.figure;
        if !differs.is_empty() {
            notes.push(format!("{name} differs from the paper: {differs}"));
        }
        if quick {
            notes.push("--quick: small sizes and few cases, a first look and no comparison".into());
        }
        notes
    }
}

impl Figure {
    /// The model that the figure runs, where `--model` names the model `asked`; `None` where that
    /// is the default model.
    fn model<'a>(&'a self, asked: Option<&'a str>, quick: bool) -> Option<&'a str> {
        match self.model {
            ModelChoice::Only(name) if !quick => Some(name),
            ModelChoice::AnyOr(name) if !quick => asked.or(Some(name)),
            _ => asked,
        }
    }

    /// Whether it measures a model, and not bare tensors.
    pub(crate) fn runs_model(&self) -> bool {
        self.model != ModelChoice::None
    }

    fn takes_models(&self) -> bool {
        matches!(self.model, ModelChoice::Any | ModelChoice::AnyOr(_))
    }

    /// The paper's tasks, if the figure runs them.
    fn preset(&self) -> Option<&Preset> {
        match &self.measurement {
            Measurement::Preset(preset) => Some(preset),
            _ => None,
        }
    }

    /// The figure's questions and budgets, if it has any.
    fn quality(&self) -> Option<&Quality> {
        match &self.measurement {
            Measurement::Quality(quality) => Some(quality),
            _ => None,
        }
    }
}
