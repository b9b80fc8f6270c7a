//! Prompts with an answer to find, one JSON object a line.

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// What the benchmark runs without a prompt file.
const EMBEDDED: &str = include_str!("../assets/needle-1m.jsonl");
/// Held-out book text, for perplexity without a text file.
const EMBEDDED_TEXT: &str = include_str!("../assets/books.txt");

/// One prompt.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Prompt {
    /// Its name.
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

/// Reads prompts from a file, or the embedded ones.
///
/// # Errors
/// Where the file cannot be read or a line is no prompt; the line is named.
pub(crate) fn load(path: Option<&Path>) -> anyhow::Result<Vec<Prompt>> {
    let (name, text) = match path {
        Some(path) => {
            let text = std::fs::read_to_string(path);
            (path.display().to_string(), text.with_context(|| path.display().to_string())?)
        }
        None => ("embedded prompts".into(), EMBEDDED.to_string()),
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts = lines
        .map(|(index, line)| {
            serde_json::from_str(line).with_context(|| format!("{name}, line {}", index + 1))
        })
        .collect::<anyhow::Result<Vec<Prompt>>>()?;
    ensure!(!prompts.is_empty(), "{name} holds no prompts");
    Ok(prompts)
}

/// Reads the text for perplexity, or the embedded one.
///
/// # Errors
/// Where the file cannot be read.
pub(crate) fn text(path: Option<&Path>) -> anyhow::Result<String> {
    match path {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string()),
        None => Ok(EMBEDDED_TEXT.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_prompts_have_context_and_question() {
        for prompt in load(None).unwrap() {
            let (context, question) = prompt.split();
            assert!(context.len() > question.len(), "{}", prompt.id);
            assert!(question.starts_with("\nQuestion:") || question.starts_with("\nKey: \""));
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        std::fs::write(&path, "\n{\"task\": 3}\n").unwrap();
        let error = format!("{:#}", load(Some(&path)).unwrap_err());
        assert!(error.contains("line 2"), "{error}");
    }
}
