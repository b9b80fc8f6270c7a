//! Prompts with an answer to find, one JSON object a line.

use std::path::Path;

use anyhow::{Context, ensure};
use kv_models::Model;
use serde::Deserialize;

/// The source of prompts and texts that come without a file.
pub(crate) const EMBEDDED: &str = "embedded";
/// The model that the embedded prompts were made for.
pub(crate) const EMBEDDED_FOR: &str = "needle-1m";

const EMBEDDED_PROMPTS: &str = include_str!("../assets/needle-1m.jsonl");
/// Held-out book text, for perplexity without a text file.
const EMBEDDED_TEXT: &str = include_str!("../assets/books.txt");

/// Prompts, and where they come from.
#[derive(Debug)]
pub(crate) struct Prompts {
    /// The file's name, or [`EMBEDDED`].
    pub(crate) source: String,
    /// The prompts in the file's order.
    pub(crate) list: Vec<Prompt>,
}

/// One prompt.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Prompt {
    /// Its name; its line where the file gives none.
    #[serde(default)]
    pub(crate) id: String,
    /// The kind of task, such as `niah_single`.
    pub(crate) task: String,
    /// Its nominal length in tokens.
    pub(crate) length: usize,
    /// Where the answer lies, from 0 (first) to 1 (last).
    #[serde(default)]
    pub(crate) depth: Option<f64>,
    /// The text.
    pub(crate) prompt: String,
    /// What the model should say next.
    pub(crate) answer: String,
}

impl Prompt {
    /// Context and question: the question begins at the last `\nQuestion:` or `\nKey: "`; a prompt
    /// without either is all question.
    pub(crate) fn split(&self) -> (&str, &str) {
        let marks = ["\nQuestion:", "\nKey: \""];
        let at = marks.iter().filter_map(|mark| self.prompt.rfind(mark)).max();
        self.prompt.split_at(at.unwrap_or_default())
    }
}

impl Prompts {
    /// Reads prompts from a file, or the embedded ones.
    ///
    /// # Errors
    /// Where the file cannot be read or a line is no prompt; the line is named.
    pub(crate) fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let (source, text) = read(path, EMBEDDED_PROMPTS)?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let prompt = |(index, line): (usize, &str)| {
            let place = format!("line {}", index + 1);
            let mut prompt: Prompt =
                serde_json::from_str(line).with_context(|| format!("{source}, {place}"))?;
            if prompt.id.is_empty() {
                prompt.id = place;
            }
            Ok(prompt)
        };
        let list = lines.map(prompt).collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(!list.is_empty(), "{source} holds no prompts");
        Ok(Self { source, list })
    }

    /// Keeps `limit` prompts, or all where there are fewer: as even a number as can be of each
    /// task, length, and pair of both, spread over the file.
    pub(crate) fn limit(&mut self, limit: usize) {
        let mut groups: Vec<((&str, usize), Vec<usize>)> = Vec::new();
        for (index, prompt) in self.list.iter().enumerate() {
            let key = (prompt.task.as_str(), prompt.length);
            match groups.iter_mut().find(|group| group.0 == key) {
                Some(group) => group.1.push(index),
                None => groups.push((key, vec![index])),
            }
        }
        let mut taken = vec![0; groups.len()];
        for _ in 0..limit.min(self.list.len()) {
            let of = |alike: &dyn Fn(&(&str, usize)) -> bool| {
                groups.iter().zip(&taken).filter(|(group, _)| alike(&group.0)).map(|(_, n)| n).sum()
            };
            let load = |group: usize| -> (usize, usize, usize) {
                let (task, length) = groups[group].0;
                (of(&|key| key.0 == task), of(&|key| key.1 == length), taken[group])
            };
            let open = (0..groups.len()).filter(|&group| taken[group] < groups[group].1.len());
            if let Some(next) = open.min_by_key(|&group| load(group)) {
                taken[next] += 1;
            }
        }
        let chosen = groups.iter().zip(taken).enumerate().flat_map(|(group, ((_, all), taken))| {
            // The middles of as many equal stretches, elsewhere in each group: prompts of a task
            // mostly lie in the same order at every length.
            (0..taken)
                .map(move |i| all[((2 * i + 1) * all.len() / (2 * taken) + group) % all.len()])
        });
        let mut keep = vec![false; self.list.len()];
        chosen.for_each(|index| keep[index] = true);
        let mut keep = keep.into_iter();
        self.list.retain(|_| keep.next() == Some(true));
    }

    /// Leaves out prompts that exceed the model's positions together with their answers, and says
    /// which.
    ///
    /// # Errors
    /// Where none is left, and where a text cannot be tokenized.
    pub(crate) fn fit(&mut self, model: &Model) -> anyhow::Result<Option<String>> {
        let positions = model.config().max_positions;
        let all = self.list.len();
        let mut long = Vec::new();
        let mut fitting = Vec::new();
        for prompt in std::mem::take(&mut self.list) {
            let tokens = |text: &str| anyhow::Ok(model.encode(text)?.len());
            let (context, question) = prompt.split();
            let parts = tokens(context)? + tokens(question)?;
            match parts.max(tokens(&prompt.prompt)?) + tokens(&prompt.answer)? <= positions {
                true => fitting.push(prompt),
                false => long.push(prompt.id),
            }
        }
        self.list = fitting;
        let which = format!("{} of {all} prompts of {}", long.len(), self.source);
        let names = long.join(", ");
        ensure!(
            !self.list.is_empty(),
            "{which} exceed the model's {positions} positions, none is left: {names}"
        );
        let note = format!("{which} exceed the model's {positions} positions, left out: {names}");
        Ok((!long.is_empty()).then_some(note))
    }
}

/// Reads the text for perplexity, or the embedded one, and says where it is from.
///
/// # Errors
/// Where the file cannot be read.
pub(crate) fn text(path: Option<&Path>) -> anyhow::Result<(String, String)> {
    read(path, EMBEDDED_TEXT)
}

/// A file's name and text, or those embedded.
fn read(path: Option<&Path>, embedded: &str) -> anyhow::Result<(String, String)> {
    let Some(path) = path else { return Ok((EMBEDDED.into(), embedded.into())) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok((name.to_string_lossy().into_owned(), text))
}

#[cfg(test)]
#[path = "prompts_tests.rs"]
mod tests;
