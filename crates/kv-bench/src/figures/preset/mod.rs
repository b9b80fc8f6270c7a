//! Presets: a paper's own tasks, answered and graded by `evaluate` with the paper's policies and
//! settings, and the paper's numbers beside ours.
//!
//! Settings and numbers are data, a TOML file each in `assets/papers` ([`mod@file`]).

mod beside;
mod file;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use kv_core::Budget;
use kv_models::ModelError;
use kv_tasks::{Task, TaskError};
use serde_json::Value;

use crate::bench::ModelBench;
use crate::options::{Chat, Common, Evaluate, PaperOptions, PresetOptions};
use crate::policy_runs::PolicyRun;
use crate::prompts::Mode;
use crate::record::FULL;
use crate::suites::evaluate::{self, Measured};
use beside::{Scores, Table};
use file::{Column, PresetFile};

/// Questions of each task in the quick form.
const QUICK_QUESTIONS: usize = 2;
/// New tokens in the quick form.
const QUICK_TOKENS: usize = 32;
/// Tokens that are left for a chat template's own text where prompts are cut to the model's
/// positions.
const TEMPLATE_TOKENS: usize = 100;

/// What helps where a task's questions cannot be had.
const DATA: &str = "--data FOLDER names local files, and --tasks A,B runs some of the tasks";

/// A paper's table of tasks.
#[derive(Debug)]
pub(super) struct Preset {
    /// The file's TOML.
    pub(super) toml: &'static str,
    /// Changes a configuration where the model has what the paper's form needs.
    pub(super) adapt: fn(&ModelBench<'_>, &mut Value),
    /// More that is measured or noted of the policies that ran.
    pub(super) more: fn(&mut ModelBench<'_>, &PaperOptions, &[PolicyRun]) -> anyhow::Result<()>,
}

/// Configurations as they are written, and nothing more that is measured.
pub(super) const PRESET: Preset = Preset { toml: "", adapt: |_, _| {}, more: |_, _, _| Ok(()) };

/// A policy of the paper's table that ran, under the paper's name.
struct MethodRun {
    method: String,
    budget: Option<Budget>,
    policy_run: PolicyRun,
}

impl Preset {
    /// Refuses options that do not fit, before a model is loaded.
    ///
    /// # Errors
    /// For tasks and models that the paper does not have, and for a folder that is not there.
    pub(super) fn check(&self, options: &PresetOptions) -> anyhow::Result<()> {
        let paper = PresetFile::read(self.toml)?;
        paper.columns(&options.tasks)?;
        paper.published(options.published.as_deref(), "")?;
        if let Some(folder) = &options.data {
            ensure!(folder.is_dir(), "--data: {} is no folder", folder.display());
        }
        Ok(())
    }

    /// What titles say of a model that is none of the paper's.
    pub(super) fn other_model(&self, model: &str) -> Option<String> {
        let paper = PresetFile::read(self.toml).ok()?;
        let name = Path::new(model).file_name().map_or(model.into(), OsStr::to_string_lossy);
        paper.own_model(model).is_none().then(|| format!("{name}, not the paper's model"))
    }

    /// Answers the paper's tasks by the loaded model, which `model` names, and sets the paper's
    /// numbers beside the scores.
    ///
    /// # Errors
    /// Where a task, a policy, the model or the file of answers refuses.
    pub(super) fn run(
        &self,
        bench: &mut ModelBench<'_>,
        name: &str,
        model: &str,
        options: &PaperOptions,
    ) -> anyhow::Result<()> {
        let paper = PresetFile::read(self.toml)?;
        let own = &options.preset;
        let columns = paper.columns(&own.tasks)?;
        let budgets = bench.common.budget.clone().unwrap_or_else(|| paper.budgets.clone());
        let methods = self.methods(bench, &paper, &budgets)?;
        let all = methods.iter().map(|own| own.policy_run.clone()).collect();
        let policy_runs = bench.common.select_or_add(all, &budgets)?;
        let mut settings = settings(&paper, &columns, &bench.common, options);
        ask_without_template(bench, &mut settings, own)?;
        fit(bench, &paper, &mut settings)?;
        let published = paper.published(own.published.as_deref(), model)?;
        let is_it = paper.own_model(model).is_some_and(|own| own.name == published.name);
        let mut scores = Scores::new(&columns, settings.mode == Mode::Both);
        let measured =
            evaluate::measure(bench, &settings, &policy_runs, &mut |graded| scores.add(graded));
        let measured =
            measured.map_err(|error| match error.chain().any(|cause| cause.is::<TaskError>()) {
                true => anyhow!("{error:#}; {DATA}"),
                false => error,
            })?;
        let mut changed = changed(&paper, &bench.common, options, &settings, &measured)?;
        if measured.left_out > 0 {
            changed.push("long questions are left out".into());
        }
        if !is_it {
            changed.insert(0, format!("the model is {}", bench.model.name()));
        }
        let comparable = changed.is_empty();
        let table = Table { name, paper: &paper, published, methods: &methods, comparable };
        scores.record(bench, &table, &policy_runs);
        if !published.rows.is_empty() {
            let rest = match changed.is_empty() {
                true => String::new(),
                false => format!("; no differences: {}", changed.join("; ")),
            };
            bench.note(format!("published numbers: {}, of {}{rest}", paper.source, published.name));
        }
        (self.more)(bench, options, &policy_runs)
    }

    /// The paper's methods at each budget, the full cache first.
    fn methods(
        &self,
        bench: &ModelBench<'_>,
        paper: &PresetFile,
        budgets: &[Budget],
    ) -> anyhow::Result<Vec<MethodRun>> {
        let mut all = Vec::new();
        for method in &paper.methods {
            let mut config = method.policy.clone();
            (self.adapt)(bench, &mut config);
            let full = config["policy"] == FULL;
            let policy_runs = bench
                .common
                .build_runs(vec![config], budgets)
                .with_context(|| format!("{} of {}", method.name, paper.source))?;
            // The full cache comes along in any case.
            let skipped = if full { 0 } else { 1 };
            all.extend(policy_runs.into_iter().skip(skipped).map(|policy_run| MethodRun {
                method: method.name.clone(),
                budget: policy_run.policy.budget(),
                policy_run,
            }));
        }
        Ok(all)
    }
}

/// The settings of the paper, as far as no option replaces them.
fn settings(
    paper: &PresetFile,
    columns: &[Column],
    common: &Common,
    options: &PaperOptions,
) -> Evaluate {
    let (own, quick) = (&options.preset, common.quick);
    let mut task: Vec<String> = columns.iter().map(|column| column.task.clone()).collect();
    task.dedup();
    let chat = |chat: bool| if chat { Chat::Template } else { Chat::Raw };
    Evaluate {
        task,
        data: own.data.clone(),
        length: own.length,
        limit: options.limit.or(quick.then_some(QUICK_QUESTIONS)).or(paper.limit),
        text: None,
        few_shot: own.few_shot,
        few_shot_where_taken: paper.few_shot,
        mode: options.mode.unwrap_or(Mode::QuestionAware),
        new_tokens: own.new_tokens.or(quick.then_some(QUICK_TOKENS)).or(paper.new_tokens),
        stop: Vec::new(),
        chat: own.chat.or(paper.chat.map(chat)),
        chat_variable: Vec::new(),
        tokenizer: None,
        system: None,
        samples: own.samples.unwrap_or(1),
        temperature: paper.temperature,
        top_p: paper.top_p,
        top_k: None,
        min_p: None,
        repetition_penalty: 1.0,
        batch: own.batch,
        answers: own.answers.clone(),
    }
}

/// Asks a model without a chat template as the prompts are; says so where a task would have it.
fn ask_without_template(
    bench: &mut ModelBench<'_>,
    settings: &mut Evaluate,
    own: &PresetOptions,
) -> anyhow::Result<()> {
    let missing =
        matches!(bench.model.chat_template(), Err(ModelError::MissingChatTemplate { .. }));
    if !missing || own.chat.is_some() {
        return Ok(());
    }
    let asked = settings.chat.map(Chat::wanted);
    let mut chats = false;
    for name in &settings.task {
        chats |= asked.map_or_else(|| Task::named(name).map(|task| task.chat), Ok)?;
    }
    settings.chat = Some(Chat::Raw);
    if chats {
        let model = bench.model.name().to_string();
        bench.note(format!("{model} has no chat template, and is asked without one"));
    }
    Ok(())
}

/// Cuts prompts to the model's positions where the paper does.
///
/// # Errors
/// Where the answers alone leave prompts no position.
fn fit(bench: &ModelBench<'_>, paper: &PresetFile, settings: &mut Evaluate) -> anyhow::Result<()> {
    let config = bench.model.config();
    let positions = config.sliding_window.unwrap_or(config.max_positions);
    let mut longest = 0;
    let mut shortest = usize::MAX;
    for name in &settings.task {
        let tokens = settings
            .new_tokens
            .map_or_else(|| Task::named(name).map(|task| task.max_new_tokens), Ok)?;
        (longest, shortest) = (longest.max(tokens), shortest.min(tokens));
    }
    if shortest >= positions {
        bail!(
            "answers of {shortest} tokens leave prompts no place in the model's {}; \
             --new-tokens N takes fewer",
            config.longest()
        );
    }
    if paper.cut_middle && settings.length.is_none() {
        let left = positions.saturating_sub(longest + TEMPLATE_TOKENS);
        settings.length = Some(left).filter(|left| *left > 0);
    }
    Ok(())
}

/// What options change of the paper's setting, in words.
fn changed(
    paper: &PresetFile,
    common: &Common,
    options: &PaperOptions,
    settings: &Evaluate,
    measured: &Measured,
) -> anyhow::Result<Vec<String>> {
    let own = &options.preset;
    let most = measured.most_questions;
    // Two limits beyond all questions are one.
    let count = settings.limit != paper.limit
        && (settings.limit.is_some_and(|limit| most >= limit)
            || paper.limit.is_some_and(|limit| most > limit));
    let mut examples = false;
    if own.few_shot.is_some() && own.few_shot != paper.few_shot {
        for name in &settings.task {
            examples |= Task::named(name)?.takes_examples();
        }
    }
    let budgets = common.budget.iter().flatten().any(|budget| !paper.budgets.contains(budget));
    let changed = [
        (count, "another number of questions"),
        (common.quick || own.new_tokens.is_some(), "answers have another length"),
        (own.length.is_some(), "prompts have another length"),
        (examples, "examples are other ones"),
        (own.chat.is_some(), "--chat says how questions are asked"),
        (settings.samples > 1, "questions have several answers"),
        (settings.mode != Mode::QuestionAware, "the mode is another"),
        (budgets, "budgets are others"),
    ];
    Ok(changed.into_iter().filter(|(is, _)| *is).map(|(_, what)| what.into()).collect())
}
