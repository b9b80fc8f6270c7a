//! The arguments of `archive_slots` as backends take them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::archive::pool::ArchiveTensors;

/// The pool that is written, and the slots that are copied.
#[derive(ExtensionType)]
pub(crate) struct ArchiveArgs<B: Backend> {
    /// The pool, written in place.
    #[extension_type]
    pub(crate) pool: ArchiveTensors<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, M]`
    pub(crate) from: IntTensor<B>,
    /// `[P]`
    pub(crate) to: IntTensor<B>,
}
