//! The measurements that figures share with suites: their sizes and policies, and how they run.

use kv_core::Budget;
use serde_json::Value;

use crate::bench::{ModelBench, Sizes};
use crate::options::{self, Attention, Common, PaperOptions};
use crate::policy_runs::PolicyRun;
use crate::prompts::{Mode, Prompts, Wanted};
use crate::suites::perplexity::{self, Text};
use crate::suites::{attention, quality, throughput};

/// Budgets of figures by budget.
pub(super) const SHARES: &[Budget] =
    &[Budget::Ratio(0.5), Budget::Ratio(0.25), Budget::Ratio(0.1), Budget::Ratio(0.05)];
/// The budgets of their quick forms.
pub(super) const QUICK_SHARES: &[Budget] = &[Budget::Ratio(0.25), Budget::Ratio(0.1)];

/// Answers to prompts, and perplexity of a text, behind compressed contexts.
#[derive(Debug)]
pub(super) struct Quality {
    /// When compression happens.
    pub(super) mode: Mode,
    /// The budgets, which `--budget` replaces.
    pub(super) budgets: &'static [Budget],
    /// The budgets of the quick form, where they are others.
    pub(super) quick_budgets: &'static [Budget],
    /// Whether prompts must say at which depth their answer lies.
    pub(super) with_depth: bool,
    /// The configurations of the policies at some budgets. The full cache runs in any case.
    pub(super) policies: fn(&ModelBench<'_>, &[Budget]) -> Vec<Value>,
    /// More that is measured or noted of the policies that ran, on the texts that were read.
    pub(super) more:
        fn(&mut ModelBench<'_>, &PaperOptions, &[PolicyRun], &[Text]) -> anyhow::Result<()>,
}

/// Both modes; budgets and policies are the figure's.
pub(super) const QUALITY: Quality = Quality {
    mode: Mode::Both,
    budgets: &[],
    quick_budgets: &[],
    with_depth: false,
    policies: |_, _| Vec::new(),
    more: |_, _, _, _| Ok(()),
};

impl Quality {
    /// The budgets of `--budget`; without it the figure's own.
    pub(super) fn budgets(&self, common: &Common) -> Vec<Budget> {
        let small = common.quick && !self.quick_budgets.is_empty();
        let own = if small { self.quick_budgets } else { self.budgets };
        common.budget.clone().unwrap_or_else(|| own.to_vec())
    }

    /// When compression happens.
    pub(super) fn mode(&self, options: &PaperOptions, quick: bool) -> Mode {
        let quick_own = if self.mode == Mode::Both { Mode::QuestionAware } else { self.mode };
        options.mode.unwrap_or(if quick { quick_own } else { self.mode })
    }
}

/// Runs a figure's own policies as far as `--policy` names them, and configurations that it adds,
/// on the prompts that are `wanted`; perplexity too where the figure `reads_text`.
///
/// # Errors
/// Where a policy or the device refuses.
pub(super) fn quality(
    bench: &mut ModelBench<'_>,
    figure: &Quality,
    options: &PaperOptions,
    wanted: &Wanted<'_>,
    reads_text: bool,
) -> anyhow::Result<()> {
    let budgets = &figure.budgets(&bench.common);
    let own = bench.common.build_runs((figure.policies)(bench, budgets), budgets)?;
    let policy_runs = bench.common.select_or_add(own, budgets)?;
    let prompts = Prompts::read(wanted)?;
    // Read first: a text that is too short must not cost a finished retrieval.
    let texts = match reads_text {
        true => Text::read(bench, options.text.as_deref(), &options.contexts)?,
        false => Vec::new(),
    };
    let mode = figure.mode(options, bench.common.quick);
    quality::retrieval(bench, &policy_runs, prompts, mode)?;
    perplexity::run(bench, &policy_runs, texts.clone())?;
    (figure.more)(bench, options, &policy_runs, &texts)
}

/// The attention that policies read of real prompts, with its certificates.
#[derive(Debug)]
pub(super) struct ReadAttention {
    /// The configurations of the policies, in the quick form or not.
    pub(super) policies: fn(bool) -> Vec<Value>,
    /// The prompts, which `--limit` replaces.
    pub(super) prompts: Sizes<usize>,
    /// Decode steps behind each prompt.
    pub(super) steps: Sizes<usize>,
}

/// Runs a figure's policies as far as `--policy` names them, and the full cache.
///
/// # Errors
/// Where a policy or the device refuses.
pub(super) fn read_attention(
    bench: &mut ModelBench<'_>,
    figure: &ReadAttention,
    options: &PaperOptions,
) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let attention = Attention {
        limit: options.limit.unwrap_or(*figure.prompts.of(quick)),
        steps: *figure.steps.of(quick),
        prompts: options.prompts.clone(),
        lengths: options.lengths.clone(),
        certificates: true,
        ..Attention::default()
    };
    let policy_runs = bench.common.select_beside_full(&(figure.policies)(quick))?;
    attention::measure(bench, &policy_runs, &attention)
}

/// Prefill and decode speed.
#[derive(Debug)]
pub(super) struct Throughput {
    /// The configurations of the policies, in the quick form or not.
    pub(super) policies: fn(bool) -> Vec<Value>,
    /// Tokens of prompts, which `--lengths` replaces.
    pub(super) lengths: Sizes<&'static [usize]>,
    /// Sequences that decode together, which `--batches` replaces.
    pub(super) batches: Sizes<&'static [usize]>,
    /// Decode steps that are timed.
    pub(super) steps: Sizes<usize>,
}

/// Runs a figure's policies as far as `--policy` names them, and the full cache.
///
/// # Errors
/// Where a policy or the device refuses.
pub(super) fn throughput(
    bench: &mut ModelBench<'_>,
    figure: &Throughput,
    options: &PaperOptions,
) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let asked_or = |asked: &[usize], own: &Sizes<&[usize]>| match asked {
        [] => own.of(quick).to_vec(),
        _ => asked.to_vec(),
    };
    let options = options::Throughput {
        lengths: asked_or(&options.lengths, &figure.lengths),
        batches: asked_or(&options.batches, &figure.batches),
        steps: *figure.steps.of(quick),
        memory_cap: None,
        warm_up: options::WARM_UP,
        tensor_parallel: None,
    };
    let policy_runs = bench.common.select_beside_full(&(figure.policies)(quick))?;
    throughput::measure(bench, &policy_runs, &options)
}
