//! Tasks whose questions are the rows of files.

use kv_graders::{Answer, Cut, Grader};
use minijinja::Value;
use serde::Deserialize;

use crate::choices::Choices;
use crate::data::Data;
use crate::few_shot::FewShot;
use crate::render::{Expression, Renderer, Variables};
use crate::rows::{self, Row};
use crate::{Question, QuestionOptions, TaskError, Tokens, truncate};

/// How rows become questions.
#[derive(Clone, Debug)]
pub(crate) struct RowTask {
    pub(crate) data: Data,
    pub(crate) template: Templates,
    pub(crate) answer: Answers,
    pub(crate) few_shot: Option<FewShot>,
    pub(crate) choices: Option<Choices>,
    /// What the first row of a user's file says, which holds for all rows.
    pub(crate) uniform: Option<Uniform>,
}

/// The templates of a question's texts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Templates {
    pub(crate) context: String,
    pub(crate) question: String,
    pub(crate) answer_prefix: String,
    /// Empty: the number of the row.
    pub(crate) id: String,
    /// Empty: the name of the task.
    pub(crate) subset: String,
    /// An expression: rows where it is false are skipped. Empty: none.
    #[serde(rename = "where")]
    pub(crate) condition: String,
}

/// The expressions of an answer's texts. Empty ones give none.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Answers {
    pub(crate) references: String,
    pub(crate) classes: String,
    pub(crate) wrong: String,
}

/// What all rows of a user's file have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uniform {
    pub(crate) grader: Grader,
    pub(crate) cut: Cut,
    pub(crate) max_new_tokens: usize,
}

impl RowTask {
    pub(crate) fn questions(
        &self,
        task: &str,
        options: &QuestionOptions,
        tokens: &dyn Tokens,
    ) -> Result<Vec<Question>, TaskError> {
        let renderer = self.renderer(task)?;
        let expressions = Expressions::new(self, &renderer)?;
        let files = self.data.files(task, options.folder.as_deref())?;
        let few_shot = self.few_shot.as_ref();
        let pool = few_shot.map(|few_shot| few_shot.pool(task, &self.data, options)).transpose()?;

        let limit = options.limit.unwrap_or(usize::MAX);
        let (mut questions, mut number) = (Vec::new(), 0);
        let rows = files.iter().flat_map(|file| match file.rows() {
            Ok(rows) => rows,
            Err(error) => Box::new(std::iter::once(Err(error))),
        });
        let rows = rows.flat_map(|row| match (row, &self.data.each) {
            (Ok(row), Some(column)) => match rows::each(row, column) {
                Ok(rows) => rows.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            },
            (row, _) => vec![row],
        });
        for row in rows {
            if questions.len() >= limit {
                break;
            }
            let row = row?;
            number += 1;
            if let Some(uniform) = &self.uniform {
                crate::task::UserRow::read(&row)?.agrees(uniform, &row)?;
            }
            let Some(mut question) =
                self.question(task, &row, number, options, &renderer, &expressions)?
            else {
                continue;
            };
            if let Some(pool) = &pool {
                question.context = pool.text(&renderer, &row, number)? + &question.context;
            }
            if let Some(length) = options.length {
                truncate::middle(task, &mut question, length, tokens)?;
            }
            questions.push(question);
        }
        if questions.is_empty() && limit > 0 {
            let path = files.into_iter().next().map(|file| file.path).unwrap_or_default();
            return Err(TaskError::NoQuestions { task: task.to_owned(), path });
        }
        Ok(questions)
    }

    /// Parses the templates and expressions, to find their faults.
    pub(crate) fn check(&self, task: &str) -> Result<(), TaskError> {
        let renderer = self.renderer(task)?;
        Expressions::new(self, &renderer).map(drop)
    }

    fn renderer<'t>(&'t self, task: &'t str) -> Result<Renderer<'t>, TaskError> {
        let mut renderer = Renderer::new(task);
        renderer.template("template.context", &self.template.context)?;
        renderer.template("template.question", &self.template.question)?;
        renderer.template("template.answer_prefix", &self.template.answer_prefix)?;
        renderer.template("template.id", &self.template.id)?;
        renderer.template("template.subset", &self.template.subset)?;
        if let Some(few_shot) = &self.few_shot {
            renderer.template("few_shot.template", &few_shot.template)?;
        }
        Ok(renderer)
    }

    fn question(
        &self,
        task: &str,
        row: &Row,
        number: usize,
        options: &QuestionOptions,
        renderer: &Renderer<'_>,
        expressions: &Expressions<'_, '_>,
    ) -> Result<Option<Question>, TaskError> {
        let mut variables = Variables::of(row);
        if let Some(condition) = &expressions.condition
            && !condition.value(&variables)?.is_true()
        {
            return Ok(None);
        }
        if let (Some(choices), Some(texts)) = (&self.choices, &expressions.choices) {
            let texts = texts.texts(&variables)?;
            let (shown, letter) = choices.shuffle(texts, options.seed, number);
            variables.insert("choices", shown);
            variables.insert("letter", letter);
        }
        variables.insert("number", Value::from(number));

        let text = |part| renderer.render(part, &variables);
        let texts = |expression: &Option<Expression<'_, '_>>| match expression {
            Some(expression) => expression.texts(&variables),
            None => Ok(Vec::new()),
        };
        let answer = Answer {
            references: texts(&expressions.references)?,
            classes: texts(&expressions.classes)?,
            wrong: texts(&expressions.wrong)?,
        };
        if answer.references.iter().all(|reference| reference.trim().is_empty()) {
            return Err(TaskError::EmptyAnswer { place: row.place.clone() });
        }
        let or = |text: String, other: &dyn Fn() -> String| match text.is_empty() {
            true => other(),
            false => text,
        };
        Ok(Some(Question {
            id: or(text("template.id")?, &|| number.to_string()),
            context: text("template.context")?,
            question: text("template.question")?,
            answer,
            answer_prefix: text("template.answer_prefix")?,
            length: None,
            subset: or(text("template.subset")?, &|| task.to_owned()),
        }))
    }
}

/// The parsed expressions of a task.
struct Expressions<'e, 't> {
    condition: Option<Expression<'e, 't>>,
    choices: Option<Expression<'e, 't>>,
    references: Option<Expression<'e, 't>>,
    classes: Option<Expression<'e, 't>>,
    wrong: Option<Expression<'e, 't>>,
}

impl<'e, 't> Expressions<'e, 't> {
    fn new(task: &'t RowTask, renderer: &'e Renderer<'t>) -> Result<Self, TaskError> {
        let parse = |part, source: &'t str| match source.is_empty() {
            true => Ok(None),
            false => renderer.expression(part, source).map(Some),
        };
        let choices = task.choices.as_ref().map_or("", |choices| &choices.texts);
        Ok(Self {
            condition: parse("template.where", &task.template.condition)?,
            choices: parse("choices.texts", choices)?,
            references: parse("answer.references", &task.answer.references)?,
            classes: parse("answer.classes", &task.answer.classes)?,
            wrong: parse("answer.wrong", &task.answer.wrong)?,
        })
    }
}
