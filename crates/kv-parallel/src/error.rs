use std::time::Duration;

use kv_kernels::KernelError;

/// What goes wrong between ranks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// A rank that the group does not have.
    #[error("rank {rank} of {world} ranks: ranks count from 0")]
    Rank {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        world: usize,
    },
    /// A model that cannot be divided equally.
    #[error("{whole} {what} cannot be divided among {world} ranks equally")]
    Indivisible {
        /// What there is.
        what: &'static str,
        /// How many.
        whole: usize,
        /// The number of ranks.
        world: usize,
    },
    /// A rank ended before its group.
    #[error("rank {rank} has left the group of {world} ranks")]
    RankLeft {
        /// The rank that left.
        rank: usize,
        /// The number of ranks.
        world: usize,
    },
    /// A rank did not come.
    #[error("after {waited:?}, {present} of {world} ranks were there")]
    TimedOut {
        /// Ranks that came.
        present: usize,
        /// The number of ranks.
        world: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// A rank has drawn other tokens than rank 0 in a step.
    #[error("rank {rank} has drawn other tokens than rank 0")]
    Diverged {
        /// The rank.
        rank: usize,
    },
    /// Ranks with tensors of different sizes: they do not run the same program.
    #[error("rank {rank} adds {actual} numbers where another rank adds {expected}")]
    UnequalParts {
        /// The rank.
        rank: usize,
        /// Numbers of the rank that came before.
        expected: usize,
        /// Numbers of this rank.
        actual: usize,
    },
    /// A rank that was started in another way than rank 0.
    #[error("{what} of rank {rank} is {actual}, and of rank 0 {expected}: start all ranks alike")]
    Unlike {
        /// The rank.
        rank: usize,
        /// What differs.
        what: &'static str,
        /// The rank's.
        actual: String,
        /// Rank 0's.
        expected: String,
    },
    /// Something that some ranks did and others could not.
    #[error("some ranks could {action}, and others could not: their logs say why")]
    Uneven {
        /// What they were to do.
        action: &'static str,
    },
    /// A tensor that cannot be read.
    #[error("a tensor that all ranks add cannot be read: {reason}")]
    Unreadable {
        /// Why.
        reason: String,
    },
    /// Variables of the environment that do not tell a rank its place.
    #[error("{variable}={value}: {reason}")]
    Environment {
        /// The variable.
        variable: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A number of ranks on the command line that the environment contradicts.
    #[error("{asked} ranks were asked for, but the environment says {found}")]
    WorldSize {
        /// By the command line.
        asked: usize,
        /// By the environment.
        found: usize,
    },
    /// Processes that could not be started, or could not meet.
    #[error("{action}: {reason}")]
    Process {
        /// What was tried.
        action: String,
        /// Why it failed.
        reason: String,
    },
    /// Ranks cannot add by writing into each other's memory.
    #[error("sums through the memory of other GPUs: {reason}")]
    Direct {
        /// What failed.
        reason: String,
    },
    /// A product of which the ranks add their parts.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// NCCL cannot be used.
    #[error("NCCL cannot be used: {reason}")]
    Nccl {
        /// Why, and what to do.
        reason: String,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, ParallelError>;
