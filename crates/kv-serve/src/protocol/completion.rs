//! The fields of completions.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::protocol::common::{Common, Parts, Prepared, top_logprobs};
use crate::protocol::fields;
use crate::protocol::grammar::{self, ResponseFormat};

/// New tokens of a completion that asks for no number, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;

/// A body of `/v1/completions`.
#[derive(ToSchema)]
#[expect(
    dead_code,
    reason = "it stands in the API's document alone: `prepare` reads the two parts"
)]
pub(crate) struct CompletionRequest {
    #[serde(flatten)]
    own: CompletionFields,
    #[serde(flatten)]
    common: Common,
}

/// Fields of completions alone.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionFields {
    /// One prompt or several, as texts or as tokens.
    prompt: Prompt,
    /// Whether the text begins with the prompt.
    echo: Option<bool>,
    /// How many of the likeliest tokens are told beside each.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<usize>,
    /// What the text must follow. Of chats alone, in OpenAI's API.
    response_format: Option<ResponseFormat>,
}

/// One prompt or several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of token numbers, or a list of such lists"
)]
pub(crate) enum Prompt {
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Texts.
    Texts(Vec<String>),
    /// Lists of tokens.
    TokenLists(Vec<Vec<u32>>),
}

/// Reads a body and makes its jobs. The texts are those that each prompt's choices begin with.
///
/// # Errors
/// The field that is wrong.
pub(crate) fn prepare(
    app: &App,
    mut object: Map<String, Value>,
) -> Result<(Prepared, Option<Vec<String>>)> {
    let common: Common = fields::take(&mut object)?;
    let own: CompletionFields = fields::parse(object)?;
    common.check_model(app)?;
    let grammar =
        grammar::compile(app, own.response_format.as_ref(), common.structured_outputs.as_ref())?;
    let logprobs = own.logprobs.map(|count| top_logprobs("logprobs", count)).transpose()?;
    let echo = own.echo.unwrap_or(false);
    if echo && logprobs.is_some() {
        let message = "log-probabilities of prompts are not supported: give `echo` or `logprobs`, \
                       not both";
        return Err(ApiError::unsupported("echo", message));
    }
    // What continues a context comes after other tokens.
    let special = common.context()?.is_none();
    let prompts = own.prompt.tokens(app, special)?;
    let echo = echo.then(|| own.prompt.texts(app, &prompts)).transpose()?;
    let parts = Parts {
        prompts,
        param: "prompt",
        tokens_param: "max_tokens",
        default_tokens: Some(DEFAULT_TOKENS),
        logprobs,
        grammar,
    };
    Ok((common.prepare(app, parts)?, echo))
}

impl Prompt {
    fn tokens(&self, app: &App, special: bool) -> Result<Vec<Vec<u32>>> {
        // More prompts than choices are refused before their tokens are counted.
        let (count, most) = (self.count(), app.settings.max_choices);
        if count > most {
            let message =
                format!("{count} prompts were given; the most is {most} (`--max-choices`)");
            return Err(ApiError::invalid("prompt", message));
        }
        let encode = |text: &String| app.encode("prompt", text, special);
        let prompts: Vec<Vec<u32>> = match self {
            Self::Text(text) => vec![encode(text)?],
            Self::Tokens(tokens) => vec![tokens.clone()],
            Self::Texts(texts) => texts.iter().map(encode).collect::<Result<_>>()?,
            Self::TokenLists(lists) => lists.clone(),
        };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid("prompt", "the prompt is empty"));
        }
        let vocabulary = app.engine.card().config.vocab_size;
        let known = |token: u32| (token as usize) < vocabulary;
        if let Some(token) = prompts.iter().flatten().find(|&&token| !known(token)) {
            let message = format!("`{token}` is no token of the model's {vocabulary}");
            return Err(ApiError::invalid("prompt", message));
        }
        Ok(prompts)
    }

    /// Prompts.
    fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }

    fn texts(&self, app: &App, tokens: &[Vec<u32>]) -> Result<Vec<String>> {
        Ok(match self {
            Self::Text(text) => vec![text.clone()],
            Self::Texts(texts) => texts.clone(),
            Self::Tokens(_) | Self::TokenLists(_) => {
                let decode = |tokens: &Vec<u32>| Ok(app.tokenizer()?.decode(tokens, true)?);
                tokens.iter().map(decode).collect::<Result<_>>()?
            }
        })
    }
}
