//! Free generation on tasks, graded: `evaluate`.
//!
//! 1. Tasks give questions ([`kv_tasks`]), which become prompts ([`asked`]).
//! 2. Questions of similar length go through the model in batches. All policies share the prefill
//!    of a batch, and each generates behind its own compressed cache ([`mod@batches`]).
//! 3. Each output is graded and written to a file of answers at once ([`answer_file`]). A run that
//!    finds an answer in the file does not generate it again, so that a stopped run goes on where
//!    it was.
//!    Beside the output stands what the policy held of the prompt ([`kept`]).
//! 4. The answers become records, for tables and the report, which shows their texts too.

mod answer_file;
mod asked;
mod batches;
mod kept;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use kv_core::counted;
use kv_models::{
    GeneratedBatch, Model, ModelError, Request, Sampling, Session, Tokenizer, generate_from,
};
use kv_policies::Policy;
use kv_tasks::{Question, QuestionOptions, Task, TaskError, Tokens};
use serde_json::json;

use crate::bench::ModelBench;
use crate::options::{Chat, Evaluate};
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts::Mode;
use crate::record::{Case, is_full, metric, mode};
use crate::report::{ShownAnswer, ShownQuestion};
use answer_file::{Answer, AnswerFile, Key, seed_of};
use asked::Asked;
use batches::{Batch, batches};

const SUITE: &str = "evaluate";
/// Shares kept where no budget is given.
const BUDGETS: [f64; 3] = [0.5, 0.25, 0.1];
/// Questions that generate together, where the command does not say how many.
const BATCH: usize = 8;
/// A mean score of the full cache below which policies are not worth comparing.
const LEAST_SCORE: f64 = 0.02;

/// A graded answer of a question under a policy.
pub(crate) struct Graded<'a> {
    pub(crate) policy_run: &'a PolicyRun,
    pub(crate) task: &'a Task,
    pub(crate) question: &'a Question,
    /// Whether the question is known at compression, one of [`mode`].
    pub(crate) mode: &'a str,
    pub(crate) output: &'a str,
    /// 0 to 1, by the task's grader.
    pub(crate) score: f64,
}

/// Runs the suite.
///
/// # Errors
/// Where a task, a model, a policy or the file of answers refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Evaluate) -> anyhow::Result<()> {
    let policy_runs = bench.common.policy_runs(&BUDGETS)?;
    let measured = measure(bench, options, &policy_runs, &mut |_| Ok(()));
    measured.map(drop).map_err(|error| match error.chain().find_map(helping_option) {
        Some(option) => anyhow!("{error:#}; {option} names it"),
        None => error,
    })
}

/// The option that helps against an error.
fn helping_option(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    match error.downcast_ref()? {
        TaskError::Offline { .. }
        | TaskError::NotInDataSet { .. }
        | TaskError::Unavailable { .. }
        | TaskError::NoFolder { .. } => Some("--data FOLDER"),
        TaskError::NoLength { .. } => Some("--length TOKENS"),
        TaskError::NoText { .. } => Some("--text FILE"),
        _ => None,
    }
}

/// Questions that were asked.
pub(crate) struct Measured {
    /// Questions that are left out, as the model has no positions for them.
    pub(crate) left_out: usize,
    /// The most questions that a task gave, with those that are left out.
    pub(crate) most_questions: usize,
}

/// Records the answers of some policies, and shows each of them to `see`.
///
/// # Errors
/// As [`run`], and the errors of `see`.
pub(crate) fn measure(
    bench: &mut ModelBench<'_>,
    options: &Evaluate,
    policy_runs: &[PolicyRun],
    see: &mut dyn FnMut(&Graded<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<Measured> {
    options.sampling().validate()?;
    ensure!(
        options.samples == 1 || options.temperature > 0.0,
        "--samples {}: all samples of a question are equal without a --temperature above 0",
        options.samples
    );
    if let Some(path) = &options.tokenizer {
        let name = bench.model.name();
        ensure!(bench.model.tokenizer().is_none(), "--tokenizer: {name} has a tokenizer");
        bench.model.set_tokenizer(Tokenizer::from_file(path)?);
    }
    let (asked, measured) = questions(bench, options)?;
    let longest = asked.iter().map(Asked::tokens).max().unwrap_or_default();
    bench.remark(policy_runs, longest)?;
    let path = match &options.answers {
        Some(path) => path.clone(),
        None => default_answers(bench.model.name())?,
    };
    let mut file = AnswerFile::open(&path)?;
    let without = asked.iter().filter(|own| own.context().is_none()).count();
    if options.mode != Mode::QuestionAware && without > 0 {
        bench.note(format!(
            "{without} of {} questions have no context, and are asked with the question in sight \
             alone",
            asked.len()
        ));
    }
    let fingerprint = bench.model.fingerprint()?;
    let runs = Runs { bench, options, policy_runs, asked: &asked, fingerprint };
    let answers = runs.answers(&mut file)?;
    let mut shown: Vec<ShownQuestion> = asked.iter().map(Asked::shown).collect();
    let mut of_full = Vec::new();
    for (policy_run, index, answer) in answers {
        let asked = &asked[index];
        // By the grader and the references of this run.
        let score = asked.score(&answer.output)?;
        let (task, question, output) = (&*asked.task, &asked.question, &*answer.output);
        see(&Graded { policy_run, task, question, mode: &answer.key.mode, output, score })?;
        let case = Case {
            task: Some(asked.task_name()),
            length: Some(asked.tokens()),
            mode: Some(answer.key.mode.clone()),
            ..Case::default()
        };
        let case = case.prompt_of(&asked.task.name, &asked.question.id);
        if is_full(&policy_run.label) {
            of_full.push(score);
        }
        let setup = policy_run.setup();
        bench.record(SUITE, &case, setup, metric::SCORE, score);
        bench.record(SUITE, &case, setup, metric::NEW_TOKENS, answer.tokens as f64);
        bench.record(SUITE, &case, setup, metric::LIVE_BYTES, answer.kept_bytes as f64);
        bench.record(SUITE, &case, setup, metric::ANSWER_SECONDS, answer.seconds);
        shown[index].answers.push(ShownAnswer {
            policy: policy_run.label.clone(),
            budget: policy_run.budget,
            mode: answer.key.mode,
            sample: answer.key.sample,
            output: answer.output,
            finish: answer.finish,
            score,
            tokens: answer.tokens,
            bytes: answer.kept_bytes,
            seconds: answer.seconds,
            kept: answer.kept,
        });
    }
    bench.show(shown);
    let mean = of_full.iter().sum::<f64>() / of_full.len().max(1) as f64;
    if !of_full.is_empty() && mean < LEAST_SCORE {
        bench.note(format!(
            "the full cache scores {:.1} % in the mean: the model cannot answer these questions, \
             and differences between policies say nothing",
            100.0 * mean
        ));
    }
    bench.note(settings(options, &asked));
    bench.note(format!("answers, one JSON line each: {}", path.display()));
    Ok(measured)
}

/// `kv-bench/evaluate-MODEL.jsonl` in cargo's target folder, or in the current folder's `target`.
fn default_answers(model: &str) -> anyhow::Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = target.join("kv-bench");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let name: String = model
        .chars()
        .map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' })
        .collect();
    Ok(folder.join(format!("evaluate-{name}.jsonl")))
}

/// A model's dtype, and the dtype of its matrices where it is another.
fn dtypes(model: &Model) -> String {
    let [own, matrices] = [model.llama().dtype(), model.llama().matrix_dtype()]
        .map(|dtype| format!("{dtype:?}").to_lowercase());
    if own == matrices { own } else { format!("{own}, matrices {matrices}") }
}

/// How the questions were asked and graded.
fn settings(options: &Evaluate, asked: &[Asked]) -> String {
    let sampling = options.sampling();
    let chosen = match sampling.temperature > 0.0 {
        false => "the likeliest tokens".to_string(),
        true => {
            let limits = [
                sampling.top_p.map(|p| format!("top-p {p}")),
                sampling.top_k.map(|k| format!("top-k {k}")),
                sampling.min_p.map(|p| format!("min-p {p}")),
            ];
            let limits: Vec<String> = limits.into_iter().flatten().collect();
            let drawn = vec![format!("drawn with temperature {}", sampling.temperature)];
            let answers = vec![format!("{} a question", counted(options.samples, "answer"))];
            [drawn, limits, answers].concat().join(", ")
        }
    };
    let mut tasks: Vec<String> = asked
        .iter()
        .map(|own| {
            let Task { name, grader, chat, max_new_tokens, .. } = &*own.task;
            let through = if *chat { "chat template" } else { "raw prompt" };
            format!("{name} ({through}, {max_new_tokens} new tokens, graded by `{grader}`)")
        })
        .collect();
    tasks.dedup();
    format!("tokens: {chosen}; tasks: {}", tasks.join(", "))
}

/// A model's tokenizer as tasks take it.
struct ModelTokens<'a>(&'a Model);

impl Tokens for ModelTokens<'_> {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.0.encode_continuation(text).map_err(|error| error.to_string())
    }

    fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.0.decode(ids).map_err(|error| error.to_string())
    }
}

/// The questions of all tasks, as the model is asked them, and how many there are.
fn questions(
    bench: &mut ModelBench<'_>,
    options: &Evaluate,
) -> anyhow::Result<(Vec<Asked>, Measured)> {
    let model = &bench.model;
    let wanted = QuestionOptions {
        folder: options.data.clone(),
        length: options.length,
        limit: options.limit,
        seed: bench.common.seed,
        text: options.text.clone(),
        few_shot: None,
    };
    let mut tasks = tasks(options)?;
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    let untemplated = matches!(model.chat_template(), Err(ModelError::MissingChatTemplate { .. }));
    if untemplated && options.chat.is_none() && tasks.iter().any(|task| task.chat) {
        tasks.iter_mut().for_each(|task| task.chat = false);
        notes.push(format!("{} has no chat template, and is asked without one", model.name()));
    }
    let mut measured = Measured { left_out: 0, most_questions: 0 };
    for task in tasks.into_iter().map(Arc::new) {
        let name = &task.name;
        let own = task.takes_examples().then_some(options.few_shot_where_taken).flatten();
        let wanted = QuestionOptions { few_shot: options.few_shot.or(own), ..wanted.clone() };
        let questions =
            task.questions(&wanted, &ModelTokens(model)).with_context(|| name.clone())?;
        ensure!(!questions.is_empty(), "{name}: no questions");
        measured.most_questions = measured.most_questions.max(questions.len());
        let mut skipped = 0;
        for question in questions {
            let asked = Asked::new(model, &task, question, &options.chat_variable)?;
            // Nothing is measured of a prompt that the model has no positions for.
            match model.config().check_length(asked.tokens().saturating_add(task.max_new_tokens)) {
                Ok(()) => all.push(asked),
                Err(_) => skipped += 1,
            }
        }
        if skipped > 0 {
            let advice = match task.is_generated() {
                true => "a smaller --length makes shorter prompts",
                false => "--length N cuts the middle of longer prompts",
            };
            notes.push(format!(
                "{name}: left out, as too long for the model's {}: {}; {advice}",
                model.config().longest(),
                counted(skipped, "question")
            ));
        }
        measured.left_out += skipped;
    }
    notes.into_iter().for_each(|note| bench.note(note));
    ensure!(!all.is_empty(), "no question fits into the model's positions");
    Ok((all, measured))
}

/// The tasks as the options change them.
fn tasks(options: &Evaluate) -> anyhow::Result<Vec<Task>> {
    let mut all: Vec<Task> = Vec::new();
    for name in options.task.iter().flat_map(|name| names(name)) {
        let mut task = task_of(name)?;
        let known = all.iter().any(|own| own.name == task.name);
        ensure!(!known, "{name}: another task of this run has the name {} too", task.name);
        if let Some(tokens) = options.new_tokens {
            task.max_new_tokens = tokens;
        }
        task.stop.extend(options.stop.iter().cloned());
        task.chat = options.chat.map_or(task.chat, Chat::wanted);
        task.system = options.system.clone().or(task.system);
        all.push(task);
    }
    ensure!(
        options.chat_variable.is_empty() || all.iter().any(|task| task.chat),
        "--chat-variable: no question goes through a chat template; add --chat template"
    );
    Ok(all)
}

/// The tasks that a name stands for: all of a group, such as `ruler`, or itself.
fn names(name: &str) -> Vec<&str> {
    let of_group =
        |task: &&'static str| task.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
    let group: Vec<&str> = Task::names().filter(of_group).collect();
    if group.is_empty() { vec![name] } else { group }
}

/// A task by its name, or from a file of questions or a TOML file.
fn task_of(name: &str) -> anyhow::Result<Task> {
    let path = PathBuf::from(name);
    Ok(match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => {
            let text = std::fs::read_to_string(&path).with_context(|| name.to_string())?;
            Task::from_toml(&text).with_context(|| name.to_string())?
        }
        Some("json" | "jsonl" | "parquet" | "csv") => Task::of_file(&path)?,
        _ => Task::named(name).map_err(|error| anyhow!("{error} `kv-bench list` names all"))?,
    })
}

/// Generates for all sequences of a session, to the end.
fn generate_all(session: Session<'_>, requests: &[Request]) -> kv_models::Result<GeneratedBatch> {
    generate_from(session, requests, |_| ControlFlow::Continue(()))
}

/// How a question is asked.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// Whether the question is in sight when the prompt is compressed.
    aware: bool,
    /// The number of the sample, from 0.
    sample: usize,
}

/// Answers to be written.
struct Written {
    generated: GeneratedBatch,
    /// What was held of each prompt.
    strips: Vec<Option<String>>,
    /// Seconds of an answer.
    each: f64,
}

/// What a run asks.
struct Runs<'a, 'b, 'm> {
    bench: &'b ModelBench<'m>,
    options: &'b Evaluate,
    policy_runs: &'a [PolicyRun],
    asked: &'a [Asked],
    fingerprint: String,
}

impl<'a> Runs<'a, '_, '_> {
    /// All answers, each with its policy and the number of its question. Answers that the file
    /// lacks are generated and written to it.
    fn answers(
        &self,
        file: &mut AnswerFile,
    ) -> anyhow::Result<Vec<(&'a PolicyRun, usize, Answer)>> {
        let modes: &[bool] = match self.options.mode {
            Mode::QuestionAware => &[true],
            Mode::QuestionAgnostic => &[false],
            Mode::Both => &[true, false],
        };
        let batches = modes.iter().flat_map(|&aware| {
            let of_mode = batches(self.asked, aware, self.most_together());
            of_mode.into_iter().map(move |batch| (aware, batch))
        });
        let batches: Vec<(bool, Batch)> = batches.collect();
        ensure!(!batches.is_empty(), "no question has a context to compress by itself");
        let work: usize = batches
            .iter()
            .flat_map(|(_, batch)| {
                batch.questions().iter().map(|&index| self.asked[index].tokens())
            })
            .sum();
        let mut progress = Progress::new(work * self.options.samples, SUITE);
        let mut all = Vec::new();
        for sample in 0..self.options.samples {
            for (aware, batch) in &batches {
                let turn = Turn { aware: *aware, sample };
                self.answer_batch(file, turn, batch)?;
                for &index in batch.questions() {
                    let asked = &self.asked[index];
                    for policy_run in self.policy_runs {
                        let key = self.key(policy_run, asked, turn);
                        let answer = file.get(&key).context("an answer is missing")?;
                        all.push((policy_run, index, answer.clone()));
                    }
                    progress.advance(asked.tokens());
                }
            }
        }
        progress.finish();
        Ok(all)
    }

    /// Questions that generate together, at most.
    fn most_together(&self) -> usize {
        self.options.batch.unwrap_or(if self.bench.is_cpu() { 1 } else { BATCH })
    }

    /// Generates the answers of a batch that the file lacks.
    fn answer_batch(&self, file: &mut AnswerFile, turn: Turn, batch: &Batch) -> anyhow::Result<()> {
        let all = batch.questions();
        let open = |own: &&PolicyRun| !self.lacking(file, own, all, turn).is_empty();
        let open: Vec<&PolicyRun> = self.policy_runs.iter().filter(open).collect();
        if open.is_empty() {
            return Ok(());
        }
        match batch {
            Batch::Prompts(_) => self.answer_prompts(file, turn, all, &open),
            Batch::Context(_) => self.answer_on_context(file, turn, all, &open),
        }
    }

    /// Generates the answers to questions with prompts of their own, all together.
    fn answer_prompts(
        &self,
        file: &mut AnswerFile,
        turn: Turn,
        all: &[usize],
        open: &[&PolicyRun],
    ) -> anyhow::Result<()> {
        let lacking = |index: &usize| {
            open.iter().any(|own| !self.lacking(file, own, &[*index], turn).is_empty())
        };
        let rows: Vec<usize> = all.iter().copied().filter(lacking).collect();
        let requests = self.requests(&rows, turn);
        let prompts = requests.iter().map(|own| own.tokens.clone()).collect();
        let (sessions, prefill) =
            self.start(open, turn, prompts, self.asked[rows[0]].room(turn.aware))?;
        for (policy_run, session) in open.iter().zip(sessions) {
            let strips = kept::strips(&session)?;
            let started = Instant::now();
            let generated = generate_all(session, &requests);
            let generated = generated.with_context(|| policy_run.label.clone())?;
            let seconds = prefill + started.elapsed().as_secs_f64();
            let each = seconds / rows.len() as f64;
            self.write(file, policy_run, turn, &rows, Written { generated, strips, each })?;
        }
        Ok(())
    }

    /// Generates the answers to questions on one context, which is compressed once.
    fn answer_on_context(
        &self,
        file: &mut AnswerFile,
        turn: Turn,
        all: &[usize],
        open: &[&PolicyRun],
    ) -> anyhow::Result<()> {
        let first = &self.asked[all[0]];
        let context = first.context().unwrap_or_default().to_vec();
        let (sessions, prefill) = self.start(open, turn, vec![context], first.room(turn.aware))?;
        for (policy_run, session) in open.iter().zip(sessions) {
            let strips = kept::strips(&session)?;
            let own = self.lacking(file, policy_run, all, turn);
            let appended = |index: usize| self.asked[index].appended(turn.aware);
            let equal = own.chunk_by(|&a, &b| appended(a) == appended(b));
            for rows in equal.flat_map(|equal| equal.chunks(self.most_together())) {
                let started = Instant::now();
                let repeated = session.repeated(rows.len())?;
                let generated = generate_all(repeated, &self.requests(rows, turn));
                let generated = generated.with_context(|| policy_run.label.clone())?;
                let strips = vec![strips[0].clone(); rows.len()];
                let generation = started.elapsed().as_secs_f64() / rows.len() as f64;
                let each = prefill / own.len() as f64 + generation;
                self.write(file, policy_run, turn, rows, Written { generated, strips, each })?;
            }
        }
        Ok(())
    }

    /// The questions, of `all`, whose answers under a policy are not in the file.
    fn lacking(
        &self,
        file: &AnswerFile,
        policy_run: &PolicyRun,
        all: &[usize],
        turn: Turn,
    ) -> Vec<usize> {
        let lacks =
            |&index: &usize| file.get(&self.key(policy_run, &self.asked[index], turn)).is_none();
        all.iter().copied().filter(lacks).collect()
    }

    /// The sessions of some policies, with room for `room` tokens behind each prompt, and a
    /// policy's share of the seconds that this takes.
    fn start(
        &self,
        open: &[&PolicyRun],
        turn: Turn,
        prompts: Vec<Vec<u32>>,
        room: usize,
    ) -> anyhow::Result<(Vec<Session<'_>>, f64)> {
        let model = &self.bench.model;
        // A policy's draws depend on the tokens that it compresses, whatever is asked behind them.
        let seed = |prompt: &Vec<u32>| {
            seed_of(&json!([prompt, self.bench.common.seed, turn.sample]).to_string())
        };
        let seeds: Vec<u64> = prompts.iter().map(seed).collect();
        let policies: Vec<Arc<dyn Policy>> = open.iter().map(|own| own.policy.clone()).collect();
        let started = Instant::now();
        let room = vec![room; prompts.len()];
        let sessions = Session::start_rows(model, &policies, &prompts, &seeds, &room)?;
        model.llama().device().sync()?;
        Ok((sessions, started.elapsed().as_secs_f64() / open.len() as f64))
    }

    /// The requests of some questions. Whatever the policy, a question draws the same numbers.
    fn requests(&self, rows: &[usize], turn: Turn) -> Vec<Request> {
        let request = |&index: &usize| {
            let asked = &self.asked[index];
            let seed = self.key(&self.policy_runs[0], asked, turn).seed();
            asked.request(turn.aware, Sampling { seed, ..self.options.sampling() })
        };
        rows.iter().map(request).collect()
    }

    /// Grades answers and writes the ones that the file lacks.
    fn write(
        &self,
        file: &mut AnswerFile,
        policy_run: &PolicyRun,
        turn: Turn,
        rows: &[usize],
        written: Written,
    ) -> anyhow::Result<()> {
        let Written { generated, strips, each } = written;
        let bytes = generated.kept_bytes.into_iter().zip(generated.ended_bytes);
        let outputs = generated.outputs.into_iter().zip(bytes).zip(strips);
        for (&index, ((output, (kept_bytes, ended_bytes)), kept)) in rows.iter().zip(outputs) {
            let asked = &self.asked[index];
            let key = self.key(policy_run, asked, turn);
            if file.get(&key).is_some() {
                continue;
            }
            let text = output.text.unwrap_or_default();
            let score = asked.score(&text)?;
            file.add(Answer {
                hash: key.hash(),
                key,
                prompt_tokens: asked.tokens(),
                output: text,
                finish: format!("{:?}", output.finish).to_lowercase(),
                tokens: output.tokens.len(),
                kept_bytes,
                peak_bytes: ended_bytes.max(kept_bytes),
                seconds: each,
                score,
                kept,
            })?;
        }
        Ok(())
    }

    /// What an answer depends on.
    fn key(&self, policy_run: &PolicyRun, asked: &Asked, turn: Turn) -> Key {
        let Turn { aware, sample } = turn;
        let model = &self.bench.model;
        Key {
            model: model.name().into(),
            fingerprint: self.fingerprint.clone(),
            dtype: dtypes(model),
            task: asked.task.name.clone(),
            question: asked.question.id.clone(),
            subset: asked.question.subset.clone(),
            prompt: asked.hash.clone(),
            policy: policy_run.policy.config(),
            mode: if aware { mode::AWARE } else { mode::AGNOSTIC }.into(),
            new_tokens: asked.task.max_new_tokens,
            stop: asked.task.stop.clone(),
            sampling: self.options.sampling(),
            seed: self.bench.common.seed,
            sample,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::record::{Record, mean, metric, mode};
    use crate::testing::ran;

    /// Questions of needles that the embedded model finds.
    fn questions(path: &Path) {
        let filler = "The sea was calm that day, and the old boat lay upon the sand. ";
        let needles = [("clever fiddle", "21963"), ("green lamp", "70415"), ("old door", "38820")];
        let line = |(index, (what, number)): (usize, (&str, &str))| {
            let [before, after] = [3 + index, 9].map(|count| filler.repeat(count));
            let context =
                format!("{before}\nThe secret number of the {what} is {number}.\n{after}");
            let question =
                format!("\nQuestion: What is the secret number of the {what}?\nAnswer: ");
            json!({"id": what, "context": context, "question": question, "answers": [number],
                "grader": "contains", "max_new_tokens": 5})
        };
        let lines = needles.into_iter().enumerate().map(line);
        let text: String = lines.map(|line| line.to_string() + "\n").collect();
        std::fs::write(path, text).unwrap();
    }

    fn lines(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn answers_are_graded_and_a_stopped_run_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let [task, answers] =
            ["needles.jsonl", "answers.jsonl"].map(|name| folder.path().join(name));
        questions(&task);
        let run = |batch: &str| -> Vec<Record> {
            let [task, answers] = [&task, &answers].map(|path| path.to_str().unwrap());
            let line = ["evaluate", "--task", task, "--answers", answers, "--budget", "0.5"];
            let more = ["--policy", "snapkv,streaming-llm", "--mode", "both", "--batch", batch];
            ran(&[&line[..], &more].concat()).unwrap().0
        };
        let score = |records: &[Record], policy: &str, mode: &str| {
            let own = records.iter().filter(|r| {
                let case = r.case.mode.as_deref() == Some(mode);
                case && r.policy == policy && r.metric == metric::SCORE
            });
            let own: Vec<&Record> = own.collect();
            assert_eq!(own.len(), 3);
            mean(&own).unwrap()
        };
        let records = run("2");
        for mode in [mode::AWARE, mode::AGNOSTIC] {
            assert_eq!(score(&records, "full", mode), 1.0);
            assert!(score(&records, "streaming-llm", mode) < 1.0);
        }
        let first = lines(&answers);
        assert_eq!(first.len(), 3 * 3 * 2);
        let whole = first.iter().filter(|line| line["policy"]["policy"] == "full");
        assert!(whole.into_iter().all(|line| line["score"] == 1.0 && line["tokens"] == 5));
        let bytes = |policy: &str| {
            let own = first.iter().find(|line| line["policy"]["policy"] == policy);
            own.unwrap()["kept_bytes"].as_u64().unwrap()
        };
        assert!(bytes("snapkv") < bytes("full") * 6 / 10);
        // The share of the prompt that strips show; prompts of a batch have several lengths.
        let shares = |policy: &str| -> Vec<f64> {
            let own = first.iter().filter(|line| line["policy"]["policy"] == policy);
            own.map(|line| {
                let kept = line["kept"].as_str().unwrap();
                let digits: Vec<u32> = kept.chars().map(|c| c.to_digit(16).unwrap()).collect();
                assert_eq!(digits.len(), 96);
                f64::from(digits.iter().sum::<u32>()) / (15.0 * 96.0)
            })
            .collect()
        };
        assert_eq!(shares("full"), [1.0; 6]);
        for policy in ["snapkv", "streaming-llm"] {
            let shares = shares(policy);
            assert!(shares.iter().all(|share| (0.45..0.55).contains(share)), "{policy} {shares:?}");
        }
        // A run that was killed in the midst of a line goes on, in other batches, to equal answers.
        let text = std::fs::read_to_string(&answers).unwrap();
        std::fs::write(&answers, &text[..text.len() / 2]).unwrap();
        let values = |records: &[Record]| {
            let own = records.iter().filter(|r| r.metric == metric::SCORE);
            own.map(|r| (r.case.clone(), r.policy.clone(), r.value)).collect::<Vec<_>>()
        };
        assert_eq!(values(&run("1")), values(&records));
        let named = |lines: &[Value]| {
            let mut own: Vec<String> = lines
                .iter()
                .map(|line| {
                    format!(
                        "{} {} {} {}",
                        line["question"], line["policy"], line["mode"], line["output"]
                    )
                })
                .collect();
            own.sort();
            own
        };
        assert_eq!(named(&lines(&answers)), named(&first));
        // Nothing is left to do.
        let before = std::fs::read_to_string(&answers).unwrap();
        run("3");
        assert_eq!(std::fs::read_to_string(&answers).unwrap(), before);
    }

    #[test]
    fn questions_on_one_context_have_the_answers_that_they_have_alone() {
        let folder = tempfile::tempdir().unwrap();
        let filler = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(4);
        let needle = |(what, number): (&str, u32)| {
            format!("{filler}\nThe secret number of the {what} is {number}.\n")
        };
        let needles = [("clever fiddle", 21963), ("green lamp", 70415), ("door", 38820)];
        let context: String = needles.map(needle).concat() + &filler;
        let asked = needles.map(|(what, number)| {
            let question =
                format!("\nQuestion: What is the secret number of the {what}?\nAnswer: ");
            let line = json!({"id": what, "context": context, "question": question,
                "answers": [number.to_string()], "grader": "contains", "max_new_tokens": 5});
            line.to_string() + "\n"
        });
        let run = |name: &str, questions: &str| -> Vec<Value> {
            let [task, answers] = ["jsonl", "answers"].map(|kind| {
                folder.path().join(name).with_extension(kind).to_str().unwrap().to_string()
            });
            std::fs::write(&task, questions).unwrap();
            let line = ["evaluate", "--task", &task, "--answers", &answers, "--budget", "0.4"];
            let policies = "snapkv,h2o,random,kvreviver";
            let more = ["--policy", policies, "--mode", "question-agnostic", "--batch", "2"];
            ran(&[&line[..], &more].concat()).unwrap();
            lines(Path::new(&answers))
        };
        let own = |lines: &[Value]| {
            // Not the bytes: a cache has room for the longest of its questions.
            let fields = ["question", "policy", "output", "kept"];
            let mut own: Vec<String> = lines
                .iter()
                .map(|line| fields.map(|field| line[field].to_string()).join(" "))
                .collect();
            own.sort();
            own
        };
        let together = run("together", &asked.concat());
        let alone: Vec<Value> =
            asked.iter().enumerate().flat_map(|(i, asked)| run(&format!("{i}"), asked)).collect();
        assert_eq!(together.len(), 3 * 5);
        assert_eq!(own(&together), own(&alone));
        let full = together.iter().filter(|line| line["policy"]["policy"] == "full");
        assert!(full.into_iter().all(|line| line["score"] == 1.0), "{together:#?}");
        // A run that was stopped within the context's questions goes on to equal answers.
        let path = folder.path().join("together.answers");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() * 3 / 5]).unwrap();
        assert_eq!(own(&run("together", &asked.concat())), own(&together));
    }

    #[test]
    fn samples_are_drawn_anew_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let [task, answers] =
            ["needles.jsonl", "answers.jsonl"].map(|name| folder.path().join(name));
        questions(&task);
        let [task, path] = [&task, &answers].map(|path| path.to_str().unwrap());
        let line =
            ["evaluate", "--task", task, "--answers", path, "--policy", "full", "--limit", "1"];
        let more = ["--samples", "3", "--temperature", "2.5", "--new-tokens", "12"];
        ran(&[&line[..], &more].concat()).unwrap();
        let outputs: Vec<Value> =
            lines(&answers).iter().map(|line| line["output"].clone()).collect();
        assert_eq!(outputs.len(), 3);
        assert!(outputs[0] != outputs[1] || outputs[1] != outputs[2], "{outputs:?}");
    }

    #[test]
    fn what_cannot_be_asked_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broken.jsonl");
        std::fs::write(&path, "{\"question\": \"a\"}\n").unwrap();
        let answers = folder.path().join("answers.jsonl");
        let answers = answers.to_str().unwrap();
        for (task, part) in [
            ("ruler/niah_singel_1", "ruler/niah_single_1"),
            (path.to_str().unwrap(), "answer"),
            ("nothing.jsonl", "nothing.jsonl"),
        ] {
            let line = ["evaluate", "--policy", "full", "--answers", answers, "--task", task];
            let error = format!("{:#}", ran(&line).unwrap_err());
            assert!(error.contains(part), "{task}: {error}");
        }
        let task = folder.path().join("needles.jsonl");
        questions(&task);
        let tokenizer =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../kv-models/assets/needle-1m/tokenizer.json");
        let raw = task.to_str().unwrap();
        for (task, option, value, part) in [
            (raw, "--tokenizer", tokenizer, "--tokenizer: needle-1m has a tokenizer"),
            (raw, "--chat-variable", "thinking=false", "add --chat template"),
            (raw, "--few-shot", "2", "\"needles\" has 0 solved examples, expected at least 2"),
            (raw, "--samples", "2", "equal without a --temperature above 0"),
            ("ruler/vt", "--samples", "1", "such as 4096; --length TOKENS names it"),
            ("ruler", "--length", "512", "; --text FILE names it"),
            ("gsm", "--samples", "1", "did you mean \"gsm8k\"? `kv-bench list` names all"),
            ("loogle/shortdep_qa", "--samples", "1", "--data FOLDER names it"),
        ] {
            let line = ["evaluate", "--policy", "full", "--answers", answers, "--task", task];
            let error = format!("{:#}", ran(&[&line[..], &[option, value]].concat()).unwrap_err());
            assert!(error.contains(part), "{task} {option}: {error}");
        }
    }
}
