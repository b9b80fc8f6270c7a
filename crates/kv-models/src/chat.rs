//! Chat messages to a prompt, by the model's own template.

mod date;
mod functions;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use minijinja::{Environment, Value, context};
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::special_tokens::{SpecialTokens, read_if_there, read_object};

const TEMPLATE: &str = "chat";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`, for most templates.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// A message of the system.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// A model's chat template, rendered as `transformers` does it.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    variables: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// Compiles a template, without special tokens. `{% generation %}` blocks, which mark for
    /// training what the model says, render what is inside.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] names the line that does not parse.
    pub fn new(source: impl Into<String>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        functions::add_to(&mut environment);
        environment
            .add_template_owned(TEMPLATE, source::readable(&source.into())?)
            .map_err(failed)?;
        Ok(Self { environment, variables: BTreeMap::new() })
    }

    /// Reads the template of a model's folder: `chat_template.jinja`, or `chat_template` of
    /// `tokenizer_config.json` (of several the one named `default`, else the first), with the
    /// special tokens of `tokenizer_config.json` and, where it does not name them, of
    /// `special_tokens_map.json`.
    ///
    /// # Errors
    /// [`ModelError::MissingChatTemplate`] if there is none; [`ModelError::InvalidJson`];
    /// [`ModelError::Io`]; the errors of [`Self::new`].
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let source = match read_if_there(&folder.join("chat_template.jinja"))? {
            Some(source) => Some(source),
            None => config.get("chat_template").and_then(template_of),
        };
        let source =
            source.ok_or_else(|| ModelError::MissingChatTemplate { path: folder.into() })?;
        let mut template = Self::new(source)?;
        for (role, token) in SpecialTokens::from_folder(folder)?.iter() {
            template = template.with_variable(role, token);
        }
        Ok(template)
    }

    /// Defines a variable of the template, such as `enable_thinking` of Qwen3 or `bos_token`.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), Value::from_serialize(value));
        self
    }

    /// The prompt for a conversation; `add_generation_prompt` ends it with what makes the model
    /// answer. It contains the special tokens: encode it with `add_special = false`.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`], also where the template itself refuses the messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_values(&Value::from_serialize(messages), (), add_generation_prompt)
    }

    /// [`Self::render`] for messages that have more than a role and a content, such as calls of
    /// tools and their results, and for the tools that the model may call.
    ///
    /// # Errors
    /// The errors of [`Self::render`].
    pub fn render_with_tools(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        self.render_values(&Value::from_serialize(messages), tools, add_generation_prompt)
    }

    /// Whether the template reads the tools that it is given.
    pub fn takes_tools(&self) -> bool {
        self.reads("tools")
    }

    /// Whether the template reads a variable, such as `enable_thinking` of Qwen3.
    pub fn reads(&self, name: &str) -> bool {
        let template = self.environment.get_template(TEMPLATE);
        template.is_ok_and(|template| template.undeclared_variables(false).contains(name))
    }

    /// Whether the template's text has this part, such as the tag around a call of a tool.
    pub fn mentions(&self, part: &str) -> bool {
        let template = self.environment.get_template(TEMPLATE);
        template.is_ok_and(|template| template.source().contains(part))
    }

    /// The template's text, without what [`Self::new`] leaves out.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`].
    pub fn source(&self) -> Result<String> {
        let template = self.environment.get_template(TEMPLATE).map_err(failed)?;
        Ok(template.source().to_string())
    }

    /// The text of a variable that is defined, such as `bos_token`.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name)?.as_str()
    }

    fn render_values(
        &self,
        messages: &Value,
        tools: impl Serialize,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let template = self.environment.get_template(TEMPLATE).map_err(failed)?;
        let context = context! {
            messages,
            add_generation_prompt,
            tools => Value::from_serialize(tools),
            documents => Value::from(()),
            ..Value::from_serialize(&self.variables)
        };
        template.render(context).map_err(failed)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("variables", &self.variables).finish_non_exhaustive()
    }
}

fn failed(error: minijinja::Error) -> ModelError {
    ModelError::ChatTemplate { reason: error.to_string() }
}

/// A template, or the default one of a list of `{name, template}`.
fn template_of(value: &serde_json::Value) -> Option<String> {
    if let Some(list) = value.as_array() {
        let default = list.iter().find(|entry| entry["name"] == "default");
        return Some(default.or(list.first())?.get("template")?.as_str()?.to_string());
    }
    Some(value.as_str()?.to_string())
}
