//! Solved examples before the question.

use rand::seq::index;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::data::Data;
use crate::render::{Renderer, Variables};
use crate::rows::Row;
use crate::{Place, QuestionOptions, TaskError, random};

/// Solved examples, which are put before the context.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FewShot {
    /// How many there are, unless the options say so.
    pub(crate) count: usize,
    /// A template for one example, with what parts it from the next.
    pub(crate) template: String,
    /// Which ones are taken.
    #[serde(default)]
    pub(crate) order: Order,
    /// The examples themselves; or
    #[serde(default)]
    pub(crate) examples: Vec<Map<String, Value>>,
    /// where they are: of the keys that are not given, those of `data` count.
    #[serde(default)]
    pub(crate) data: Data,
}

/// Which of the examples are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// The first ones.
    #[default]
    First,
    /// Others for each question, by the seed.
    Random,
}

impl FewShot {
    /// The examples to choose from.
    pub(crate) fn pool(
        &self,
        task: &str,
        data: &Data,
        options: &QuestionOptions,
    ) -> Result<Pool<'_>, TaskError> {
        let count = options.few_shot.unwrap_or(self.count);
        let mut rows = Vec::new();
        if count > 0 && !self.examples.is_empty() {
            let place = |index| Place {
                path: std::path::Path::new(task).into(),
                row: Some(("example", index + 1)),
            };
            rows.extend(
                self.examples
                    .iter()
                    .enumerate()
                    .map(|(index, columns)| Row { place: place(index), columns: columns.clone() }),
            );
        } else if count > 0 {
            let mut data = Data { path: None, ..data.clone() };
            data.files.clone_from(&self.data.files);
            data.local.clone_from(&self.data.local);
            data.repository = self.data.repository.clone().or(data.repository);
            data.member = self.data.member.clone().or(data.member);
            for file in data.files(task, options.folder.as_deref())? {
                for row in file.rows()? {
                    rows.push(row?);
                    // One more, in case the question itself is among them.
                    if self.order == Order::First && rows.len() > count {
                        break;
                    }
                }
            }
        }
        if rows.len() < count {
            let (expected, actual) = (count, rows.len());
            return Err(TaskError::FewExamples { task: task.to_owned(), expected, actual });
        }
        Ok(Pool { few_shot: self, count, rows, seed: options.seed })
    }
}

/// Examples to choose from.
pub(crate) struct Pool<'f> {
    few_shot: &'f FewShot,
    count: usize,
    rows: Vec<Row>,
    seed: u64,
}

impl Pool<'_> {
    /// The text of the examples for a question, which is not among them.
    pub(crate) fn text(
        &self,
        renderer: &Renderer<'_>,
        question: &Row,
        number: usize,
    ) -> Result<String, TaskError> {
        let chosen = match self.few_shot.order {
            Order::First => (0..self.rows.len()).collect(),
            Order::Random => {
                let amount = (self.count + 1).min(self.rows.len());
                let mut random = random::stream(self.seed, "few-shot", number);
                index::sample(&mut random, self.rows.len(), amount).into_vec()
            }
        };
        let others = chosen.into_iter().map(|index| &self.rows[index]);
        let others = others.filter(|row| row.columns != question.columns).take(self.count);
        others.map(|row| renderer.render("few_shot.template", &Variables::of(row))).collect()
    }
}
