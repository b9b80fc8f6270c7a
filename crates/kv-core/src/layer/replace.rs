//! Rows of a batch that are overwritten in place by another sequence, so that recorded steps stay
//! valid.

use super::{LayoutTensors, expect_shape};
use crate::layer::state::StoredState;
use crate::tensors::{columns, listed};
use crate::{Error, LayerCache, Result};

impl LayerCache {
    /// Whether [`Self::replace_row`] can put the one sequence of `from` into any row: the caches
    /// have states of equal names, all of which can be replaced, and every head has room for as
    /// many slots as `from` has reserved.
    pub fn accepts(&self, from: &Self) -> bool {
        let heads = self.layout.kv_heads();
        let own = self.layout.capacities().chunks(heads);
        self.check_kinds(from).is_ok()
            && own.flat_map(|row| row.iter().zip(from.layout.capacities())).all(|(c, n)| c >= n)
    }

    /// Makes room in the policy states ([`crate::PolicyState::widen`]): each row's states can then
    /// hold every sequence that a row's states of `like` can hold. Capacities of heads stay.
    ///
    /// # Errors
    /// The errors of [`crate::PolicyState::widen`].
    pub fn widen_states(&mut self, like: &Self) -> Result<()> {
        for (name, stored) in &mut self.states.0 {
            if let (StoredState::State(own), Some(StoredState::State(like))) =
                (stored, like.states.0.get(name))
            {
                own.widen(&**like)?;
            }
        }
        Ok(())
    }

    /// Copies the slots of the one sequence of `from` to the beginning of a row's ranges, whose
    /// lengths say how many slots there are. The lists of slots are made on the device: the host
    /// would upload an index a slot.
    pub(super) fn copy_sequence(
        &mut self,
        row: usize,
        from: &Self,
        tensors: &mut LayoutTensors,
    ) -> Result<()> {
        let heads = self.layout.kv_heads();
        let ranges = row * heads..(row + 1) * heads;
        let lengths = &self.layout.lengths()[ranges.clone()];
        if lengths.iter().all(|&length| length == 0) {
            return Ok(());
        }
        let key = [from.layout.offsets(), lengths, &self.layout.offsets()[ranges]].concat();
        let [of, to] = tensors.lists(key, || {
            let of = from.first_slots(lengths)?;
            let firsts = self.ranges.offsets.clone().slice([row..row + 1, 0..heads]);
            let counts = self.upload(lengths.iter().copied());
            let columns = columns(heads, of.dims()[1], &self.options.device);
            let to = listed(columns, firsts.reshape([heads]), counts);
            // Tracks are read at every index of the list.
            Ok([of.clamp_min(0).flatten(0, 1), to.flatten(0, 1)])
        })?;
        self.copy_from(from, &of, &to)
    }

    /// Refuses a sequence whose states or limits differ in kind.
    fn check_kinds(&self, from: &Self) -> Result<()> {
        let (heads, batch) = (self.layout.kv_heads(), from.layout.batch());
        let invalid = |reason: String| Error::InvalidPlan { what: "row", reason };
        expect_shape("head ranges", &[from.layout.head_ranges()], &[heads])?;
        if self.layout.arena.is_some() || batch != 1 {
            return Err(invalid(format!("an arena or a batch of {batch}, expected one sequence")));
        }
        let names = |cache: &Self| -> Vec<String> {
            cache.states.0.keys().chain(cache.state.keys()).cloned().collect()
        };
        let tracks = |cache: &Self| -> Vec<String> { cache.tracks.keys().cloned().collect() };
        let limited = |cache: &Self| cache.limits.is_some();
        let kinds = |cache: &Self| (names(cache), tracks(cache), limited(cache));
        if kinds(self) != kinds(from) || self.log_weights.is_some() != from.log_weights.is_some() {
            let (own, other) = (kinds(self), kinds(from));
            return Err(invalid(format!("states, tracks and limits {other:?}, expected {own:?}")));
        }
        let taken = |(own, from): (&StoredState, &StoredState)| match (own, from) {
            (StoredState::State(own), StoredState::State(from)) => own.accepts(&**from),
            _ => false,
        };
        // The names are equal, and both maps are in their order.
        let mut states = self.states.0.iter().zip(from.states.0.values());
        match states.find(|((_, own), from)| !taken((own, from))) {
            Some(((name, _), _)) => {
                Err(invalid(format!("state `{name}` cannot take the sequence's place")))
            }
            None => Ok(()),
        }
    }

    /// Puts the one sequence of `from` in the place of a row: slots, tracks, limits and state. The
    /// row keeps its capacities. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for rows that are not there, caches whose states or limits differ in
    /// kind, and states that cannot be replaced; [`Error::CapacityExhausted`] for a longer sequence
    /// than the row has room for; [`Error::Shape`]. After an error the row holds no sequence.
    pub fn replace_row(&mut self, row: usize, from: &Self) -> Result<()> {
        self.replace_row_by(row, from, &mut LayoutTensors::default())
    }

    /// [`Self::replace_row`] with tensors that layers share.
    pub(crate) fn replace_row_by(
        &mut self,
        row: usize,
        from: &Self,
        tensors: &mut LayoutTensors,
    ) -> Result<()> {
        let (heads, batch) = (self.layout.kv_heads(), self.layout.batch());
        let invalid = |reason: String| Error::InvalidPlan { what: "row", reason };
        if row >= batch {
            return Err(invalid(format!("{row} of {batch}")));
        }
        self.check_kinds(from)?;
        let ranges = row * heads..(row + 1) * heads;
        let mut lengths = self.layout.lengths().to_vec();
        lengths[ranges.clone()].copy_from_slice(from.layout.lengths());
        self.check_room(&lengths)?;
        self.layout.lengths_mut().copy_from_slice(&lengths);
        self.write_ranges(tensors)?;
        self.copy_sequence(row, from, tensors)?;
        if let (Some(own), Some(other)) = (&mut self.limits, &from.limits) {
            own[ranges].copy_from_slice(other);
        }
        for (name, state) in &mut self.state {
            let other = from.state.get(name).ok_or_else(|| invalid(format!("no `{name}`")))?;
            state.replace_row(row, other)?;
        }
        for (name, stored) in &mut self.states.0 {
            match (stored, from.states.0.get(name)) {
                (StoredState::State(own), Some(StoredState::State(other))) => {
                    own.replace_row(row, &**other)?;
                }
                _ => return Err(invalid(format!("state `{name}` comes from a file"))),
            }
        }
        Ok(())
    }
}
