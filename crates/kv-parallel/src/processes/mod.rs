//! Ranks as processes: one for each GPU.
//!
//! * [`environment`]: which rank a process is.
//! * [`start`]: starting all ranks from one command.
//! * [`meeting`]: the connections between rank 0 and every other rank. A rank notices by them that
//!   another rank has died.
//! * [`frame`]: messages on these connections.

pub(crate) mod environment;
mod frame;
pub(crate) mod meeting;
pub(crate) mod start;
