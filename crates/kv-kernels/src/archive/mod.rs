//! Slots in host memory. The device keeps a signature of each slot. Signatures choose a few slots,
//! and attention reads these slots as they are.
//!
//! - [`host_words`]: memory outside of the device's, which kernels read and write.
//! - [`pool`]: the tensors of a pool of archived slots.
//! - [`layout`]: how signatures, means and spreads lie in 32-bit words.
//! - [`archive_slots`]: slots of a pool copied into an archive, whole blocks at a time.
//! - [`signature_scores`]: estimates of the attention to archived slots.
//! - [`archived_attention`]: attention of a decode step to the best archived slots and to means of
//!   the others, continued from the attention over other slots.

pub(crate) mod archive_slots;
pub(crate) mod archived_attention;
pub(crate) mod host_words;
pub(crate) mod layout;
pub(crate) mod pool;
pub(crate) mod signature_scores;
