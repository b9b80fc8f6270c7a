//! Why a model could not be found or downloaded.

use std::path::PathBuf;

/// What stands between a model's name and its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is no local folder, no GGUF file and no hub id.
    #[error(
        "`{model}` is no existing folder, no GGUF file (`.gguf`) and no hub id \
         (`organisation/name`)"
    )]
    UnknownModel {
        /// The name asked for.
        model: String,
    },

    /// The hub does not have the model, or does not show it.
    #[error(
        "the hub answered {status} for `{model}`: check the name; for a private or gated model \
             accept its licence on the hub and set HF_TOKEN"
    )]
    NotFound {
        /// The model asked for.
        model: String,
        /// The HTTP status.
        status: u16,
    },

    /// The hub's repository lacks a file that is needed.
    #[error(
        "the hub's `{model}` has no `{file}`; only models with safetensors weights and a \
             `tokenizer.json` can be used"
    )]
    MissingFile {
        /// The model asked for.
        model: String,
        /// The file that is absent.
        file: String,
    },

    /// Offline mode is on and the model is not (wholly) in the cache.
    #[error(
        "HF_HUB_OFFLINE is set and `{file}` of `{model}` is not in the cache `{cache}`; unset \
             HF_HUB_OFFLINE to download it, set HF_HOME to the right cache, or give a local folder"
    )]
    Offline {
        /// The model asked for.
        model: String,
        /// The first file that is absent.
        file: String,
        /// The cache that was searched.
        cache: PathBuf,
    },

    /// The hub could not be reached, or a download broke off.
    #[error(
        "cannot download `{model}`: {reason}; check the network and HF_ENDPOINT, or download it \
             elsewhere and give the local folder"
    )]
    Unavailable {
        /// The model asked for.
        model: String,
        /// What the connection said.
        reason: String,
    },
}
