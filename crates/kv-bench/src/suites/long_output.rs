//! Long outputs under a fixed budget: the model goes on with a book, fed its own text (teacher
//! forcing), and is asked in the end for a fact of the prompt and for one of what came later.

use std::ops::Range;
use std::sync::Arc;

use anyhow::ensure;
use burn::tensor::Tensor;
use kv_core::{Budget, read_f32};
use kv_models::Session;
use kv_policies::Policy;

use super::{judge, record_memory};
use crate::args::Quality;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::prompts;
use crate::record::{Case, metric};
use crate::run::Bench;

const SUITE: &str = "quality";
const TASK: &str = "long-output";
/// Policies that hold a budget while decoding.
const POLICIES: [&str; 5] = ["longflow", "h2o", "vatp", "r-kv", "streaming-llm"];
/// Slots as shares of prompt and output: 3,200, 2,400 and 1,600 of LongFlow's 16,000.
const BUDGETS: [f64; 3] = [0.2, 0.15, 0.1];
/// Tokens of a prompt, and of what follows, where the model has the positions.
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
    /// Where sentences with facts were put in: what they say cannot be foreseen.
    told: [Range<usize>; 2],
    /// A question and its answer for each fact.
    questions: [[Vec<u32>; 2]; 2],
}

/// What one contender did.
struct Outcome {
    /// Negative log-likelihoods of a bucket's tokens, and their number.
    buckets: Vec<(f64, usize)>,
    /// Whether each fact was found, and the log-probability of its number, by text.
    found: [Vec<(bool, f64)>; 2],
}

/// Runs the task.
///
/// # Errors
/// For texts that are too short and policies that refuse.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Quality) -> anyhow::Result<()> {
    let positions = bench.model.config().max_positions;
    // An eighth of the positions for the prompt, three quarters for the output.
    let (prompt, output) = (PROMPT.min(positions / 8), OUTPUT.min(positions * 3 / 4));
    let output = if bench.common.quick { output / 4 } else { output };
    let count = options.limit.unwrap_or(if bench.common.quick { 1 } else { TEXTS }).min(TEXTS);
    let (source, text) = prompts::text(options.text.as_deref())?;
    let texts = texts(bench, &text, count, prompt, output)?;
    let contenders = contenders(bench, prompt + output, room(&texts))?;
    let grows = |own: &&Contender| own.budget.is_some() && !own.policy.changes_decode();
    let mut grown: Vec<&str> =
        contenders.iter().filter(grows).map(|own| own.label.as_str()).collect();
    grown.dedup();
    if !grown.is_empty() {
        let names = grown.join(", ");
        bench.note(format!(
            "{names}: no eviction while decoding, every token of the output is kept; caches of {} stay at their budgets",
            POLICIES.join(", ")
        ));
    }
    let mut progress = Progress::new(contenders.len() * output.div_ceil(CHUNK), TASK);
    for contender in &contenders {
        let outcome = decode(bench, contender, &texts, prompt, &mut progress)?;
        let setup = (contender.label.as_str(), contender.budget);
        let case = Case {
            task: Some(TASK.into()),
            length: Some(prompt + output),
            source: Some(source.clone()),
            samples: Some(outcome.buckets.iter().map(|(_, tokens)| tokens).sum()),
            ..Case::default()
        };
        let mean = |buckets: &[(f64, usize)]| {
            let (sum, count) = buckets.iter().fold((0.0, 0), |(a, n), (b, m)| (a + b, n + m));
            (sum / count.max(1) as f64).exp()
        };
        let perplexity = mean(&outcome.buckets);
        bench.record(SUITE, &case, setup, metric::PERPLEXITY, perplexity, "perplexity");
        for (index, bucket) in outcome.buckets.iter().enumerate() {
            let (position, samples) = (Some(prompt + index * BUCKET), Some(bucket.1));
            let case = Case { position, samples, ..case.clone() };
            bench.record(SUITE, &case, setup, metric::PERPLEXITY, mean(&[*bucket]), "perplexity");
        }
        for (place, found) in PLACES.iter().zip(&outcome.found) {
            for (right, logprob) in found {
                let case = Case { task: Some((*place).into()), samples: Some(1), ..case.clone() };
                let right = f64::from(u8::from(*right));
                bench.record(SUITE, &case, setup, metric::EXACT_MATCH, right, "share");
                bench.record(SUITE, &case, setup, metric::ANSWER_LOGPROB, *logprob, "nats");
            }
        }
    }
    progress.finish();
    Ok(())
}

/// The full cache and every policy at every budget, shares being of prompt and output together; a share of 1 has room for
/// a question, too.
fn contenders(bench: &Bench<'_>, tokens: usize, room: usize) -> anyhow::Result<Vec<Contender>> {
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
    let contenders = common.contenders_at(&budgets)?;
    for Contender { label, policy, .. } in &contenders {
        let budget = &policy.config()["budget"];
        ensure!(
            !budget.is_f64(),
            "budget {budget} of {label} would be a share of the prompt alone: expected tokens, or none there and --budget"
        );
    }
    Ok(contenders)
}

/// Tokens of the longest question with its answer.
fn room(texts: &[Text]) -> usize {
    let asked = texts.iter().flat_map(|text| &text.questions);
    asked.map(|[question, answer]| question.len() + answer.len()).max().unwrap_or(0)
}

/// Texts from all over a book, each with two facts.
fn texts(
    bench: &Bench<'_>,
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
        "the text has {} tokens, a prompt of {prompt} and an output of {output} need more",
        book.len()
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

fn decode(
    bench: &mut Bench<'_>,
    contender: &Contender,
    texts: &[Text],
    prompt: usize,
    progress: &mut Progress,
) -> anyhow::Result<Outcome> {
    let model = &bench.model;
    let length = texts[0].tokens.len();
    let room = room(texts);
    let prompts: Vec<Vec<u32>> = texts.iter().map(|text| text.tokens[..prompt].to_vec()).collect();
    let seeds = vec![bench.common.seed; texts.len()];
    let policy: Arc<dyn Policy> = contender.policy.clone();
    let mut session = Session::start(model, policy, &prompts, &seeds, length - prompt + room)?;
    let vocabulary = model.config().vocab_size;
    let mut memory = session.memory();
    let mut buckets = vec![(0.0, 0); (length - prompt).div_ceil(BUCKET)];
    for start in (prompt..length).step_by(CHUNK) {
        let end = (start + CHUNK).min(length);
        let next: Vec<&[u32]> = texts.iter().map(|text| &text.tokens[start..end]).collect();
        let before = session.append(&next)?;
        let rows = read_f32("logits", Tensor::cat(before, 0))?;
        // Token after token, the batch's rows beside each other.
        for (index, logits) in rows.chunks(vocabulary).enumerate() {
            let (at, row) = (start + index / texts.len(), index % texts.len());
            let text = &texts[row];
            if text.told.iter().all(|told| !told.contains(&at)) {
                let (logprob, _) = judge(logits, text.tokens[at]);
                ensure!(logprob.is_finite(), "the model's output holds NaN or Inf");
                let bucket = &mut buckets[(at - prompt) / BUCKET];
                *bucket = (bucket.0 - logprob, bucket.1 + 1);
            }
        }
        // Those that evict in bulks hold more in between.
        let now = session.memory();
        memory = if now.in_use > memory.in_use { now } else { memory };
        progress.step();
    }
    let found = [0, 1].map(|fact| ask(&session, texts, fact, vocabulary));
    let [prompted, generated] = found;
    drop(session);
    record_memory(bench, SUITE, &Case::default(), contender, &[memory]);
    Ok(Outcome { buckets, found: [prompted?, generated?] })
}

/// Asks every text's sequence for a fact: whether the answer is right, and its log-probability.
fn ask(
    session: &Session<'_>,
    texts: &[Text],
    fact: usize,
    vocabulary: usize,
) -> anyhow::Result<Vec<(bool, f64)>> {
    let mut answers = Vec::new();
    // Questions differ in length, so that each is asked alone, of all rows, and one row listens.
    for (row, text) in texts.iter().enumerate() {
        let [question, answer] = &text.questions[fact];
        let mut session = session.fork();
        session.append(&vec![&question[..]; texts.len()])?;
        let before = session.append(&vec![&answer[..]; texts.len()])?;
        let rows = read_f32("logits", Tensor::cat(before, 0))?;
        let own = rows.chunks(vocabulary).skip(row).step_by(texts.len());
        let judged: Vec<(f64, bool)> = own
            .zip(answer)
            .map(|(logits, &token)| {
                let (logprob, best) = judge(logits, token);
                (logprob, best == token)
            })
            .collect();
        let logprob = judged.iter().map(|(logprob, _)| logprob).sum::<f64>() / judged.len() as f64;
        answers.push((judged.iter().all(|(_, right)| *right), logprob));
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
