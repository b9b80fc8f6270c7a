//! The index sets of a cache, and steps that attend to them.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    AttentionOutput, CisSelectOptions, DecodeAttentionOptions, IndexSets, SlotRanges, SlotView,
    SteerOptions, cis_attention, cis_select, decode_attention, steer_sets,
};

use kv_core::{
    Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState, StateBytes,
    expect_shape, state_of, states_of,
};

/// The index sets that steps attend to, chosen on the device: one for each key-value head, or for
/// each query head.
#[derive(Debug)]
pub struct CisIndex(pub(crate) IndexSets);

/// The queries of a step.
#[derive(Debug)]
pub struct StepQueries {
    /// The queries that attend, `[B, Hq, D]`.
    pub query: Tensor<3>,
    /// The queries and keys that score slots where the step retrieves, `[B, w * Hq, d]` and
    /// `[S, d]`, for `w` queries of each head and `d` of its channels. The queries of a range lie
    /// side by side. `None` where the queries that attend score the cache's keys.
    pub scored: Option<(Tensor<3>, Tensor<2>)>,
    /// Steps whose vectors are alike share a set. `[ranges, parts, length]`
    pub vectors: Tensor<3>,
}

impl CisIndex {
    /// The index sets.
    pub fn sets(&self) -> &IndexSets {
        &self.0
    }

    /// Puts the index sets into a cache.
    ///
    /// # Errors
    /// [`Error::Shape`] for ranges that are no multiple of the heads; [`Error::InvalidPlan`] for a
    /// cache with weights.
    pub fn put_into(self, cache: &mut LayerCache) -> Result<()> {
        let (ranges, total_kv_heads) = (self.ranges(), cache.layout().head_ranges());
        if ranges == 0 || !ranges.is_multiple_of(total_kv_heads) {
            expect_shape("index sets", &[ranges], &[total_kv_heads])?;
        }
        if cache.log_weights().is_some() {
            let reason = "slots have weights, expected slots of weight 1".into();
            return Err(Error::InvalidPlan { what: "index sets", reason });
        }
        cache.insert_policy_state(self);
        Ok(())
    }

    fn ranges(&self) -> usize {
        self.0.tensors().0.dims()[0]
    }

    /// Chooses what the step attends to ([`cis_select`]), and attends to it. Also returns the
    /// log-sum-exp of each query over all tokens in sight, `[B, Hq]`, where it `measures`.
    ///
    /// # Shapes
    /// `newest` `[B]`, 32-bit, the newest tokens' indices.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without index sets; the errors of [`cis_select`] and
    /// [`decode_attention`].
    pub fn attend(
        cache: &mut LayerCache,
        queries: StepQueries,
        newest: Tensor<1, Int>,
        options: CisSelectOptions,
        measures: bool,
    ) -> Result<(AttentionOutput, Option<Tensor<2>>)> {
        let mut own = cache.take_policy_state::<Self>().ok_or_else(without)?;
        let attended = own.attend_to(cache, queries, newest, options, measures);
        cache.insert_policy_state(own);
        attended
    }

    fn attend_to(
        &mut self,
        cache: &LayerCache,
        queries: StepQueries,
        newest: Tensor<1, Int>,
        options: CisSelectOptions,
        measures: bool,
    ) -> Result<(AttentionOutput, Option<Tensor<2>>)> {
        let ranges = ranges_of(cache, self.ranges());
        let longest = cache.layout().most_capacity();
        let sets = &mut self.0;
        // Products over some channels have the scale of whole products.
        let scale = options.scale.or(Some(1.0 / (cache.head_dim() as f32).sqrt()));
        let options =
            CisSelectOptions { longest: options.longest.or(Some(longest)), scale, ..options };
        let (keys, values) = (cache.keys().clone(), cache.values().clone());
        let StepQueries { query, scored, vectors } = queries;
        if !measures && scored.is_none() {
            let pools = [keys, values];
            let output = cis_attention(query, vectors, pools, &ranges, newest, sets, options)?;
            let attended =
                AttentionOutput { output, log_sum_exp: None, probabilities: None, logits: None };
            return Ok((attended, None));
        }
        let (scoring, scored) = scored.unwrap_or_else(|| (query.clone(), keys.clone()));
        let sums = cis_select(
            scoring,
            vectors,
            scored,
            &ranges,
            newest,
            sets,
            CisSelectOptions { measures, ..options },
        )?;
        let view = SlotView::Sets(sets.clone());
        let most = sets.most() + options.longest_tail();
        let attention = DecodeAttentionOptions {
            view,
            scale: options.scale,
            longest: Some(most.min(longest)),
            log_sum_exp: measures,
            ..Default::default()
        };
        Ok((decode_attention(query, keys, values, None, &ranges, attention)?, sums))
    }

    /// Changes the sizes of sets so that steps drop a target share of attention ([`steer_sets`]).
    /// `read` and `all` are a step's log-sum-exp over the slots that it read and over all in sight,
    /// `[B, Hq]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without index sets; the errors of [`steer_sets`].
    pub fn steer(
        cache: &mut LayerCache,
        read: Tensor<2>,
        all: Tensor<2>,
        options: SteerOptions,
    ) -> Result<()> {
        let dropped = (read - all).exp().neg().add_scalar(1.0);
        let own = cache.policy_state_mut::<Self>().ok_or_else(without)?;
        Ok(steer_sets(&mut own.0, dropped, options)?)
    }
}

/// The head ranges of `count` sets: one for each key-value head, or each repeated for its query
/// heads.
fn ranges_of(cache: &LayerCache, count: usize) -> SlotRanges {
    let (layout, ranges) = (cache.layout(), cache.ranges());
    let group = count / layout.head_ranges().max(1);
    if group <= 1 {
        return ranges.clone();
    }
    let [batch, kv_heads] = [layout.batch(), layout.kv_heads()];
    let repeated = |of: &Tensor<2, Int>| {
        let each = of.clone().unsqueeze_dim::<3>(2).expand([batch, kv_heads, group]);
        each.reshape([batch, kv_heads * group])
    };
    SlotRanges { offsets: repeated(&ranges.offsets), lengths: repeated(&ranges.lengths) }
}

/// The header of index sets in a file: the shape of their vectors, and integers of a row of their
/// table.
type Header = ([usize; 4], usize);

impl PolicyState for CisIndex {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(self.0.copied())))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(self.0.clone().to_device(device))))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let parts = states_of::<Self>(self, others)?;
        let sets = parts.into_iter().map(|part| part.0.clone()).collect();
        Ok(Box::new(Self(IndexSets::concat(sets)?)))
    }

    fn accepts(&self, from: &dyn PolicyState) -> bool {
        state_of::<Self>(from).is_ok_and(|from| self.0.accepts(&from.0))
    }

    fn replace_row(&mut self, row: usize, from: &dyn PolicyState) -> Result<()> {
        let from = state_of::<Self>(from)?.0.clone();
        Ok(self.0.replace(row * from.tensors().0.dims()[0], from)?)
    }

    fn widen(&mut self, like: &dyn PolicyState) -> Result<()> {
        self.0 = self.0.clone().widened_like(&state_of::<Self>(like)?.0);
        Ok(())
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        let (table, vectors) = self.0.tensors();
        let header: Header = (vectors.dims(), table.dims()[1]);
        let saved = HostState::saved(self, "index sets", header, || {
            [("table", table.clone().try_into_data()), ("vectors", vectors.clone().try_into_data())]
        });
        saved.map(Some)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        StateBytes { device: self.0.bytes(), ..StateBytes::default() }
    }
}

impl LoadState for CisIndex {
    const NAME: &'static str = "sets";

    fn load(mut saved: SavedState, cache: &LayerCache, seen: &[usize]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "index sets", reason };
        let header = std::mem::take(&mut saved.header);
        let (shape, row): Header =
            serde_json::from_value(header).map_err(|error| invalid(error.to_string()))?;
        let (total_kv_heads, kv_heads) = (cache.layout().head_ranges(), cache.layout().kv_heads());
        if shape[0] == 0 || !shape[0].is_multiple_of(total_kv_heads) {
            return Err(invalid(format!(
                "{} ranges, expected a multiple of {total_kv_heads}",
                shape[0]
            )));
        }
        let table = saved.take("table", DType::I32, &[shape[0], row])?;
        let vectors = saved.take("vectors", DType::F32, &shape)?;
        let table = table.try_to_vec::<i32>().map_err(|error| invalid(format!("{error:?}")))?;
        let vectors = vectors.try_to_vec::<f32>().map_err(|error| invalid(format!("{error:?}")))?;
        let each = shape[0] / total_kv_heads;
        let tokens: Vec<usize> = (0..shape[0]).map(|range| seen[range / each / kv_heads]).collect();
        let device = &cache.options().device;
        Ok(Self(IndexSets::from_saved(&table, &vectors, shape, &tokens, device)?))
    }
}

fn without() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache has no index sets".into() }
}
