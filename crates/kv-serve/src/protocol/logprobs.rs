//! Log-probabilities in both of OpenAI's forms.

use kv_models::TokenLogprobs;

use crate::app::App;
use crate::protocol::answer::{ChatLogprob, CompletionLogprobs, TokenLogprob};

/// What stands for the logarithm of 0, as OpenAI has it: JSON knows no infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// A token's log-probability in a chat.
pub(crate) fn of_chat(app: &App, token: u32, own: &TokenLogprobs) -> ChatLogprob {
    let named = |token: u32, logprob: f32| {
        let (token, bytes) = app.token_text(token);
        TokenLogprob { token, logprob: logprob.max(IMPOSSIBLE), bytes }
    };
    let top = own.top.iter().map(|&(token, logprob)| named(token, logprob)).collect();
    ChatLogprob { token: named(token, own.logprob), top_logprobs: top }
}

/// Adds a token's log-probability to a completion's. `offset` is where the token's text begins. It
/// is moved to where the text ends.
pub(crate) fn add_to_completion(
    app: &App,
    lists: &mut CompletionLogprobs,
    offset: &mut usize,
    token: u32,
    own: &TokenLogprobs,
) {
    let (text, _) = app.token_text(token);
    let top = own.top.iter().map(|&(token, logprob)| {
        let (text, _) = app.token_text(token);
        (text, logprob.max(IMPOSSIBLE))
    });
    lists.top_logprobs.push(top.collect());
    lists.token_logprobs.push(own.logprob.max(IMPOSSIBLE));
    lists.text_offset.push(*offset);
    *offset += text.chars().count();
    lists.tokens.push(text);
}
