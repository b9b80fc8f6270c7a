//! Decode attention that also chooses the slot which the next token overwrites: LongFlow's fused
//! operator (section 3.4 and algorithm 1).
//!
//! A slot's importance is what it adds to the output, `‖α_i v_i‖₁ = α_i ‖v_i‖₁` (equation 6),
//! summed over the query heads of its group. Value norms never change, so they are stored with the
//! slots, and no value is read twice. Importances are compared as logarithms. The paper leaves out
//! the softmax's maximum; logarithms also tell very large and very small logits apart.
//!
//! One query is a noisy judge of a token. [`Memory`] compares slots by the largest importance that
//! they ever had, decayed, and [`Ties`] counts importances within a factor as equal. Both are ours.
//!
//! On CubeCL devices the kernel of [`crate::decode_attention`] attends. It also evicts, where
//! `strategy.rs` says so: for its own head, or, in the cube that arrives last, for all heads of the
//! sequence. Elsewhere it leaves logits, and `kernel.rs` combines the parts of heads and evicts.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod comparison;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;
mod strategy;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::decode::strategy::DecodeShape;
use super::decode::{self, DecodeConfig, Features, ViewKind};
use crate::backend::check::Check;
use crate::{KernelError, SlotRanges};
use args::EvictingArgs;
use backend::EvictingAttentionOps;
use strategy::EvictionShape;

pub use crate::components::sentinels::{LOWEST_NORM, NO_RECORD};
pub use strategy::EvictionStrategy;

const OP: &str = "evicting_attention";

/// Which heads evict one common slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EvictionScope {
    /// Every key-value head evicts its own slot.
    #[default]
    Head,
    /// All heads of a sequence evict the slot at one common place, by the sum of their importances:
    /// the paper's Algorithm 1 and its authors' code. Heads must be equally long.
    Layer,
}

/// The state that a cache held at its limits keeps besides its slots.
#[derive(Debug)]
pub struct HeldSlots<'a> {
    /// `ln ‖v_i‖₁` of every live slot, `[S]`, f32: [`crate::log_norms`].
    pub log_norms: Tensor<1>,
    /// Slots that each head may hold, `[B, Hkv]`, 32-bit.
    pub limits: Tensor<2, Int>,
    /// Places of the newest tokens, `[B, Hkv]`, 32-bit, counted from each range's first slot. The
    /// op overwrites them with the places of the next tokens.
    pub places: &'a mut Tensor<2, Int>,
    /// Counters for each sequence, `[B, ARRIVALS]`, 32-bit, 0 before and after each call. A kernel
    /// that evicts one common slot of all heads finds by them which head comes last.
    pub arrivals: &'a mut Tensor<2, Int>,
    /// What earlier steps have left of importances, if slots are compared by it.
    pub memory: Option<Memory<'a>>,
}

/// Slots are compared by the largest importance that they have had since their tokens were written,
/// decayed by `γ` a step: `S_t = max(γ S_{t−1}, I_t)`. Ours; the paper compares `I_t`.
#[derive(Debug)]
pub struct Memory<'a> {
    /// The record of every live slot, `max_t (ln I_t − t ln γ)`, `[S]`, f32. With
    /// [`EvictionScope::Layer`], the first head's slots have the records of the sequence. The op
    /// raises records in place. The newest token's slot has no record before the call, whatever
    /// stands there.
    pub records: &'a mut Tensor<1>,
    /// The newest token's position, `[B]`, 32-bit: the number `t` of the step.
    pub now: Tensor<1, Int>,
    /// `γ`, above 0 and at most 1.
    pub decay: f32,
}

/// Importances within a factor count as equal, and of equal slots the oldest is evicted. Ours: it
/// needs no memory of earlier steps. Importances are sorted into levels, `⌊ln I / ln factor⌋`.
#[derive(Debug, Clone)]
pub struct Ties {
    /// Logical positions of the slots, `[S]`, 32-bit, below 2²⁴. Where there is a [`Guard`], its
    /// positions count.
    pub positions: Tensor<1, Int>,
    /// The factor, above 1.
    pub factor: f32,
}

impl HeldSlots<'_> {
    /// Counters of each sequence.
    pub const ARRIVALS: usize = 16;
}

/// Slots that are kept whatever their importance: sinks and recents.
#[derive(Debug, Clone)]
pub struct Guard {
    /// Logical positions of the slots, `[S]`, 32-bit.
    pub positions: Tensor<1, Int>,
    /// The newest token's position, `[B]`, 32-bit.
    pub now: Tensor<1, Int>,
    /// Tokens at the first `sinks` positions are kept.
    pub sinks: usize,
    /// Tokens at the last `recents` positions are kept, the newest token among them.
    pub recents: usize,
}

/// How to attend, and which slots may be evicted.
#[derive(Debug, Clone, Default)]
pub struct EvictionOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// An upper bound of the slots of every range; `None` means the slots of the pool.
    pub longest: Option<usize>,
    /// Which heads evict one common slot.
    pub scope: EvictionScope,
    /// Whether even the newest token may be evicted, as in the authors' code.
    pub evict_newest: bool,
    /// Further slots that are kept, if any.
    pub guard: Option<Guard>,
    /// Which importances are equal, if any.
    pub ties: Option<Ties>,
    /// Also return every slot's importance.
    pub importance: bool,
    /// The kernel that attends, and the one that evicts.
    pub strategy: EvictionStrategy,
}

/// The results of an evicting attention.
#[derive(Debug, Clone)]
pub struct EvictingOutput {
    /// The attention output, `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// The logarithm of each slot's importance, `ln Σ_g α_i ‖v_i‖₁`, `[S]`, f32; `f32::MAX` for
    /// slots of weight 0, undefined outside the ranges.
    pub log_importance: Option<Tensor<1>>,
}

/// Attention of one query per sequence over its slots, and the place of each head's next token.
///
/// The places and records in `held` change in place. A head below its limit writes its next token
/// after its live slots. A full head overwrites its least important slot, the lowest one among
/// equals. Slots of weight 0 and slots whose importance is NaN are not evicted. Where no slot may
/// be evicted, the newest token's slot is overwritten.
///
/// # Shapes
/// The shapes of [`crate::decode_attention`], [`HeldSlots`] and [`Guard`].
///
/// # Errors
/// [`KernelError`] for shapes, dtypes, devices or sizes that do not fit, and for a forced strategy
/// that cannot run the call; nothing is changed.
pub fn evicting_attention(
    query: Tensor<3>,
    [keys, values]: [Tensor<2>; 2],
    log_weights: Option<Tensor<1>>,
    ranges: &SlotRanges,
    held: HeldSlots<'_>,
    options: EvictionOptions,
) -> Result<EvictingOutput, KernelError> {
    let HeldSlots { log_norms: norms, limits, places, arrivals, mut memory } = held;
    let [batch, query_heads, head_dim] = query.dims();
    let [slots, _] = keys.dims();
    let [_, kv_heads] = ranges.offsets.dims();
    let check = Check::new(OP, &query);
    let (pools, weights) = ([&keys, &values], log_weights.as_ref());
    decode::check(&check, OP, &query, pools, weights, ranges, decode::ATTENDING)?;
    check.shape("log_norms", &norms, &[slots])?;
    check.f32("log_norms", &norms)?;
    let per_head = [batch, kv_heads];
    check.shape("limits", &limits, &per_head)?;
    check.int("limits", &limits)?;
    check.shape("places", places, &per_head)?;
    check.int("places", places)?;
    check.shape("arrivals", arrivals, &[batch, HeldSlots::ARRIVALS])?;
    check.int("arrivals", arrivals)?;
    if let Some(guard) = &options.guard {
        check.shape("positions", &guard.positions, &[slots])?;
        check.int("positions", &guard.positions)?;
        check.shape("now", &guard.now, &[batch])?;
        check.int("now", &guard.now)?;
    }
    if let Some(ties) = &options.ties {
        check.shape("positions", &ties.positions, &[slots])?;
        check.int("positions", &ties.positions)?;
        if !(ties.factor > 1.0 && ties.factor.is_finite()) {
            return Err(check.unsupported("factor", ties.factor, "a number above 1"));
        }
    }
    if let Some(memory) = &memory {
        check.shape("records", memory.records, &[slots])?;
        check.f32("records", memory.records)?;
        check.shape("now", &memory.now, &[batch])?;
        check.int("now", &memory.now)?;
        if !(memory.decay > 0.0 && memory.decay <= 1.0) {
            return Err(check.unsupported("decay", memory.decay, "a number above 0, at most 1"));
        }
    }

    let longest = options.longest.unwrap_or(slots).min(slots);
    let shape = EvictionShape {
        attention: DecodeShape {
            head_dim,
            total_kv_heads: batch * kv_heads,
            longest,
            listed: false,
            weighted: log_weights.is_some(),
        },
        group: query_heads / kv_heads,
        alone: options.guard.is_none() && options.ties.is_none() && !options.importance,
    };
    let strategy = check.chosen(options.strategy, query.dtype(), &shape)?;
    let attention = DecodeConfig {
        scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        features: Features {
            weighted: log_weights.is_some(),
            numerators: false,
            log_sum_exp: true,
            scores: true,
            view: ViewKind::All,
        },
        longest,
        sinks: 0,
        raw: true,
        strategy: strategy.attention(),
    };
    let protected = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let guard = options.guard.as_ref();
    let config = EvictionConfig {
        attention,
        guarded: guard.is_some(),
        sinks: protected(guard.map_or(0, |guard| guard.sinks)),
        recents: protected(guard.map_or(0, |guard| guard.recents)),
        spares_newest: !options.evict_newest,
        growth: memory.as_ref().map_or(0.0, |memory| -memory.decay.ln()),
        levels: options.ties.as_ref().map(|ties| 1.0 / ties.factor.ln()),
        scope: options.scope,
        importance: options.importance,
        strategy,
    };
    let tied = options.ties.map(|ties| ties.positions);
    let (positions, now) = options.guard.map(|guard| (guard.positions, guard.now)).unzip();
    let steps = memory.as_ref().map(|memory| memory.now.clone());
    let records = memory.as_mut().map(|memory| check.take(memory.records));
    let evicted = <Dispatch as EvictingAttentionOps>::evicting_attention(EvictingArgs {
        query: query.into_dispatch(),
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        log_weights: log_weights.into(),
        log_norms: norms.into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        limits: limits.into_dispatch(),
        write_slots: check.take_ints(places).into_dispatch(),
        arrivals: check.take_ints(arrivals).into_dispatch(),
        positions: positions.or(tied).into(),
        now: now.into(),
        records: records.into(),
        steps: steps.into(),
        config,
    });
    *places = Tensor::from_dispatch(evicted.write_slots);
    *arrivals = Tensor::from_dispatch(evicted.arrivals);
    if let (Some(memory), Some(records)) = (memory, evicted.records.into_option()) {
        *memory.records = Tensor::from_dispatch(records);
    }
    Ok(EvictingOutput {
        output: Tensor::from_dispatch(evicted.output),
        log_importance: options.importance.then(|| Tensor::from_dispatch(evicted.importance)),
    })
}

/// Comptime configuration and scalars of a call, as backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EvictionConfig {
    pub(crate) attention: DecodeConfig,
    /// Whether sinks and recents are kept.
    pub(crate) guarded: bool,
    pub(crate) sinks: i32,
    pub(crate) recents: i32,
    pub(crate) spares_newest: bool,
    /// `−ln γ`, where records are compared.
    pub(crate) growth: f32,
    /// `1 / ln f`, where importances within a factor `f` are equal.
    pub(crate) levels: Option<f32>,
    pub(crate) scope: EvictionScope,
    pub(crate) importance: bool,
    pub(crate) strategy: EvictionStrategy,
}
