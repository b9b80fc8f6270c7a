//! The tokens that a tokenizer puts around a text.

use serde_json::{Map, Value, json};

use super::vocab::Vocab;
use crate::GgufError;
use crate::config::{BOS, EOS};
use crate::metadata::{Metadata, missing};

/// `post_processor` of `tokenizer.json`, or null where nothing is added.
///
/// `begins` says whether a text begins with the first token where the file does not say.
pub(crate) fn post_processor(
    metadata: &Metadata,
    vocab: &Vocab<'_>,
    begins: bool,
) -> Result<Value, GgufError> {
    let adds = |flag: &str, default: bool, key: &str| match metadata.flag(flag, default)? {
        true => metadata.token(key, vocab.tokens.len())?.map(Some).ok_or_else(|| missing(key)),
        false => Ok(None),
    };
    let bos = adds("tokenizer.ggml.add_bos_token", begins, BOS)?;
    let eos = adds("tokenizer.ggml.add_eos_token", false, EOS)?;
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
    }
    let sequence = |name: &str, kind: u8| {
        let special =
            |id: usize| json!({"SpecialToken": {"id": vocab.tokens[id], "type_id": kind}});
        let text = json!({"Sequence": {"id": name, "type_id": kind}});
        bos.map(special).into_iter().chain([text]).chain(eos.map(special)).collect::<Vec<_>>()
    };
    let single = sequence("A", 0);
    let pair = [single.clone(), sequence("B", 1)].concat();
    let ids: Map<String, Value> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| {
            let token = vocab.tokens[id];
            (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}))
        })
        .collect();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": ids,
    }))
}
