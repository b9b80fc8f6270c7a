//! What a text must follow.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::protocol::fields;
use crate::shapers::{Grammar, GrammarSource};

/// The most bytes of a regular expression or a grammar. Their automata take seconds beyond it.
const MOST_TEXT: usize = 16 << 10;

/// OpenAI's `response_format`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    /// Any text.
    Text {},
    /// Any JSON object.
    JsonObject {},
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema, with its name. Read by itself: errors within tagged enumerations have no
        /// path.
        #[schema(value_type = NamedSchema)]
        json_schema: Map<String, Value>,
    },
}

/// A JSON schema with its name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedSchema {
    /// A name, which changes nothing.
    #[serde(rename = "name")]
    pub(crate) _name: String,
    /// A description, which changes nothing.
    #[serde(rename = "description")]
    pub(crate) _description: Option<String>,
    /// The schema; any JSON without one.
    #[schema(value_type = Option<Object>)]
    pub(crate) schema: Option<Value>,
    /// Schemas are always followed strictly.
    #[serde(rename = "strict")]
    pub(crate) _strict: Option<bool>,
}

/// vLLM's `structured_outputs`: one of its fields.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    json: Option<Value>,
    /// A regular expression that the whole text matches.
    regex: Option<String>,
    /// The texts to choose from.
    choice: Option<Vec<String>>,
    /// A grammar in llguidance's form of Lark.
    grammar: Option<String>,
}

/// Compiles what a request's text must follow.
///
/// # Errors
/// The field that is wrong; two fields that would both apply.
pub(crate) fn compile(
    app: &App,
    format: Option<&ResponseFormat>,
    structured: Option<&StructuredOutputs>,
) -> Result<Option<Grammar>> {
    let format = match format {
        None | Some(ResponseFormat::Text {}) => None,
        Some(ResponseFormat::JsonObject {}) => {
            Some(("response_format", GrammarSource::Json(json!({"type": "object"}))))
        }
        Some(ResponseFormat::JsonSchema { json_schema }) => {
            let named: NamedSchema =
                fields::parse_within("response_format.json_schema", json_schema.clone())?;
            let schema = named.schema.unwrap_or_else(|| json!({}));
            Some(("response_format.json_schema.schema", GrammarSource::Json(schema)))
        }
    };
    let structured = structured.map(StructuredOutputs::source).transpose()?;
    match (format, structured) {
        (Some(_), Some((param, _))) => {
            let message = format!("give `{param}` or `response_format`, not both");
            Err(ApiError::invalid(param, message))
        }
        (Some((param, source)), None) | (None, Some((param, source))) => {
            compile_one(app, param, &source).map(Some)
        }
        (None, None) => Ok(None),
    }
}

/// Compiles one grammar.
///
/// # Errors
/// What is wrong with it, about the field that it came from.
pub(crate) fn compile_one(app: &App, param: &str, source: &GrammarSource) -> Result<Grammar> {
    let compiled = app.grammars(param)?.compile(source);
    compiled.map_err(|reason| ApiError::invalid(param, format!("`{param}`: {reason}")))
}

impl StructuredOutputs {
    fn source(&self) -> Result<(&'static str, GrammarSource)> {
        if self.choice.as_ref().is_some_and(Vec::is_empty) {
            let message = "there is no text to choose";
            return Err(ApiError::invalid("structured_outputs.choice", message));
        }
        for (param, text) in [
            ("structured_outputs.regex", &self.regex),
            ("structured_outputs.grammar", &self.grammar),
        ] {
            let bytes = text.as_ref().map_or(0, String::len);
            if bytes > MOST_TEXT {
                let message = format!("`{param}` has {bytes} bytes; the most is {MOST_TEXT}");
                return Err(ApiError::invalid(param, message));
            }
        }
        let mut sources = [
            self.json.clone().map(|json| ("structured_outputs.json", GrammarSource::Json(json))),
            self.regex.clone().map(|r| ("structured_outputs.regex", GrammarSource::Regex(r))),
            self.choice.as_ref().map(|texts| {
                // Strings of Lark are JSON's.
                let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
                let lark = format!("start: {}", texts.join(" | "));
                ("structured_outputs.choice", GrammarSource::Lark(lark))
            }),
            self.grammar.clone().map(|g| ("structured_outputs.grammar", GrammarSource::Lark(g))),
        ]
        .into_iter()
        .flatten();
        match (sources.next(), sources.next()) {
            (Some(source), None) => Ok(source),
            _ => {
                let message = "one of `json`, `regex`, `choice` and `grammar` was expected";
                Err(ApiError::invalid("structured_outputs", message))
            }
        }
    }
}
