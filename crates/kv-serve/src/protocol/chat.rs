//! The fields of chats.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::protocol::common::{Common, Parts, Prepared, top_logprobs};
use crate::protocol::fields;
use crate::protocol::grammar::{self, ResponseFormat};
use crate::protocol::tools::{Tool, ToolChoice, ToolMode, Tools};

/// Variables of a chat template that follow from other fields.
const SET_HERE: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// A body of `/v1/chat/completions`.
#[derive(ToSchema)]
#[expect(
    dead_code,
    reason = "it stands in the API's document alone: `prepare` reads the two parts"
)]
pub(crate) struct ChatRequest {
    #[serde(flatten)]
    own: ChatFields,
    #[serde(flatten)]
    common: Common,
}

/// Fields of chats alone.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatFields {
    /// The conversation.
    messages: Vec<ChatMessage>,
    /// The most new tokens: the newer name of `max_tokens`.
    #[schema(minimum = 1)]
    max_completion_tokens: Option<usize>,
    /// Whether tokens' log-probabilities are told.
    logprobs: Option<bool>,
    /// How many of the likeliest tokens are told beside each.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<usize>,
    /// What the text must follow.
    response_format: Option<ResponseFormat>,
    /// Tools that the model may call, if its template takes them.
    tools: Option<Vec<Tool>>,
    /// Whether a tool is called, and which.
    tool_choice: Option<ToolChoice>,
    /// Whether several tools may be called at once.
    parallel_tool_calls: Option<bool>,
    /// Variables of the chat template, such as `enable_thinking`. Not among OpenAI's fields.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatMessage {
    /// Who speaks.
    role: Role,
    /// What is said: a text, or parts of the type `text`.
    #[schema(value_type = Option<Content>)]
    content: Option<Value>,
    /// The speaker's name, for templates that look at it.
    name: Option<String>,
    /// Calls of tools that the model made.
    tool_calls: Option<Vec<MadeCall>>,
    /// The call whose result this is.
    tool_call_id: Option<String>,
    /// What the model said instead of an answer.
    refusal: Option<String>,
}

/// What a message says.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it stands in the API's document alone: `text` reads it")]
pub(crate) enum Content {
    /// A text.
    Text(String),
    /// Parts of a text.
    Parts(Vec<ContentPart>),
}

/// A part of a text.
#[derive(ToSchema)]
#[expect(dead_code, reason = "it stands in the API's document alone: `text` reads it")]
pub(crate) struct ContentPart {
    /// `text`.
    #[serde(rename = "type")]
    kind: String,
    /// The text.
    text: String,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// The system.
    System,
    /// The system, in OpenAI's newer word.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool.
    Tool,
}

/// A call of a tool that the model made.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MadeCall {
    id: String,
    #[serde(rename = "type")]
    _kind: Option<crate::protocol::tools::FunctionType>,
    function: MadeFunction,
    #[serde(rename = "index")]
    _index: Option<usize>,
}

/// A function that the model called.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MadeFunction {
    name: String,
    arguments: String,
}

/// Reads a body and makes its jobs. The tools are those whose calls are to be read.
///
/// # Errors
/// The field that is wrong.
pub(crate) fn prepare(
    app: &App,
    mut object: Map<String, Value>,
) -> Result<(Prepared, Option<Tools>)> {
    let mut common: Common = fields::take(&mut object)?;
    let own: ChatFields = fields::parse(object)?;
    common.check_model(app)?;
    match (common.max_tokens, own.max_completion_tokens) {
        (Some(a), Some(b)) if a != b => {
            let message = "`max_tokens` and `max_completion_tokens` differ";
            return Err(ApiError::invalid("max_completion_tokens", message));
        }
        (None, newer) => common.max_tokens = newer,
        _ => {}
    }
    let tokens_param = match own.max_completion_tokens {
        Some(_) => "max_completion_tokens",
        None => "max_tokens",
    };
    let tools = own.tools(app)?;
    let calls = match &tools {
        Some(tools) => tools.grammar(own.tool_choice.as_ref())?,
        None => None,
    };
    let mut grammar =
        grammar::compile(app, own.response_format.as_ref(), common.structured_outputs.as_ref())?;
    if let Some(calls) = calls {
        if grammar.is_some() {
            let message = "calls that `tool_choice` forces, or whose tool is `strict`, cannot \
                           follow `response_format` or `structured_outputs` too";
            return Err(ApiError::invalid("tool_choice", message));
        }
        grammar = Some(grammar::compile_one(app, "tools", &calls)?);
    }
    let logprobs = match (own.logprobs.unwrap_or(false), own.top_logprobs) {
        (true, count) => Some(top_logprobs("top_logprobs", count.unwrap_or(0))?),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs: true`";
            return Err(ApiError::invalid("top_logprobs", message));
        }
    };
    let prompt = own.prompt(app, tools.as_ref())?;
    let parts = Parts {
        prompts: vec![prompt],
        param: "messages",
        tokens_param,
        default_tokens: None,
        logprobs,
        grammar,
    };
    Ok((common.prepare(app, parts)?, tools))
}

impl ChatFields {
    /// The tools that the model is told of.
    fn tools(&self, app: &App) -> Result<Option<Tools>> {
        if self.tools.as_ref().is_none_or(Vec::is_empty) {
            let given = [
                ("tool_choice", self.tool_choice.is_some()),
                ("parallel_tool_calls", self.parallel_tool_calls.is_some()),
            ];
            if let Some((field, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                return Err(ApiError::invalid(field, format!("`{field}` needs `tools`")));
            }
        }
        let none = matches!(self.tool_choice, Some(ToolChoice::Mode(ToolMode::None)));
        match &self.tools {
            Some(tools) if !tools.is_empty() && !none => {
                let parallel = self.parallel_tool_calls.unwrap_or(true);
                Tools::new(app.chat()?, tools.clone(), parallel).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The tokens of the conversation.
    fn prompt(&self, app: &App, tools: Option<&Tools>) -> Result<Vec<u32>> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "at least one message was expected"));
        }
        let mut template = app.chat()?.clone();
        for (name, value) in self.chat_template_kwargs.iter().flatten() {
            let message = if SET_HERE.contains(&name.as_str()) {
                Some(format!("the server sets the chat template's variable `{name}`"))
            } else if !template.reads(name) {
                Some(format!("the model's chat template reads no variable `{name}`"))
            } else {
                None
            };
            if let Some(message) = message {
                let field = format!("chat_template_kwargs.{name}");
                return Err(ApiError::unsupported(field, message));
            }
            template = template.with_variable(name, value);
        }
        let messages = self.messages.iter().enumerate();
        let messages = messages.map(|(index, message)| {
            message.check(index, &template)?;
            message.value(index)
        });
        let messages: Vec<Value> = messages.collect::<Result<_>>()?;
        let tools = tools.map(Tools::values);
        let text = template.render_with_tools(&messages, tools.as_deref(), true)?;
        let tokens = app.encode("messages", &text, false)?;
        if tokens.is_empty() {
            return Err(ApiError::invalid("messages", "the messages have no text"));
        }
        Ok(tokens)
    }
}

impl ChatMessage {
    /// Refuses calls of tools where the template would leave them out.
    fn check(&self, index: usize, template: &kv_models::ChatTemplate) -> Result<()> {
        let calls = self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
        if calls && !template.mentions("tool_calls") {
            let message = "the model's chat template takes no calls of tools";
            return Err(ApiError::unsupported(format!("messages[{index}].tool_calls"), message));
        }
        Ok(())
    }

    /// The message as templates take it.
    fn value(&self, index: usize) -> Result<Value> {
        let field = |name: &str| format!("messages[{index}].{name}");
        let mut content = match &self.content {
            None => None,
            Some(content) => Some(text(&field("content"), content)?),
        };
        if let Some(refusal) = &self.refusal {
            content = Some(content.unwrap_or_default() + refusal);
        }
        let role = match self.role {
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        if content.is_none() && self.tool_calls.is_none() {
            return Err(ApiError::invalid(field("content"), "the message has no content"));
        }
        let mut message = json!({"role": role, "content": content.unwrap_or_default()});
        if let Some(name) = &self.name {
            message["name"] = json!(name);
        }
        if let Some(id) = &self.tool_call_id {
            message["tool_call_id"] = json!(id);
        }
        if let Some(calls) = &self.tool_calls {
            let call = |call: &MadeCall| {
                let text = &call.function.arguments;
                // Templates write arguments as JSON themselves.
                let arguments = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
                json!({"id": call.id, "type": "function",
                    "function": {"name": call.function.name, "arguments": arguments}})
            };
            message["tool_calls"] = calls.iter().map(call).collect();
        }
        Ok(message)
    }
}

/// The text of a content: a string, or parts of the type `text`.
fn text(field: &str, content: &Value) -> Result<String> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::invalid(field, "a text or a list of parts was expected")),
    };
    let part = |(index, part): (usize, &Value)| {
        let field = format!("{field}[{index}]");
        let mut keys = part.as_object().into_iter().flat_map(Map::keys);
        let other = keys.find(|key| !["type", "text"].contains(&key.as_str()));
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(text)) => match other {
                None => Ok(text.to_string()),
                Some(key) => {
                    let field = format!("{field}.{key}");
                    let message = format!("`{field}` is not supported by this server");
                    Err(ApiError::unsupported(field, message))
                }
            },
            (Some(kind), _) if kind != "text" => {
                let message = format!("parts of the type `{kind}` are not supported");
                Err(ApiError::unsupported(format!("{field}.type"), message))
            }
            _ => Err(ApiError::invalid(field, "a part with `type` and `text` was expected")),
        }
    };
    parts.iter().enumerate().map(part).collect()
}
