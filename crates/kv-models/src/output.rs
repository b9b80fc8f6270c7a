//! A sequence's text as it grows, cut at stop strings.

use crate::error::Result;
use crate::tokenizer::TextStream;

/// The text of one sequence, token by token, up to the first of its stop strings.
///
/// A piece is shown once no later token can take it back: the beginning of a stop string is held
/// back until it is clear that the stop string does not follow, and a character until all of its
/// bytes are there.
///
/// ```
/// use kv_models::{Model, TextOutput};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::load("needle-1m", &burn::tensor::Device::flex(), None)?;
/// let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
/// let mut output = TextOutput::new(tokenizer.stream(true), vec!["196".into()]);
/// let mut shown = String::new();
/// for token in tokenizer.encode("21963", false)? {
///     shown += &output.push(token)?;
///     if output.is_stopped() {
///         break;
///     }
/// }
/// assert_eq!((shown.as_str(), output.text()), ("2", "2"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct TextOutput {
    stream: TextStream,
    stop: Vec<String>,
    text: String,
    /// Bytes of `text` that have been shown. No stop string begins before them.
    shown: usize,
    stopped: bool,
}

impl TextOutput {
    /// The text of a stream, cut before the first of the strings `stop`; empty ones are ignored.
    pub fn new(stream: TextStream, stop: Vec<String>) -> Self {
        let stop = stop.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stream, stop, text: String::new(), shown: 0, stopped: false }
    }

    /// Adds a token; returns the text that can be shown by now, which may be empty. Tokens behind
    /// a stop string change nothing.
    ///
    /// # Errors
    /// [`crate::ModelError::Tokenizer`].
    pub fn push(&mut self, token: u32) -> Result<String> {
        if self.stopped {
            return Ok(String::new());
        }
        self.text.push_str(&self.stream.push(token)?.unwrap_or_default());
        let complete = self.text.len();
        // A stop string counts as soon as it is there, also where later bytes could change it.
        let held_back = self.stream.held_back()?;
        self.text.push_str(held_back.trim_end_matches(char::REPLACEMENT_CHARACTER));
        if let Some(at) = self.first_stop() {
            self.text.truncate(at);
            self.stopped = true;
            return Ok(self.show(at));
        }
        self.text.truncate(complete);
        Ok(self.show(complete - self.beginning_of_a_stop()))
    }

    /// Ends the text; returns the rest that can be shown. A character of which bytes are missing is
    /// `U+FFFD` in [`Self::text`] and is not shown.
    ///
    /// # Errors
    /// [`crate::ModelError::Tokenizer`].
    pub fn finish(&mut self) -> Result<String> {
        if self.stopped {
            return Ok(String::new());
        }
        let rest = self.stream.finish()?.unwrap_or_default();
        self.text.push_str(&rest);
        let whole = rest.trim_end_matches(char::REPLACEMENT_CHARACTER);
        Ok(self.show(self.text.len() - (rest.len() - whole.len())))
    }

    /// Whether a stop string has ended the text.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The text so far, without what is held back for its missing bytes and without the stop
    /// string.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// [`Self::text`], without a copy.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Bytes of the text that have been shown.
    pub fn shown(&self) -> usize {
        self.shown
    }

    /// How many bytes must have been shown ([`Self::shown`]) before the last token has been shown
    /// as a whole. `None` for a token that a stop string took, which is never shown.
    ///
    /// # Errors
    /// [`crate::ModelError::Tokenizer`].
    pub fn end_of_last(&self) -> Result<Option<usize>> {
        if self.stopped {
            return Ok(None);
        }
        // A character of which bytes are missing will take at least one.
        let is_partial = !self.stream.held_back()?.is_empty();
        Ok(Some(self.text.len() + usize::from(is_partial)))
    }

    /// The new text up to the byte `end`.
    fn show(&mut self, end: usize) -> String {
        let piece = self.text[self.shown..end].to_string();
        self.shown = end;
        piece
    }

    /// Where the first stop string begins.
    fn first_stop(&self) -> Option<usize> {
        let open = &self.text[self.shown..];
        let found = self.stop.iter().filter_map(|stop| open.find(stop.as_str()));
        found.min().map(|at| self.shown + at)
    }

    /// Bytes at the end of the text with which a stop string may begin.
    fn beginning_of_a_stop(&self) -> usize {
        let open = &self.text[self.shown..];
        let beginnings = self.stop.iter().flat_map(|stop| {
            stop.char_indices().map(|(at, _)| &stop[..at]).filter(|start| open.ends_with(start))
        });
        beginnings.map(str::len).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
