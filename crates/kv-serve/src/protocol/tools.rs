//! Tools that a model may call.
//!
//! A model calls a tool by its text, in the form that its template teaches. Two forms are read:
//! `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen, and a bare
//! `{"name": ..., "parameters": {...}}`, of Llama. Where a call must be made, a grammar forces it.

use kv_models::ChatTemplate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::{ApiError, Result};
use crate::protocol::answer::{Called, ToolCall};
use crate::shapers::{GrammarSource, with_little_space};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A tool of a request.
#[derive(Debug, Clone, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tool {
    /// `function`.
    #[serde(rename = "type")]
    pub(crate) kind: FunctionType,
    /// The function.
    pub(crate) function: Function,
}

/// The kind of tools that there is.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FunctionType {
    /// A function.
    Function,
}

/// A function that a model may call.
#[derive(Debug, Clone, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Function {
    /// Its name.
    pub(crate) name: String,
    /// What it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) description: Option<String>,
    /// The JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub(crate) parameters: Option<Map<String, Value>>,
    /// Whether calls follow the schema. Forced calls always do.
    #[serde(skip_serializing)]
    pub(crate) strict: Option<bool>,
}

/// Whether a tool is called, and which.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected `none`, `auto`, `required`, or a function as in \
                 {\"type\": \"function\", \"function\": {\"name\": \"...\"}}"
)]
pub(crate) enum ToolChoice {
    /// `none`, `auto` or `required`.
    Mode(ToolMode),
    /// A certain function.
    Named(NamedTool),
}

/// Whether a tool is called.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolMode {
    /// No tool.
    None,
    /// As the model will.
    Auto,
    /// Some tool.
    Required,
}

/// A certain function.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedTool {
    /// `function`.
    #[serde(rename = "type")]
    pub(crate) _kind: FunctionType,
    /// The function.
    pub(crate) function: NamedFunction,
}

/// A function's name.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedFunction {
    /// Its name.
    pub(crate) name: String,
}

/// The form in which a model calls tools.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Tagged,
    Bare,
}

impl Form {
    fn arguments(self) -> &'static str {
        match self {
            Self::Tagged => "arguments",
            Self::Bare => "parameters",
        }
    }
}

/// The tools of a request that the model is told of.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    tools: Vec<Tool>,
    form: Form,
    /// Whether there may be several calls.
    pub(crate) parallel: bool,
}

impl Tools {
    /// Tools for a model with this template.
    ///
    /// # Errors
    /// A template that takes no tools, and tools of one name.
    pub(crate) fn new(template: &ChatTemplate, tools: Vec<Tool>, parallel: bool) -> Result<Self> {
        if !template.takes_tools() {
            let message = "the model's chat template takes no tools: start the server with one \
                           that does, by `--chat-template FILE`";
            return Err(ApiError::unsupported("tools", message));
        }
        for (index, tool) in tools.iter().enumerate() {
            if tools[..index].iter().any(|other| other.function.name == tool.function.name) {
                let message = format!("two tools are called `{}`", tool.function.name);
                return Err(ApiError::invalid(format!("tools[{index}].function.name"), message));
            }
        }
        let form = if template.mentions(OPEN) { Form::Tagged } else { Form::Bare };
        Ok(Self { tools, form, parallel })
    }

    /// The tools as templates take them.
    pub(crate) fn values(&self) -> Vec<Value> {
        self.tools.iter().map(|tool| json!(tool)).collect()
    }

    /// The grammar of a call that must be made, or of calls that may be made where one of them is
    /// strict; `None` for any text.
    ///
    /// # Errors
    /// A name that no tool has.
    pub(crate) fn grammar(&self, choice: Option<&ToolChoice>) -> Result<Option<GrammarSource>> {
        let allowed: Vec<&Function> = match choice {
            Some(ToolChoice::Mode(ToolMode::Required)) => {
                self.tools.iter().map(|tool| &tool.function).collect()
            }
            None | Some(ToolChoice::Mode(_)) => return Ok(self.strict()),
            Some(ToolChoice::Named(named)) => {
                let name = &named.function.name;
                let tool = self.tools.iter().find(|tool| tool.function.name == *name);
                let message = || format!("no tool is called `{name}`");
                let tool =
                    tool.ok_or_else(|| ApiError::invalid("tool_choice.function.name", message()))?;
                vec![&tool.function]
            }
        };
        let schema = any_of(allowed.into_iter().map(|function| self.schema(function)));
        Ok(Some(match self.form {
            Form::Bare => GrammarSource::Json(schema),
            Form::Tagged => GrammarSource::Lark(format!(
                "start: \"{OPEN}\\n\" call \"\\n{CLOSE}\"\ncall: %json {}\n",
                with_little_space(schema)
            )),
        }))
    }

    /// The grammar of texts and of calls in any order, where a tool is strict. A lazy expression
    /// ends with the first tag, so that a call must follow.
    fn strict(&self) -> Option<GrammarSource> {
        self.tools.iter().find(|tool| tool.function.strict == Some(true))?;
        let schema = any_of(self.tools.iter().map(|Tool { function, .. }| {
            let any = Map::from_iter([("type".into(), json!("object"))]);
            match function.strict {
                Some(true) => self.schema(function),
                _ => self.schema(&Function { parameters: Some(any), ..function.clone() }),
            }
        }));
        let rules = match self.form {
            Form::Tagged => format!(
                "start: (begin \"\\n\"? call \"\\n\"? \"{CLOSE}\")* REST?\n\
                 begin[lazy]: /(.|\\n)*{OPEN}/\n\
                 REST: /(.|\\n)+/\n"
            ),
            Form::Bare => "start: (REST | call ((\";\" | \",\")? \" \"? \"\\n\"? call)*)?\n\
                           REST: /[ \\t\\r\\n]*[^ \\t\\r\\n{\\[<](.|\\n)*/\n"
                .into(),
        };
        Some(GrammarSource::Lark(format!("{rules}call: %json {}\n", with_little_space(schema))))
    }

    /// The schema of a function's call. A function without parameters takes none.
    fn schema(&self, function: &Function) -> Value {
        let key = self.form.arguments();
        let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let arguments = function.parameters.clone().map_or_else(none, Value::Object);
        json!({
            "type": "object",
            "properties": {"name": {"const": function.name}, key: arguments},
            "required": ["name", key],
            "additionalProperties": false,
        })
    }

    /// Reads one text's calls.
    pub(crate) fn reader(&self) -> ToolReader {
        ToolReader { tools: self.clone(), text: String::new(), shown: 0 }
    }

    /// The call in some JSON, if it is one of these tools'.
    fn call(&self, value: &Value) -> Option<ToolCall> {
        let name = value.get("name")?.as_str()?;
        self.tools.iter().find(|tool| tool.function.name == name)?;
        let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
        let arguments = match arguments {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        Some(ToolCall {
            index: None,
            id: format!("call_{:016x}", rand::random::<u64>()),
            kind: "function",
            function: Called { name: name.into(), arguments },
        })
    }
}

/// Divides one growing text into what is said and calls of tools.
#[derive(Debug, Clone)]
pub(crate) struct ToolReader {
    tools: Tools,
    text: String,
    /// Bytes of `text` that were returned.
    shown: usize,
}

impl ToolReader {
    /// Adds text; returns what is certainly no part of a call.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        self.text.push_str(piece);
        let hidden = &self.text[self.shown..];
        let count = match self.tools.form {
            Form::Tagged => match hidden.find(OPEN) {
                Some(start) => start,
                None => hidden.len() - held(hidden),
            },
            Form::Bare => match self.text.trim_start().chars().next() {
                None | Some('{' | '<' | '[') => 0,
                Some(_) => hidden.len(),
            },
        };
        let piece = hidden[..count].to_string();
        self.shown += count;
        piece
    }

    /// The rest of what is said, and the calls.
    pub(crate) fn finish(self) -> (String, Vec<ToolCall>) {
        let hidden = &self.text[self.shown..];
        let values = match self.tools.form {
            Form::Tagged => tagged(hidden),
            Form::Bare => bare(hidden),
        };
        let calls: Option<Vec<ToolCall>> =
            values.into_iter().flatten().map(|value| self.tools.call(&value)).collect();
        match calls {
            Some(mut calls) if !calls.is_empty() => {
                if !self.tools.parallel {
                    calls.truncate(1);
                }
                (String::new(), calls)
            }
            // No calls, or none of these tools: it is text.
            _ => (hidden.to_string(), Vec::new()),
        }
    }
}

/// A schema of values that follow one of several.
fn any_of(schemas: impl Iterator<Item = Value>) -> Value {
    let mut schemas: Vec<Value> = schemas.collect();
    match schemas.len() {
        1 => schemas.remove(0),
        _ => json!({ "anyOf": schemas }),
    }
}

/// Bytes at the end that may be the beginning of a tag.
fn held(text: &str) -> usize {
    (1..OPEN.len()).rev().find(|&count| text.ends_with(&OPEN[..count])).unwrap_or(0)
}

/// The JSON between tags. The last one may lack its end, which some models' stop tokens swallow.
fn tagged(text: &str) -> Option<Vec<Value>> {
    let parts = text.split(OPEN).skip(1).map(|part| part.split(CLOSE).next().unwrap_or(part));
    parts.map(|part| serde_json::from_str(part.trim()).ok()).collect()
}

/// Objects one after another.
fn bare(text: &str) -> Option<Vec<Value>> {
    let text = text.trim().trim_start_matches("<|python_tag|>");
    let text = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let mut rest = text;
    let mut values = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\n', '\t', '\r', ';', ',']);
        if rest.is_empty() {
            return Some(values);
        }
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter();
        values.push(stream.next()?.ok()?);
        rest = &rest[stream.byte_offset()..];
    }
}

#[cfg(test)]
mod tests {
    use kv_core::select_device;
    use kv_models::{Engine, EngineOptions, LogitsShaper, Model, ModelCard};

    use super::*;
    use crate::shapers::Grammars;

    fn tools(form: Form) -> Tools {
        let tool = |name: &str| Tool {
            kind: FunctionType::Function,
            function: Function {
                name: name.into(),
                description: None,
                parameters: None,
                strict: None,
            },
        };
        Tools { tools: vec![tool("add"), tool("sea")], form, parallel: true }
    }

    /// What is shown of a text that comes in pieces, and the calls.
    fn read(form: Form, text: &str) -> (String, Vec<(String, String)>) {
        let mut reader = tools(form).reader();
        let mut shown = String::new();
        for piece in text.chars() {
            shown += &reader.push(&piece.to_string());
        }
        let (rest, calls) = reader.finish();
        let calls = calls.into_iter().map(|call| (call.function.name, call.function.arguments));
        (shown + &rest, calls.collect())
    }

    #[test]
    fn calls_are_read_in_both_forms() {
        let call = |name: &str| (name.to_string(), r#"{"a":1}"#.to_string());
        let text = "So: <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                    <tool_call>{\"name\": \"sea\", \"arguments\": {\"a\": 1}}";
        assert_eq!(read(Form::Tagged, text), ("So: ".into(), vec![call("add"), call("sea")]));
        let text =
            r#"{"name": "add", "parameters": {"a": 1}}; {"name":"sea","parameters":{"a":1}}"#;
        assert_eq!(read(Form::Bare, text), (String::new(), vec![call("add"), call("sea")]));
    }

    #[test]
    fn other_text_is_shown_as_it_is() {
        for (form, text) in [
            (Form::Tagged, "a < b, <tool_ca"),
            (Form::Tagged, "<tool_call>no JSON</tool_call>"),
            (Form::Tagged, "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>"),
            (Form::Bare, "{\"name\": \"other\", \"parameters\": {}}"),
            (Form::Bare, "{ no JSON"),
            (Form::Bare, "words, then {\"name\": \"add\", \"parameters\": {}}"),
            (Form::Bare, ""),
        ] {
            assert_eq!(read(form, text), (text.to_string(), Vec::new()));
        }
    }

    /// Whether tokens of a text are allowed one after the other, and the text may end then.
    fn follows(card: &ModelCard, tools: &Tools, text: &str) -> bool {
        let grammar = tools.grammar(None).unwrap().unwrap();
        let mut grammar = Grammars::new(card).unwrap().compile(&grammar).unwrap();
        let mut allows = |token: u32| {
            let mut logits = vec![0.0; card.config.vocab_size];
            grammar.shape(&mut logits).unwrap();
            let allows = logits[token as usize] == 0.0;
            if allows {
                grammar.accept(token).unwrap();
            }
            allows
        };
        let tokens = card.tokenizer.as_ref().unwrap().encode(text, false).unwrap();
        tokens.into_iter().all(&mut allows) && allows(card.config.eos_token_ids[0])
    }

    #[test]
    fn calls_of_strict_tools_follow_their_schemas() {
        let load = || Model::load("needle-1m", &select_device("cpu".parse()?)?, None);
        let engine = Engine::start(load, EngineOptions::default()).unwrap();
        let parameters = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"], "additionalProperties": false});
        for form in [Form::Tagged, Form::Bare] {
            let mut tools = tools(form);
            assert!(tools.grammar(None).unwrap().is_none());
            tools.tools[0].function.strict = Some(true);
            tools.tools[0].function.parameters = parameters.as_object().cloned();
            let key = form.arguments();
            let call = |name: &str, arguments: &str| {
                let call = format!("{{\"name\": \"{name}\", \"{key}\": {arguments}}}");
                match form {
                    Form::Tagged => format!("{OPEN}\n{call}\n{CLOSE}"),
                    Form::Bare => call,
                }
            };
            let good = call("add", "{\"a\": 1}");
            let other = call("sea", "{\"b\": [3, {}]}");
            for text in ["", "The sea: a < b.\nYes.", &good, &other, &format!("{good}\n{other}")] {
                assert!(follows(engine.card(), &tools, text), "{form:?}: {text}");
            }
            if form == Form::Tagged {
                assert!(follows(engine.card(), &tools, &format!("So: {good}, so.")));
            }
            for (name, arguments) in [("add", "{\"a\": 3}"), ("add", "{}"), ("sand", "{}")] {
                let text = call(name, arguments);
                assert!(!follows(engine.card(), &tools, &text), "{form:?}: {text}");
            }
        }
    }

    #[test]
    fn one_call_where_several_are_not_wanted() {
        let tools = Tools { parallel: false, ..tools(Form::Bare) };
        let mut reader = tools.reader();
        let call = r#"{"name":"add","parameters":{}}"#;
        assert_eq!(reader.push(&format!("{call}\n{call}")), "");
        assert_eq!(reader.finish().1.len(), 1);
    }
}
