//! Slots of 1 to 8 bits a number: written in blocks, and attended to as they are.
//!
//! - [`pool`]: the tensors of a pool of quantised slots.
//! - [`layout`]: how codes, minima and steps lie in 32-bit words.
//! - [`quantize_slots`]: slots of a pool quantised into another, whole blocks at a time.
//! - [`quantized_attention`]: attention of a decode step over quantised slots, continued from the
//!   attention over other slots.

pub(crate) mod layout;
pub(crate) mod pool;
pub(crate) mod quantize_slots;
pub(crate) mod quantized_attention;
