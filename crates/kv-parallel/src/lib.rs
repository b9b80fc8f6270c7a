#![doc = include_str!("../README.md")]

mod collective;
#[cfg(feature = "cuda")]
mod direct;
mod error;
#[cfg(feature = "cuda")]
mod nccl;
mod processes;
mod ranks;
mod shard;
mod threads;

pub use collective::{Collective, Solo};
#[cfg(feature = "cuda")]
pub use direct::Direct;
pub use error::{ParallelError, Result};
#[cfg(feature = "cuda")]
pub use nccl::Nccl;
pub use processes::meeting::Meeting;
pub use ranks::{Ranks, Role};
pub use shard::Shard;
pub use threads::Threads;
