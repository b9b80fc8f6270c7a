//! Retrieval: exact match and log-probability of the answer, and agreement with the full cache.

use anyhow::{Context, ensure};
use kv_core::MemoryReport;
use kv_models::{Sampling, Session};
use kv_policies::Reads;

use super::next_token::{Judged, judge_answer, rows};
use super::perplexity::{self, Text};
use super::policy_records::{Votes, reads_of, record_memory, record_reads};
use super::{conversation, long_output};
use crate::bench::ModelBench;
use crate::options::{Quality, Task};
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts::{Mode, Prompt, Prompts};
use crate::record::{Case, metric, mode};

const SUITE: &str = "quality";
/// Shares kept where no budget is given: 50 to 95 % dropped.
const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const QUICK_BUDGETS: [f64; 2] = [0.5, 0.25];

/// Runs the suite.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Quality) -> anyhow::Result<()> {
    match options.task {
        Some(Task::LongOutput) => return long_output::run(bench, options),
        Some(Task::Conversation) => return conversation::run(bench, options),
        None => {}
    }
    let quick = bench.common.quick;
    let budgets: &[f64] = if quick { &QUICK_BUDGETS } else { &BUDGETS };
    let policy_runs = bench.common.policy_runs(budgets)?;
    let prompts = Prompts::read(&options.wanted(quick))?;
    // Read first: a text that is too short must not cost a finished retrieval.
    let texts = match options.no_perplexity {
        true => None,
        false => Some(Text::read(bench, options.text.as_deref(), &options.contexts)?),
    };
    retrieval(bench, &policy_runs, prompts, options.mode)?;
    texts.map_or(Ok(()), |texts| perplexity::run(bench, &policy_runs, texts))
}

/// Runs prompts under all policies, which share each prompt's prefill.
pub(crate) fn retrieval(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    mut prompts: Prompts,
    wanted: Mode,
) -> anyhow::Result<()> {
    let modes: Vec<bool> = match wanted {
        Mode::QuestionAware => vec![true],
        Mode::QuestionAgnostic => vec![false],
        Mode::Both => vec![true, false],
    };
    if let Some(note) = prompts.fit(&bench.model)? {
        bench.note(note);
    }
    let Prompts { source, list: prompts } = prompts;
    let longest = prompts.iter().map(|prompt| prompt.length).max().unwrap_or_default();
    bench.remark(policy_runs, longest)?;
    // Bytes of text, as prompts of some lengths take several times as long as others.
    let work: usize = prompts.iter().map(|prompt| prompt.prompt.len()).sum();
    let mut progress = Progress::new(work * modes.len(), "retrieval");
    let mut memory: Vec<Vec<MemoryReport>> = vec![Vec::new(); policy_runs.len()];
    let mut reads = vec![Reads::default(); policy_runs.len()];
    let mut votes = vec![Votes::default(); policy_runs.len()];
    for (index, prompt) in prompts.iter().enumerate() {
        for &aware in &modes {
            // Policies that draw must draw anew for every prompt.
            let seed = bench.common.seed.wrapping_add(index as u64);
            let run = answer(bench, policy_runs, prompt, aware, seed)
                .with_context(|| format!("prompt {}", prompt.id))?;
            let full = run[0].judged.best.clone();
            let sums = memory.iter_mut().zip(&mut votes).zip(&mut reads);
            for ((policy_run, answered), ((memory, votes), reads)) in
                policy_runs.iter().zip(run).zip(sums)
            {
                memory.push(answered.memory);
                *votes += answered.votes;
                *reads += answered.reads;
                let case = Case {
                    task: Some(prompt.task.clone()),
                    length: Some(prompt.length),
                    depth: prompt.depth,
                    mode: Some(if aware { mode::AWARE } else { mode::AGNOSTIC }.into()),
                    ..Case::default()
                };
                let case = case.prompt_of(&source, &prompt.id);
                let judged = &answered.judged;
                let same = judged.best.iter().zip(&full).filter(|(a, b)| a == b).count();
                let agreement = same as f64 / full.len() as f64;
                let setup = policy_run.setup();
                judged.record(bench, SUITE, &case, setup);
                bench.record(SUITE, &case, setup, metric::AGREEMENT, agreement);
            }
            progress.advance(prompt.prompt.len());
        }
    }
    progress.finish();
    for (policy_run, reports) in policy_runs.iter().zip(&memory) {
        record_memory(bench, SUITE, &Case::default(), policy_run, reports);
    }
    for (policy_run, votes) in policy_runs.iter().zip(votes) {
        votes.record(bench, SUITE, &Case::default(), policy_run);
    }
    for (policy_run, reads) in policy_runs.iter().zip(reads) {
        record_reads(bench, SUITE, &Case::default(), policy_run, reads);
    }
    Ok(())
}

/// How one policy answered one prompt.
struct Answered {
    judged: Judged,
    memory: MemoryReport,
    /// The votes of the prompt's tokens.
    votes: Votes,
    reads: Reads,
}

fn answer(
    bench: &ModelBench<'_>,
    policy_runs: &[PolicyRun],
    prompt: &Prompt,
    aware: bool,
    seed: u64,
) -> anyhow::Result<Vec<Answered>> {
    let model = &bench.model;
    let answer = model.encode_continuation(&prompt.answer)?;
    ensure!(!answer.is_empty(), "its answer is empty");
    let (context, question) = if aware {
        (model.encode(&prompt.prompt)?, Vec::new())
    } else {
        let (context, question) = prompt.split().context("nothing marks its question")?;
        (model.encode(context)?, model.encode_continuation(question)?)
    };
    let policies = PolicyRun::policies(policy_runs);
    let room = question.len() + answer.len();
    let sessions = Session::start_many(model, &policies, &[context], &[seed], room)?;
    // The full cache's, which answers first: as many rows of a vocabulary as the answer has tokens.
    let mut full = Vec::new();
    sessions
        .into_iter()
        .map(|session| {
            let kept = session.memory();
            let votes = Votes::of_session(&session)?;
            let mut decoder = session.decoder(&[Sampling::greedy()])?;
            decoder.append_question(&[&question])?;
            let before = decoder.append(&[&answer])?;
            let session = decoder.session();
            // State that a policy makes at its first step counts; tokens behind the prompt do not.
            let memory = MemoryReport { policy: session.memory().policy, ..kept };
            let logits = rows(before)?;
            let reads = reads_of(session)?;
            if full.is_empty() {
                full.clone_from(&logits);
            }
            let judged = judge_answer(&logits, &full, &answer)?;
            Ok(Answered { judged, memory, votes, reads })
        })
        .collect()
}
