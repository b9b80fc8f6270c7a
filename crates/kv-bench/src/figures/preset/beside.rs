//! Our scores and the paper's numbers, as records of one table.

use anyhow::Context;

use super::MethodRun;
use super::file::{Column, PaperModel, PresetFile};
use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::record::{Case, metric, mode};
use crate::studies::SUITE;
use crate::suites::evaluate::Graded;

/// The heading of the mean over all columns.
const AVERAGE: &str = "average";

/// The scores of answers in each column.
pub(super) struct Scores<'a> {
    columns: &'a [Column],
    /// Whether the modes are told apart.
    by_mode: bool,
    all: Vec<Score>,
}

/// The paper's side of a table.
pub(super) struct Table<'a> {
    /// The preset's name.
    pub(super) name: &'a str,
    pub(super) paper: &'a PresetFile,
    /// The model whose numbers are shown.
    pub(super) published: &'a PaperModel,
    /// The paper's methods as they ran.
    pub(super) methods: &'a [MethodRun],
    /// Whether the difference of ours is shown.
    pub(super) comparable: bool,
}

/// The score of an answer.
struct Score {
    /// The policy's label and budget.
    setup: (String, Option<f64>),
    /// The column's number.
    column: usize,
    mode: String,
    /// The task and the question.
    asked: [String; 2],
    score: f64,
}

impl<'a> Scores<'a> {
    /// No score yet.
    pub(super) fn new(columns: &'a [Column], by_mode: bool) -> Self {
        Self { columns, by_mode, all: Vec::new() }
    }

    /// Adds an answer's score in each column of its task.
    ///
    /// # Errors
    /// Where a grader refuses the reference answer.
    pub(super) fn add(&mut self, graded: &Graded<'_>) -> anyhow::Result<()> {
        let Graded { policy_run, task, question, mode, output, score } = graded;
        let (label, budget) = policy_run.setup();
        for (column, own) in self.columns.iter().enumerate() {
            if own.task != task.name {
                continue;
            }
            let score = match own.grader {
                None => *score,
                Some(grader) => grader
                    .grade(task.cut.apply(output), &question.answer)
                    .with_context(|| format!("{}, question {}", task.name, question.id))?,
            };
            self.all.push(Score {
                setup: (label.into(), budget),
                column,
                mode: (*mode).into(),
                asked: [task.name.clone(), question.id.clone()],
                score,
            });
        }
        Ok(())
    }

    /// Records every score, and beside their means the published numbers of the same policies.
    pub(super) fn record(
        &self,
        bench: &mut ModelBench<'_>,
        table: &Table<'_>,
        policy_runs: &[PolicyRun],
    ) {
        let Table { name, paper, published, methods, comparable } = *table;
        for policy_run in policy_runs {
            let setup = policy_run.setup();
            let own = methods.iter().find(|own| own.policy_run.setup() == setup);
            let row = own.and_then(|own| published.row(&own.method, own.budget));
            for &mode in self.modes() {
                // Papers compress prompts with the question in sight.
                let row = row.filter(|_| mode != Some(mode::AGNOSTIC));
                let mut means = Vec::new();
                for (column, own) in self.columns.iter().enumerate() {
                    let case = self.case(name, &own.heading, mode);
                    let scores = self.of(setup, column, mode);
                    for score in &scores {
                        let [task, question] = &score.asked;
                        let case = case.clone().prompt_of(task, question);
                        bench.record(SUITE, &case, setup, metric::OUR_SCORE, score.score);
                    }
                    let mean = mean(scores.iter().map(|own| own.score));
                    means.extend(mean);
                    let place = paper.columns.iter().position(|it| it.heading == own.heading);
                    let number = row.zip(place).and_then(|(row, at)| row.scores.get(at).copied());
                    let number = number.map(|number| paper.share(number));
                    write(bench, &case, setup, (mean, number), comparable);
                }
                if paper.average && means.len() == paper.columns.len() {
                    let case = self.case(name, AVERAGE, mode);
                    let mean = mean(means.into_iter());
                    if let Some(mean) = mean {
                        bench.record(SUITE, &case, setup, metric::OUR_SCORE, mean);
                    }
                    let number = row.and_then(|row| row.average).map(|own| paper.share(own));
                    write(bench, &case, setup, (mean, number), comparable);
                }
            }
        }
    }

    /// The modes that are told apart.
    fn modes(&self) -> &'static [Option<&'static str>] {
        if self.by_mode { &[Some(mode::AWARE), Some(mode::AGNOSTIC)] } else { &[None] }
    }

    fn of(&self, setup: (&str, Option<f64>), column: usize, mode: Option<&str>) -> Vec<&Score> {
        let fits = |own: &&Score| {
            (own.setup.0.as_str(), own.setup.1) == setup
                && own.column == column
                && mode.is_none_or(|mode| own.mode == mode)
        };
        self.all.iter().filter(fits).collect()
    }

    fn case(&self, name: &str, part: &str, mode: Option<&str>) -> Case {
        Case { mode: mode.map(Into::into), ..Case::of(format!("{name}, {part}")) }
    }
}

/// Records a published number, and the difference of ours where the two compare.
fn write(
    bench: &mut ModelBench<'_>,
    case: &Case,
    setup: (&str, Option<f64>),
    (ours, published): (Option<f64>, Option<f64>),
    comparable: bool,
) {
    let Some(published) = published else { return };
    bench.record(SUITE, case, setup, metric::PUBLISHED_SCORE, published);
    if let Some(ours) = ours.filter(|_| comparable) {
        bench.record(SUITE, case, setup, metric::SCORE_DIFFERENCE, ours - published);
    }
}

fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0usize);
    numbers.for_each(|number| (sum, count) = (sum + number, count + 1));
    (count > 0).then(|| sum / count as f64)
}
