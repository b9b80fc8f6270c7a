//! Sizes of a stream.

/// The sizes that follow from a prompt's budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) sinks: usize,
    pub(super) recents: usize,
    pub(super) batch: usize,
    /// The number of instances, with values in one bucket.
    pub(super) instances: usize,
}

impl Sizes {
    /// Slots of a head after `tokens` tokens, at most, with values in one bucket: half a batch a
    /// level of each instance, what waits, and the exact ones.
    pub(super) fn slots(self, tokens: usize) -> usize {
        let Self { sinks, recents, batch, instances } = self;
        let taken = tokens.saturating_sub(sinks + recents) / batch * batch;
        let levels = (taken / batch).max(1).ilog2() as usize;
        (instances * (levels + 1) * (batch / 2)).min(taken) + (sinks + recents + batch).min(tokens)
    }

    /// How many tokens of `tokens` the stream has taken, sinks counted in.
    pub(super) fn taken(self, tokens: usize) -> usize {
        let Self { sinks, recents, batch, .. } = self;
        sinks + tokens.saturating_sub(sinks + recents) / batch * batch
    }
}
