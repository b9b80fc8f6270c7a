//! The text that needles are hidden in.

use std::fs;
use std::path::Path;

use unicode_segmentation::UnicodeSegmentation;

use crate::{Place, TaskError};

/// RULER's sentences that say nothing.
pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// A text as words and sentences, which repeats itself without end.
pub(super) struct Essay {
    words: Vec<String>,
    /// The first word of each sentence.
    starts: Vec<usize>,
}

impl Essay {
    /// Reads a text file, or a JSON file with the key `text`, as RULER's own essays are in.
    pub(super) fn read(path: &Path) -> Result<Self, TaskError> {
        let text = fs::read_to_string(path).map_err(|error| TaskError::io(path, error))?;
        let json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        let essay = if json { Self::new(&of_json(path, &text)?) } else { Self::new(&text) };
        if essay.words.is_empty() {
            return Err(TaskError::EmptyText { path: path.to_path_buf() });
        }
        Ok(essay)
    }

    fn new(text: &str) -> Self {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let text = words.join(" ");
        let (mut starts, mut word, mut at) = (Vec::new(), 0, 0);
        for (start, sentence) in text.split_sentence_bound_indices() {
            while at < start {
                at += words[word].len() + 1;
                word += 1;
            }
            // A bound inside of a word is none here.
            if at == start && !sentence.trim().is_empty() {
                starts.push(word);
            }
        }
        Self { words, starts }
    }

    /// The first words of each sentence in the first `words` words of the text.
    pub(super) fn sentences(&self, words: usize) -> Vec<usize> {
        let rounds = (0..).map(|round| round * self.words.len());
        let starts = rounds.flat_map(|first| self.starts.iter().map(move |start| first + start));
        starts.take_while(|&start| start < words).collect()
    }

    /// The words from `first` to before `end`.
    pub(super) fn push(&self, text: &mut String, first: usize, end: usize) {
        for word in first..end {
            if word > first {
                text.push(' ');
            }
            text.push_str(&self.words[word % self.words.len()]);
        }
    }
}

fn of_json(path: &Path, text: &str) -> Result<String, TaskError> {
    #[derive(serde::Deserialize)]
    struct Text {
        text: String,
    }
    let parsed: Result<Text, _> = serde_json::from_str(text);
    parsed.map(|json| json.text).map_err(|error| TaskError::Json {
        place: Place { path: path.into(), row: Some(("line", error.line())) },
        reason: error.to_string(),
    })
}
