//! What the front end reads of a model: a folder of files as Hugging Face has them.
//!
//! The files are made from the loaded model, a folder or a GGUF file alike. So the front
//! end divides texts into the tokens that the engine knows, and ends at the same ones.

use std::io::{self, Write};
use std::path::Path;

use kv_models::{ChatTemplate, ModelCard};
use serde_json::{Map, Value, json};

use crate::error::SetupError;

/// Special tokens that chat templates may name.
const NAMED: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// Writes the files of a model to a folder. Sequences have `positions` tokens at most.
///
/// # Errors
/// [`SetupError::NoTokenizer`], [`SetupError::Write`], and the errors of the tokenizer and of the
/// template.
pub(crate) fn write(
    folder: &Path,
    card: &ModelCard,
    positions: usize,
    template: &ChatTemplate,
) -> Result<(), SetupError> {
    let config = &card.config;
    let tokenizer = card.tokenizer.as_ref().ok_or(SetupError::NoTokenizer)?;
    let description = json!({
        "architectures": [config.architecture.name()],
        "model_type": config.architecture.model_type(),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": positions,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids,
    });
    let mut named: Map<String, Value> = NAMED
        .iter()
        .filter_map(|name| Some((name.to_string(), json!(template.variable(name)?))))
        .collect();
    named.insert("chat_template".into(), json!(template.source()?));
    for (file, text) in [
        ("config.json", description.to_string()),
        ("tokenizer.json", tokenizer.to_json()?),
        ("tokenizer_config.json", Value::Object(named).to_string()),
    ] {
        let path = folder.join(file);
        replace(&path, &text).map_err(|source| SetupError::Write { path, source })?;
    }
    Ok(())
}

/// Writes a file that others may be reading, or writing alike: they see it whole or not at all.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}
