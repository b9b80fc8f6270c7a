//! A job within a batch.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use kv_core::read_f32;
use kv_kernels::{DrawState, Reading, draw};
use serde::{Deserialize, Serialize};

use super::job::{Ended, Held, JobError, JobId, LogitsShaper, TokenLogprobs, Update};
use crate::generate::Running;
use crate::{Finish, Model, ModelError, Request, Sampling};

/// The callback of a job: takes an update, and returns whether anybody still listens.
pub(super) type Updates = Box<dyn FnMut(Update) -> bool + Send>;

/// An error, and what failed by it. Boxed, as results without an error are far more frequent.
pub(super) type Failed<T> = Box<(JobError, T)>;

/// A job that decodes.
pub(super) struct Row {
    pub(super) id: JobId,
    pub(super) policy: serde_json::Value,
    pub(super) prompt_tokens: usize,
    pub(super) began: Instant,
    running: Running,
    updates: Updates,
    logprobs: Option<usize>,
    /// Tokens of a row with log-probabilities that have not been told, since a stop string may
    /// begin within their text.
    withheld: VecDeque<Withheld>,
    host: Option<HostDraws>,
    /// Whether the next draw belongs to no job.
    pub(super) skips: bool,
}

/// A token that is told once its text has been shown.
struct Withheld {
    /// Bytes of text that have been shown then; `None` for a token that a stop string took.
    end: Option<usize>,
    token: u32,
    logprobs: TokenLogprobs,
}

/// Draws whose logits the host changes before.
struct HostDraws {
    shaper: Option<Box<dyn LogitsShaper>>,
    repetition: Option<Repetition>,
    state: DrawState,
}

/// The repetition penalty, as in [`crate::Sampling::repetition_penalty`].
struct Repetition {
    factor: f32,
    seen: BTreeSet<u32>,
}

/// What a row decided for its next step.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Decision {
    /// It goes on with the token that the device drew.
    Drawn,
    /// It goes on with another token.
    Replaced(u32),
    /// It has ended, and has been told so where it failed.
    Ended,
}

impl Row {
    pub(super) fn new(
        model: &Model,
        id: JobId,
        request: &Request,
        policy: serde_json::Value,
        prompt_tokens: usize,
        updates: Updates,
    ) -> Self {
        let (running, began) = (Running::new(model, request), Instant::now());
        let (logprobs, host, skips, withheld) = (None, None, false, VecDeque::new());
        Self { id, policy, prompt_tokens, began, running, updates, logprobs, withheld, host, skips }
    }

    /// Reports log-probabilities, and lets the host change logits. `history` has the tokens that a
    /// repetition penalty counts.
    pub(super) fn shape_by(
        &mut self,
        logprobs: Option<usize>,
        shaper: Option<Box<dyn LogitsShaper>>,
        sampling: Sampling,
        history: &[u32],
        device: &Device,
    ) -> Result<(), JobError> {
        self.logprobs = logprobs;
        let factor = sampling.repetition_penalty as f32;
        let seen = || history.iter().copied().collect();
        let repetition = (factor != 1.0).then(|| Repetition { factor, seen: seen() });
        if shaper.is_some() || repetition.is_some() {
            let settings = [sampling.settings()?];
            let state = DrawState::new(&settings, &[0], device).map_err(ModelError::from)?;
            self.host = Some(HostDraws { shaper, repetition, state });
        }
        Ok(())
    }

    /// Whether the job goes on no more.
    pub(super) fn has_ended(&self) -> bool {
        self.running.finish.is_some()
    }

    /// The settings of the device's draws, without the repetition penalty, which the host applies.
    pub(super) fn device_sampling(sampling: Sampling) -> Sampling {
        Sampling { repetition_penalty: 1.0, ..sampling }
    }

    /// Whether the host looks at logits behind every step.
    pub(super) fn needs_logits(&self) -> bool {
        self.logprobs.is_some() || self.host.is_some()
    }

    /// New tokens so far.
    pub(super) fn new_tokens(&self) -> usize {
        self.running.tokens.len()
    }

    /// Tells the job something; returns whether anybody still listens.
    pub(super) fn tell(&mut self, update: Update) -> bool {
        (self.updates)(update)
    }

    /// Takes the token that the device drew, −1 as `None`. `logits`, `[1, vocabulary]`, are read
    /// where the row needs them; `has_position` says whether the model has a position for another
    /// token.
    pub(super) fn take(
        &mut self,
        model: &Model,
        drawn: Option<u32>,
        logits: impl FnOnce() -> Tensor<2>,
        has_position: bool,
    ) -> Decision {
        match self.try_take(model, drawn, logits, has_position) {
            Ok(decision) => decision,
            Err(error) => {
                self.tell(Update::Failed(error));
                Decision::Ended
            }
        }
    }

    fn try_take(
        &mut self,
        model: &Model,
        drawn: Option<u32>,
        logits: impl FnOnce() -> Tensor<2>,
        has_position: bool,
    ) -> Result<Decision, JobError> {
        let step = self.new_tokens();
        let drawn = drawn.ok_or(ModelError::NonFinite { step })?;
        let (token, logprobs, complete) = if self.needs_logits() {
            let device = model.llama().device();
            let logits = read_f32("logits", logits()).map_err(ModelError::from)?;
            let (token, complete) = match &mut self.host {
                Some(host) => host.draw(logits.clone(), &device, step)?,
                None => (drawn, false),
            };
            (token, self.logprobs.map(|top| logprobs_of(&logits, token, top)), complete)
        } else {
            (drawn, None, false)
        };
        let event = self.running.take(model, 0, token)?;
        if complete {
            self.running.finish.get_or_insert(Finish::Stop);
        }
        if !has_position {
            self.running.finish.get_or_insert(Finish::Length);
        }
        if let Some(event) = event {
            let text = event.text.unwrap_or_default();
            let listens = match logprobs {
                None => self.tell(Update::Token { token: event.token, text, logprobs }),
                Some(logprobs) => {
                    let end = self.running.end_of_last()?;
                    self.withheld.push_back(Withheld { end, token, logprobs });
                    self.tell_shown(text)
                }
            };
            if !listens {
                self.running.finish = Some(Finish::Cancelled);
            }
        }
        Ok(match self.running.finish {
            Some(_) => Decision::Ended,
            None if token != drawn => Decision::Replaced(token),
            None => Decision::Drawn,
        })
    }

    /// Tells the tokens whose text has been shown with `text`, which goes with the last of them.
    /// Returns whether anybody still listens.
    fn tell_shown(&mut self, mut text: String) -> bool {
        let shown = self.running.shown();
        let is_shown = |own: &Withheld| own.end.is_some_and(|end| end <= shown);
        let count = self.withheld.iter().take_while(|own| is_shown(own)).count();
        let told: Vec<Withheld> = self.withheld.drain(..count).collect();
        if told.is_empty() && !text.is_empty() {
            return self.tell(Update::Token { token: None, text, logprobs: None });
        }
        told.into_iter().enumerate().all(|(at, Withheld { token, logprobs, .. })| {
            let text = if at + 1 == count { std::mem::take(&mut text) } else { String::new() };
            self.tell(Update::Token { token: Some(token), text, logprobs: Some(logprobs) })
        })
    }

    /// Takes the first rank's decision on another rank.
    pub(super) fn follow(&mut self, decision: Decision) {
        if matches!(decision, Decision::Ended) {
            self.cancel();
        }
    }

    /// Tells the job that it has ended. Returns why, or `None` where it failed before.
    pub(super) fn end(mut self, held: Held) -> Option<Finish> {
        let finish = self.running.finish?;
        let rest = self.running.rest(0).ok().flatten().and_then(|rest| rest.text);
        // Nothing is held back any more, but for a character whose bytes are missing.
        for Withheld { token, logprobs, .. } in std::mem::take(&mut self.withheld) {
            if !self.running.is_stopped() {
                let (token, text) = (Some(token), String::new());
                self.tell(Update::Token { token, text, logprobs: Some(logprobs) });
            }
        }
        if let Some(text) = rest {
            self.tell(Update::Token { token: None, text, logprobs: None });
        }
        let tokens = self.new_tokens();
        self.tell(Update::Ended(Ended { finish, tokens, held }));
        Some(finish)
    }

    /// Ends the job before its next token.
    pub(super) fn cancel(&mut self) {
        self.running.finish = Some(Finish::Cancelled);
    }
}

impl HostDraws {
    /// Draws a token from logits that it changes; returns it, and whether the text is complete.
    fn draw(
        &mut self,
        mut logits: Vec<f32>,
        device: &Device,
        step: usize,
    ) -> Result<(u32, bool), JobError> {
        if let Some(repetition) = &self.repetition {
            repetition.shape(&mut logits);
        }
        let failed = |reason| JobError::Shaper { reason };
        if let Some(shaper) = &mut self.shaper {
            shaper.shape(&mut logits).map_err(failed)?;
        }
        if logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            return Err(failed("every token is banned".into()));
        }
        // The kernel takes infinite logits for a failure.
        logits.iter_mut().for_each(|logit| *logit = logit.max(f32::MIN));
        let row = Tensor::<1>::from_data(logits.as_slice(), (device, DType::F32));
        let row = row.reshape([1, logits.len()]);
        let drawn = draw(row, &mut self.state).map_err(ModelError::from)?;
        let drawn = Reading::begin(drawn).and_then(Reading::wait).map_err(ModelError::from)?;
        let token = drawn.first().and_then(|token| u32::try_from(*token).ok());
        let token = token.ok_or(ModelError::NonFinite { step })?;
        if let Some(repetition) = &mut self.repetition {
            repetition.seen.insert(token);
        }
        let complete = match &mut self.shaper {
            Some(shaper) => shaper.accept(token).map_err(failed)?,
            None => false,
        };
        Ok((token, complete))
    }
}

impl Repetition {
    fn shape(&self, logits: &mut [f32]) {
        for &token in &self.seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / self.factor } else { *logit * self.factor };
            }
        }
    }
}

/// The log-probability of a token and of the `top` likeliest tokens; among equals, the lower ids.
fn logprobs_of(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    let log_sum_exp = f64::from(most) + sum.ln();
    let of = |token: u32| {
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit) - log_sum_exp) as f32
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let count = top.min(ids.len());
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if count > 0 && count < ids.len() {
        ids.select_nth_unstable_by(count - 1, by_logit);
    }
    ids.truncate(count);
    ids.sort_unstable_by(by_logit);
    TokenLogprobs { logprob: of(token), top: ids.into_iter().map(|id| (id, of(id))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_sum_to_one_and_come_in_order() {
        let found = logprobs_of(&[1.0, 3.0, 3.0, -2.0], 0, 4);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 0, 3]);
        let sum: f32 = found.top.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(found.logprob, found.top[2].1);
        assert_eq!(logprobs_of(&[1.0, 3.0, 2.0], 1, 1).top, [(1, found_of(&[1.0, 3.0, 2.0], 1))]);
    }

    fn found_of(logits: &[f32], token: usize) -> f32 {
        let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
        (logits[token].exp() / sum).ln()
    }
}
