//! Why policies fail.

use kv_core::counted;

/// Why a policy could not be built or could not do its step. Caches are unchanged after an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] kv_core::Error),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] kv_kernels::KernelError),
    /// No policy of this name.
    #[error("unknown policy `{name}`{suggestion}; known: {known}")]
    UnknownPolicy {
        /// The name.
        name: String,
        /// ` (did you mean ...?)`, or empty.
        suggestion: String,
        /// All names.
        known: String,
    },
    /// The configuration is not what the policy takes.
    #[error("policy `{policy}`: {reason}")]
    InvalidConfig {
        /// The policy.
        policy: String,
        /// What is wrong, with names and values.
        reason: String,
    },
    /// Sinks and recents alone exceed the budget.
    #[error(
        "policy `{policy}`: {} and {} exceed the budget of {}; protect fewer tokens or raise the \
         budget",
        counted(*.sinks, "sink"),
        counted(*.recents, "recent"),
        counted(*.budget, "slot")
    )]
    ProtectedOverBudget {
        /// The policy.
        policy: &'static str,
        /// Protected first tokens.
        sinks: usize,
        /// Protected last tokens.
        recents: usize,
        /// Slots per head.
        budget: usize,
    },
    /// The caller did not show the policy what it declared to need.
    #[error("policy `{policy}` needs {what}, which the observation lacks")]
    MissingObservation {
        /// The policy.
        policy: &'static str,
        /// The missing part.
        what: &'static str,
    },
}

/// `Result` with this crate's [`PolicyError`].
pub type Result<T> = std::result::Result<T, PolicyError>;
