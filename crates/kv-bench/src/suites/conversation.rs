//! Several questions in one conversation. The first question is in sight when the prompt is
//! compressed; later questions ask for facts that the first question had no use for.

use anyhow::ensure;
use kv_models::Session;

use super::next_token::{Judged, judge_answer, rows};
use crate::bench::ModelBench;
use crate::options::Quality;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts::{Prompt, Prompts, Wanted};
use crate::record::Case;

const SUITE: &str = "quality";
const TASK: &str = "conversation";
/// Shares kept where no budget is given.
const BUDGETS: [f64; 2] = [0.25, 0.1];
/// Questions of a conversation.
const QUESTIONS: usize = 4;
/// Prompts of the quick form.
const QUICK_PROMPTS: usize = 2;
/// How contexts tell their facts.
const TELLS: &str = "The secret number of the ";
const IS: &str = " is ";

/// A sentence that tells a fact, and the question for it.
struct Fact {
    question: String,
    answer: String,
}

/// Runs the task.
///
/// # Errors
/// Where no prompt tells enough facts, and where a policy refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Quality) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let policy_runs = bench.common.policy_runs(&BUDGETS)?;
    let mut prompts = Prompts::read(&Wanted { limit: None, ..options.wanted(quick) })?;
    prompts.list.retain(|prompt| conversation(prompt).is_some());
    ensure!(
        !prompts.list.is_empty(),
        "no prompt of {} tells {QUESTIONS} facts as `{TELLS}…{IS}…`",
        prompts.source
    );
    if let Some(limit) = options.limit.or(quick.then_some(QUICK_PROMPTS)) {
        prompts.limit(limit);
    }
    if let Some(note) = prompts.fit(&bench.model)? {
        bench.note(note);
    }
    let mut progress = Progress::new(prompts.list.len(), TASK);
    for (index, prompt) in prompts.list.iter().enumerate() {
        let Some(facts) = conversation(prompt) else { continue };
        let seed = bench.common.seed.wrapping_add(index as u64);
        let answered = converse(bench, &policy_runs, prompt, &facts, seed)?;
        for (policy_run, answers) in policy_runs.iter().zip(answered) {
            for (turn, answer) in answers.into_iter().enumerate() {
                let case = Case::of(format!("{TASK}, question {}", turn + 1))
                    .length(prompt.length)
                    .prompt_of(&prompts.source, &prompt.id);
                answer.record(bench, SUITE, &case, policy_run.setup());
            }
        }
        progress.step();
    }
    progress.finish();
    bench.note(format!(
        "each prompt is compressed with its first question in sight; the {} others ask for facts \
         of the same context, and see all questions and right answers before them",
        QUESTIONS - 1
    ));
    Ok(())
}

/// A prompt's own question, and others that its context answers, evenly spread over it.
fn conversation(prompt: &Prompt) -> Option<Vec<Fact>> {
    let (context, own) = prompt.split()?;
    let told = context.split(TELLS).skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once(IS)?;
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        (digits > 0).then(|| (name, &rest[..digits]))
    });
    let others: Vec<(&str, &str)> = told.filter(|(name, _)| !own.contains(name)).collect();
    let wanted = QUESTIONS - 1;
    if others.len() < wanted {
        return None;
    }
    let first = Fact { question: own.into(), answer: prompt.answer.clone() };
    let others = (0..wanted).map(|turn| {
        let (name, answer) = others[(2 * turn + 1) * others.len() / (2 * wanted)];
        let question = format!("\nQuestion: What is the secret number of the {name}?\nAnswer: ");
        Fact { question, answer: answer.into() }
    });
    Some(std::iter::once(first).chain(others).collect())
}

/// How every policy answers each question. Divergences are from the full cache, which is the first
/// of the policies.
fn converse(
    bench: &ModelBench<'_>,
    policy_runs: &[PolicyRun],
    prompt: &Prompt,
    facts: &[Fact],
    seed: u64,
) -> anyhow::Result<Vec<Vec<Judged>>> {
    let model = &bench.model;
    let turns = facts.iter().enumerate().map(|(turn, fact)| {
        // The first question is in the prompt.
        let question = if turn == 0 { "" } else { &fact.question };
        Ok([model.encode_continuation(question)?, model.encode_continuation(&fact.answer)?])
    });
    let turns = turns.collect::<anyhow::Result<Vec<_>>>()?;
    let policies = PolicyRun::policies(policy_runs);
    let room = turns.iter().flatten().map(Vec::len).sum();
    let prompt = model.encode(&prompt.prompt)?;
    let sessions = Session::start_many(model, &policies, &[prompt], &[seed], room)?;
    // The full cache's logits of every answer: as many rows of a vocabulary as it has tokens.
    let mut full: Vec<Vec<f32>> = Vec::new();
    let converse = |mut session: Session<'_>| {
        let answers = turns.iter().enumerate().map(|(turn, [question, answer])| {
            if !question.is_empty() {
                session.append(&[question])?;
            }
            let logits = rows(session.append(&[answer])?)?;
            if full.len() == turn {
                full.push(logits.clone());
            }
            judge_answer(&logits, &full[turn], answer)
        });
        answers.collect::<anyhow::Result<Vec<_>>>()
    };
    sessions.into_iter().map(converse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_ask_for_what_the_context_tells() {
        let prompts = Prompts::load(None).unwrap();
        let talks: Vec<_> = prompts.list.iter().filter_map(conversation).collect();
        assert!(talks.len() >= 4, "{}", talks.len());
        for facts in &talks {
            assert_eq!(facts.len(), QUESTIONS);
            for (at, fact) in facts.iter().enumerate() {
                assert!(fact.question.starts_with("\nQuestion: What is the secret number of the "));
                assert!(fact.answer.len() == 5, "{}", fact.answer);
                assert!(facts[..at].iter().all(|earlier| earlier.question != fact.question));
            }
        }
    }
}
