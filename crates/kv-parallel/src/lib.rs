#![doc = include_str!("../README.md")]

mod collective;
mod error;
#[cfg(feature = "cuda")]
mod nccl;
mod processes;
mod ranks;
mod shard;
mod threads;

pub use collective::{Collective, Solo};
pub use error::{ParallelError, Result};
#[cfg(feature = "cuda")]
pub use nccl::Nccl;
pub use processes::meeting::Meeting;
pub use ranks::{Ranks, Role};
pub use shard::Shard;
pub use threads::Threads;
