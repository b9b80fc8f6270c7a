//! Queries, keys and values of one layer, real or made up, and how wrong a policy's attention is.

use std::time::Instant;

use anyhow::{Context, ensure};
use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, counted, read_f32};
use kv_models::PrefillPass;
use kv_policies::{LayerContext, Needs, Observation, Policy};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use crate::bench::ModelBench;
use crate::options::PaperOptions;
use crate::prompts::{Prompts, Wanted};

/// The prompts of a figure of single layers, and their tokens. Without `--lengths`, the longest
/// prompts are taken; without `--limit`, `limit` prompts. Each is longer than two `window`s.
///
/// # Errors
/// Where a file has no such prompt.
pub(super) fn prompts(
    bench: &mut ModelBench<'_>,
    options: &PaperOptions,
    limit: usize,
    window: usize,
) -> anyhow::Result<(String, Vec<Vec<u32>>)> {
    let mut prompts = Prompts::read(&Wanted { limit: None, ..options.wanted() })?;
    if let Some(note) = prompts.fit(&bench.model)? {
        bench.note(note);
    }
    if options.lengths.is_empty() {
        let longest = prompts.list.iter().map(|prompt| prompt.length).max().unwrap_or_default();
        prompts.list.retain(|prompt| prompt.length == longest);
    }
    prompts.limit(options.limit.unwrap_or(limit));
    let mut all = Vec::new();
    for prompt in &prompts.list {
        let tokens = bench.model.encode(&prompt.prompt)?;
        ensure!(
            tokens.len() > 2 * window,
            "{}, line {}: the prompt has {}, expected more than {}",
            prompts.source,
            prompt.line,
            counted(tokens.len(), "token"),
            2 * window
        );
        all.push(tokens);
    }
    Ok((prompts.source, all))
}

/// Calls `see` with some layers of a prompt as the model computes them, one at a time.
///
/// # Errors
/// Errors of the model and of `see`.
pub(super) fn observe(
    bench: &ModelBench<'_>,
    tokens: &[u32],
    layers: &[usize],
    see: &mut dyn FnMut(&LayerPrompt) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, column_sums: false, raw_queries: false },
        ..PrefillPass::default()
    };
    bench.observe(tokens, pass, &mut |observation| {
        let wanted = layers.contains(&observation.layer.index);
        let Some(queries) = observation.window.as_ref().filter(|_| wanted) else { return Ok(()) };
        see(&LayerPrompt {
            queries: queries.clone(),
            keys: observation.keys.clone(),
            values: observation.values.clone(),
            layer: observation.layer,
        })
    })
}

/// One layer's prompt after RoPE.
pub(super) struct LayerPrompt {
    /// `[B, Hq, T, D]`
    pub(super) queries: Tensor<4>,
    /// `[B, Hkv, T, D]`
    pub(super) keys: Tensor<4>,
    /// `[B, Hkv, T, D]`
    pub(super) values: Tensor<4>,
    pub(super) layer: LayerContext,
}

/// A prompt's cache under a policy.
pub(super) struct Outcome {
    /// Attention of the last queries, `[B, Hq, N, D]`.
    pub(super) output: Vec<f32>,
    /// Seconds that compression took.
    pub(super) seconds: f64,
}

/// Tokens in clusters, each with a direction of keys and one of values; queries look at a cluster.
pub(super) struct Clustered {
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
}

/// Clusters of a head.
const CLUSTERS: usize = 32;
/// Norms of real queries, keys around their mean, and values (the paper's table 3).
const NORMS: [f32; 3] = [15.0, 15.6, 3.35];
/// Share of a row that is its own, the rest being its cluster's.
const OWN: f32 = 0.5;
/// The share of queries that is their own. With it logits spread by a few units.
const OWN_OF_QUERIES: f32 = 0.8;

impl Clustered {
    pub(super) fn draw(&self, seed: u64, device: &Device, dtype: DType) -> LayerPrompt {
        let mut draws = ChaCha8Rng::seed_from_u64(seed);
        let Self { query_heads, kv_heads, tokens, head_dim } = *self;
        let mut normal = |count: usize| -> Vec<f32> {
            (0..count).map(|_| draws.sample(StandardNormal)).collect()
        };
        let count = kv_heads * CLUSTERS * head_dim;
        let (of_keys, of_values) = (normal(count), normal(count));
        let noise =
            [query_heads, kv_heads, kv_heads].map(|heads| normal(heads * tokens * head_dim));
        let mut clusters = |heads: usize| -> Vec<usize> {
            (0..heads * tokens).map(|_| draws.random_range(0..CLUSTERS)).collect()
        };
        let (of_tokens, of_queries) = (clusters(kv_heads), clusters(query_heads));
        let rows = |heads: usize,
                    norm: f32,
                    own: f32,
                    noise: &[f32],
                    clusters: &[usize],
                    directions: &[f32]| {
            let scale = norm / (head_dim as f32).sqrt() / own.hypot(1.0 - own);
            let mut rows = Vec::with_capacity(noise.len());
            for (row, noise) in noise.chunks(head_dim).enumerate() {
                let head = row / tokens * kv_heads / heads;
                let direction = (head * CLUSTERS + clusters[row]) * head_dim;
                let mixed = noise.iter().zip(&directions[direction..]);
                rows.extend(mixed.map(|(noise, all)| scale * (own * noise + (1.0 - own) * all)));
            }
            let flat = Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32));
            flat.reshape([1, heads, tokens, head_dim]).cast(dtype)
        };
        let [queries, keys, values] = &noise;
        LayerPrompt {
            queries: rows(query_heads, NORMS[0], OWN_OF_QUERIES, queries, &of_queries, &of_keys),
            keys: rows(kv_heads, NORMS[1], OWN, keys, &of_tokens, &of_keys),
            values: rows(kv_heads, NORMS[2], OWN, values, &of_tokens, &of_values),
            layer: LayerContext { index: 0, count: 1 },
        }
    }
}

impl LayerPrompt {
    /// Compresses all but the last `window` tokens, and attends with theirs as they would.
    pub(super) fn run(
        &self,
        policy: &dyn Policy,
        window: usize,
        seed: u64,
    ) -> anyhow::Result<Outcome> {
        let [batch, _, tokens, _] = self.keys.dims();
        let device = self.keys.device();
        let before = tokens.checked_sub(window).context("the prompt is shorter than its window")?;
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([batch, tokens]);
        let first = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, before);
        let last = |tensor: &Tensor<4>| tensor.clone().narrow(2, before, window);
        let (keys, values) = (first(&self.keys), first(&self.values));
        let (seeds, seen) = ([seed], positions.clone().narrow(1, 0, before));
        let observation = Observation::new(&keys, &values, &seen)
            .of_layer(self.layer)
            .with_window(first(&self.queries))
            .with_seeds(&seeds);
        let options = CacheOptions::new(&device, self.keys.dtype());
        wait(&device)?;
        let clock = Instant::now();
        let mut cache = policy.prefill(&observation, window, options)?;
        wait(&device)?;
        let seconds = clock.elapsed().as_secs_f64();
        let positions = positions.narrow(1, before, window);
        cache.extend(last(&self.keys), last(&self.values), positions)?;
        let output = cache.attend_extended(last(&self.queries))?;
        Ok(Outcome { output: read_f32("output", output)?, seconds })
    }
}

/// `‖output − exact‖ / ‖exact‖`.
pub(super) fn relative_error(output: &[f32], exact: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = output.iter().zip(exact).map(|(a, e)| square(a - e)).sum();
    let norm: f64 = exact.iter().map(|e| square(*e)).sum();
    (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// Mean and standard deviation.
pub(super) fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, (variance / (count - 1.0).max(1.0)).sqrt())
}

fn wait(device: &Device) -> anyhow::Result<()> {
    device.sync().map_err(|error| anyhow::anyhow!("{error}"))
}
