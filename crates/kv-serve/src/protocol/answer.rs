//! The bodies of answers.

use std::collections::BTreeMap;

use kv_models::Finish;
use serde::Serialize;
use utoipa::ToSchema;

/// What a request took. The fields about the cache are this server's own.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
pub(crate) struct Usage {
    /// Tokens of the prompts; with a context, the context's tokens too.
    pub(crate) prompt_tokens: usize,
    /// New tokens of all choices.
    pub(crate) completion_tokens: usize,
    /// Both.
    pub(crate) total_tokens: usize,
    /// More of the prompt.
    pub(crate) prompt_tokens_details: PromptDetails,
    /// Tokens that a head kept in the end, the mean over layers and heads, of all choices.
    pub(crate) kv_tokens_kept: f64,
    /// Bytes of the caches in the end, with what policies remember beside slots.
    pub(crate) kv_bytes: usize,
    /// Bytes of keys and values that policies kept in host memory.
    pub(crate) kv_host_bytes: usize,
    /// Bytes that full caches would have had.
    pub(crate) kv_full_bytes: usize,
}

/// More of the prompt.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Tokens whose keys and values were there already.
    pub(crate) cached_tokens: usize,
}

/// An answer of `/v1/chat/completions`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    pub(crate) id: String,
    /// `chat.completion`.
    pub(crate) object: &'static str,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
}

/// A choice of a chat.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: Said,
    pub(crate) logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub(crate) finish_reason: &'static str,
}

/// What the model says.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Said {
    /// `assistant`.
    pub(crate) role: &'static str,
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ToolCall {
    /// Its place among the calls, in streams alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    pub(crate) id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) function: Called,
}

/// A called function.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct Called {
    pub(crate) name: String,
    /// A JSON object, as text.
    pub(crate) arguments: String,
}

/// An event of a chat's stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunk {
    pub(crate) id: String,
    /// `chat.completion.chunk`.
    pub(crate) object: &'static str,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<ChatDelta>,
    /// In the last event, where `stream_options.include_usage` asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// What is new of a choice.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatDelta {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// What is new of a message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

/// Log-probabilities of a chat's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatLogprob>,
}

/// A token's log-probability.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatLogprob {
    #[serde(flatten)]
    pub(crate) token: TokenLogprob,
    pub(crate) top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    /// Its text; halves of characters are `U+FFFD`.
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// An answer of `/v1/completions`, or an event of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Completion {
    pub(crate) id: String,
    /// `text_completion`.
    pub(crate) object: &'static str,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// A choice of a completion.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; none before the end of a stream.
    pub(crate) finish_reason: Option<&'static str>,
}

/// Log-probabilities of a completion's tokens, in lists of equal length.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    pub(crate) token_logprobs: Vec<f32>,
    pub(crate) top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Where each token begins, in characters of the text.
    pub(crate) text_offset: Vec<usize>,
}

/// OpenAI's word for the end of a text.
pub(crate) fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::End | Finish::Stop | Finish::Cancelled => "stop",
    }
}
