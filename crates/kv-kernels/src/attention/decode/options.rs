//! What a call may ask for, and what it returns.

use burn::tensor::{Int, Tensor};

use super::index_sets::IndexSets;
use super::strategy::DecodeStrategy;
use crate::backend::check::Check;
use crate::slots::pool::within;
use crate::{KernelError, Reading};

/// What to attend to, and what to compute besides the output.
#[derive(Debug, Clone, Default)]
pub struct DecodeAttentionOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// Weights of the values alone, `[S]`, f32, not logarithms: the `a_i` that the numerator has
    /// instead of `w_i`. A slot may have one of the two be 0.
    pub numerator_weights: Option<Tensor<1>>,
    /// Which slots of a range are read.
    pub view: SlotView,
    /// The most slots that any range holds, if known, which none may exceed: ranges are split among
    /// the device's processors, and shared memory is taken, accordingly. By default the pool's
    /// slots.
    pub longest: Option<usize>,
    /// Also return the log-sum-exp.
    pub log_sum_exp: bool,
    /// Also return every slot's attention probability.
    pub probabilities: bool,
    /// Also return every slot's logit.
    pub logits: bool,
    /// Which kernel attends.
    pub strategy: DecodeStrategy,
}

/// Which slots of each range a query attends to.
#[derive(Debug, Clone, Default)]
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one view a call")]
pub enum SlotView {
    /// All of them.
    #[default]
    All,
    /// The first `sinks`, and those from `starts` on.
    Window {
        /// Slots at the start of each range.
        sinks: usize,
        /// Where the window begins, counted from the range's first slot, `[B, Hkv]`, 32-bit.
        starts: Tensor<2, Int>,
    },
    /// A list of slots of the pool; ranges are not looked at.
    List {
        /// Slots, `[B, Hkv, N]`, 32-bit; those outside the pool count as absent.
        slots: Tensor<3, Int>,
        /// How many of them, from the first on, `[B, Hkv]`, 32-bit.
        counts: Tensor<2, Int>,
    },
    /// What [`crate::cis_select`] has chosen, of these ranges.
    Sets(IndexSets),
}

impl SlotView {
    /// Checks that lists name slots of a pool of `slots` alone, for those who make lists of their
    /// own. Waits for the device, which ops do not: slots that are not there are absent to them.
    /// Other views name no slots.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for the first slot that is not there and for counts beyond a
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

/// What one call returns.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// `ln sum_i w_i exp(s_i)`, `[B, Hq]`, f32; −∞ where nothing was attended to.
    pub log_sum_exp: Option<Tensor<2>>,
    /// `[S, G]`, f32: column `g` of a slot's row is the probability that query head `h * G + g` of
    /// the slot's key-value head `h` gives to it. Slots that were not attended to hold 0.
    pub probabilities: Option<Tensor<2>>,
    /// Logits `ln w_i + s_i`, `[S, G]`, f32, in the order of [`Self::probabilities`]; 0 for slots
    /// that were not attended to.
    pub logits: Option<Tensor<2>>,
}

/// Comptime configuration and scalars, as the backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DecodeConfig {
    pub(crate) scale: f32,
    pub(crate) features: Features,
    /// An upper bound of the slots that one query attends to.
    pub(crate) longest: usize,
    /// Of [`SlotView::Window`].
    pub(crate) sinks: usize,
    /// Whether logits are wanted rather than probabilities.
    pub(crate) raw: bool,
    pub(crate) strategy: DecodeStrategy,
}

/// What changes the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Features {
    pub(crate) weighted: bool,
    pub(crate) numerators: bool,
    pub(crate) log_sum_exp: bool,
    /// Whether every slot's logit is written, of which probabilities are made.
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

/// A checked view, as the backends take it.
pub(super) struct CheckedView {
    pub(super) kind: ViewKind,
    /// Starts, listed slots or sets, flat.
    pub(super) slots: Option<Tensor<1, Int>>,
    /// Numbers of listed slots, in place of the ranges' lengths.
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
