//! A template's text, as the template engine understands it.

use regex::Regex;

use crate::error::{ModelError, Result};

/// `{% generation %}` and `{% endgeneration %}` in every form of whitespace control.
const GENERATION: &str = r"\{%([-+]?)[ \t\n]*(end)?generation[ \t\n]*([-+]?)%\}";

/// The template with Jinja's line ends, and with `generation` blocks as scopes.
///
/// Jinja reads `\r\n` and `\r` as `\n`. A `generation` block, which `transformers` defines, marks
/// what the model says, for training. It renders what is inside, in a scope of its own: as `with`
/// does.
pub(super) fn readable(source: &str) -> Result<String> {
    let lines = source.replace("\r\n", "\n").replace('\r', "\n");
    let tags = Regex::new(GENERATION)
        .map_err(|error| ModelError::ChatTemplate { reason: error.to_string() })?;
    Ok(tags.replace_all(&lines, "{%$1 ${2}with $3%}").into_owned())
}
