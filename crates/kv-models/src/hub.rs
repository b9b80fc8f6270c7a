//! From a model's name to a folder with its files.

use std::env;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo};

use crate::error::{HubError, ModelError, Result};
use crate::weights;

const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
const OPTIONAL: [&str; 4] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The folder with a model's files: `model` itself if it is a folder, else the snapshot of the hub
/// model `organisation/name` in the cache, downloaded where it is not (wholly) there.
///
/// A snapshot that is complete is used as it is, without asking the hub for a newer one. The
/// environment is that of Hugging Face's own tools: `HF_HUB_CACHE` or `HF_HOME` for the cache,
/// `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`.
///
/// # Errors
/// [`HubError::UnknownModel`] if `model` is neither a folder nor looks like a hub id;
/// [`HubError::Offline`] in offline mode; [`HubError::NotFound`],
/// [`HubError::MissingFile`], [`HubError::Unavailable`] when downloading.
pub fn resolve(model: &str) -> Result<PathBuf> {
    if Path::new(model).is_dir() {
        return Ok(model.into());
    }
    if !is_hub_id(model) {
        return Err(HubError::UnknownModel { model: model.to_string() }.into());
    }
    Hub::from_env().snapshot(model)
}

/// `organisation/name` in the hub's alphabet, which rules out paths.
fn is_hub_id(model: &str) -> bool {
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && !part.contains("..")
    };
    model.split_once('/').is_some_and(|(organisation, name)| part(organisation) && part(name))
}

/// Where models come from.
struct Hub {
    cache: PathBuf,
    endpoint: Option<String>,
    token: Option<String>,
    offline: bool,
    progress: bool,
}

impl Hub {
    fn from_env() -> Self {
        let set = |name| env::var(name).ok().filter(|value: &String| !value.is_empty());
        let home = || {
            let user = env::home_dir().unwrap_or_default().join(".cache");
            let cache = set("XDG_CACHE_HOME").map_or(user, PathBuf::from);
            set("HF_HOME").map_or(cache.join("huggingface"), PathBuf::from)
        };
        let yes = |value: String| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_uppercase());
        Self {
            cache: set("HF_HUB_CACHE").map_or_else(|| home().join("hub"), PathBuf::from),
            endpoint: set("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_string()),
            token: set("HF_TOKEN"),
            offline: set("HF_HUB_OFFLINE").is_some_and(yes),
            progress: true,
        }
    }

    fn snapshot(&self, model: &str) -> Result<PathBuf> {
        let missing = match self.cached(model) {
            Some(folder) => match missing_file(&folder)? {
                None => return Ok(folder),
                Some(file) => file,
            },
            None => REQUIRED[0].to_string(),
        };
        if self.offline {
            let (model, cache) = (model.to_string(), self.cache.clone());
            return Err(HubError::Offline { model, file: missing, cache }.into());
        }
        self.download(model)
    }

    fn repo_folder(&self, model: &str) -> PathBuf {
        self.cache.join(Repo::model(model.to_string()).folder_name())
    }

    /// The snapshot that the cache's `main` refers to.
    fn cached(&self, model: &str) -> Option<PathBuf> {
        let repo = self.repo_folder(model);
        let commit = std::fs::read_to_string(repo.join("refs/main")).ok()?;
        Some(repo.join("snapshots").join(commit.trim())).filter(|folder| folder.is_dir())
    }

    fn download(&self, model: &str) -> Result<PathBuf> {
        let cache = Cache::new(self.cache.clone());
        let mut builder =
            ApiBuilder::from_cache(cache.clone()).with_progress(self.progress).with_retries(3);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        if let Some(token) = &self.token {
            builder = builder.with_token(Some(token.clone()));
        }
        let repo = builder.build().map_err(|error| hub_error(model, error))?.model(model.into());
        let info = repo.info().map_err(|error| hub_error(model, error))?;
        let folder = self.repo_folder(model).join("snapshots").join(&info.sha);
        let offered = |file: &str| info.siblings.iter().any(|sibling| sibling.rfilename == file);
        let fetch = |file: &str| {
            if folder.join(file).is_file() {
                return Ok(());
            }
            repo.download(file).map(|_| ()).map_err(|error| hub_error(model, error))
        };

        for file in REQUIRED.into_iter().chain(OPTIONAL).filter(|file| offered(file)) {
            fetch(file)?;
        }
        if offered(WEIGHTS) {
            fetch(WEIGHTS)?;
        } else if offered(INDEX) {
            fetch(INDEX)?;
            for shard in weights::shards(&folder.join(INDEX))? {
                fetch(&shard)?;
            }
        }
        if let Some(file) = missing_file(&folder)? {
            return Err(HubError::MissingFile { model: model.to_string(), file }.into());
        }
        // Where all files were there already, no download has recorded the newest version.
        let recorded = cache.model(model.to_string()).create_ref(&info.sha);
        recorded.map_err(|source| ModelError::io(&self.cache, source))?;
        Ok(folder)
    }
}

/// The first file that a model's folder lacks.
fn missing_file(folder: &Path) -> Result<Option<String>> {
    let lacks = |file: &&str| !folder.join(file).is_file();
    if let Some(file) = REQUIRED.iter().find(|file| lacks(file)) {
        return Ok(Some(file.to_string()));
    }
    if folder.join(WEIGHTS).is_file() {
        return Ok(None);
    }
    if !folder.join(INDEX).is_file() {
        return Ok(Some(WEIGHTS.to_string()));
    }
    let shards = weights::shards(&folder.join(INDEX))?;
    Ok(shards.into_iter().find(|shard| lacks(&shard.as_str())))
}

fn hub_error(model: &str, error: ApiError) -> HubError {
    let reason = error.to_string();
    let model = model.to_string();
    match status(error) {
        Some(status @ (401 | 403 | 404)) => HubError::NotFound { model, status },
        _ => HubError::Unavailable { model, reason },
    }
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
