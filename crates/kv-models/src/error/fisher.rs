//! Why Fisher information could not be measured or read.

use std::path::PathBuf;

use kv_core::counted;

/// What is wrong with a text, with its windows, or with what was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FisherError {
    /// The windows together are longer than the text.
    #[error(
        "the text has {}, {samples} windows need {samples} x {window}; give a longer text, or \
         fewer or shorter windows",
        counted(*.tokens, "token")
    )]
    TextTooShort {
        /// Tokens of the text.
        tokens: usize,
        /// Windows asked for.
        samples: usize,
        /// Tokens that each takes of the text.
        window: usize,
    },

    /// No windows, or windows in which nothing is predicted or that the model has no positions for.
    #[error(
        "{} of {}; expected at least one, of {least} to {most} tokens",
        counted(*.samples, "window"),
        counted(*.window, "token")
    )]
    InvalidWindows {
        /// Windows asked for.
        samples: usize,
        /// Tokens of each, special ones included.
        window: usize,
        /// The shortest window.
        least: usize,
        /// The model's positions.
        most: usize,
    },

    /// The gradients hold something that is no number.
    #[error("window {window}: the gradients hold NaN or Inf; check the weights")]
    NonFinite {
        /// The window, from 0.
        window: usize,
    },

    /// Nothing was measured yet.
    #[error(
        "`{path}` does not exist; measure it with `cargo xtask bench fisher --model MODEL --text \
         FILE --output {path}`"
    )]
    Missing {
        /// The file asked for.
        path: PathBuf,
    },

    /// The file is of a model with another number of layers.
    #[error(
        "the Fisher information of {model} has {}, the model {expected}; measure this model's",
        counted(*.actual, "layer")
    )]
    WrongLayers {
        /// The model that was measured.
        model: String,
        /// Layers of the model at hand.
        expected: usize,
        /// Layers that were measured.
        actual: usize,
    },

    /// Models that are embedded, random or from the hub have no folder to write to.
    #[error("{model} is no local folder, so that no {file} lies in it; name the file instead")]
    NoFolder {
        /// The model's name.
        model: String,
        /// The file that would lie in it.
        file: &'static str,
    },
}
