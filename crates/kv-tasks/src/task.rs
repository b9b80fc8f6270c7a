//! Tasks: built in, from TOML, or from a file of questions.

use std::path::Path;

use kv_graders::{Cut, Grader};
use serde::Deserialize;

use crate::choices::Choices;
use crate::data::{Data, is_hub_id, is_pattern};
use crate::few_shot::FewShot;
use crate::row_task::{Answers, RowTask, Templates, Uniform};
use crate::rows::{Row, RowFile};
use crate::ruler::Ruler;
use crate::{Question, QuestionOptions, TaskError, Tokens, builtin};

/// A task: how its questions are read or made, asked and graded.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "TaskFile")]
pub struct Task {
    /// Its name, such as `longbench/narrativeqa`.
    pub name: String,
    /// The benchmark that it belongs to, such as `longbench`.
    pub family: String,
    /// What the model does in it, in a sentence.
    pub about: String,
    /// The most tokens that the model generates.
    pub max_new_tokens: usize,
    /// Texts that end the output, and are no part of it.
    pub stop: Vec<String>,
    /// How the output is scored.
    pub grader: Grader,
    /// What part of the output is scored.
    pub cut: Cut,
    /// Whether the question is asked through the model's chat template.
    pub chat: bool,
    /// The system message of the chat.
    pub system: Option<String>,
    source: Source,
}

/// Where the questions come from.
#[derive(Clone, Debug)]
enum Source {
    Rows(Box<RowTask>),
    Ruler { ruler: Ruler, data: Option<Box<Data>> },
}

/// A task as its TOML has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFile {
    name: String,
    family: String,
    about: String,
    max_new_tokens: usize,
    #[serde(default)]
    stop: Vec<String>,
    grader: Grader,
    #[serde(default)]
    cut: Cut,
    #[serde(default)]
    chat: bool,
    system: Option<String>,
    data: Option<Data>,
    template: Option<Templates>,
    answer: Option<Answers>,
    few_shot: Option<FewShot>,
    choices: Option<Choices>,
    ruler: Option<Ruler>,
}

impl Task {
    /// A built-in task.
    ///
    /// # Errors
    /// [`TaskError::UnknownTask`] with the nearest name.
    pub fn named(name: &str) -> Result<Self, TaskError> {
        Self::from_toml(builtin::toml(name)?)
    }

    /// The names of the built-in tasks.
    pub fn names() -> impl Iterator<Item = &'static str> {
        builtin::TASKS.iter().map(|(name, _)| *name)
    }

    /// A task from TOML. The README says what it may have.
    ///
    /// # Errors
    /// [`TaskError::Toml`] with line and column, [`TaskError::Invalid`], or
    /// [`TaskError::Template`].
    pub fn from_toml(text: &str) -> Result<Self, TaskError> {
        let file: TaskFile = toml::from_str(text)?;
        Self::try_from(file)
    }

    /// A task whose questions are the rows of a JSONL, JSON, Parquet or CSV file.
    ///
    /// Each row has `question` and `answers` (or, in all rows, `answer`): a text, a number or a
    /// list of these. It may have `context`, `answer_prefix`, `id`, `subset`, `classes` and
    /// `wrong`. Columns that are the same in all rows, or only in the first, set the task: `grader`
    /// (`f1` by default), `cut` and `max_new_tokens` (128 by default).
    ///
    /// # Errors
    /// [`TaskError`] if the file cannot be read, is malformed, or its first row lacks a column or
    /// names an unknown grader.
    pub fn of_file(path: &Path) -> Result<Self, TaskError> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let file = RowFile { path: path.to_path_buf(), member: None, records: None };
        let Some(first) = file.rows()?.next().transpose()? else {
            return Err(TaskError::NoQuestions { task: name, path: path.to_path_buf() });
        };
        let user = UserRow::read(&first)?;
        let uniform = Uniform {
            grader: user.grader.unwrap_or(Grader::F1),
            cut: user.cut.unwrap_or_default(),
            max_new_tokens: user.max_new_tokens.unwrap_or(128),
        };
        let short = first.columns.contains_key("answer") && !first.columns.contains_key("answers");
        let answers = if short { "answer" } else { "answers" };
        let optional = |column: &str| format!("{{{{ {column} if {column} is defined else '' }}}}");
        let list = |column: &str| format!("{column} if {column} is defined else none");
        let rows = RowTask {
            data: Data { path: Some(path.to_path_buf()), ..Data::default() },
            template: Templates {
                context: optional("context"),
                question: "{{ question }}".into(),
                answer_prefix: optional("answer_prefix"),
                id: optional("id"),
                subset: optional("subset"),
                condition: String::new(),
            },
            answer: Answers {
                references: answers.into(),
                classes: list("classes"),
                wrong: list("wrong"),
            },
            few_shot: None,
            choices: None,
            uniform: Some(uniform),
        };
        Ok(Self {
            about: format!("questions of {}", path.display()),
            family: "file".into(),
            max_new_tokens: uniform.max_new_tokens,
            stop: Vec::new(),
            grader: uniform.grader,
            cut: uniform.cut,
            chat: false,
            system: None,
            source: Source::Rows(Box::new(rows)),
            name,
        })
    }

    /// Whether it has solved examples, which [`QuestionOptions::few_shot`] counts.
    pub fn takes_examples(&self) -> bool {
        match &self.source {
            Source::Rows(rows) => rows.few_shot.is_some(),
            Source::Ruler { .. } => false,
        }
    }

    /// Whether its questions are generated here, to a given length.
    pub fn is_generated(&self) -> bool {
        matches!(self.source, Source::Ruler { .. })
    }

    /// Its questions, in the order of the data set, or generated.
    ///
    /// # Errors
    /// [`TaskError`] with the file and the row, if files are missing or malformed, if the tokenizer
    /// fails, or if the options lack what the task needs or ask for examples that it has not.
    pub fn questions(
        &self,
        options: &QuestionOptions,
        tokens: &dyn Tokens,
    ) -> Result<Vec<Question>, TaskError> {
        if let Some(expected) = options.few_shot.filter(|&count| count > 0)
            && !self.takes_examples()
        {
            return Err(TaskError::FewExamples { task: self.name.clone(), expected, actual: 0 });
        }
        match &self.source {
            Source::Rows(rows) => rows.questions(&self.name, options, tokens),
            Source::Ruler { ruler, data } => {
                let (data, new) = (data.as_deref(), self.max_new_tokens);
                ruler.questions(&self.name, data, new, options, tokens)
            }
        }
    }
}

impl TryFrom<TaskFile> for Task {
    type Error = TaskError;

    fn try_from(file: TaskFile) -> Result<Self, TaskError> {
        if file.max_new_tokens == 0 {
            return Err(file.invalid("max_new_tokens", "at least 1", "0"));
        }
        let few_shot = file.few_shot.iter().map(|few_shot| &few_shot.data);
        for data in file.data.iter().chain(few_shot) {
            if let Some(name) = data.repository.iter().find(|name| !is_hub_id(name)) {
                return Err(file.invalid("data.repository", "organisation/name", name));
            }
            let patterns = data.files.iter().chain(&data.local);
            if let Some(pattern) = patterns.into_iter().find(|name| !is_pattern(name)) {
                let expected = "a relative path with or without `*`";
                return Err(file.invalid("data.files or data.local", expected, pattern));
            }
        }
        let source = match &file.ruler {
            Some(ruler) => file.generated(ruler)?,
            None => file.rows()?,
        };
        Ok(Self {
            source,
            name: file.name,
            family: file.family,
            about: file.about,
            max_new_tokens: file.max_new_tokens,
            stop: file.stop,
            grader: file.grader,
            cut: file.cut,
            chat: file.chat,
            system: file.system,
        })
    }
}

impl TaskFile {
    fn invalid(&self, key: &str, expected: &'static str, actual: &str) -> TaskError {
        TaskError::Invalid {
            task: self.name.clone(),
            key: key.to_owned(),
            expected,
            actual: actual.to_owned(),
        }
    }

    /// The part of the file that makes rows into questions.
    fn rows(&self) -> Result<Source, TaskError> {
        let missing = |key, expected| self.invalid(key, expected, "nothing");
        let data = self.data.clone().ok_or_else(|| missing("data", "the files of the rows"))?;
        if data.files.is_empty() && data.local.is_empty() {
            return Err(missing("data.files", "names of files"));
        }
        let template = self.template.clone();
        let template = template.ok_or_else(|| missing("template", "the texts of a question"))?;
        let answer = self.answer.clone();
        let answer = answer.ok_or_else(|| missing("answer", "the references of an answer"))?;
        if answer.references.trim().is_empty() {
            return Err(missing("answer.references", "an expression"));
        }
        let (few_shot, choices) = (self.few_shot.clone(), self.choices.clone());
        let rows = RowTask { data, template, answer, few_shot, choices, uniform: None };
        rows.check(&self.name)?;
        Ok(Source::Rows(Box::new(rows)))
    }

    /// The part of the file that generates questions.
    fn generated(&self, ruler: &Ruler) -> Result<Source, TaskError> {
        let others = [
            ("template", self.template.is_some()),
            ("answer", self.answer.is_some()),
            ("few_shot", self.few_shot.is_some()),
            ("choices", self.choices.is_some()),
            ("data", self.data.is_some() && !ruler.needs_data()),
        ];
        if let Some((key, _)) = others.iter().find(|(_, given)| *given) {
            return Err(self.invalid(key, "nothing beside `ruler`", "a table"));
        }
        if ruler.needs_data() && self.data.is_none() {
            return Err(self.invalid("data", "the files of the documents", "nothing"));
        }
        if let Some((key, expected, actual)) = ruler.fault() {
            return Err(self.invalid(key, expected, &actual));
        }
        Ok(Source::Ruler { ruler: ruler.clone(), data: self.data.clone().map(Box::new) })
    }
}

/// What a row of a user's file says of the whole task.
pub(crate) struct UserRow {
    grader: Option<Grader>,
    cut: Option<Cut>,
    max_new_tokens: Option<usize>,
}

/// The columns of a user's file that are read, but `id` and `cut`, which resemble too many words.
const COLUMNS: [&str; 10] = [
    "question",
    "answers",
    "answer",
    "context",
    "answer_prefix",
    "subset",
    "classes",
    "wrong",
    "grader",
    "max_new_tokens",
];
/// Letters that may be wrong, missing or too many in a column that was misspelt.
const WRONG_LETTERS: usize = 2;

impl UserRow {
    /// Refuses columns that were misspelt: without them a question would be another one.
    fn check_columns(row: &Row) -> Result<(), TaskError> {
        let lacks = |known: &&&str| !row.columns.contains_key(**known);
        // One of them is enough.
        let answers = ["answer", "answers"];
        let answered = answers.iter().any(|own| row.columns.contains_key(*own));
        let lacking = COLUMNS.iter().filter(lacks);
        let lacking: Vec<&&str> =
            lacking.filter(|known| !(answered && answers.contains(*known))).collect();
        for column in row.columns.keys().filter(|own| !COLUMNS.contains(&own.as_str())) {
            let distance = |known: &str| strsim::osa_distance(column, known);
            let nearest = lacking.iter().find(|known| distance(known) <= WRONG_LETTERS);
            if let Some(nearest) = nearest {
                let (place, column) = (row.place.clone(), column.clone());
                return Err(TaskError::MisspeltColumn { place, column, nearest });
            }
        }
        Ok(())
    }

    pub(crate) fn read(row: &Row) -> Result<Self, TaskError> {
        Self::check_columns(row)?;
        let unknown = |source| TaskError::UnknownName { place: row.place.clone(), source };
        let text = |key: &'static str| match row.columns.get(key) {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(serde_json::Value::String(text)) => Ok(Some(text.as_str())),
            Some(other) => Err(TaskError::NotText {
                place: row.place.clone(),
                part: key,
                actual: other.to_string(),
            }),
        };
        Ok(Self {
            grader: text("grader")?.map(str::parse).transpose().map_err(unknown)?,
            cut: text("cut")?.map(str::parse).transpose().map_err(unknown)?,
            max_new_tokens: match row.columns.get("max_new_tokens") {
                None | Some(serde_json::Value::Null) => None,
                Some(value) => {
                    let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
                    Some(count.filter(|&count| count > 0).ok_or_else(|| TaskError::NotCount {
                        place: row.place.clone(),
                        column: "max_new_tokens",
                        actual: value.to_string(),
                    })?)
                }
            },
        })
    }

    /// Whether the row says what the first one says, or nothing.
    pub(crate) fn agrees(&self, first: &Uniform, row: &Row) -> Result<(), TaskError> {
        let same = |key, expected: String, actual: Option<String>| match actual {
            Some(actual) if actual != expected => {
                Err(TaskError::Mixed { place: row.place.clone(), key, expected, actual })
            }
            _ => Ok(()),
        };
        let tokens = self.max_new_tokens.map(|tokens| tokens.to_string());
        same("grader", first.grader.to_string(), self.grader.map(|name| name.to_string()))?;
        same("cut", first.cut.to_string(), self.cut.map(|name| name.to_string()))?;
        same("max_new_tokens", first.max_new_tokens.to_string(), tokens)
    }
}
