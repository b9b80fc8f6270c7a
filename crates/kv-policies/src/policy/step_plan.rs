//! The parts of one decode step of a layer, told before it runs.

use std::fmt;
use std::sync::PoisonError;

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, read_i32};
use kv_kernels::{
    AttentionOutput, DecodeAttentionOptions, EvictionOptions, EvictionScope, GroupReduction, Guard,
    Ties,
};

use super::config::invalid;
use super::error::{PolicyError, Result};
use super::observation::LayerContext;
use super::step::Step;
use super::write_slots::WriteSlots;

/// One decode step of a layer, in the order in which it runs:
///
/// 1. The new token goes to its slot ([`TokenSlot`]).
/// 2. An eviction that needs no attention drops slots.
/// 3. The token's query attends ([`StepAttention`]).
/// 4. What the attention gave each slot is noted ([`StepUpdate`]).
/// 5. An eviction by scores of the attention chooses slots ([`EvictionRule`]).
/// 6. They are merged into slots that stay ([`Merge`]), and dropped.
/// 7. Positions are renumbered.
///
/// A policy plans ([`crate::Policy::plan`]); [`Self::run`] carries the plan out. A policy around
/// another takes the other's plan and adds its merge ([`Self::merging`]).
///
/// After an attention of the policy's own, or one that chooses a victim, there can be no update, no
/// eviction and no merge: a plan with one of these is refused. So is a merge in a step whose token
/// overwrites a slot.
#[must_use = "a plan does nothing before it runs"]
pub struct StepPlan<'a> {
    /// The layer's number among layers that read each other's lists ([`Step::board`]). A layer
    /// before its turn is refused before anything changes. `None` for a layer by itself.
    pub turn: Option<usize>,
    /// Where the new token goes.
    pub slot: TokenSlot,
    /// The slots that its query attends to.
    pub attention: StepAttention<'a>,
    /// The update of tracks by the attention.
    pub update: Option<StepUpdate<'a>>,
    /// The slots that are dropped, and when.
    pub eviction: Option<EvictionRule<'a>>,
    /// The merge of slots before they are dropped. An eviction that needs no attention then still
    /// chooses before it, but the query attends to its victims.
    pub merge: Option<&'a dyn Merge>,
    /// Whether the step ends with positions without gaps, and keys rotated to them
    /// ([`LayerCache::rerotate`]).
    pub renumbers: bool,
    /// Whether the step can be recorded and replayed, as a CUDA graph is: it launches the kernels
    /// that every other recordable step of its policy and [`Self::kind`] launches. It neither waits
    /// for the device nor allocates a tensor of the cache.
    pub recordable: bool,
    /// Which of its policy's steps this is, where some launch other kernels than others; usually 0.
    pub kind: u32,
}

/// Where a step's token goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenSlot {
    /// Behind the live slots ([`LayerCache::append`]).
    Append,
    /// Over the slot that the step before has chosen ([`WriteSlots::write`]).
    Overwrite,
}

/// What a step's query attends to.
pub enum StepAttention<'a> {
    /// All live slots.
    Live {
        /// Whether an update of the policy's own or the eviction looks at probabilities, `[S, G]`.
        probabilities: bool,
        /// Whether they look at logits `[S, G]` and log-sum-exp `[B, Hq]`. Updates that add
        /// probabilities or contributions have these without being asked for here.
        logits: bool,
    },
    /// All live slots, in a launch that chooses the slot of the next token too
    /// ([`WriteSlots::attend_and_choose_victim`]).
    ChooseVictim(VictimChoice),
    /// An attention of the policy's own, from the query `[B, Hq, D]` after RoPE to the output
    /// `[B, Hq, D]`.
    Own(OwnAttention<'a>),
}

/// How the launch that attends chooses the slot that the next token overwrites.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct VictimChoice {
    /// Which heads give up a slot together.
    pub scope: EvictionScope,
    /// First and last tokens that no step overwrites.
    pub protected: [usize; 2],
    /// Whether the token just written may be overwritten next, where no last token is protected.
    pub evict_newest: bool,
    /// `γ`, where slots are compared by the largest importance that they have had, decayed by `γ` a
    /// step ([`kv_kernels::Memory`]).
    pub memory: Option<f32>,
    /// The factor within which importances are equal, where the oldest of equal slots goes
    /// ([`kv_kernels::Ties`]).
    pub ties: Option<f32>,
}

/// An attention of a policy's own.
pub type OwnAttention<'a> =
    Box<dyn FnOnce(&mut LayerCache, Tensor<3>, &Step) -> Result<Tensor<3>> + 'a>;

/// The update of tracks by a step's attention.
pub enum StepUpdate<'a> {
    /// A group's probabilities are added to a track.
    AddProbabilities {
        /// The track.
        sums: &'static str,
        /// How a group's probabilities become one number.
        reduction: GroupReduction,
    },
    /// A group's probabilities times `‖v‖₁` of the slot's value are added to a track.
    AddContributions {
        /// The track.
        sums: &'static str,
        /// The track of `‖v‖₁`.
        norms: &'static str,
        /// How a group's probabilities become one number.
        reduction: GroupReduction,
    },
    /// An update of the policy's own.
    Own(OwnUpdate<'a>),
}

/// An update of a policy's own, given the cache, the step, and the step's query and attention.
pub type OwnUpdate<'a> = Box<dyn FnOnce(&mut LayerCache, &Step, &StepOutput) -> Result<()> + 'a>;

/// The query and the attention of a step.
#[derive(Debug)]
pub struct StepOutput {
    /// The new tokens' queries after RoPE, `[B, Hq, D]`.
    pub query: Tensor<3>,
    /// The attention's output, with the probabilities or logits that the plan asks for.
    pub attention: AttentionOutput,
}

/// Which slots go once a head is `interval` over its limit.
pub struct EvictionRule<'a> {
    /// Whether the scores need no attention, so that the step attends only to slots that stay.
    pub before_attention: bool,
    /// Slots over a head's limit at which it evicts.
    pub interval: usize,
    /// Whether the slots that stay keep their order. If not, the last slot moves into the gap of a
    /// single one.
    pub keeps_order: bool,
    /// The first and last tokens that a head always keeps, by its number of slots.
    pub protected: Box<dyn Fn(usize) -> Result<[usize; 2]> + 'a>,
    /// Scores of all slots, `[S]`, f32: the lowest go. Values of slots beyond a head's length are
    /// ignored.
    pub scores: SlotScores<'a>,
}

/// Scores of all slots, `[S]`, in a decode step.
pub type SlotScores<'a> = Box<dyn Fn(&DecodeView<'_>) -> Result<Tensor<1>> + 'a>;

/// The inputs of a decode step's scores.
#[derive(Debug)]
pub struct DecodeView<'a> {
    /// The layer.
    pub layer: LayerContext,
    /// The slots as they are before this step's eviction, the new token's included.
    pub cache: &'a LayerCache,
    /// The step.
    pub step: &'a Step,
    /// The new tokens' queries after RoPE, `[B, Hq, D]`.
    pub query: &'a Tensor<3>,
    /// This step's attention; `None` before it.
    pub attention: Option<&'a AttentionOutput>,
}

/// The merge of slots that another policy's plan evicts, before they are dropped.
pub trait Merge {
    /// Merges victims into slots that stay, and updates the tracks that later merges need. Runs in
    /// every step, even without victims. Returns the slots to drop: `attended.due`, or these
    /// victims in another form.
    ///
    /// # Errors
    /// The errors of [`crate::Policy::step`].
    fn merge(&self, cache: &mut LayerCache, attended: Attended<'_>) -> Result<Option<Eviction>>;
}

/// The parts of a step that a merge is shown.
#[derive(Debug)]
pub struct Attended<'a> {
    /// The layer.
    pub layer: LayerContext,
    /// The step.
    pub step: &'a Step,
    /// The new tokens' queries after RoPE, `[B, Hq, D]`.
    pub query: Tensor<3>,
    /// Every slot's logit with its log-weight, `[S, G]`, f32.
    pub logits: Tensor<2>,
    /// `[B, Hq]`, f32.
    pub log_sum_exp: Tensor<2>,
    /// The victims; `None` while all heads are within their limits.
    pub due: Option<Eviction>,
}

/// Slots that a step drops.
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one a step")]
#[derive(Debug)]
pub enum Eviction {
    /// One slot of each head over its limit.
    One {
        /// `[B, Hkv]`
        victims: Tensor<2, Int>,
        /// `[B * Hkv]`
        limits: Vec<usize>,
    },
    /// All slots but the ones of the highest scores.
    KeepTop {
        /// `[S]`, f32.
        scores: Tensor<1>,
        /// How many stay of each head, `[B * Hkv]`.
        counts: Vec<usize>,
    },
    /// All slots except this selection, which stays in its order.
    Keep(Selection),
}

impl StepPlan<'_> {
    /// Appends the token and attends to all live slots, as any number of steps may in a recording.
    pub fn append() -> Self {
        Self {
            turn: None,
            slot: TokenSlot::Append,
            attention: StepAttention::Live { probabilities: false, logits: false },
            update: None,
            eviction: None,
            merge: None,
            renumbers: false,
            recordable: true,
            kind: 0,
        }
    }
}

impl<'a> StepPlan<'a> {
    /// Appends the token and attends in a policy's own way.
    pub fn attend_with(
        attend: impl FnOnce(&mut LayerCache, Tensor<3>, &Step) -> Result<Tensor<3>> + 'a,
    ) -> Self {
        Self { attention: StepAttention::Own(Box::new(attend)), ..StepPlan::append() }
    }

    /// The plan with a merge of its victims.
    pub fn merging(self, merge: &'a dyn Merge) -> Self {
        Self { merge: Some(merge), ..self }
    }

    /// The plan of a step that launches the kernels of its kind.
    pub fn of_kind(self, kind: u32) -> Self {
        Self { kind, ..self }
    }

    /// The plan, recordable or not.
    pub fn recordable(self, recordable: bool) -> Self {
        Self { recordable, ..self }
    }

    /// Runs the step; returns the attention's output, `[B, Hq, D]`.
    ///
    /// # Errors
    /// [`PolicyError`]; a full cache is one.
    pub fn run(
        self,
        layer: LayerContext,
        cache: &mut LayerCache,
        step: &Step,
    ) -> Result<Tensor<3>> {
        self.check()?;
        if let Some(layer) = self.turn {
            let board = step.board.lock().unwrap_or_else(PoisonError::into_inner);
            board.check_layer_order(layer)?;
        }
        let query = self.slot.write(cache, step)?;
        self.attend(layer, cache, query, step)
    }

    /// Refuses a plan with parts that the step would not run.
    fn check(&self) -> Result<()> {
        let live = matches!(self.attention, StepAttention::Live { .. });
        if self.merge.is_some() && !(live && self.slot == TokenSlot::Append) {
            let reason = "its steps do not attend to all live slots behind an append";
            return Err(invalid("evictor", reason.into()));
        }
        let behind = self.eviction.as_ref().is_some_and(|rule| !rule.before_attention);
        if !live && (behind || self.update.is_some()) {
            let reason = "its plan has an update or an eviction behind an attention that leaves \
                          neither probabilities nor logits";
            return Err(invalid("decode step", reason.into()));
        }
        Ok(())
    }

    /// Runs what follows the token's write, given its query `[B, Hq, D]` after RoPE.
    ///
    /// # Errors
    /// The errors of [`Self::run`].
    pub fn attend(
        self,
        layer: LayerContext,
        cache: &mut LayerCache,
        query: Tensor<3>,
        step: &Step,
    ) -> Result<Tensor<3>> {
        self.check()?;
        let renumbers = self.renumbers;
        let output = self.attend_and_evict(layer, cache, query, step)?;
        if renumbers {
            cache.rerotate(&step.inverse_frequencies)?;
        }
        Ok(output)
    }

    fn attend_and_evict(
        self,
        layer: LayerContext,
        cache: &mut LayerCache,
        query: Tensor<3>,
        step: &Step,
    ) -> Result<Tensor<3>> {
        let Self { attention, update, eviction, merge, .. } = self;
        if let (Some(_), Some(StepUpdate::AddContributions { norms, .. })) = (merge, &update) {
            // Merges of earlier steps may have changed values.
            cache.set_value_norms(norms)?;
        }
        let (before, behind) = match eviction {
            Some(rule) if rule.before_attention => (Some(rule), None),
            rule => (None, rule),
        };
        let mut due = match before {
            Some(rule) => {
                rule.due(&DecodeView { layer, cache, step, query: &query, attention: None })?
            }
            None => None,
        };
        if merge.is_none()
            && let Some(due) = due.take()
        {
            due.apply_to(cache)?;
        }
        let (probabilities, logits) = match attention {
            StepAttention::Own(attend) => return attend(cache, query, step),
            StepAttention::ChooseVictim(choice) => {
                let position = &step.position;
                let chosen = WriteSlots::attend_and_choose_victim(cache, query, position, choice)?;
                return Ok(chosen.output);
            }
            StepAttention::Live { probabilities, logits } => {
                let updates = update.as_ref().is_some_and(StepUpdate::takes_logits);
                (probabilities, logits || updates || merge.is_some())
            }
        };
        let attention = attend_live(cache, &query, probabilities, logits)?;
        let output = StepOutput { query, attention };
        if let Some(update) = update {
            update.apply_to(cache, step, &output)?;
        }
        if let Some(rule) = behind {
            due = rule.due(&output.view(layer, cache, step))?;
        }
        let StepOutput { query, attention } = output;
        if let Some(merge) = merge {
            let (logits, log_sum_exp) = logits_of(&attention)?;
            let attended = Attended { layer, step, query, logits, log_sum_exp, due };
            due = merge.merge(cache, attended)?;
        }
        if let Some(due) = due {
            due.apply_to(cache)?;
        }
        Ok(attention.output)
    }
}

impl fmt::Debug for StepPlan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attention = match &self.attention {
            StepAttention::Live { .. } => "all live slots",
            StepAttention::ChooseVictim(_) => "all live slots, choosing a victim",
            StepAttention::Own(_) => "the policy's own",
        };
        f.debug_struct("StepPlan")
            .field("slot", &self.slot)
            .field("attention", &attention)
            .field("updates", &self.update.is_some())
            .field("evicts", &self.eviction.is_some())
            .field("merges", &self.merge.is_some())
            .field("renumbers", &self.renumbers)
            .field("recordable", &self.recordable)
            .field("kind", &self.kind)
            .finish()
    }
}

impl VictimChoice {
    /// The kernel's options for a step whose tokens have these positions, `[B]`.
    pub(crate) fn options(self, cache: &LayerCache, position: &Tensor<1, Int>) -> EvictionOptions {
        let Self { scope, protected: [sinks, recents], evict_newest, ties, .. } = self;
        let guard = (sinks > 0 || recents > 0).then(|| Guard {
            positions: cache.positions().clone(),
            now: position.clone(),
            sinks,
            recents,
        });
        let positions = || cache.positions().clone();
        let ties = ties.map(|factor| Ties { positions: positions(), factor });
        EvictionOptions { scope, evict_newest, guard, ties, ..EvictionOptions::default() }
    }
}

impl TokenSlot {
    fn write(self, cache: &mut LayerCache, step: &Step) -> Result<Tensor<3>> {
        match self {
            Self::Append => step.append(cache),
            Self::Overwrite => step.overwrite(cache),
        }
    }
}

impl StepUpdate<'_> {
    fn takes_logits(&self) -> bool {
        matches!(self, Self::AddProbabilities { .. } | Self::AddContributions { .. })
    }

    fn apply_to(self, cache: &mut LayerCache, step: &Step, output: &StepOutput) -> Result<()> {
        match self {
            Self::AddProbabilities { sums, reduction } => {
                let (logits, log_sum_exp) = output.logits()?;
                Ok(cache.add_probabilities(sums, logits, log_sum_exp, reduction)?)
            }
            Self::AddContributions { sums, norms, reduction } => {
                let (logits, log_sum_exp) = output.logits()?;
                Ok(cache.add_contributions([sums, norms], logits, log_sum_exp, reduction)?)
            }
            Self::Own(update) => update(cache, step, output),
        }
    }
}

impl StepOutput {
    /// The logits `[S, G]` and log-sum-exp `[B, Hq]` of a plan that asks for them.
    pub(crate) fn logits(&self) -> Result<(Tensor<2>, Tensor<2>)> {
        logits_of(&self.attention)
    }

    pub(crate) fn view<'a>(
        &'a self,
        layer: LayerContext,
        cache: &'a LayerCache,
        step: &'a Step,
    ) -> DecodeView<'a> {
        DecodeView { layer, cache, step, query: &self.query, attention: Some(&self.attention) }
    }
}

impl DecodeView<'_> {
    /// This step's attention probabilities, `[S, G]`.
    ///
    /// # Errors
    /// [`PolicyError::MissingObservation`] for plans that did not ask for them.
    pub fn probabilities(&self) -> Result<&Tensor<2>> {
        self.attention
            .and_then(|attention| attention.probabilities.as_ref())
            .ok_or_else(|| missing("attention probabilities"))
    }

    /// This step's logits `[S, G]` and log-sum-exp `[B, Hq]`.
    ///
    /// # Errors
    /// The errors of [`Self::probabilities`].
    pub fn logits(&self) -> Result<(Tensor<2>, Tensor<2>)> {
        logits_of(self.attention.ok_or_else(|| missing("attention"))?)
    }

    /// The track of accumulated scores of this name, `[S]`.
    ///
    /// # Errors
    /// [`PolicyError::MissingObservation`] for a cache that another policy has filled.
    pub fn track(&self, name: &str) -> Result<Tensor<1>> {
        self.cache.track(name).cloned().ok_or_else(|| missing("accumulated scores"))
    }
}

impl EvictionRule<'_> {
    /// Whether every step of a full cache evicts one slot of each head, so that all steps launch
    /// the same kernels.
    pub fn is_steady(&self, cache: &LayerCache) -> bool {
        self.interval == 1 && !self.keeps_order && cache.at_limits()
    }

    /// Whether some head evicts once it holds `more` slots more.
    pub fn is_due(&self, cache: &LayerCache, more: usize) -> bool {
        self.due_heads(cache, more).any(|due| due)
    }

    fn due_heads(&self, cache: &LayerCache, more: usize) -> impl Iterator<Item = bool> {
        let heads = cache.layout().lengths().iter().zip(cache.limits().unwrap_or_default());
        heads.map(move |(&length, &limit)| length + more >= limit.saturating_add(self.interval))
    }

    /// The slots to evict, if some head is `interval` slots over its limit.
    ///
    /// # Errors
    /// The errors of its scores, and [`PolicyError`] where a head's limit is below the number of
    /// protected tokens.
    pub fn due(&self, view: &DecodeView<'_>) -> Result<Option<Eviction>> {
        let DecodeView { cache, step, .. } = view;
        let Some(limits) = cache.limits() else { return Ok(None) };
        if !self.is_due(cache, 0) {
            return Ok(None);
        }
        let protected = limits.iter().map(|&limit| (self.protected)(limit));
        let protected = protected.collect::<Result<Vec<_>>>()?;
        let scores = (self.scores)(view)?;
        if self.interval == 1 && !self.keeps_order {
            let alike = protected.first().filter(|first| protected.iter().all(|own| own == *first));
            let victims = match alike {
                Some(&ends) => cache.lowest_unprotected(scores, &step.position, ends)?,
                None => cache.lowest_slots(protect(cache, scores, &step.position, &protected))?,
            };
            return Ok(Some(Eviction::One { victims, limits: limits.to_vec() }));
        }
        // Many slots go at once, or the scores depend on the slots' order, which must stay.
        let scores = protect(cache, scores, &step.position, &protected);
        let heads = self.due_heads(cache, 0).zip(limits).zip(cache.layout().lengths());
        let counts = heads.map(|((due, &limit), &length)| if due { limit } else { length });
        Ok(Some(Eviction::KeepTop { scores, counts: counts.collect() }))
    }
}

impl Eviction {
    /// The slots that stay. Waits for the device where single victims go.
    ///
    /// # Errors
    /// [`PolicyError`] where the device cannot be read.
    pub fn kept(self, cache: &LayerCache) -> Result<Selection> {
        match self {
            Self::One { victims, limits } => {
                let victims = read_i32("victims", victims)?;
                let layout = cache.layout();
                let kept =
                    victims.iter().zip(&limits).enumerate().map(|(range, (&victim, &limit))| {
                        let live = layout.live(range);
                        let all = 0..live.len() as u32;
                        let goes = |at: &u32| {
                            live.len() > limit && live.start + *at as usize == victim as usize
                        };
                        all.filter(|at| !goes(at)).collect()
                    });
                Ok(Selection::new(kept.collect())?)
            }
            Self::KeepTop { scores, counts } => Ok(cache.highest(scores, &counts)?),
            Self::Keep(kept) => Ok(kept),
        }
    }

    /// Drops the victims.
    fn apply_to(self, cache: &mut LayerCache) -> Result<()> {
        match self {
            Self::One { victims, limits } => cache.evict_slots(victims, &limits)?,
            many => {
                let kept = many.kept(cache)?;
                cache.retain(&kept)?;
            }
        }
        Ok(())
    }
}

/// Attention to all live slots. Where the plan asks for logits, probabilities are computed from
/// them: the kernel writes one or the other.
fn attend_live(
    cache: &LayerCache,
    query: &Tensor<3>,
    probabilities: bool,
    logits: bool,
) -> Result<AttentionOutput> {
    let options = DecodeAttentionOptions {
        probabilities: probabilities && !logits,
        logits,
        log_sum_exp: logits,
        ..Default::default()
    };
    let mut attention = cache.attend(query.clone(), options)?;
    if probabilities && logits {
        let (logits, log_sum_exp) = logits_of(&attention)?;
        // Each slot takes the log-sum-exps of its head range.
        let own = log_sum_exp.reshape([cache.layout().head_ranges(), logits.dims()[1]]);
        let own = own.select(0, cache.slot_ranges().clone());
        attention.probabilities = Some((logits - own).exp());
    }
    Ok(attention)
}

/// Logits and log-sum-exp of an attention that was asked for them.
fn logits_of(attention: &AttentionOutput) -> Result<(Tensor<2>, Tensor<2>)> {
    let logits = attention.logits.clone().ok_or_else(|| missing("logits"))?;
    Ok((logits, attention.log_sum_exp.clone().ok_or_else(|| missing("log-sum-exp"))?))
}

fn missing(what: &'static str) -> PolicyError {
    PolicyError::MissingObservation { policy: "decode step", what }
}

/// Raises the scores of each head's first and last tokens beyond all others.
fn protect(
    cache: &LayerCache,
    mut scores: Tensor<1>,
    position: &Tensor<1, Int>,
    protected: &[[usize; 2]],
) -> Tensor<1> {
    let (rows, heads) = (cache.layout().batch(), cache.layout().kv_heads());
    let device = &cache.options().device;
    let of_slots = |per_head: Tensor<1, Int>| per_head.select(0, cache.slot_ranges().clone());
    let upload = |end: usize| {
        let counts = protected.iter().map(|ends| i32::try_from(ends[end]).unwrap_or(i32::MAX));
        let counts: Vec<i32> = counts.collect();
        Tensor::<1, Int>::from_data(counts.as_slice(), (device, DType::I32))
    };
    if protected.iter().any(|[sinks, _]| *sinks > 0) {
        let first = cache.positions().clone().lower(of_slots(upload(0)));
        scores = scores.mask_fill(first, f32::INFINITY);
    }
    if protected.iter().any(|[_, recents]| *recents > 0) {
        // The oldest protected position of each slot's head range.
        let now = position.clone().cast(DType::I32).unsqueeze_dim::<2>(1);
        let now = now.expand([rows, heads]).reshape([rows * heads]);
        let oldest = of_slots((now - upload(1)).add_scalar(1));
        let recent = cache.positions().clone().greater_equal(oldest);
        scores = scores.mask_fill(recent, f32::INFINITY);
    }
    scores
}
