//! The greatest prompt that is no longer than asked for.

use super::Prompt;
use crate::{TaskError, Tokens};

/// What a prompt has to fit in.
pub(super) struct Fit<'t> {
    pub(super) task: &'t str,
    /// Tokens of prompt and answer.
    pub(super) length: usize,
    pub(super) max_new_tokens: usize,
    pub(super) tokens: &'t dyn Tokens,
}

/// A prompt that fits.
pub(super) struct Fitted {
    pub(super) prompt: Prompt,
    pub(super) size: usize,
    pub(super) tokens: usize,
}

/// So few tokens may be left without a search for a greater size that uses them.
const FEW: usize = 4;

impl Fitted {
    /// Whether no greater size will do, if one more step has the tokens that it has up to `high`.
    fn near(&self, budget: usize, high: usize, above: usize) -> bool {
        let (left, steps) = (budget - self.tokens, high - self.size);
        steps <= 1 || left <= FEW || 2 * left * steps < above - self.tokens
    }
}

impl Fit<'_> {
    /// Tokens of the prompt alone.
    pub(super) fn budget(&self) -> usize {
        self.length.saturating_sub(self.max_new_tokens)
    }

    /// The prompt of the greatest size from `least` to `most` that fits.
    ///
    /// The size is searched by the secant through the greatest that fits and the least that does
    /// not, and by halves where that is slow, until a few tokens are left, or less than half of
    /// what one more step has. `start` is a guess.
    pub(super) fn greatest(
        &self,
        least: usize,
        most: usize,
        start: Option<usize>,
        prompt: impl Fn(usize) -> Prompt,
    ) -> Result<Fitted, TaskError> {
        let budget = self.budget();
        let mut size = start.unwrap_or(least).clamp(least, most.max(least));
        let (mut low, mut high): (Option<Fitted>, Option<(usize, usize)>) = (None, None);
        for step in 0.. {
            let built = prompt(size);
            let tokens = self.count(&built, budget)?;
            if tokens <= budget {
                low = Some(Fitted { prompt: built, size, tokens });
            } else {
                high = Some((size, tokens));
            }
            size = match (&low, high) {
                (None, Some((size, tokens))) if size <= least => {
                    let needed = tokens + self.max_new_tokens;
                    let (task, length) = (self.task.to_owned(), self.length);
                    return Err(TaskError::TooLong { task, length, needed });
                }
                (None, Some((size, tokens))) => {
                    (scale(size, budget, tokens)).clamp(least, size - 1)
                }
                (Some(low), None) if low.size >= most || budget - low.tokens <= FEW => break,
                (Some(low), None) => {
                    let guess = scale(low.size, budget, low.tokens);
                    guess.clamp(low.size + 1, low.size.saturating_mul(16).max(16)).min(most)
                }
                (Some(low), Some((high, above))) if low.near(budget, high, above) => break,
                (Some(low), Some((high, above))) => {
                    let span = high - low.size;
                    let guess = match step % 3 {
                        2 => low.size + span / 2,
                        _ => low.size + scale(span, budget - low.tokens, above - low.tokens),
                    };
                    guess.clamp(low.size + 1, high - 1)
                }
                (None, None) => break,
            };
        }
        low.ok_or_else(|| TaskError::TooLong {
            task: self.task.to_owned(),
            length: self.length,
            needed: self.length + 1,
        })
    }

    /// The tokens of a prompt, whether the model reads its parts one by one or as one text, of
    /// which either can be more.
    fn count(&self, prompt: &Prompt, budget: usize) -> Result<usize, TaskError> {
        let count = |text: &str| match self.tokens.encode(text) {
            Ok(ids) => Ok(ids.len()),
            Err(reason) => Err(TaskError::Tokenizer { task: self.task.to_owned(), reason }),
        };
        let parts = count(&prompt.context)? + count(&prompt.question)?;
        let parts = parts + count(&prompt.answer_prefix)?;
        // A prompt that is too long already needs no second count.
        if parts > budget { Ok(parts) } else { Ok(parts.max(count(&prompt.text())?)) }
    }
}

/// `value * part / whole` without overflow.
fn scale(value: usize, part: usize, whole: usize) -> usize {
    let scaled = value as u128 * part as u128 / (whole as u128).max(1);
    usize::try_from(scaled).unwrap_or(usize::MAX)
}
