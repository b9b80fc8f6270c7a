//! Long outputs under a fixed budget: the model goes on with a book, fed its own text (teacher
//! forcing), and is asked in the end for a fact of the prompt and for a fact of the output.
//!
//! All policies go on together, a few tokens at a time, so that they can be compared with the full
//! cache's next-token distributions: the caches of all policies are held at once.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{bail, ensure};
use kv_core::{Budget, MemoryReport, counted};
use kv_models::{Decoder, Sampling, Session};
use kv_policies::Policy;

use super::next_token::{Judged, by_position, judge_answer, judge_rows, rows};
use super::policy_records::record_memory;
use crate::bench::ModelBench;
use crate::options::Quality;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts;
use crate::record::{Case, metric};

const SUITE: &str = "quality";
const TASK: &str = "long-output";
/// Policies that hold a budget while decoding.
const POLICIES: [&str; 5] = ["longflow", "h2o", "vatp", "r-kv", "streaming-llm"];
/// Slots as shares of prompt and output: 3,200, 2,400 and 1,600 of LongFlow's 16,000.
const BUDGETS: [f64; 3] = [0.2, 0.15, 0.1];
/// Tokens of a prompt and of the output, where the model has the positions.
const PROMPT: usize = 1_000;
const OUTPUT: usize = 6_000;
/// Texts that are continued side by side.
const TEXTS: usize = 4;
/// Tokens that are fed before their logits are read.
const CHUNK: usize = 100;
/// Tokens of a bucket of positions.
const BUCKET: usize = 500;
/// Things with a number, and where each is told: in the prompt, or in the output.
const FACTS: [[(&str, &str); 2]; TEXTS] = [
    [("clever fiddle", "21963"), ("green lamp", "70415")],
    [("old door", "38820"), ("silver spoon", "94157")],
    [("quiet garden", "50736"), ("red wagon", "16284")],
    [("young sailor", "83091"), ("broken clock", "42678")],
];
const PLACES: [&str; 2] = ["fact in the prompt", "fact in the output"];

/// One text with its facts.
struct Text {
    tokens: Vec<u32>,
    /// The token ranges of the sentences with facts. They are left out of perplexity, as no model
    /// can foresee the numbers in them.
    told: [Range<usize>; 2],
    /// A question and its answer for each fact.
    questions: [[Vec<u32>; 2]; 2],
}

/// Sums over some tokens.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    /// The sum of negative log-likelihoods.
    surprise: f64,
    /// The sum of divergences from the full cache.
    divergence: f64,
    tokens: usize,
}

/// One policy's session, and its sums so far.
struct Run<'a> {
    decoder: Decoder<'a>,
    /// The sums of each bucket of positions.
    buckets: Vec<Sums>,
    /// The memory when most was held.
    memory: MemoryReport,
}

/// An answer that was fed token by token.
#[derive(Clone)]
struct Answer {
    tokens: Vec<u32>,
    /// The logits before each token, `[N, V]`.
    rows: Vec<f32>,
}

/// Runs the task.
///
/// # Errors
/// For texts that are too short and policies that refuse.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Quality) -> anyhow::Result<()> {
    let positions = bench.model.config().max_positions;
    // An eighth of the positions for the prompt, three quarters for the output.
    let (prompt, output) = (PROMPT.min(positions / 8), OUTPUT.min(positions * 3 / 4));
    let output = if bench.common.quick { output / 4 } else { output };
    let count = options.limit.unwrap_or(if bench.common.quick { 1 } else { TEXTS }).min(TEXTS);
    let (source, text) = prompts::text(options.text.as_deref())?;
    let texts = texts(bench, &text, count, prompt, output)?;
    let policy_runs = policy_runs(bench, prompt + output, longest_question(&texts))?;
    let grows =
        |own: &&PolicyRun| own.budget.is_some() && !own.policy.capabilities().changes_decode;
    let mut grown: Vec<&str> =
        policy_runs.iter().filter(grows).map(|own| own.label.as_str()).collect();
    grown.dedup();
    if !grown.is_empty() {
        let names = grown.join(", ");
        bench.note(format!(
            "{names}: no eviction while decoding, every token of the output is kept; caches of {} \
             stay at their budgets",
            POLICIES.join(", ")
        ));
    }
    let length = prompt + output;
    let vocabulary = bench.model.config().vocab_size;
    let mut progress = Progress::new(policy_runs.len() * output.div_ceil(CHUNK), TASK);
    let runs = policy_runs.iter().map(|own| Run::start(bench, own, &texts, prompt));
    let mut runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
    for start in (prompt..length).step_by(CHUNK) {
        let tokens = start..(start + CHUNK).min(length);
        let mut full = None;
        for run in &mut runs {
            let rows = run.feed(&texts, tokens.clone())?;
            // The full cache runs first.
            let full = full.get_or_insert_with(|| rows.clone());
            run.rate(&texts, prompt, start, [&full[..], &rows], vocabulary)?;
            progress.step();
        }
    }
    progress.finish();
    let mut full = None;
    let mut done = Vec::new();
    for Run { decoder, buckets, memory } in runs {
        let session = decoder.session();
        let [prompted, generated] = [0, 1].map(|fact| ask(session, &texts, fact, vocabulary));
        let found = [prompted?, generated?];
        let full = full.get_or_insert_with(|| found.clone());
        let answers = found.iter().zip(&*full).map(|(own, full)| {
            let pairs = own.iter().zip(full);
            let judged = pairs.map(|(own, full)| judge_answer(&own.rows, &full.rows, &own.tokens));
            judged.collect::<anyhow::Result<Vec<Judged>>>()
        });
        done.push((buckets, memory, answers.collect::<anyhow::Result<Vec<_>>>()?));
    }
    for (policy_run, (buckets, memory, answers)) in policy_runs.iter().zip(done) {
        record_memory(bench, SUITE, &Case::default(), policy_run, &[memory]);
        let case = Case {
            task: Some(TASK.into()),
            length: Some(length),
            source: Some(source.clone()),
            ..Case::default()
        };
        let mut whole = Sums::default();
        buckets.iter().for_each(|bucket| whole.add(*bucket));
        whole.record(bench, policy_run, &case);
        for (index, bucket) in buckets.iter().enumerate() {
            let position = Some(prompt + index * BUCKET);
            bucket.record(bench, policy_run, &Case { position, ..case.clone() });
        }
        for (place, answers) in PLACES.iter().zip(answers) {
            for (index, judged) in answers.iter().enumerate() {
                let text = format!("text {}", index + 1);
                let case = Case { task: Some((*place).into()), ..case.clone() };
                let case = case.prompt_of(&source, &text);
                judged.record(bench, SUITE, &case, policy_run.setup());
            }
        }
    }
    Ok(())
}

/// The full cache and every policy at every budget, shares being of prompt and output together; a
/// share of 1 has room for a question, too.
fn policy_runs(
    bench: &ModelBench<'_>,
    tokens: usize,
    room: usize,
) -> anyhow::Result<Vec<PolicyRun>> {
    let mut common = bench.common.clone();
    let shares = common.budget.clone().unwrap_or_else(|| BUDGETS.map(Budget::Ratio).to_vec());
    let tokens_of = |share: Budget| match share {
        Budget::Tokens(count) => count,
        Budget::Ratio(1.0) => tokens + room,
        Budget::Ratio(_) => share.resolve(tokens),
    };
    let budgets: Vec<Budget> =
        shares.into_iter().map(|share| Budget::Tokens(tokens_of(share))).collect();
    common.policy.get_or_insert_with(|| POLICIES.join(","));
    let policy_runs = common.policy_runs_at(&budgets)?;
    for PolicyRun { label, policy, .. } in &policy_runs {
        if let Some(Budget::Ratio(share)) = policy.budget() {
            bail!(
                "budget {share} of {label} would be a share of the prompt alone: expected tokens, \
                 or none there and --budget"
            );
        }
    }
    Ok(policy_runs)
}

/// Tokens of the longest question with its answer.
fn longest_question(texts: &[Text]) -> usize {
    let asked = texts.iter().flat_map(|text| &text.questions);
    asked.map(|[question, answer]| question.len() + answer.len()).max().unwrap_or(0)
}

/// Texts from all over a book, each with two facts.
fn texts(
    bench: &ModelBench<'_>,
    text: &str,
    count: usize,
    prompt: usize,
    output: usize,
) -> anyhow::Result<Vec<Text>> {
    let model = &bench.model;
    let book = model.encode(text)?;
    let length = prompt + output;
    ensure!(
        book.len() > length + count,
        "the text has {}, a prompt of {prompt} and an output of {output} need more",
        counted(book.len(), "token")
    );
    let stride = (book.len() - length) / count;
    let of = |index: usize| {
        let mut tokens = book[index * stride..][..length].to_vec();
        let mut told = [0..0, 0..0];
        // In the middle of the prompt and of the output; the later one first, so that it stays.
        for (fact, at) in [(1, prompt + output / 2), (0, prompt / 2)] {
            let (what, number) = FACTS[index][fact];
            let sentence = format!("\nThe secret number of the {what} is {number}.\n");
            let sentence = model.encode_continuation(&sentence)?;
            told[fact] = at..at + sentence.len();
            let rest = tokens.split_off(at);
            tokens.extend(sentence.iter().chain(&rest));
        }
        let shift = told[0].len();
        told[1] = told[1].start + shift..told[1].end + shift;
        tokens.truncate(length);
        let question = |(what, number): (&str, &str)| {
            let text = format!("\nQuestion: What is the secret number of the {what}?\nAnswer: ");
            anyhow::Ok([model.encode_continuation(&text)?, model.encode_continuation(number)?])
        };
        let questions = [question(FACTS[index][0])?, question(FACTS[index][1])?];
        Ok(Text { tokens, told, questions })
    };
    (0..count).map(of).collect()
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.surprise += other.surprise;
        self.divergence += other.divergence;
        self.tokens += other.tokens;
    }

    /// Records perplexity and divergence, means over the tokens.
    fn record(self, bench: &mut ModelBench<'_>, policy_run: &PolicyRun, case: &Case) {
        let setup = policy_run.setup();
        let case = Case { samples: Some(self.tokens), ..case.clone() };
        let tokens = self.tokens.max(1) as f64;
        let (perplexity, divergence) = ((self.surprise / tokens).exp(), self.divergence / tokens);
        bench.record(SUITE, &case, setup, metric::PERPLEXITY, perplexity);
        bench.record(SUITE, &case, setup, metric::TEXT_KL_DIVERGENCE, divergence);
    }
}

impl<'a> Run<'a> {
    /// Prefills the texts' first `prompt` tokens.
    fn start(
        bench: &'a ModelBench<'_>,
        policy_run: &PolicyRun,
        texts: &[Text],
        prompt: usize,
    ) -> anyhow::Result<Self> {
        let length = texts[0].tokens.len();
        let prompts: Vec<Vec<u32>> =
            texts.iter().map(|text| text.tokens[..prompt].to_vec()).collect();
        let seeds = vec![bench.common.seed; texts.len()];
        let policy: Arc<dyn Policy> = policy_run.policy.clone();
        let new = length - prompt + longest_question(texts);
        let session = Session::start(&bench.model, policy, &prompts, &seeds, new)?;
        let buckets = vec![Sums::default(); (length - prompt).div_ceil(BUCKET)];
        let memory = session.memory();
        let decoder = session.decoder(&vec![Sampling::greedy(); texts.len()])?;
        Ok(Self { decoder, buckets, memory })
    }

    /// Feeds some tokens of every text; returns the logits before them, token after token, the
    /// texts' rows beside each other.
    fn feed(&mut self, texts: &[Text], tokens: Range<usize>) -> anyhow::Result<Vec<f32>> {
        let next: Vec<&[u32]> = texts.iter().map(|text| &text.tokens[tokens.clone()]).collect();
        let before = self.decoder.append(&next)?;
        // Policies that evict in bulk hold more between two evictions.
        let now = self.decoder.session().memory();
        self.memory = if now.in_use > self.memory.in_use { now } else { self.memory };
        rows(before)
    }

    /// Adds the log-likelihoods of the texts under the logits from token `start` on, and the
    /// divergence of these logits from the full cache's.
    fn rate(
        &mut self,
        texts: &[Text],
        prompt: usize,
        start: usize,
        [full, own]: [&[f32]; 2],
        vocabulary: usize,
    ) -> anyhow::Result<()> {
        let place = |index: usize| (start + index / texts.len(), &texts[index % texts.len()]);
        let fed: Vec<u32> = (0..own.len() / vocabulary)
            .map(|index| {
                let (at, text) = place(index);
                text.tokens[at]
            })
            .collect();
        let rated = judge_rows(own, &fed, vocabulary).into_iter();
        let rated = rated.zip(by_position(full, own, vocabulary));
        for (index, ((logprob, _), divergence)) in rated.enumerate() {
            let (at, text) = place(index);
            if text.told.iter().all(|told| !told.contains(&at)) {
                ensure!(logprob.is_finite(), "the model's output holds NaN or Inf");
                let sums = Sums { surprise: -logprob, divergence, tokens: 1 };
                self.buckets[(at - prompt) / BUCKET].add(sums);
            }
        }
        Ok(())
    }
}

/// Asks every text's sequence for a fact.
fn ask(
    session: &Session<'_>,
    texts: &[Text],
    fact: usize,
    vocabulary: usize,
) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    // Questions differ in length, so that each is asked alone, of all rows, and one row listens.
    for (row, text) in texts.iter().enumerate() {
        let [question, answer] = &text.questions[fact];
        let mut session = session.fork();
        session.append(&vec![&question[..]; texts.len()])?;
        let before = session.append(&vec![&answer[..]; texts.len()])?;
        let rows = rows(before)?;
        let own = rows.chunks(vocabulary).skip(row).step_by(texts.len());
        answers.push(Answer { tokens: answer.clone(), rows: own.flatten().copied().collect() });
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::ran;

    const LINE: [&str; 4] = ["quality", "--task", "long-output", "--quick"];

    #[test]
    fn budgets_are_of_prompt_and_output() {
        let words = [&LINE[..], &["--policy", "longflow", "--budget", "5000,1.0,0.2"]].concat();
        let (records, _) = ran(&words).unwrap();
        let mean = |policy: &str, budget: Option<f64>, name: &str| {
            let own = records.iter().filter(|r| {
                r.policy == policy && r.budget == budget && r.metric == name && r.value.is_finite()
            });
            let values: Vec<f64> = own.map(|record| record.value).collect();
            assert!(!values.is_empty(), "{policy} {budget:?} has no {name}");
            values.iter().sum::<f64>() / values.len() as f64
        };
        let budgets: Vec<f64> = {
            let mut all: Vec<f64> = records
                .iter()
                .filter(|r| r.policy == "longflow")
                .filter_map(|r| r.budget)
                .collect();
            all.dedup();
            all
        };
        let [more, all, fifth] = budgets[..] else { panic!("{budgets:?}") };
        let (full, held) = (
            mean("full", None, metric::TEXT_KL_DIVERGENCE),
            mean("longflow", Some(fifth), metric::TEXT_KL_DIVERGENCE),
        );
        assert!(full == 0.0 && held > 1e-3, "{full}, {held}");
        // A number of tokens is that number, and a share of 1 has room for the question.
        assert_eq!(more, 5_000.0);
        for budget in [more, all] {
            for name in [metric::PERPLEXITY, metric::ANSWER_LOGPROB] {
                let [own, full] = [("longflow", Some(budget)), ("full", None)]
                    .map(|(policy, budget)| mean(policy, budget, name));
                assert!((own - full).abs() < 1e-4, "{budget}, {name}: {own} for {full}");
            }
        }
        let held = |budget: f64| mean("longflow", Some(budget), metric::BYTES_IN_USE);
        assert!(held(fifth) < 0.25 * held(all));
        assert!(
            mean("longflow", Some(fifth), metric::PERPLEXITY)
                > mean("full", None, metric::PERPLEXITY)
        );
    }

    #[test]
    fn budgets_that_say_something_else_are_refused() {
        for (more, part) in [
            (["--budget", "0.001"], "one token"),
            (["--policy", r#"{"policy": "longflow", "budget": 0.2}"#], "share of the prompt alone"),
        ] {
            let error = ran(&[&LINE[..], &more].concat()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
