//! Documents that are compressed once, for many requests.
//!
//! A context is a compressed cache of one sequence. A job on it appends its prompt to a copy. Only
//! policies whose decode steps append and attend may compress contexts: others would go on changing
//! the document's slots by the first question.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use kv_core::LayerCache;
use kv_policies::SlotWeights;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::group::{bytes_of, held_in};
use super::job::{Held, JobError};
use crate::{Model, ModelError, Session};

/// The longest name.
const NAME: usize = 64;

/// A compressed context.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextInfo {
    /// Its name.
    pub name: String,
    /// Its policy's configuration.
    pub policy: serde_json::Value,
    /// Tokens of the document.
    pub tokens: usize,
    /// What is kept of it.
    pub held: Held,
    /// Whether a file has it.
    pub is_saved: bool,
}

/// The contexts of an engine.
pub(super) struct Contexts<'a> {
    all: BTreeMap<String, Context<'a>>,
    /// The most bytes of all contexts.
    limit: usize,
    folder: Option<PathBuf>,
}

struct Context<'a> {
    session: Session<'a>,
    tokens: Vec<u32>,
    /// The files of a saved context, as they were written.
    files: Option<[Stamp; 2]>,
}

/// What is kept of a context, as far as a job on it needs a place.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptContext {
    /// Tokens of the document.
    pub(super) tokens: usize,
    /// Slots that a head keeps of them, the mean over the heads of the layer that keeps the most.
    pub(super) slots: usize,
    /// The weights of the slots.
    pub(super) weights: SlotWeights,
}

impl KeptContext {
    /// What a session of one sequence keeps of so many tokens.
    pub(super) fn of(session: &Session<'_>, tokens: usize) -> Self {
        let mean = |layer: &LayerCache| {
            let lengths = layer.layout().lengths();
            lengths.iter().sum::<usize>().div_ceil(lengths.len().max(1))
        };
        let most = session.cache().layers.iter().map(mean).max();
        Self { tokens, slots: most.unwrap_or_default(), weights: session.slot_weights() }
    }
}

/// By which a file that was written is known again.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Stamp {
    bytes: u64,
    changed: SystemTime,
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let data = fs::symlink_metadata(path)?;
        Ok(Self { bytes: data.len(), changed: data.modified()? })
    }
}

/// The files of a context: the one that names it, and its cache.
struct Files {
    names: PathBuf,
    cache: PathBuf,
}

impl Files {
    /// What the files are now.
    fn stamps(&self) -> Result<[Stamp; 2], JobError> {
        let of = |path: &PathBuf| Stamp::of(path).map_err(|error| failed(path, error));
        Ok([of(&self.names)?, of(&self.cache)?])
    }

    /// Refuses files that this engine did not write, or that were changed since.
    fn check(&self, written: Option<[Stamp; 2]>) -> Result<(), JobError> {
        for (at, path) in [&self.names, &self.cache].into_iter().enumerate() {
            match Stamp::of(path) {
                Ok(stamp) if written.is_none_or(|written| written[at] != stamp) => {
                    return Err(JobError::ForeignFile { path: path.clone() });
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(path, error)),
            }
        }
        Ok(())
    }
}

/// What a file beside a saved cache says of it.
#[derive(Serialize, Deserialize)]
struct Saved {
    tokens: Vec<u32>,
    policy: serde_json::Value,
    /// The SHA-256 of the cache's file, in hexadecimal digits.
    sha256: Option<String>,
}

impl<'a> Contexts<'a> {
    /// The contexts that a folder has for this model. Files of other models are left alone.
    pub(super) fn load(model: &'a Model, limit: usize, folder: Option<PathBuf>) -> Self {
        let mut contexts = Self { all: BTreeMap::new(), limit, folder };
        let files = contexts.folder.iter().flat_map(fs::read_dir).flatten().flatten();
        let files: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
        for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
            let Some(name) = path.file_stem().and_then(|name| name.to_str()) else { continue };
            match contexts.read(model, name, path) {
                Ok(context) => drop(contexts.all.insert(name.to_string(), context)),
                Err(error) => tracing::warn!("context `{name}` is not loaded: {error}"),
            }
        }
        contexts
    }

    /// The tokens of each context, and its policy's configuration.
    pub(super) fn documents(&self) -> BTreeMap<String, (Vec<u32>, String)> {
        let document = |context: &Context<'_>| {
            (context.tokens.clone(), context.session.policy().config().to_string())
        };
        self.all.iter().map(|(name, context)| (name.clone(), document(context))).collect()
    }

    /// Whether a context has files.
    pub(super) fn is_saved(&self, name: &str) -> bool {
        self.all.get(name).is_some_and(|context| context.files.is_some())
    }

    /// Leaves the contexts of these names, which all ranks have.
    pub(super) fn keep_only(&mut self, names: &[String]) {
        self.all.retain(|name, _| {
            let stays = names.contains(name);
            if !stays {
                tracing::warn!(
                    "context `{name}` is not loaded: another rank does not have it, or has \
                     another document by this name"
                );
            }
            stays
        });
    }

    fn read(&self, model: &'a Model, name: &str, path: &Path) -> Result<Context<'a>, JobError> {
        let text = fs::read_to_string(path).map_err(|error| failed(path, error))?;
        let saved: Saved = serde_json::from_str(&text).map_err(|error| {
            let (file, reason) = (path.display().to_string(), error.to_string());
            JobError::from(ModelError::InvalidJson { file, reason })
        })?;
        let files = Files { names: path.into(), cache: path.with_extension("cache") };
        if let Some(expected) = saved.sha256
            && sha256(&files.cache)? != expected
        {
            return Err(JobError::DamagedFile { path: files.cache });
        }
        let policy = kv_policies::build(&saved.policy).map_err(ModelError::from)?;
        let session = Session::restore(model, policy, &files.cache)?;
        self.check(name, bytes_of(session.cache()))?;
        Ok(Context { session, tokens: saved.tokens, files: Some(files.stamps()?) })
    }

    /// Checks that a context may get a name and has room.
    ///
    /// # Errors
    /// [`JobError::ContextName`], [`JobError::ContextExists`], [`JobError::ContextsFull`].
    pub(super) fn check(&self, name: &str, bytes: usize) -> Result<(), JobError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let hidden = name.starts_with('.');
        if name.is_empty() || name.len() > NAME || hidden || !name.chars().all(is_plain) {
            return Err(JobError::ContextName { name: name.into() });
        }
        if self.all.contains_key(name) {
            return Err(JobError::ContextExists { name: name.into() });
        }
        let taken = self.bytes();
        if taken + bytes > self.limit {
            let (name, limit) = (name.to_string(), self.limit);
            return Err(JobError::ContextsFull { name, needed: bytes, taken, limit });
        }
        Ok(())
    }

    /// Keeps a compressed document.
    ///
    /// # Errors
    /// The errors of [`Self::check`].
    pub(super) fn insert(
        &mut self,
        name: &str,
        tokens: Vec<u32>,
        mut session: Session<'a>,
    ) -> Result<ContextInfo, JobError> {
        session.resize(0)?;
        self.check(name, bytes_of(session.cache()))?;
        let context = Context { session, tokens, files: None };
        let info = context.info(name);
        self.all.insert(name.to_string(), context);
        Ok(info)
    }

    /// A copy with room for a question of `tokens` tokens.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`].
    pub(super) fn copy(&self, name: &str, tokens: usize) -> Result<Session<'a>, JobError> {
        let context = self.all.get(name).ok_or_else(|| self.unknown(name))?;
        let mut session = context.session.fork();
        session.resize(tokens)?;
        Ok(session)
    }

    /// The tokens of a document.
    pub(super) fn tokens(&self, name: &str) -> Option<&[u32]> {
        self.all.get(name).map(|context| &context.tokens[..])
    }

    /// What is kept of a document.
    pub(super) fn kept(&self, name: &str) -> Option<KeptContext> {
        let context = self.all.get(name)?;
        Some(KeptContext::of(&context.session, context.tokens.len()))
    }

    /// How many tokens each document has.
    pub(super) fn lengths(&self) -> BTreeMap<String, usize> {
        let all = self.all.iter();
        all.map(|(name, context)| (name.clone(), context.tokens.len())).collect()
    }

    /// All contexts.
    pub(super) fn list(&self) -> Vec<ContextInfo> {
        self.all.iter().map(|(name, context)| context.info(name)).collect()
    }

    /// Bytes of all contexts.
    pub(super) fn bytes(&self) -> usize {
        self.all.values().map(|context| bytes_of(context.session.cache())).sum()
    }

    /// Checks that a context and its files may be dropped.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], and [`JobError::ForeignFile`] where others have changed its
    /// files.
    pub(super) fn may_forget(&self, name: &str) -> Result<(), JobError> {
        let context = self.all.get(name).ok_or_else(|| self.unknown(name))?;
        match (self.files(name), context.files) {
            (Some(files), Some(written)) => files.check(Some(written)),
            _ => Ok(()),
        }
    }

    /// Drops a context and its files.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], and [`JobError::Model`] where a file stays.
    pub(super) fn forget(&mut self, name: &str) -> Result<(), JobError> {
        let forgotten = self.forget_files(name);
        self.all.remove(name);
        forgotten
    }

    /// Drops the files of a context, which stays.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], and [`JobError::Model`] where a file stays.
    pub(super) fn forget_files(&mut self, name: &str) -> Result<(), JobError> {
        let (unknown, files) = (self.unknown(name), self.files(name));
        let context = self.all.get_mut(name).ok_or(unknown)?;
        if let (Some(files), Some(_)) = (files, context.files.take()) {
            for path in [&files.names, &files.cache] {
                match fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(failed(path, error));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Saves a context to the folder. Both files are whole before they get their names, and the one
    /// that names the context gets its name last, so that a stopped engine or a full disk leaves no
    /// half context.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], [`JobError::NoContextFolder`], [`JobError::ForeignFile`],
    /// [`JobError::Model`].
    pub(super) fn save(&mut self, name: &str) -> Result<PathBuf, JobError> {
        let (unknown, files) = (self.unknown(name), self.files(name));
        let context = self.all.get_mut(name).ok_or(unknown)?;
        let (Some(files), Some(folder)) = (files, &self.folder) else {
            return Err(JobError::NoContextFolder);
        };
        fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        files.check(context.files)?;
        let begun = || {
            let begun = tempfile::Builder::new().prefix(".context-").tempfile_in(folder);
            begun.map(NamedTempFile::into_temp_path).map_err(|error| failed(folder, error))
        };
        let (cache, names) = (begun()?, begun()?);
        context.session.save(&cache)?;
        let policy = context.session.policy().config();
        let sha256 = Some(sha256(&cache)?);
        let saved = serde_json::json!(Saved { tokens: context.tokens.clone(), policy, sha256 });
        fs::write(&names, saved.to_string()).map_err(|error| failed(&files.names, error))?;
        for (whole, path) in [(cache, &files.cache), (names, &files.names)] {
            whole.persist(path).map_err(|error| failed(path, error.error))?;
        }
        context.files = Some(files.stamps()?);
        Ok(files.names)
    }

    fn files(&self, name: &str) -> Option<Files> {
        // Not `with_extension`: a name may have dots.
        let path = |kind| self.folder.as_ref().map(|folder| folder.join(format!("{name}.{kind}")));
        Some(Files { names: path("json")?, cache: path("cache")? })
    }

    pub(super) fn unknown(&self, name: &str) -> JobError {
        let names: Vec<&str> = self.all.keys().map(String::as_str).collect();
        let known = match names.is_empty() {
            true => String::new(),
            false => format!("; known: {}", names.join(", ")),
        };
        JobError::UnknownContext { name: name.into(), known }
    }
}

impl Context<'_> {
    fn info(&self, name: &str) -> ContextInfo {
        ContextInfo {
            name: name.into(),
            policy: self.session.policy().config(),
            tokens: self.tokens.len(),
            held: held_in(&self.session, 0),
            is_saved: self.files.is_some(),
        }
    }
}

impl Session<'_> {
    /// Gives every head exactly `room` free slots.
    fn resize(&mut self, room: usize) -> Result<(), ModelError> {
        let mut layers = self.cache_mut().layers.iter_mut();
        Ok(layers.try_for_each(|layer: &mut LayerCache| layer.shrink(room))?)
    }
}

/// The SHA-256 of a file, in hexadecimal digits.
fn sha256(path: &Path) -> Result<String, JobError> {
    let mut hash = Sha256::new();
    let mut file = fs::File::open(path).map_err(|error| failed(path, error))?;
    io::copy(&mut file, &mut hash).map_err(|error| failed(path, error))?;
    Ok(format!("{:x}", hash.finalize()))
}

fn failed(path: &Path, source: io::Error) -> JobError {
    ModelError::Io { path: path.into(), source }.into()
}
