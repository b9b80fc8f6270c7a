//! The records of `evaluate` as answers: one for each policy, budget, question, mode and sample.

use std::collections::{BTreeMap, BTreeSet};

use crate::families;
use crate::interval::Estimate;
use crate::record::{Case, Record, by_setup, group_by, is_full, metric};

/// Answers by policy and budget, with the names that they refer to by number.
#[derive(Debug, Default)]
pub(super) struct Answers<'a> {
    /// Policies at budgets, the full cache first.
    pub(super) setups: Vec<Setup<'a>>,
    /// Tasks, those with several subsets once for each of them.
    pub(super) tasks: Vec<&'a str>,
    /// The whole task that each of `tasks` is a part of.
    pub(super) whole_tasks: Vec<&'a str>,
    pub(super) modes: Vec<&'a str>,
    pub(super) questions: Vec<QuestionKey<'a>>,
}

/// A policy at a budget.
#[derive(Debug)]
pub(super) struct Setup<'a> {
    pub(super) policy: &'a str,
    pub(super) budget: Option<f64>,
    pub(super) answers: Vec<Answer>,
    pub(super) records: Vec<&'a Record>,
}

/// A question of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QuestionKey<'a> {
    pub(super) task: usize,
    /// Its name in the task.
    pub(super) name: &'a str,
    /// Tokens of its prompt.
    pub(super) length: usize,
}

/// What was measured of one answer; NaN where records do not say.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    pub(super) question: usize,
    pub(super) mode: usize,
    pub(super) score: f64,
    pub(super) bytes: f64,
    pub(super) tokens: f64,
    pub(super) seconds: f64,
}

impl<'a> Answers<'a> {
    /// The answers of some records. An answer begins with its score; its other numbers follow.
    pub(super) fn of(records: &[&'a Record]) -> Self {
        let mut all = Self::default();
        let scored: Vec<&Record> =
            records.iter().copied().filter(|r| r.metric == metric::SCORE).collect();
        let mut tasks = group_by(scored.iter().copied(), |r| task_of(&r.case));
        // Batches go by length, so that first sight says little.
        tasks.sort_unstable_by_key(|(task, _)| *task);
        all.tasks = tasks.iter().map(|(task, _)| *task).collect();
        all.whole_tasks = tasks.iter().map(|(_, own)| whole_task_of(&own[0].case)).collect();
        let modes = group_by(scored.iter().copied(), |r| mode_of(&r.case));
        all.modes = modes.into_iter().map(|(mode, _)| mode).collect();
        let mut numbers = BTreeMap::new();
        for (policy, budget, records) in by_setup(records) {
            let mut answers: Vec<Answer> = Vec::new();
            let mut case = None;
            for &record in &records {
                if record.metric == metric::SCORE {
                    case = Some(&record.case);
                    let answer = all.begin(record, &mut numbers);
                    answers.push(answer);
                }
                let Some(answer) = answers.last_mut().filter(|_| case == Some(&record.case)) else {
                    continue;
                };
                match record.metric.as_str() {
                    metric::LIVE_BYTES => answer.bytes = record.value,
                    metric::NEW_TOKENS => answer.tokens = record.value,
                    metric::ANSWER_SECONDS => answer.seconds = record.value,
                    _ => {}
                }
            }
            if !answers.is_empty() {
                all.setups.push(Setup { policy, budget, answers, records });
            }
        }
        all
    }

    /// The answer that a score begins; its question gets a number where it is new.
    fn begin(
        &mut self,
        record: &'a Record,
        numbers: &mut BTreeMap<QuestionKey<'a>, usize>,
    ) -> Answer {
        let place = |names: &[&str], name| names.iter().position(|own| *own == name);
        let key = QuestionKey {
            task: place(&self.tasks, task_of(&record.case)).unwrap_or_default(),
            name: record.case.prompt.as_deref().unwrap_or_default(),
            length: record.case.length.unwrap_or_default(),
        };
        let question = *numbers.entry(key).or_insert_with(|| {
            self.questions.push(key);
            self.questions.len() - 1
        });
        Answer {
            question,
            mode: place(&self.modes, mode_of(&record.case)).unwrap_or_default(),
            score: record.value,
            bytes: f64::NAN,
            tokens: f64::NAN,
            seconds: f64::NAN,
        }
    }

    /// Whether a policy has no answer of some task or subset.
    pub(super) fn lacks_tasks(&self, setup: &Setup<'_>) -> bool {
        let own = setup.answers.iter().map(|answer| self.questions[answer.question].task);
        own.collect::<BTreeSet<_>>().len() < self.tasks.len()
    }

    /// The full cache's bytes of each question and mode.
    pub(super) fn full_bytes(&self) -> BTreeMap<(usize, usize), f64> {
        let full = self.setups.iter().find(|setup| setup.is_full());
        let answers = full.into_iter().flat_map(|setup| &setup.answers);
        answers.map(|answer| ((answer.question, answer.mode), answer.bytes)).collect()
    }
}

impl Setup<'_> {
    /// Whether it is the full cache.
    pub(super) fn is_full(&self) -> bool {
        is_full(self.policy)
    }

    /// The name of the policy's family.
    pub(super) fn family(&self) -> &'static str {
        match families::of_label(self.policy) {
            Some(family) => families::name(family),
            None if self.is_full() => "all tokens",
            None => "others",
        }
    }

    /// The mean of the tasks' means, in which every task counts once, however many questions and
    /// subsets it has.
    pub(super) fn average(&self) -> Option<Estimate> {
        let scored = self.records.iter().copied().filter(|r| r.metric == metric::SCORE);
        let tasks = group_by(scored, |r| whole_task_of(&r.case));
        let groups: Vec<Vec<&Record>> = tasks.into_iter().map(|(_, records)| records).collect();
        Estimate::of_groups(&groups, metric::SCORE)
    }

    /// The mean of its bytes, and of the full cache's for the same questions; NaN where records do
    /// not say.
    pub(super) fn bytes(&self, full: &BTreeMap<(usize, usize), f64>) -> [f64; 2] {
        let both = self.answers.iter().map(|answer| {
            let key = (answer.question, answer.mode);
            [answer.bytes, full.get(&key).copied().unwrap_or(f64::NAN)]
        });
        let sums = both.fold([0.0; 2], |[own, full], [a, b]| [own + a, full + b]);
        sums.map(|sum| sum / self.answers.len() as f64)
    }

    /// New tokens in a second, over all answers; NaN where records do not say.
    pub(super) fn speed(&self) -> f64 {
        let sum = |number: fn(&Answer) -> f64| self.answers.iter().map(number).sum::<f64>();
        sum(|answer| answer.tokens) / sum(|answer| answer.seconds)
    }
}

/// A task without its subset, which names the source of the task's questions.
fn whole_task_of(case: &Case) -> &str {
    case.source.as_deref().unwrap_or_else(|| task_of(case))
}

/// A task with its subset.
fn task_of(case: &Case) -> &str {
    case.task.as_deref().unwrap_or_default()
}

fn mode_of(case: &Case) -> &str {
    case.mode.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::evaluation;

    #[test]
    fn numbers_of_an_answer_stand_together() {
        let mut records = evaluation();
        // Of another answer.
        let mut stray = records[2].clone();
        stray.case.prompt = Some("stray".into());
        records.insert(3, stray);
        let records: Vec<&Record> = records.iter().collect();
        let answers = Answers::of(&records);
        assert_eq!(answers.tasks, ["needles", "sums"]);
        assert_eq!(answers.questions.len(), 6);
        let setup = &answers.setups[0];
        assert!(setup.is_full() && setup.family() == "all tokens");
        assert_eq!(setup.bytes(&answers.full_bytes()), [1000.0; 2]);
        let other = answers.setups.iter().find(|own| own.policy == "snapkv").unwrap();
        assert_eq!((other.family(), other.answers.len()), ("drop", 6));
        let [own, full] = other.bytes(&answers.full_bytes());
        assert_eq!(own / full, other.budget.unwrap());
        assert_eq!(other.speed(), 8.0);
    }
}
