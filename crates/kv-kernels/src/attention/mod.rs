//! Attention ops for decode steps and prompts.
//!
//! - [`causal_softmax`]: softmax of logits in memory. Each query sees the keys up to its own key.
//! - [`continued`]: attention over slots in parts, continued from the attention over other slots.
//! - [`decode`]: one query a sequence over the slots of its heads, with weights, lists and windows.
//! - [`evicting`]: decode attention that also chooses the slot which the next token overwrites
//!   (LongFlow).
//! - [`prefill`]: causal attention of a prompt or of a part of one, with column sums.
//! - [`sketch`]: decode attention over exact slots and over tokens in a count-sketch (KVReviver).

pub(crate) mod causal_softmax;
pub(crate) mod continued;
pub(crate) mod decode;
pub(crate) mod evicting;
pub(crate) mod prefill;
pub(crate) mod sketch;
