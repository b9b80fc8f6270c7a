//! Graders of the answer in the last `\boxed{}` of an output.

use crate::{math, text};

/// The inside of the last `\boxed{...}` of `text`, or of the last `\fbox{...}` if there is no
/// `\boxed`. Braces inside are balanced. None if there is no box or it does not end.
///
/// ```
/// let output = r"So $x = \boxed{\frac{1}{2}}$.";
/// assert_eq!(kv_graders::last_boxed(output), Some(r"\frac{1}{2}"));
/// ```
pub fn last_boxed(text: &str) -> Option<&str> {
    let command = if text.contains(r"\boxed") { r"\boxed" } else { r"\fbox" };
    let start = text.rfind(command)? + command.len();
    let mut depth = 0;
    for (index, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => {
                let inside = &text[start..start + index];
                return inside.trim_start().strip_prefix('{');
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// 1 if the boxed answer is equivalent to the reference, by [`math::equivalent`].
pub(crate) fn boxed(output: &str, reference: &str) -> f64 {
    let answer = last_boxed(output);
    text::score(answer.is_some_and(|answer| math::equivalent(answer, reference)))
}

/// MATH's own score: 1 if the boxed answer is equal to the reference after MATH's normalisation.
///
/// Source: MATH, `modeling/eval_math_gpt.py` and `modeling/math_equivalence.py`. There, a box has
/// its brace right after the command, and `\fbox` finds no answer.
pub(crate) fn boxed_math(output: &str, reference: &str) -> f64 {
    let follows = |start: usize| output[start..].starts_with(r"\boxed{");
    let answer = output.rfind(r"\boxed").filter(|start| follows(*start)).and(last_boxed(output));
    text::score(answer.is_some_and(|answer| math::math_is_equiv(answer, reference)))
}
