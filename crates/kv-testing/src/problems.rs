//! The problems that benches time and tests check, in one list.

use std::collections::BTreeMap;

/// The problems of the suite `kernels`, with and without `--strategies`. The file belongs to the
/// benchmark, as a published crate holds all that it reads.
const TIMED: &str = include_str!("../../kv-bench/problems.json");

/// A small step of a small model: `cargo bench` times every op at it.
pub const STEP: Step =
    Step { batch: 2, kv_heads: 2, group: 4, head_dim: 64, slots: 512, prompt: 128 };

/// The sizes of [`STEP`].
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Sequences.
    pub batch: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Query heads of a key-value head.
    pub group: usize,
    /// Numbers in a head's row.
    pub head_dim: usize,
    /// Slots of each sequence's key-value head.
    pub slots: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
}

impl Step {
    /// Key-value heads of all sequences.
    pub const fn pairs(&self) -> usize {
        self.batch * self.kv_heads
    }
}

/// The sizes of each problem at which `kv-bench kernels` times an op, in the order of `fields`.
///
/// # Panics
/// Where the file has no such op or field.
pub fn timed<const N: usize>(op: &str, fields: [&str; N]) -> Vec<[usize; N]> {
    type Ops = BTreeMap<String, Vec<BTreeMap<String, usize>>>;
    let groups: BTreeMap<String, Ops> = serde_json::from_str(TIMED).unwrap();
    let problems = groups.values().filter_map(|ops| ops.get(op)).flatten();
    let mut sizes: Vec<_> = problems.map(|problem| fields.map(|field| problem[field])).collect();
    assert!(!sizes.is_empty(), "no problems of {op} are timed");
    // Both forms of the suite may have the same one.
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}
