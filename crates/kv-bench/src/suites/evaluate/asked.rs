//! A question as the model is asked it.

use std::sync::Arc;

use anyhow::Context;
use kv_models::{Message, Model, Request, Sampling};
use kv_tasks::{Question, Task};
use serde_json::Value;

use super::answer_file::hash_of;
use crate::report;

/// Room behind a prompt is a multiple of this number of tokens.
const ROOM: usize = 256;

/// A question's tokens.
pub(super) struct Asked {
    pub(super) task: Arc<Task>,
    pub(super) question: Question,
    /// The whole prompt.
    prompt: Vec<u32>,
    /// The prompt in two parts: what may be compressed without the question in sight, and the rest.
    /// The first part is empty where the question has no context.
    parts: [Vec<u32>; 2],
    /// The hash of the tokens of both parts.
    pub(super) hash: String,
}

impl Asked {
    /// Encodes a question, through the model's chat template where the task asks through it.
    ///
    /// The template sees `chat_variables`.
    ///
    /// # Errors
    /// For models without a tokenizer or a chat template, and for a template that changes the
    /// context.
    pub(super) fn new(
        model: &Model,
        task: &Arc<Task>,
        question: Question,
        chat_variables: &[(String, Value)],
    ) -> anyhow::Result<Self> {
        let Question { context, question: asked, answer_prefix, .. } = &question;
        let (text, split) = match task.chat {
            false => (format!("{context}{asked}{answer_prefix}"), context.len()),
            true => {
                let system = task.system.as_deref().map(Message::system);
                let message = format!("{context}{asked}");
                let messages = system.into_iter().chain([Message::user(message.clone())]);
                let messages: Vec<Message> = messages.collect();
                let text = chat_variables
                    .iter()
                    .fold(model.chat_template()?.clone(), |template, (name, value)| {
                        template.with_variable(name, value)
                    })
                    .render(&messages, true)?;
                // Templates may trim a message. What stands before it, such as a system message,
                // may have the same words.
                let at = text.rfind(message.trim()).with_context(|| {
                    format!("question {}: the chat template changes its text", question.id)
                })?;
                let trimmed =
                    context.len().saturating_sub(message.len() - message.trim_start().len());
                let split = if context.trim().is_empty() { 0 } else { at + trimmed };
                (text + answer_prefix, split)
            }
        };
        let encode = |text: &str| match task.chat {
            // A template writes the special tokens itself.
            true => model.encode_continuation(text),
            false => model.encode(text),
        };
        let prompt = encode(&text)?;
        let parts = match split {
            0 => [Vec::new(), prompt.clone()],
            _ => [encode(&text[..split])?, model.encode_continuation(&text[split..])?],
        };
        let hash = hash_of(&serde_json::to_string(&parts)?);
        Ok(Self { task: task.clone(), question, prompt, parts, hash })
    }

    /// Tokens of the prompt, in one piece or in two.
    pub(super) fn tokens(&self) -> usize {
        self.prompt.len().max(self.parts.iter().map(Vec::len).sum())
    }

    /// The task's name, and the subset's where the task has several.
    pub(super) fn task_name(&self) -> String {
        let (task, subset) = (&self.task.name, &self.question.subset);
        // The name of a task with one subset may end with it.
        if task.ends_with(subset) { task.clone() } else { format!("{task} {subset}") }
    }

    /// The question as the report shows it, without answers yet.
    pub(super) fn shown(&self) -> report::ShownQuestion {
        let Question { id, context, question, answer_prefix, answer, .. } = &self.question;
        let prompt = format!("{context}{question}{answer_prefix}");
        report::ShownQuestion::new(self.task_name(), id, self.tokens(), &prompt, &answer.references)
    }

    /// The tokens that can be compressed without the question in sight.
    pub(super) fn context(&self) -> Option<&[u32]> {
        let [context, rest] = &self.parts;
        (!context.is_empty() && !rest.is_empty()).then_some(context)
    }

    /// Tokens that follow the compressed prompt.
    pub(super) fn appended(&self, aware: bool) -> usize {
        if aware { 0 } else { self.parts[1].len() }
    }

    /// Tokens to keep room for behind the compressed prompt. Some policies compress by this number,
    /// and answers must not depend on the other questions of a batch, which all have one room: it
    /// is rounded up, so that questions of different lengths share a batch or a context.
    pub(super) fn room(&self, aware: bool) -> usize {
        let tokens = self.appended(aware).saturating_add(self.task.max_new_tokens);
        tokens.checked_next_multiple_of(ROOM).unwrap_or(tokens)
    }

    /// The request to the model.
    pub(super) fn request(&self, aware: bool, sampling: Sampling) -> Request {
        let (tokens, question) = match aware {
            true => (self.prompt.clone(), Vec::new()),
            false => (self.parts[0].clone(), self.parts[1].clone()),
        };
        let Task { max_new_tokens, stop, .. } = &*self.task;
        Request {
            tokens,
            question,
            new_tokens: *max_new_tokens,
            sampling,
            stop: stop.clone(),
            stop_at_end: true,
        }
    }

    /// The score of an output, 0 to 1.
    ///
    /// # Errors
    /// For a reference answer without the fields that the grader reads, such as classes.
    pub(super) fn score(&self, output: &str) -> anyhow::Result<f64> {
        let Task { grader, cut, name, .. } = &*self.task;
        let output = cut.apply(output);
        let score = grader.grade(output, &self.question.answer);
        score.with_context(|| format!("{name}, question {}", self.question.id))
    }
}
