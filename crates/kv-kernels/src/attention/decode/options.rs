//! Options and results of `decode_attention`.

use burn::tensor::{Int, Tensor};

use super::index_sets::IndexSets;
use super::strategy::DecodeStrategy;
use crate::backend::check::Check;
use crate::slots::pool::within;
use crate::{KernelError, Reading};

/// The slots to attend to, and the results besides the output.
#[derive(Debug, Clone, Default)]
pub struct DecodeAttentionOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// Weights of the values alone, `[S]`, f32, not logarithms: the `a_i` of the numerator. `None`
    /// means `a_i = w_i`. A slot may have `a_i = 0` or `w_i = 0`.
    pub numerator_weights: Option<Tensor<1>>,
    /// The slots of each range that the query attends to.
    pub view: SlotView,
    /// An upper bound of the slots of every range; no range may exceed it. It sets how many cubes
    /// share a range, and how much shared memory a cube takes. `None` means the slots of the pool.
    pub longest: Option<usize>,
    /// Also return the log-sum-exp.
    pub log_sum_exp: bool,
    /// Also return every slot's attention probability.
    pub probabilities: bool,
    /// Also return every slot's logit.
    pub logits: bool,
    /// The kernel to run.
    pub strategy: DecodeStrategy,
}

/// Which slots of each range a query attends to.
#[derive(Debug, Clone, Default)]
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one view a call")]
pub enum SlotView {
    /// All slots of the range.
    #[default]
    All,
    /// The first `sinks` slots, and all slots from `starts` on.
    Window {
        /// Slots at the start of each range.
        sinks: usize,
        /// The first slot of the window, counted from the range's first slot, `[B, Hkv]`, 32-bit.
        starts: Tensor<2, Int>,
    },
    /// A list of slots of the pool for each key-value head. The ranges' offsets and lengths are
    /// ignored.
    List {
        /// Slots, `[B, Hkv, N]`, 32-bit. Numbers outside the pool count as absent.
        slots: Tensor<3, Int>,
        /// Slots in each list, `[B, Hkv]`, 32-bit; the rest of a row is not read.
        counts: Tensor<2, Int>,
    },
    /// The index sets that [`crate::cis_select`] has chosen for these ranges.
    Sets(IndexSets),
}

impl SlotView {
    /// Checks that lists name only slots of a pool of `slots` slots, for callers who make their own
    /// lists. This waits for the device. Ops do not check: they treat slots outside the pool as
    /// absent. Other views name no slots and always pass.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for the first slot outside the pool, and for counts beyond a
    /// list's end; [`KernelError::Shape`] and [`KernelError::Dtype`].
    pub fn validate(&self, slots: usize) -> Result<(), KernelError> {
        const OP: &str = "slot_view";
        let Self::List { slots: list, counts } = self else { return Ok(()) };
        let check = Check::new(OP, list);
        let [batch, kv_heads, most] = list.dims();
        check.shape("counts", counts, &[batch, kv_heads])?;
        let named = Reading::begin(list.clone().flatten(0, 2))?;
        let counts = Reading::begin(counts.clone().flatten(0, 1))?.wait()?;
        for (named, count) in named.wait()?.chunks(most.max(1)).zip(counts) {
            within(OP, "counts", i64::from(count), most + 1)?;
            let mut named = named[..count as usize].iter();
            named.try_for_each(|&slot| within(OP, "slots", i64::from(slot), slots))?;
        }
        Ok(())
    }
}

/// The results of attention over slots.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attention output, `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// `ln sum_i w_i exp(s_i)`, `[B, Hq]`, f32; −∞ where the query attends to nothing.
    pub log_sum_exp: Option<Tensor<2>>,
    /// Attention probabilities, `[S, G]`, f32. Column `g` of a slot of key-value head `h` is the
    /// probability that query head `h * G + g` gives to the slot. Slots that are not attended to
    /// hold 0.
    pub probabilities: Option<Tensor<2>>,
    /// Logits `ln w_i + s_i`, `[S, G]`, f32, laid out as [`Self::probabilities`]. Slots that are
    /// not attended to hold 0.
    pub logits: Option<Tensor<2>>,
}

/// Comptime features and scalars of a call, as backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DecodeConfig {
    pub(crate) scale: f32,
    pub(crate) features: Features,
    /// An upper bound of the slots that one query attends to.
    pub(crate) longest: usize,
    /// The `sinks` of [`SlotView::Window`], else 0.
    pub(crate) sinks: usize,
    /// Whether logits are wanted rather than probabilities.
    pub(crate) raw: bool,
    pub(crate) strategy: DecodeStrategy,
}

/// Comptime features of the kernels: each combination compiles kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Features {
    pub(crate) weighted: bool,
    pub(crate) numerators: bool,
    pub(crate) log_sum_exp: bool,
    /// Whether the logit of every slot is written. Probabilities are made of logits.
    pub(crate) scores: bool,
    pub(crate) view: ViewKind,
}

/// [`SlotView`] without its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ViewKind {
    All,
    Window,
    List,
    Sets,
}

/// A view whose shapes and dtypes are checked.
pub(super) struct CheckedView {
    pub(super) kind: ViewKind,
    /// The starts of windows, the listed slots or the table of index sets, flat.
    pub(super) slots: Option<Tensor<1, Int>>,
    /// The lengths of lists, which replace the ranges' lengths.
    pub(super) lengths: Option<Tensor<2, Int>>,
    pub(super) sinks: usize,
    pub(super) longest: usize,
}

impl SlotView {
    pub(super) fn check(
        &self,
        check: &Check,
        batch: usize,
        kv_heads: usize,
    ) -> Result<CheckedView, KernelError> {
        let per_head = [batch, kv_heads];
        let view =
            |kind| CheckedView { kind, slots: None, lengths: None, sinks: 0, longest: usize::MAX };
        Ok(match self {
            Self::All => view(ViewKind::All),
            Self::Window { sinks, starts } => {
                check.shape("starts", starts, &per_head)?;
                check.int("starts", starts)?;
                let slots = Some(starts.clone().reshape([batch * kv_heads]));
                CheckedView { slots, sinks: *sinks, ..view(ViewKind::Window) }
            }
            Self::List { slots, counts } => {
                let width = slots.dims()[2];
                check.shape("slots", slots, &[batch, kv_heads, width])?;
                check.int("slots", slots)?;
                check.shape("counts", counts, &per_head)?;
                check.int("counts", counts)?;
                if width == 0 {
                    return Err(super::unsupported(super::OP, "slots", 0, "lists of at least 1"));
                }
                CheckedView {
                    slots: Some(slots.clone().reshape([batch * kv_heads * width])),
                    lengths: Some(counts.clone()),
                    longest: width,
                    ..view(ViewKind::List)
                }
            }
            Self::Sets(sets) => {
                let (table, _) = sets.tensors();
                let row = table.dims()[1];
                check.shape("sets", table, &[batch * kv_heads, row])?;
                CheckedView {
                    slots: Some(table.clone().reshape([batch * kv_heads * row])),
                    ..view(ViewKind::Sets)
                }
            }
        })
    }
}
