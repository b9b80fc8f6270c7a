//! Files of data sets on the Hugging Face hub, by way of its cache.

use std::env;
use std::path::PathBuf;

use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use crate::TaskError;
use crate::data::{list, matches};

/// The files of a data set that match the patterns. Files that are all in the cache are used as
/// they are, without asking the hub for newer ones.
///
/// The environment is that of Hugging Face's own tools: `HF_HUB_CACHE` or `HF_HOME` for the cache,
/// `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`.
pub(crate) fn files(
    repository: &str,
    revision: Option<&str>,
    patterns: &[String],
) -> Result<Vec<PathBuf>, TaskError> {
    let set = |name| env::var(name).ok().filter(|value: &String| !value.is_empty());
    let home = || {
        let user = env::home_dir().unwrap_or_default().join(".cache");
        let cache = set("XDG_CACHE_HOME").map_or(user, PathBuf::from);
        set("HF_HOME").map_or(cache.join("huggingface"), PathBuf::from)
    };
    let yes = |value: String| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_uppercase());
    let hub = Hub {
        cache: set("HF_HUB_CACHE").map_or_else(|| home().join("hub"), PathBuf::from),
        endpoint: set("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_string()),
        token: set("HF_TOKEN"),
        offline: set("HF_HUB_OFFLINE").is_some_and(yes),
        repository: repository.to_owned(),
        revision: revision.unwrap_or("main").to_owned(),
    };
    hub.files(patterns)
}

/// A data set, and where it comes from.
struct Hub {
    cache: PathBuf,
    endpoint: Option<String>,
    token: Option<String>,
    offline: bool,
    repository: String,
    revision: String,
}

impl Hub {
    fn files(&self, patterns: &[String]) -> Result<Vec<PathBuf>, TaskError> {
        let missing = match self.cached()? {
            Some(folder) => match select(&list(&folder)?, patterns) {
                Ok(found) => return Ok(found.iter().map(|file| folder.join(file)).collect()),
                Err(missing) => missing,
            },
            None => patterns.join(", "),
        };
        if self.offline {
            let (repository, cache) = (self.repository.clone(), self.cache.clone());
            return Err(TaskError::Offline { repository, missing, cache });
        }
        self.download(patterns)
    }

    fn repo(&self) -> Repo {
        let (name, revision) = (self.repository.clone(), self.revision.clone());
        Repo::with_revision(name, RepoType::Dataset, revision)
    }

    /// The snapshot of the revision in the cache.
    fn cached(&self) -> Result<Option<PathBuf>, TaskError> {
        let folder = self.cache.join(self.repo().folder_name());
        let commit = match std::fs::read_to_string(folder.join("refs").join(&self.revision)) {
            Ok(commit) => commit,
            // A revision that is a commit has no reference of its own.
            Err(_) => self.revision.clone(),
        };
        Ok(Some(folder.join("snapshots").join(commit.trim())).filter(|folder| folder.is_dir()))
    }

    fn download(&self, patterns: &[String]) -> Result<Vec<PathBuf>, TaskError> {
        let cache = Cache::new(self.cache.clone());
        let mut builder = ApiBuilder::from_cache(cache).with_retries(3);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        if let Some(token) = &self.token {
            builder = builder.with_token(Some(token.clone()));
        }
        let fault = |error| self.fault(error);
        let repo = builder.build().map_err(fault)?.repo(self.repo());
        let info = repo.info().map_err(fault)?;
        let offered: Vec<_> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let found = select(&offered, patterns).map_err(|missing| TaskError::NotInDataSet {
            repository: self.repository.clone(),
            missing,
        })?;
        found.iter().map(|file| repo.get(file).map_err(fault)).collect()
    }

    fn fault(&self, error: ApiError) -> TaskError {
        let (repository, reason) = (self.repository.clone(), error.to_string());
        match status(error) {
            Some(status @ (401 | 403 | 404)) => TaskError::NotOnHub { repository, status },
            _ => TaskError::Unavailable { repository, reason },
        }
    }
}

/// The files that match each pattern, in the patterns' order; or the first pattern without a file,
/// or of which a part is missing.
fn select(files: &[String], patterns: &[String]) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for pattern in patterns {
        let mut matching: Vec<_> =
            files.iter().filter(|file| matches(pattern, file)).cloned().collect();
        matching.sort();
        let parts = matching.iter().filter_map(|file| parts(file)).max().unwrap_or(1);
        if matching.len() < parts {
            return Err(pattern.clone());
        }
        found.extend(matching);
    }
    Ok(found)
}

/// The number of parts that a file is one of: 3 for `train-00000-of-00003.parquet`.
fn parts(file: &str) -> Option<usize> {
    let (_, count) = file.rsplit_once("-of-")?;
    count.split('.').next()?.parse().ok()
}

/// The HTTP status of the answer, if there was one.
fn status(error: ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => error.into_response().map(|response| response.status()),
        ApiError::TooManyRetries(error) => status(*error),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
