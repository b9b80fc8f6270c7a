//! Prompts without a model.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{Budget, CacheOptions, LayerCache, Room, Selection, read_f32};
use kv_kernels::{PrefillOptions, prefill_attention};
use kv_policies::{
    EvictionPolicy, EvictionRule, LayerContext, Observation, Plan, Policy, Result, Step, StepPlan,
    build,
};
use kv_testing::relative_error;
use serde_json::Value;

/// One layer's queries, keys and values after RoPE.
pub(crate) struct Prompt {
    pub(crate) query: Tensor<4>,
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
    pub(crate) raw_query: Option<Tensor<4>>,
    pub(crate) frequencies: Vec<f64>,
}

pub(crate) const LAYER: LayerContext = LayerContext { index: 0, count: 1 };

impl Prompt {
    pub(crate) fn new(query: Tensor<4>, keys: Tensor<4>, values: Tensor<4>) -> Self {
        Self { query, keys, values, raw_query: None, frequencies: Vec::new() }
    }

    /// Shows the prompt to `observe`, with everything that any policy needs.
    pub(crate) fn observed<T>(&self, observe: impl FnOnce(&Observation<'_>) -> T) -> T {
        let device = self.keys.device();
        let [batch, _, tokens, _] = self.keys.dims();
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([batch, tokens]);
        let whole = self.query.dims()[2] == tokens;
        let sums = whole.then(|| {
            let options =
                PrefillOptions { column_sums: Some(usize::MAX), ..PrefillOptions::default() };
            let attention = prefill_attention(&self.query, &self.keys, &self.values, &options);
            attention.unwrap().column_sums
        });
        let seeds: Vec<u64> = (0..batch as u64).collect();
        let observation = Observation::new(&self.keys, &self.values, &positions)
            .with_window(self.query.clone())
            .with_column_sums(sums.flatten())
            .with_raw_queries(self.raw_query.clone())
            .with_frequencies(&self.frequencies)
            .with_seeds(&seeds);
        observe(&observation)
    }

    /// The cache that a policy makes of the prompt.
    pub(crate) fn compress(&self, policy: &dyn Policy, new_tokens: usize) -> LayerCache {
        let options = CacheOptions::new(&self.keys.device(), DType::F32);
        self.observed(|seen| policy.prefill(seen, new_tokens, options)).unwrap()
    }
}

pub(crate) fn policy(config: Value) -> Arc<dyn Policy> {
    build(&config).unwrap()
}

/// The `index`-th decode step of tensors `[B, H, N, D]`.
pub(crate) fn step(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    index: usize,
    position: usize,
) -> Step {
    let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, index, 1).squeeze_dim::<3>(2);
    let device: Device = keys.device();
    let batch = keys.dims()[0];
    let position = Tensor::full([batch], position as i32, (&device, DType::I32));
    Step::new(pick(query), pick(keys), pick(values), position)
}

/// Live positions of one (sequence, head), ascending.
pub(crate) fn kept(cache: &LayerCache, range: usize) -> Vec<u32> {
    let positions = cache.read_positions().unwrap();
    let mut kept: Vec<u32> =
        cache.layout().live(range).map(|slot| positions[slot] as u32).collect();
    kept.sort_unstable();
    kept
}

/// Compares scores where both are finite: protected tokens carry `max + 1` there, infinity here.
pub(crate) fn same_scores(context: &str, actual: Tensor<3>, expected: &[f64], limit: f64) {
    let actual = read_f32("scores", actual).unwrap();
    assert_eq!(actual.len(), expected.len(), "{context}");
    let (a, e): (Vec<f32>, Vec<f64>) =
        actual.iter().zip(expected).filter(|(a, _)| a.is_finite()).unzip();
    let error = relative_error(&a, &e);
    assert!(error < limit, "{context}: scores off by {error}");
}

/// Compares kept tokens by their scores: which of equal scores are kept may differ.
pub(crate) fn same_but_for_ties(context: &str, scores: &[f32], actual: &[u32], expected: &[u32]) {
    assert_eq!(actual.len(), expected.len(), "{context}");
    let sorted = |kept: &[u32]| {
        let mut scores: Vec<f32> = kept.iter().map(|&token| scores[token as usize]).collect();
        scores.sort_by(f32::total_cmp);
        scores
    };
    let pairs = sorted(actual).into_iter().zip(sorted(expected));
    pairs.for_each(|(a, e)| assert!(a == e || (a - e).abs() < 1e-7, "{context}: {a} for {e}"));
}

/// Keeps given tokens, and evicts the oldest.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) kept: Vec<Vec<u32>>,
    /// Slots of a head.
    pub(crate) limit: usize,
    /// Scores of all tokens; zeros where there are none.
    pub(crate) scores: Vec<f32>,
    /// The position that each head evicts next; the oldest where there are none.
    pub(crate) victims: Vec<i32>,
    /// First and last tokens that are said to be protected.
    pub(crate) protected: [usize; 2],
}

impl Given {
    pub(crate) fn new(kept: Vec<Vec<u32>>, limit: usize) -> Self {
        Self { kept, limit, scores: Vec::new(), victims: Vec::new(), protected: [0, 0] }
    }
}

impl Policy for Given {
    fn name(&self) -> &'static str {
        "given"
    }

    fn config(&self) -> Value {
        serde_json::json!({"policy": "given"})
    }

    fn budget(&self) -> Option<Budget> {
        Some(Budget::Tokens(self.limit))
    }

    fn select(&self, _observation: &Observation<'_>) -> Result<Plan> {
        Ok(Selection::new(self.kept.clone())?.into())
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        _observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        Ok(cache.set_limits(vec![self.limit; selection.head_ranges()])?)
    }

    fn room(&self, _observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        Ok(Room::Extra(new_tokens))
    }

    fn plan(&self, _layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        let rule = EvictionRule {
            before_attention: false,
            interval: 1,
            keeps_order: false,
            protected: Box::new(|_| Ok([0, 0])),
            scores: Box::new(|view| {
                let mut positions = view.cache.positions().clone();
                if !self.victims.is_empty() {
                    let victims = Tensor::<1, Int>::from_data(
                        self.victims.as_slice(),
                        (&positions.device(), DType::I32),
                    );
                    let victims = victims.select(0, view.cache.slot_ranges().clone());
                    positions = (positions - victims).abs();
                }
                Ok(positions.float().cast(DType::F32))
            }),
        };
        Ok(StepPlan { eviction: Some(rule), ..StepPlan::append() })
    }

    fn into_eviction_policy(
        self: Arc<Self>,
    ) -> std::result::Result<Arc<dyn EvictionPolicy>, &'static str> {
        Ok(self)
    }
}

impl EvictionPolicy for Given {
    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>> {
        Ok(Some((self.scores(observation, self.limit)?, self.limit)))
    }

    fn scores(&self, observation: &Observation<'_>, _slots: usize) -> Result<Tensor<3>> {
        let [batch, heads, tokens, _] = observation.dims();
        let device = observation.keys.device();
        let mut scores = self.scores.clone();
        scores.resize(batch * heads * tokens, 0.0);
        let scores = Tensor::<1>::from_data(scores.as_slice(), (&device, DType::F32));
        Ok(scores.reshape([batch, heads, tokens]))
    }

    fn protected(&self, _slots: usize, _decoding: bool) -> Result<[usize; 2]> {
        Ok(self.protected)
    }

    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>> {
        Ok(Arc::new(Self::new(self.kept.clone(), budget.resolve(usize::MAX))))
    }
}
