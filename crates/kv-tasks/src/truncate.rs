//! Prompts that are too long lose their middle, as in LongBench (Bai et al. 2023, section 4.1).

use crate::{Question, TaskError, Tokens};

/// Cuts `question` to at most `length` tokens: the first and the last half of the prompt's tokens
/// stay. What the cut removes is always a part of the context.
///
/// # Errors
/// [`TaskError::TooLong`] if question and answer prefix alone are longer.
pub(crate) fn middle(
    task: &str,
    question: &mut Question,
    length: usize,
    tokens: &dyn Tokens,
) -> Result<(), TaskError> {
    let fails = |reason| TaskError::Tokenizer { task: task.to_owned(), reason };
    let rest = format!("{}{}", question.question, question.answer_prefix);
    let ids = tokens.encode(&format!("{}{rest}", question.context)).map_err(fails)?;
    if ids.len() <= length {
        return Ok(());
    }
    let half = length / 2;
    let head = tokens.decode(&ids[..half]).map_err(fails)?;
    let tail = tokens.decode(&ids[ids.len() - half..]).map_err(fails)?;
    // Decoding can change white space at the ends, so the question's own text is kept, not its
    // decoded tokens.
    if let Some(tail) = tail.strip_suffix(&rest) {
        question.context = head + tail;
        return Ok(());
    }
    let needed = tokens.encode(&rest).map_err(fails)?.len();
    let Some(left) = length.checked_sub(needed) else {
        return Err(TaskError::TooLong { task: task.to_owned(), length, needed });
    };
    // The question is longer than half of the length: the context alone is halved.
    let ids = tokens.encode(&question.context).map_err(fails)?;
    let half = (left / 2).min(ids.len() / 2);
    let head = tokens.decode(&ids[..half]).map_err(fails)?;
    question.context = head + &tokens.decode(&ids[ids.len() - half..]).map_err(fails)?;
    Ok(())
}
