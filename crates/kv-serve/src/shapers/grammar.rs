//! Texts that follow a JSON schema, a regular expression or a grammar, by llguidance.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kv_models::{LogitsShaper, ModelCard, Tokenizer};
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// The most bytes of a grammar's text.
const MOST_BYTES: usize = 128 << 10;
/// The most alternatives that a grammar has open at one place, such as the values of an
/// enumeration.
const MOST_ITEMS: usize = 20_000;
/// The stack on which a grammar is compiled: llguidance goes through references by recursion, in
/// frames of up to 10 KiB, and the shortest reference in a grammar's text has 8 bytes.
const STACK: usize = (MOST_BYTES / 8) * (10 << 10);

/// What a text must follow.
#[derive(Debug, Clone)]
pub(crate) enum GrammarSource {
    /// A JSON schema.
    Json(Value),
    /// A regular expression, which the whole text matches.
    Regex(String),
    /// A grammar in llguidance's form of Lark.
    Lark(String),
}

/// Compiles grammars for one model's tokens.
pub(crate) struct Grammars {
    factory: ParserFactory,
    /// The bytes of each token, special ones after llguidance's mark.
    trie: TokTrie,
}

impl Grammars {
    /// Reads the vocabulary of a model.
    ///
    /// # Errors
    /// The reason why grammars cannot be had with this tokenizer.
    pub(crate) fn new(card: &ModelCard) -> Result<Self, String> {
        let tokenizer = card.tokenizer.as_ref().ok_or("the model has no tokenizer")?;
        let mut words = token_bytes(tokenizer)?;
        // An embedding may have more rows than there are tokens, or fewer.
        words.resize(card.config.vocab_size.max(words.len()), Vec::new());
        let ends = &card.config.eos_token_ids;
        let end = *ends.first().ok_or("the model has no token that ends a text")?;
        let info = TokRxInfo::new(words.len() as u32, end);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(ends);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie.clone()));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_items_in_row = MOST_ITEMS;
        Ok(Self { factory, trie })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn compile(&self, source: &GrammarSource) -> Result<Grammar, String> {
        let bytes = match source {
            GrammarSource::Json(schema) => schema.to_string().len(),
            GrammarSource::Regex(text) | GrammarSource::Lark(text) => text.len(),
        };
        if bytes > MOST_BYTES {
            return Err(format!("it has {bytes} bytes; the most is {MOST_BYTES}"));
        }
        stacker::grow(STACK, || self.compile_here(source))
    }

    /// [`Self::compile`] on the current stack.
    fn compile_here(&self, source: &GrammarSource) -> Result<Grammar, String> {
        let grammar = match source {
            GrammarSource::Json(schema) => {
                TopLevelGrammar::from_json_schema(with_little_space(schema.clone()))
            }
            GrammarSource::Regex(regex) => TopLevelGrammar::from_regex(regex),
            GrammarSource::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = self.factory.create_parser(grammar).map_err(|error| error.to_string())?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask shows what a matcher cannot start with.
        if let Err(error) = matcher.compute_mask() {
            let reason = error.to_string();
            let is_empty = reason.contains(&StopReason::NoExtensionBias.to_string());
            return Err(match is_empty {
                true => "no text follows it: its parts exclude each other, or a reference leads \
                         to itself alone"
                    .into(),
                false => reason,
            });
        }
        Ok(Grammar { matcher })
    }

    /// The bytes of a token as text has them; `None` for special ones.
    pub(crate) fn bytes(&self, token: u32) -> Option<&[u8]> {
        let known = (token as usize) < self.trie.vocab_size();
        let bytes = known.then(|| self.trie.token(token))?;
        (!bytes.is_empty() && bytes[0] != TokTrie::SPECIAL_TOKEN_MARKER).then_some(bytes)
    }
}

/// A schema whose JSON has at most one space between its parts. Small models that may write any
/// number of line feeds write nothing else.
pub(crate) fn with_little_space(mut schema: Value) -> Value {
    if let Some(map) = schema.as_object_mut() {
        map.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": " ?"}));
    }
    schema
}

/// The bytes of all tokens. llguidance panics at vocabularies that it does not know.
fn token_bytes(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, String> {
    let json = tokenizer.to_json().map_err(|error| error.to_string())?;
    let json: Value = serde_json::from_str(&json).map_err(|error| error.to_string())?;
    let read = catch_unwind(AssertUnwindSafe(|| token_bytes_from_tokenizer_json(&json)));
    read.map_err(|_| "the tokenizer's vocabulary is of an unknown form".to_string())?
        .map_err(|error| error.to_string())
}

/// A compiled grammar, at its start.
#[derive(Clone)]
pub(crate) struct Grammar {
    matcher: Matcher,
}

impl LogitsShaper for Grammar {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token >= mask.len() || !mask.is_allowed(token as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        if !self.matcher.is_stopped() {
            self.matcher.consume_token(token).map_err(|error| error.to_string())?;
        }
        Ok(self.matcher.is_stopped())
    }
}
