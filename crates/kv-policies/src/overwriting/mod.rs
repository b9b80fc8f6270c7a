//! Policies whose new tokens are written over slots that were chosen before.
//!
//! * [`longflow`]: overwrites the slot that adds least to the output.
//! * [`duo_attention`]: some heads keep everything, others sinks and recents, the oldest of which
//!   is overwritten.
//!
//! Neither policy writes a slot itself: [`crate::WriteSlots`] (`policy/write_slots.rs`) holds the
//! slot that each head's next token takes, writes the token there, and chooses the slot of the step
//! after.

mod duo_attention;
mod longflow;

pub use duo_attention::{DuoAttention, Gates};
pub use longflow::{LongFlow, Scope};
