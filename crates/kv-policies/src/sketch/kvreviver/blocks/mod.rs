//! KVReviver with a vague part in blocks of tokens, in place of the paper's sketch.

mod form;
mod pool;
mod state;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, CacheOptions, LayerAllocation, LayerCache, Room, Selection};
use kv_kernels::{AttendedSlots, DecodeAttentionOptions, GroupReduction, scatter_scalars};
use serde::{Deserialize, Serialize};

use super::NAME;
use super::prompt::{PromptScorer, candidates, exact_tokens, group};
use crate::policy::config::{Config, config_of};
use crate::{
    Capabilities, Composition, EvictionPolicy, LayerContext, Needs, Observation, Plan, Policy,
    PolicyError, Result, StepPlan,
};

use pool::BLOCK;

pub use form::VagueForm;
pub use pool::VaguePool;
pub use state::{VagueHead, VagueTokens};

/// The fewest exact slots: a recent token and a candidate.
const LEAST: usize = 2;

/// What attention over blocks takes of a group of query heads: their number, and their numbers.
const MOST_HEADS: usize = 16;
const MOST_QUERIES: usize = 1_024;

/// The policy that scores prompts by default. Accumulated attention drops needles first where not
/// all tokens find room (docs/results/quality.md).
const SCORER: &str = "snapkv";

/// KVReviver with a vague part in blocks (ours): tokens that leave the exact slots are
/// kept in one of three forms ([`VagueForm`]).
///
/// * *Quantised*: a few bits of each number, which attention reads as they are
///   ([`kv_kernels::quantized_attention`]).
/// * *Archive*: whole tokens in host memory, and on the device a bit for each channel of their
///   keys. At each step the bits choose a few tokens of each head, which attention reads from host
///   memory exactly; the others stand as a mean for each block
///   ([`kv_kernels::archived_attention`]).
/// * *Summary*: the means alone.
///
/// The paper's sketch cannot bring tokens back: at its own settings tens of tokens share each
/// entry. In the bytes of the paper's budget there is room for two or three bits of each number of
/// most tokens: of 128 dimensions a quantised slot takes 19 % of a 16-bit slot, an archived one 5 %
/// of the device's memory.
///
/// A head's budget `B`, in bytes of 16-bit slots of the device's memory, holds `E` exact slots and
/// `V` vague ones of `q` times the bytes: `E + q V ≤ B`. `E` is at least the share `exact` of `B`.
/// All tokens are kept where they find room; else the tokens of the lowest scores are dropped.
/// Exact slots hold the most recent tokens and the tokens of the highest scores. A prompt's scores
/// are SnapKV's, or another policy's, or the attention that tokens have accumulated, as in the
/// paper; every step then adds its attention. While decoding, each 64 exact slots over the limit go
/// into the vague part as a block: the ones of the lowest scores that are not recent. A full vague
/// part gives up its oldest block. Vague tokens have no scores, and do not become exact again.
#[derive(Debug, Clone)]
pub struct BlockReviver {
    options: BlockReviverOptions,
    scorer: PromptScorer,
}

/// The options of KVReviver with a vague part in blocks.
// The flattened `form` refuses unknown options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockReviverOptions {
    /// Slots per key-value head whose bytes, at 16 bits a number, all parts share.
    pub budget: Budget,
    /// How layers share the budget.
    pub layers: LayerAllocation,
    /// The least share of the budget that exact slots have.
    pub exact: f64,
    /// The share of the exact slots that the most recent tokens have.
    pub recent: f64,
    /// The form of vague tokens, and its options.
    #[serde(flatten)]
    pub form: VagueForm,
}

/// The parts of one layer, of each of its head ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parts {
    /// Slots kept exactly.
    limit: usize,
    /// The number of exact slots for the most recent tokens.
    recents: usize,
    /// Vague slots, whole blocks.
    vague: usize,
    /// Exact slots over the limit that leave together.
    over: usize,
    /// How many of a prompt's tokens may take the room in which a block gathers, where the
    /// vague slots have no room for them.
    spare: usize,
}

impl Parts {
    /// The exact slots of a prompt of `tokens` tokens: beside the usual ones, the tokens that whole
    /// blocks of vague slots leave, where there is room for all of them.
    fn exact_of(self, tokens: usize) -> usize {
        let others = tokens.saturating_sub(self.limit);
        let left = others - (others / BLOCK * BLOCK).min(self.vague);
        let fits = others <= self.vague || left <= self.spare;
        tokens.min(self.limit + if fits { left } else { 0 })
    }
}

impl BlockReviverOptions {
    /// The default options of a form.
    pub fn new(budget: Budget, form: VagueForm) -> Self {
        Self {
            budget,
            layers: LayerAllocation::Uniform,
            // At 25 % nearly all tokens of long prompts find room beside it.
            exact: 0.1,
            // As in the paper, where recent tokens and candidates have equal shares.
            recent: 0.5,
            form,
        }
    }

    /// The parts of `budget` slots (`B`) for a prompt of `prompt` tokens, of which they shall hold
    /// `tokens` (`T`) in the end. Tokens have `head_dim` numbers; decode steps add `new_tokens`.
    fn parts(
        &self,
        budget: usize,
        [prompt, tokens]: [usize; 2],
        new_tokens: usize,
        head_dim: usize,
    ) -> Parts {
        // A block gathers in exact slots before it moves. Fewer tokens to come need less room; the
        // room of a whole block also holds the tokens of a prompt that whole blocks leave.
        let gathers = BLOCK.min(new_tokens + 1);
        let [less, whole] = [gathers, BLOCK]
            .map(|gathers| self.parts_beside(gathers, budget, tokens, new_tokens, head_dim));
        let keeps_all = |parts: Parts| parts.exact_of(tokens) + parts.vague >= tokens;
        let left = less.vague > 0 && less.exact_of(prompt) > less.limit.min(prompt);
        if left || (keeps_all(whole) && !keeps_all(less)) { whole } else { less }
    }

    /// The parts where a block gathers in room for `gathers` slots.
    fn parts_beside(
        &self,
        gathers: usize,
        budget: usize,
        tokens: usize,
        new_tokens: usize,
        head_dim: usize,
    ) -> Parts {
        let share = self.form.slot_share(head_dim);
        let parts = |limit: usize, vague: usize, over: usize| {
            let recents = ((limit as f64 * self.recent).round() as usize).clamp(1, limit - 1);
            // In less room than a block's there is room for the tokens to come alone.
            let spare = if vague > 0 && gathers == BLOCK { BLOCK - 1 } else { 0 };
            Parts { limit, recents, vague, over, spare }
        };
        // Without a vague part, tokens that leave are dropped.
        let without = |budget: usize| {
            let over = (budget / 4).clamp(1, BLOCK);
            parts(budget.saturating_sub(over.min(new_tokens + 1)).max(LEAST), 0, over)
        };
        if budget >= tokens {
            let limit = without(budget).limit.max(tokens).max(LEAST);
            return parts(limit, 0, budget.saturating_sub(limit).clamp(1, BLOCK));
        }
        let rest = budget.saturating_sub(gathers);
        let least = ((rest as f64 * self.exact).ceil() as usize).max(LEAST);
        if share >= 1.0 || rest <= least {
            return without(budget);
        }
        // All tokens find room where `V` is at least this: then `E = T - V`, and `E + q V ≤ B`.
        let wanted = (tokens as f64 - rest as f64) / (1.0 - share);
        let all = (wanted.ceil() as usize).next_multiple_of(BLOCK);
        if all + least <= tokens {
            return parts(tokens - all, all, BLOCK);
        }
        let most = ((rest - least) as f64 / share) as usize;
        let vague = most.min(tokens.saturating_sub(least)) / BLOCK * BLOCK;
        if vague == 0 {
            return without(budget);
        }
        parts(rest - (vague as f64 * share).ceil() as usize, vague, BLOCK)
    }
}

impl BlockReviver {
    /// `candidates` scores prompts in place of accumulated attention, as for
    /// [`super::KvReviver::new`]. A configuration without `candidates` takes SnapKV.
    ///
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for shares outside 0 to 1, options of a form outside their
    /// ranges, a budget of fewer than two tokens, and for candidates whose heads choose together.
    pub fn new(
        options: BlockReviverOptions,
        candidates: Option<Arc<dyn EvictionPolicy>>,
    ) -> Result<Self> {
        let invalid = |reason: String| PolicyError::InvalidConfig { policy: NAME.into(), reason };
        options.budget.validate()?;
        for (name, share) in [("exact", options.exact), ("recent", options.recent)] {
            if !(share > 0.0 && share <= 1.0) {
                return Err(invalid(format!("`{name}` is {share}, expected above 0, up to 1")));
            }
        }
        options.form.check().map_err(invalid)?;
        if let Budget::Tokens(budget) = options.budget
            && budget < LEAST
        {
            return Err(invalid(format!("`budget` is {budget}, expected at least {LEAST} tokens")));
        }
        Ok(Self { options, scorer: PromptScorer::new(candidates)? })
    }

    /// The options.
    pub fn options(&self) -> &BlockReviverOptions {
        &self.options
    }

    /// One layer's parts.
    fn parts(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Parts> {
        let LayerContext { index, count } = observation.layer;
        let [.., tokens, head_dim] = observation.dims();
        let layers = &self.options.layers;
        let (budget, all) = match self.options.budget {
            // Budgets in tokens fill up behind short prompts.
            Budget::Tokens(budget) => {
                (layers.spread(count, budget, LEAST, usize::MAX)?[index], tokens + new_tokens)
            }
            budget => {
                let slots = budget.resolve(tokens).max(LEAST);
                (layers.spread(count, slots, LEAST, tokens.max(LEAST))?[index], tokens)
            }
        };
        Ok(self.options.parts(budget, [tokens, all], new_tokens, head_dim))
    }

    /// The policy from its configuration, of which `vague` was taken.
    pub(super) fn from_config(config: &mut Config, form: VagueForm) -> Result<Arc<dyn Policy>> {
        let candidates = candidates(config, Some(SCORER))?;
        let beside = "`budget`, `layers`, `exact`, `recent` or `candidates` with its own";
        config.set_defaults_by("budget", |budget| BlockReviverOptions::new(budget, form));
        let options = config.take_beside::<BlockReviverOptions>(NAME, beside)?;
        Ok(Arc::new(Self::new(options, candidates)?))
    }
}

impl Policy for BlockReviver {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        let mut config = config_of(NAME, &self.options);
        self.scorer.write_into(&mut config);
        config
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.options.budget)
    }

    /// A part of the budget is the vague tokens'.
    fn least_kept(&self, _tokens: usize) -> usize {
        0
    }

    fn composition(&self) -> Composition<'_> {
        self.scorer.composition()
    }

    fn needs(&self) -> Needs {
        self.scorer.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let parts = self.parts(observation, 0)?;
        let scores = self.scorer.scores(observation, parts.limit)?;
        let exact = parts.exact_of(observation.tokens());
        Ok(exact_tokens(observation, exact, [exact, parts.recents], scores)?.into())
    }

    fn init_cache(
        &self,
        _cache: &mut LayerCache,
        _observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        let reason = "its parts need the number of tokens to come, as `prefill` is told".into();
        Err(PolicyError::InvalidConfig { policy: NAME.into(), reason })
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        let parts = self.parts(observation, new_tokens)?;
        let kept = parts.exact_of(observation.tokens());
        Ok(Room::Total((parts.limit + parts.over).min(kept + new_tokens + 1)))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, combines: false, ..Capabilities::default() }
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.prepare_leaving();
        Ok(cache.restore_state::<VagueTokens>()?)
    }

    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        // A step that moves a block into the vague part launches other kernels.
        let moves = VagueTokens::of(cache)?.is_due(cache, 1);
        Ok(StepPlan::attend_with(move |cache, query, step| {
            let options =
                DecodeAttentionOptions { logits: true, log_sum_exp: true, ..Default::default() };
            let attention = cache.attend(query.clone(), options)?;
            let missing = |what| PolicyError::MissingObservation { policy: NAME, what };
            let before = AttendedSlots {
                output: attention.output,
                log_sum_exp: attention.log_sum_exp.ok_or_else(|| missing("log-sum-exp"))?,
            };
            let logits = attention.logits.ok_or_else(|| missing("logits"))?;
            let AttendedSlots { output, log_sum_exp } =
                VagueTokens::of(cache)?.attend(query, before)?;
            cache.add_probabilities(
                VagueTokens::SCORES,
                logits,
                log_sum_exp,
                GroupReduction::Sum,
            )?;
            if moves {
                VagueTokens::take_weakest(cache, &step.position)?;
            }
            Ok(output)
        })
        .of_kind(u32::from(moves)))
    }

    fn prefill(
        &self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        if observation.prompt_tokens != tokens {
            let reason = format!(
                "{tokens} of {} prompt tokens reach this layer, expected all of them",
                observation.prompt_tokens
            );
            return Err(PolicyError::InvalidConfig { policy: NAME.into(), reason });
        }
        let group = group(observation);
        if group > MOST_HEADS || group * head_dim > MOST_QUERIES {
            let reason = format!(
                "{group} query heads of {head_dim} numbers share a key-value head, expected at most \
                 {MOST_HEADS} of {MOST_QUERIES} numbers together"
            );
            return Err(PolicyError::InvalidConfig { policy: NAME.into(), reason });
        }
        let parts = self.parts(observation, new_tokens)?;
        let scores = self.scorer.scores(observation, parts.limit)?;
        let exact = parts.exact_of(tokens);
        let selection = exact_tokens(observation, exact, [exact, parts.recents], scores.clone())?;
        let (keys, values) = (observation.keys, observation.values);
        let room = self.room(observation, new_tokens)?;
        let (device, dtype) = (options.device.clone(), options.dtype);
        let mut cache = LayerCache::from_prefill(
            keys,
            values,
            observation.positions,
            &selection,
            room,
            options,
        )?;
        let head = VagueHead {
            blocks: parts.vague / BLOCK,
            limit: parts.limit,
            recents: parts.recents,
            over: parts.over,
        };
        cache.set_limits(vec![head.limit; batch * kv_heads])?;
        let mut state = VagueTokens::new(
            vec![head; batch * kv_heads],
            kv_heads,
            selection.lengths(),
            head_dim,
            self.options.form,
            (dtype, &device),
        )?;
        state.fill(keys, values, &vague_tokens(scores.clone(), &selection, parts.vague)?)?;
        cache.insert_policy_state(state);
        cache.prepare_leaving();
        cache.set_kept_track(VagueTokens::SCORES, scores.flatten(0, 1), &selection, 0.0)?;
        Ok(cache)
    }
}

/// The tokens of a prompt that go into the vague part: the tokens of the highest scores that are
/// not exact, whole blocks of them.
fn vague_tokens(scores: Tensor<3>, exact: &Selection, vague: usize) -> Result<Selection> {
    let [batch, kv_heads, tokens] = scores.dims();
    let lengths = vec![tokens; batch * kv_heads];
    let others = exact.others(&lengths)?;
    let left = others.lengths().iter().min().copied().unwrap_or_default();
    let count = vague.min(left) / BLOCK * BLOCK;
    if count == 0 {
        return Ok(Selection::all(batch * kv_heads, 0));
    }
    // Exact tokens go last.
    let device = scores.device();
    let firsts: Vec<usize> = (0..batch * kv_heads).map(|range| range * tokens).collect();
    let slots = exact.lists(&firsts, &device)?.slots.flatten::<1>(0, 1);
    let mut flat = scores.reshape([batch * kv_heads * tokens]).mul_scalar(1.0);
    let lowest = Tensor::full(slots.dims(), f32::MIN, (&device, DType::F32));
    scatter_scalars(&mut flat, slots, lowest)?;
    Ok(Selection::highest(flat.reshape([batch, kv_heads, tokens]), count)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots that a prompt's parts take of 16-bit slots, room included, fit the budget, and all
    /// tokens are kept where they find room.
    #[test]
    fn parts_take_no_more_than_the_budget() {
        let options = BlockReviverOptions::new(Budget::Ratio(0.25), VagueForm::QUANTIZED);
        for new_tokens in [10, 57, 200] {
            let parts = options.parts(512, [2_048; 2], new_tokens, 64);
            assert_eq!(parts.exact_of(2_048) + parts.vague, 2_048, "{parts:?}");
        }
        let quantized =
            |[key_bits, value_bits]: [usize; 2]| VagueForm::Quantized { key_bits, value_bits };
        let forms = [
            (64, quantized([3, 2])),
            (128, quantized([2, 2])),
            (16, quantized([8, 8])),
            (2, quantized([8, 8])),
            (64, VagueForm::ARCHIVE),
            (128, VagueForm::ARCHIVE),
            (2, VagueForm::ARCHIVE),
            (64, VagueForm::SUMMARY),
        ];
        for (head_dim, form) in forms {
            for exact in [0.1, 0.5, 1.0] {
                let options = BlockReviverOptions {
                    exact,
                    ..BlockReviverOptions::new(Budget::Ratio(0.25), form)
                };
                let share = form.slot_share(head_dim);
                for prompt in (3..3_000).step_by(7) {
                    for budget in [2, 5, prompt / 10, prompt / 4, prompt / 2, prompt - 1] {
                        for new_tokens in [0, 6, 63, 64, 500] {
                            let budget = budget.max(LEAST);
                            for tokens in [prompt, prompt + new_tokens] {
                                let parts =
                                    options.parts(budget, [prompt, tokens], new_tokens, head_dim);
                                let context = format!(
                                    "{head_dim} {form:?} {exact}: {budget} of {prompt} and \
                                     {tokens}, {new_tokens} more: {parts:?}"
                                );
                                check(parts, budget, [prompt, tokens], new_tokens, share, &context);
                            }
                        }
                    }
                }
            }
        }
    }

    fn check(
        parts: Parts,
        budget: usize,
        [prompt, tokens]: [usize; 2],
        new_tokens: usize,
        share: f64,
        context: &str,
    ) {
        let Parts { limit, recents, vague, over, .. } = parts;
        let kept = parts.exact_of(prompt);
        let room = (limit + over).min(kept + new_tokens + 1).max(kept);
        let taken = room as f64 + share * vague as f64;
        assert!(limit >= LEAST && (1..limit).contains(&recents), "{context}");
        assert!((1..=BLOCK).contains(&over), "{context}");
        assert!(vague == 0 || over == BLOCK, "{context}");
        assert!(vague.is_multiple_of(BLOCK), "{context}");
        // A slot is appended before one goes: of the least slots, and of a prompt that is kept
        // whole.
        let whole = if budget >= tokens { tokens.max(LEAST) } else { LEAST };
        assert!(taken <= budget.max(whole + 1) as f64, "{context}: {kept} kept, {taken} taken");
        if vague > 0 && tokens == prompt && kept + vague >= tokens {
            assert_eq!(kept + vague.min(tokens - kept), tokens, "{context}");
        }
    }
}
