//! A preset's file: a paper's settings, and the numbers that it published.

use anyhow::{Context, ensure};
use kv_core::Budget;
use kv_graders::Grader;
use serde::Deserialize;
use serde_json::Value;

/// What a paper measured, how, and its numbers.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PresetFile {
    /// The paper and its table or figure.
    pub(super) source: String,
    /// Whether the numbers are per cents; shares of one otherwise.
    percent: bool,
    /// The budgets of policies that leave theirs open.
    pub(super) budgets: Vec<Budget>,
    /// At most so many new tokens, in place of the tasks' own numbers.
    pub(super) new_tokens: Option<usize>,
    /// Solved examples before each question of the tasks that have examples, in place of their own
    /// numbers.
    pub(super) few_shot: Option<usize>,
    /// At most so many questions of each task.
    pub(super) limit: Option<usize>,
    /// Whether questions go through the chat template, in place of the tasks' own choice.
    pub(super) chat: Option<bool>,
    /// 0, the default, takes the likeliest token.
    #[serde(default)]
    pub(super) temperature: f64,
    /// Only the likeliest tokens that together reach this probability.
    pub(super) top_p: Option<f64>,
    /// Whether prompts beyond the model's positions lose their middle, as in LongBench.
    #[serde(default)]
    pub(super) cut_middle: bool,
    /// Whether the table has a mean over its columns.
    #[serde(default)]
    pub(super) average: bool,
    /// The columns.
    pub(super) columns: Vec<Column>,
    /// The methods, the full cache first.
    pub(super) methods: Vec<Method>,
    /// The models, the default first.
    pub(super) models: Vec<PaperModel>,
}

/// A column of the paper's table: a task, graded.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Column {
    /// The task's name.
    pub(super) task: String,
    /// In place of the task's own grader.
    pub(super) grader: Option<Grader>,
    /// The paper's heading.
    pub(super) heading: String,
}

/// A method of the paper's table, as the policy that it is here.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Method {
    /// The paper's name.
    pub(super) name: String,
    /// The configuration.
    pub(super) policy: Value,
}

/// A model of the paper, with its numbers.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PaperModel {
    /// The hub id.
    pub(super) name: String,
    /// The rows of the table.
    #[serde(default)]
    pub(super) rows: Vec<Published>,
}

impl PaperModel {
    /// Whether a hub id, or a part of a path, has this model's name.
    fn is_named_by(&self, model: &str) -> bool {
        let id = self.name.to_lowercase();
        let name = id.rsplit('/').next().unwrap_or(&id);
        // The hub's cache.
        let cached = format!("models--{}", id.replace('/', "--"));
        model.to_lowercase().split(['/', '\\']).any(|part| {
            let part = part.strip_suffix(".gguf").unwrap_or(part);
            part == name || part == cached
        })
    }

    /// The row of a method at a budget. A row without a budget is of all.
    pub(super) fn row(&self, method: &str, budget: Option<Budget>) -> Option<&Published> {
        let fits = |own: &&Published| {
            own.method == method && own.budget.is_none_or(|own| budget == Some(own))
        };
        self.rows.iter().find(fits)
    }
}

/// A row of the paper's table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Published {
    /// The method's name.
    pub(super) method: String,
    /// The budget, where the method has one.
    pub(super) budget: Option<Budget>,
    /// A number for each column, or none at all.
    #[serde(default)]
    pub(super) scores: Vec<f64>,
    /// The mean over the columns.
    pub(super) average: Option<f64>,
}

impl PresetFile {
    /// Reads a file.
    ///
    /// # Errors
    /// For a file of another form.
    pub(super) fn read(toml: &str) -> anyhow::Result<Self> {
        Ok(toml::from_str(toml)?)
    }

    /// The columns of the tasks that are named; all without a name.
    ///
    /// # Errors
    /// For names of other tasks.
    pub(super) fn columns(&self, tasks: &[String]) -> anyhow::Result<Vec<Column>> {
        for name in tasks {
            let known = self.columns.iter().any(|column| column.task == *name);
            ensure!(known, "--tasks: there is no `{name}`, but {}", self.tasks().join(", "));
        }
        let wanted = |column: &&Column| tasks.is_empty() || tasks.contains(&column.task);
        Ok(self.columns.iter().filter(wanted).cloned().collect())
    }

    /// The names of all tasks.
    pub(super) fn tasks(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.columns.iter().map(|column| &*column.task).collect();
        names.dedup();
        names
    }

    /// The paper's model that a hub id, a folder or a file names.
    pub(super) fn own_model(&self, model: &str) -> Option<&PaperModel> {
        self.models.iter().find(|own| own.is_named_by(model))
    }

    /// The paper's model whose numbers stand beside those of a model: the one that is `asked` for,
    /// the model itself, or the first of the preset's file.
    ///
    /// # Errors
    /// Where the paper has no model that is asked for.
    pub(super) fn published(
        &self,
        asked: Option<&str>,
        model: &str,
    ) -> anyhow::Result<&PaperModel> {
        let Some(asked) = asked else {
            let own = self.own_model(model).or(self.models.first());
            return own.context("the preset has no model");
        };
        let names: Vec<&str> = self.models.iter().map(|own| &*own.name).collect();
        self.own_model(asked).with_context(|| {
            format!("--published: there is no `{asked}`, but {}", names.join(", "))
        })
    }

    /// A published number as a share of one.
    pub(super) fn share(&self, number: f64) -> f64 {
        if self.percent { number / 100.0 } else { number }
    }
}
