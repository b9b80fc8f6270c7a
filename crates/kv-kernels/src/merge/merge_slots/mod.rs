//! ZIP merging (KeepKV): each group of slots becomes one slot that gets the group's attention.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
pub mod reference;
#[cfg(feature = "gpu")]
pub(crate) mod sums;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::nearest_slots::SlotLists;
use crate::KernelError;
use crate::backend::check::Check;
use args::MergeSlotsArgs;
use backend::MergeSlotsOps;

const OP: &str = "merge_slots";

/// The key of a merged slot. Where all keys of a group are equal, the key stays and the weights add
/// up, whatever the scores (lemma 6). Otherwise, let `k̄` be the group's mean key, weighted by `w =
/// p ŝ`; `a = ln(Σ w / Σ p)` the logit that the merged slot should have; and `b = Σ w ln ŝ / Σ w`
/// the logit of `k̄`:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyRule {
    /// `(a / b) k̄`, KeepKV's equation 25. Where the guard trips, [`Self::Additive`].
    Paper,
    /// `k̄ + (a − b) √D q/‖q‖²` for the query `q` of the merge. This meets the paper's constraint
    /// without its singularity, as `b = q·k̄/√D` where the scores are that query's. Without a
    /// query, or with one so short that the key would move by more than `guard ‖k̄‖` (heads of a
    /// group that cancel), [`Self::Votes`].
    Additive,
    /// `k̄`, with a slot weight of `Σ p exp(a − b)` that makes up for the logit.
    Votes,
    /// `k̄`, and nothing makes up for the logit, as in other papers' merges.
    Mean,
}

/// How [`merge_slots`] merges.
#[derive(Debug, Clone)]
pub struct MergeOptions {
    /// The rule for keys.
    pub rule: KeyRule,
    /// The range of the paper's factor `a / b` is `1 / guard` to `guard`. Outside it, the factor
    /// would flip the key, or make it vanish or explode. Infinity takes the equation as it is.
    pub guard: f32,
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// The query of each row's merges, `[P, D]`, f32.
    pub queries: Option<Tensor<2>>,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self { rule: KeyRule::Paper, guard: GUARD, scale: None, queries: None }
    }
}

impl MergeOptions {
    /// Checks the head dim and the queries of `rows` rows. Returns the configuration for backends.
    pub(crate) fn config(
        &self,
        op: &'static str,
        check: &Check,
        rows: usize,
        head_dim: usize,
        within: bool,
    ) -> Result<MergeConfig, KernelError> {
        if head_dim > MOST {
            return Err(KernelError::Unsupported {
                op,
                argument: "head dim",
                actual: head_dim.to_string(),
                supported: "up to 256",
            });
        }
        if let Some(queries) = &self.queries {
            check.shape("queries", queries, &[rows, head_dim])?;
            check.f32("queries", queries)?;
        }
        Ok(MergeConfig {
            rule: self.rule,
            guard: self.guard,
            scale: self.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
            queried: self.queries.is_some(),
            within,
        })
    }
}

/// The default of [`MergeOptions::guard`].
pub const GUARD: f32 = 4.0;

/// Victims, the kept slots that they are merged into, and the weights of both.
#[derive(Debug, Clone)]
pub struct MergeLists {
    /// Slots that are merged into others, `[P, N]`, in the pool `from`.
    pub victims: SlotLists,
    /// Each victim's place in its row's list of kept slots, `[P, N]`, 32-bit. A victim is dropped
    /// where this is no place in the list.
    pub targets: Tensor<2, Int>,
    /// `ln p` and `ln ŝ` of the victims, `[P, N, 2]`, f32. Where votes are counted, `[P, N, 4]`:
    /// then the tokens that each victim stands for, modulo [`crate::VOTES_RADIX`] and in multiples
    /// of it. `[P, N, 5]`: then also a number that merges add up.
    pub victim_weights: Tensor<3>,
    /// Kept slots, `[P, M]`, in the pool `into`; no slot twice.
    pub kept: SlotLists,
    /// The numbers of [`Self::victim_weights`] for the kept slots, `[P, M, 2]`, `[P, M, 4]` or
    /// `[P, M, 5]`.
    pub kept_weights: Tensor<3>,
}

/// The results of merges besides the merged slots.
#[derive(Debug, Clone)]
pub struct Merged {
    /// The new `ln p` and `ln ŝ` of the kept slots, and votes and sums where there are any, laid
    /// out as [`MergeLists::kept_weights`].
    pub weights: Tensor<3>,
    /// Whether the guard tripped, `[P, M]`, 32-bit.
    pub guarded: Tensor<2, Int>,
}

/// Merges victims into kept slots, whose keys and values in `into` are written in place. With `w =
/// p ŝ`, the value is `v = Σ w v / Σ w`, and the key follows [`KeyRule`], so that one slot of
/// weight `Σ p` gets the attention that the group had for scores `ŝ` (KeepKV, equations 7 and 25).
/// Its own score is `Σ w / Σ p`. Kept slots without victims stay unchanged.
///
/// Weights and scores are logarithms, and sums are kept in f32 relative to their largest term:
/// scores of `exp(±200)` and `exp(−∞)` do no harm. A group without mass is averaged by its weights
/// `p`. Votes are added as whole numbers, exact up to 2³⁶.
///
/// # Shapes
/// Keys and values `[Sv, D]` in `from` and `[S, D]` in `into`; all of one dtype, f32, f16 or bf16,
/// with `D` up to 256. Without `from`, victims are slots of `into`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn merge_slots(
    from: Option<[&Tensor<2>; 2]>,
    into: [&mut Tensor<2>; 2],
    lists: &MergeLists,
    options: &MergeOptions,
) -> Result<Merged, KernelError> {
    let [keys, values] = into;
    let check = Check::new(OP, keys);
    check.supported()?;
    let [slots, head_dim] = keys.dims();
    check.float("keys", keys)?;
    check.filled("keys", keys)?;
    check.shape("keys", keys, &[slots, head_dim])?;
    check.shape("values", values, &[slots, head_dim])?;
    for (argument, tensor) in from
        .iter()
        .flat_map(|[keys, values]| [("victims' keys", *keys), ("victims' values", *values)])
    {
        let [sources, _] = from.map_or([0; 2], |[keys, _]| keys.dims());
        check.shape(argument, tensor, &[sources, head_dim])?;
        check.filled(argument, tensor)?;
        check.same_dtype(argument, tensor, "the keys' dtype", keys.dtype())?;
        check.counted(argument, tensor)?;
    }
    check.same_dtype("values", values, "the keys' dtype", keys.dtype())?;
    check.counted("keys", keys)?;
    let ([rows, width], [_, places]) = (lists.victims.slots.dims(), lists.kept.slots.dims());
    lists.victims.check(&check, "victims", rows)?;
    lists.kept.check(&check, "kept", rows)?;
    check.shape("targets", &lists.targets, &[rows, width])?;
    check.int("targets", &lists.targets)?;
    let columns = lists.victim_weights.dims()[2];
    if ![2, 4, 5].contains(&columns) {
        let supported = "2, 4 with votes, or 5 with votes and a sum";
        return Err(check.unsupported("numbers of a weight", columns, supported));
    }
    check.shape("victims' weights", &lists.victim_weights, &[rows, width, columns])?;
    check.f32("victims' weights", &lists.victim_weights)?;
    check.shape("kept slots' weights", &lists.kept_weights, &[rows, places, columns])?;
    check.f32("kept slots' weights", &lists.kept_weights)?;
    let config = options.config(OP, &check, rows, head_dim, from.is_none())?;
    let merged = <Dispatch as MergeSlotsOps>::merge_slots(MergeSlotsArgs {
        keys: check.take(keys).into_dispatch(),
        values: check.take(values).into_dispatch(),
        from_keys: from.map(|[keys, _]| keys.clone()).into(),
        from_values: from.map(|[_, values]| values.clone()).into(),
        victims: lists.victims.slots.clone().into_dispatch(),
        victim_counts: lists.victims.counts.clone().into_dispatch(),
        targets: lists.targets.clone().into_dispatch(),
        victim_weights: lists.victim_weights.clone().into_dispatch(),
        kept: lists.kept.slots.clone().into_dispatch(),
        kept_counts: lists.kept.counts.clone().into_dispatch(),
        kept_weights: lists.kept_weights.clone().into_dispatch(),
        queries: options.queries.clone().into(),
        config,
    });
    *keys = Tensor::from_dispatch(merged.keys);
    *values = Tensor::from_dispatch(merged.values);
    Ok(Merged {
        weights: Tensor::from_dispatch(merged.weights),
        guarded: Tensor::from_dispatch(merged.guarded),
    })
}

/// The largest head dim.
const MOST: usize = 256;

/// Comptime configuration and scalars of a call, as backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MergeConfig {
    pub(crate) rule: KeyRule,
    pub(crate) guard: f32,
    pub(crate) scale: f32,
    pub(crate) queried: bool,
    /// Whether victims are slots of the pool `into`.
    pub(crate) within: bool,
}

/// The number of votes at which [`crate::MergingSlots::votes`] carries into `votes_high`.
pub const VOTES_RADIX: f32 = 4096.0;
