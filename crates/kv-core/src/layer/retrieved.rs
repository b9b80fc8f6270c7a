//! Steps that attend to index sets.

use burn::tensor::{Int, Tensor};
use kv_kernels::{
    AttentionOutput, DecodeAttentionOptions, IndexSets, RetrieveOptions, SlotRanges, SlotView,
    SteerOptions, decode_attention, retrieve_slots, retrieving_attention, steer_sets,
};

use crate::{Error, LayerCache, Result};

impl LayerCache {
    /// What steps attend to, where a policy chooses on the device: a range a key-value head, or a
    /// query head.
    pub fn index_sets(&self) -> Option<&IndexSets> {
        self.sets.as_ref()
    }

    /// Gives steps something to choose from.
    ///
    /// # Errors
    /// [`Error::Shape`] for ranges that are no multiple of the heads; [`Error::InvalidPlan`] for a
    /// cache with weights.
    pub fn set_index_sets(&mut self, sets: IndexSets) -> Result<()> {
        let (ranges, pairs) = (sets.tensors().0.dims()[0], self.layout.pairs());
        if ranges == 0 || !ranges.is_multiple_of(pairs) {
            super::expect_shape("index sets", &[ranges], &[pairs])?;
        }
        if self.log_weights.is_some() {
            let reason = "slots have weights, expected slots of weight 1".into();
            return Err(Error::InvalidPlan { what: "index sets", reason });
        }
        self.sets = Some(sets);
        Ok(())
    }

    /// Chooses what the step attends to ([`retrieve_slots`]), and attends to it. Also returns the
    /// log-sum-exp of each query over all tokens in sight, `[B, Hq]`, where it `measures`.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `vectors` `[ranges, parts, length]`, what similarity is of; `newest`
    /// `[B]`, 32-bit, the newest tokens' indices.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without index sets; see [`retrieve_slots`] and [`decode_attention`].
    pub fn attend_chosen(
        &mut self,
        query: Tensor<3>,
        vectors: Tensor<3>,
        newest: Tensor<1, Int>,
        options: RetrieveOptions,
        measures: bool,
    ) -> Result<(AttentionOutput, Option<Tensor<2>>)> {
        let mut sets = self.sets.take().ok_or_else(without)?;
        let ranges = self.ranges_of(sets.tensors().0.dims()[0]);
        let longest = self.layout.capacities().iter().max().copied().unwrap_or_default();
        let options = RetrieveOptions { longest: options.longest.or(Some(longest)), ..options };
        let (keys, values) = (self.keys.clone(), self.values.clone());
        if !measures {
            let pools = [keys, values];
            let output =
                retrieving_attention(query, vectors, pools, &ranges, newest, &mut sets, options);
            self.sets = Some(sets);
            let output = output?;
            let attended =
                AttentionOutput { output, log_sum_exp: None, probabilities: None, logits: None };
            return Ok((attended, None));
        }
        let sums = retrieve_slots(
            query.clone(),
            vectors,
            keys.clone(),
            &ranges,
            newest,
            &mut sets,
            options,
            measures,
        );
        let (view, most) = (SlotView::Sets(sets.clone()), sets.most());
        self.sets = Some(sets);
        let sums = sums?;
        let attention = DecodeAttentionOptions {
            view,
            scale: options.scale,
            longest: Some(most.min(longest)),
            log_sum_exp: measures,
            ..Default::default()
        };
        Ok((decode_attention(query, keys, values, None, &ranges, attention)?, sums))
    }

    /// Brings the sizes of sets to where a target share of attention is dropped ([`steer_sets`]),
    /// given the log-sums of a step over what it read and over all in sight, `[B, Hq]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without index sets; see [`steer_sets`].
    pub fn steer_sets(
        &mut self,
        read: Tensor<2>,
        all: Tensor<2>,
        options: SteerOptions,
    ) -> Result<()> {
        let dropped = (read - all).exp().neg().add_scalar(1.0);
        let sets = self.sets.as_mut().ok_or_else(without)?;
        Ok(steer_sets(sets, dropped, options)?)
    }

    /// The ranges of so many heads: key-value heads', or each repeated for its query heads.
    fn ranges_of(&self, count: usize) -> SlotRanges {
        let group = count / self.layout.pairs().max(1);
        if group <= 1 {
            return self.ranges.clone();
        }
        let [batch, kv_heads] = [self.layout.batch(), self.layout.kv_heads()];
        let repeated = |of: &Tensor<2, Int>| {
            let each = of.clone().unsqueeze_dim::<3>(2).expand([batch, kv_heads, group]);
            each.reshape([batch, kv_heads * group])
        };
        SlotRanges {
            offsets: repeated(&self.ranges.offsets),
            lengths: repeated(&self.ranges.lengths),
        }
    }
}

fn without() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache has no index sets".into() }
}
