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

/// Adds a token's log-probability to a completion's. `offset` counts the characters that have begun
/// before the token. It is moved behind the token.
pub(crate) fn add_to_completion(
    app: &App,
    lists: &mut CompletionLogprobs,
    offset: &mut usize,
    token: u32,
    own: &TokenLogprobs,
) {
    let top = own.top.iter().map(|&(token, logprob)| (name(app, token), logprob.max(IMPOSSIBLE)));
    lists.top_logprobs.push(top.collect());
    lists.token_logprobs.push(own.logprob.max(IMPOSSIBLE));
    let (_, bytes) = app.token_text(token);
    let continues = |byte: &u8| byte & 0xc0 == 0x80;
    // A token may have a part of a character: it stands where the character does.
    let within = bytes.first().is_some_and(continues);
    lists.text_offset.push(offset.saturating_sub(usize::from(within)));
    *offset += bytes.iter().filter(|byte| !continues(byte)).count();
    lists.tokens.push(name(app, token));
}

/// A token's text; its bytes where they are no text, as OpenAI writes them.
fn name(app: &App, token: u32) -> String {
    let (text, bytes) = app.token_text(token);
    if std::str::from_utf8(&bytes).is_ok() {
        return text;
    }
    let bytes: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{bytes}")
}
