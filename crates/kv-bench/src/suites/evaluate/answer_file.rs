//! The file of answers: a JSON line for each answer, written as soon as it is there.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use kv_models::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::console::say;
use crate::interrupt::{LeftFile, LeftKind};

/// What an answer depends on. Equal keys have equal answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) model: String,
    /// What tells the model from others of its name.
    pub(super) fingerprint: String,
    pub(super) dtype: String,
    pub(super) task: String,
    pub(super) subset: String,
    /// The question's name in its task.
    pub(super) question: String,
    /// The hash of the prompt's tokens, and of where its context ends.
    pub(super) prompt: String,
    /// The policy's configuration, with its budget.
    pub(super) policy: Value,
    /// Whether the question is known at compression, one of [`crate::record::mode`].
    pub(super) mode: String,
    /// At most so many new tokens.
    pub(super) new_tokens: usize,
    pub(super) stop: Vec<String>,
    /// How tokens are chosen; its own seed does not count.
    #[serde(with = "Chosen")]
    pub(super) sampling: Sampling,
    /// The run's seed.
    pub(super) seed: u64,
    /// The number of the sample, from 0.
    pub(super) sample: usize,
}

/// [`Sampling`] in a file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Sampling")]
struct Chosen {
    repetition_penalty: f64,
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    #[serde(skip)]
    seed: u64,
}

/// An answer with its bytes, tokens and time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Answer {
    /// The key's hash. Numbers of a configuration may change their last digit in a file.
    pub(super) hash: String,
    #[serde(flatten)]
    pub(super) key: Key,
    /// Tokens of the prompt, the question included.
    pub(super) prompt_tokens: usize,
    pub(super) output: String,
    /// Why it ended: `length`, `end` or `stop`.
    pub(super) finish: String,
    /// New tokens.
    pub(super) tokens: usize,
    /// The sequence's live bytes once the prompt is compressed.
    pub(super) kept_bytes: usize,
    /// The most of them, at compression or in the end.
    pub(super) peak_bytes: usize,
    /// Its share of its batch's time; the policies of a run share the prefill's.
    pub(super) seconds: f64,
    /// 0 to 1, by the grader of the run that wrote it. Later runs grade the output again.
    pub(super) score: f64,
    /// What was held of the prompt once it was compressed ([`super::kept`]). Files of earlier
    /// versions do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kept: Option<String>,
}

/// A file of answers. No other run may write it at once.
pub(super) struct AnswerFile {
    path: PathBuf,
    file: File,
    answers: HashMap<String, Answer>,
    _left: LeftFile,
}

impl AnswerFile {
    /// Opens a file, or begins one. A last line that was cut off, as by a kill, is removed.
    ///
    /// # Errors
    /// Where the file cannot be read or written, where another run writes it, and for a line in its
    /// midst that is no answer.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let name = || path.display().to_string();
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let mut options = OpenOptions::new();
        let file = options.create(true).read(true).append(true).open(path).with_context(name)?;
        ensure!(
            file.metadata().with_context(name)?.is_file(),
            "{}: no regular file, expected one that can be read again",
            name()
        );
        // Where a file system has no locks, nothing is told.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("{}: another run writes this file; --answers FILE takes another", name());
        }
        let mut lines = BufReader::new(&file);
        let (mut answers, mut whole, mut number) = (HashMap::new(), 0u64, 0);
        loop {
            let mut line = Vec::new();
            let bytes = lines.read_until(b'\n', &mut line).with_context(name)?;
            number += 1;
            if bytes == 0 {
                break;
            }
            if !line.ends_with(b"\n") {
                say!("{}: line {number} was cut off, and is left out", name());
                file.set_len(whole).with_context(name)?;
                break;
            }
            let answer: Answer = serde_json::from_slice(&line).with_context(|| {
                format!("{}, line {number}: no answer of this program; mend or remove it", name())
            })?;
            answers.insert(answer.hash.clone(), answer);
            whole += bytes as u64;
        }
        if !answers.is_empty() {
            say!("{}: {} answers are there already", name(), answers.len());
        }
        let _left = LeftFile::new(LeftKind::Answers, path.into());
        Ok(Self { path: path.into(), file, answers, _left })
    }

    /// The answer of a key.
    pub(super) fn get(&self, key: &Key) -> Option<&Answer> {
        self.answers.get(&key.hash())
    }

    /// Adds an answer, in the file too.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub(super) fn add(&mut self, answer: Answer) -> anyhow::Result<()> {
        let line = serde_json::to_string(&answer)? + "\n";
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush());
        written.with_context(|| {
            format!(
                "{}: answers before this one are kept, and a run goes on behind them",
                self.path.display()
            )
        })?;
        self.answers.insert(answer.hash.clone(), answer);
        Ok(())
    }
}

impl Key {
    /// The hash of the key.
    pub(super) fn hash(&self) -> String {
        hash_of(&serde_json::to_string(self).unwrap_or_default())
    }

    /// A seed for the numbers that this answer alone draws.
    pub(super) fn seed(&self) -> u64 {
        let Self { task, subset, question, prompt, seed, sample, .. } = self;
        seed_of(&format!("{task}|{subset}|{question}|{prompt}|{seed}|{sample}"))
    }
}

/// A seed of a text's own: the first eight bytes of its SHA-256.
pub(super) fn seed_of(text: &str) -> u64 {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(8).fold(0, |seed, &byte| seed << 8 | u64::from(byte))
}

/// The first half of a text's SHA-256, in hexadecimal.
pub(super) fn hash_of(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(question: &str, sample: usize) -> Answer {
        let key = Key {
            model: "m".into(),
            fingerprint: "f".into(),
            dtype: "f32".into(),
            task: "t".into(),
            subset: String::new(),
            question: question.into(),
            prompt: "00".into(),
            // In a file this number changes its last digit.
            policy: json!({"policy": "r-kv", "threshold": f64::from(0.98f32)}),
            mode: "question-aware".into(),
            new_tokens: 8,
            stop: vec!["\n".into()],
            sampling: Sampling { seed: 3, ..Sampling::greedy() },
            seed: 0,
            sample,
        };
        Answer {
            hash: key.hash(),
            key,
            prompt_tokens: 100,
            output: "é\n\"b\"".into(),
            finish: "stop".into(),
            tokens: 3,
            kept_bytes: 10,
            peak_bytes: 12,
            seconds: 0.5,
            score: 1.0,
            kept: Some("0f8".into()),
        }
    }

    #[test]
    fn answers_are_there_again_and_cut_lines_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers.jsonl");
        let mut file = AnswerFile::open(&path).unwrap();
        file.add(answer("1", 0)).unwrap();
        file.add(answer("2", 1)).unwrap();
        let busy = AnswerFile::open(&path).err().unwrap().to_string();
        assert!(busy.contains("another run"), "{busy}");
        drop(file);
        let whole = std::fs::read_to_string(&path).unwrap();
        // In the midst of a character.
        let cut = whole.find('é').unwrap() + 1;
        std::fs::write(&path, [whole.as_bytes(), &whole.as_bytes()[..cut]].concat()).unwrap();
        let file = AnswerFile::open(&path).unwrap();
        // A request's own seed does not count.
        let mut key = answer("2", 1).key;
        key.sampling.seed = 9;
        assert_eq!(file.get(&key).unwrap().output, "é\n\"b\"");
        assert_eq!(file.get(&answer("2", 1).key).unwrap().kept.as_deref(), Some("0f8"));
        assert!(file.get(&answer("2", 0).key).is_none());
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole);
        // Earlier versions wrote lines without `kept`.
        std::fs::write(&path, whole.replace(",\"kept\":\"0f8\"", "")).unwrap();
        assert_eq!(AnswerFile::open(&path).unwrap().get(&key).unwrap().kept, None);
        std::fs::write(&path, "{}\n".to_string() + &whole).unwrap();
        let error = format!("{:#}", AnswerFile::open(&path).err().unwrap());
        assert!(error.contains("line 1") && error.contains("missing field"), "{error}");
    }
}
