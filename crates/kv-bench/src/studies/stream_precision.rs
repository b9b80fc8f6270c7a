//! The precision ε of BalanceKV's equation (2) against the slots that the streaming algorithm holds
//! (theorem 3.1), at prefixes of a long stream of bounded keys and values of three powers of two.

use anyhow::Context;
use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32};
use kv_kernels::DecodeAttentionOptions;
use kv_policies::{Observation, Policy};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde_json::json;

use super::SUITE;
use crate::bench::Bench;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};

/// Tokens that are halved together, `t`.
const BATCHES: [usize; 4] = [32, 64, 128, 256];
const HEAD_DIM: usize = 16;
const QUERIES: usize = 16;
/// A γ at which the walk flips fair coins: uniform sampling in the algorithm's structure.
const COINS: f64 = 1e-12;

/// One head's stream with `r² / √d = 1`.
struct Stream {
    keys: Tensor<4>,
    values: Tensor<4>,
    queries: Tensor<4>,
}

/// Measures `prefixes` of the stream, in tokens; notes give the exponents of the records.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench, name: &str, prefixes: &[usize]) -> anyhow::Result<()> {
    let longest = prefixes.last().copied().context("there are prefixes")?;
    let stream = Stream::draw(longest, bench.common.seed, &bench.device);
    let mut notes = Vec::new();
    let mut progress = Progress::new(3 * BATCHES.len() * prefixes.len(), name);
    for (label, joint, gamma) in [
        ("balancekv-stream", false, 4.0),
        ("balancekv-stream joint", true, 4.0),
        ("balancekv-stream by coins", false, COINS),
    ] {
        let mut points = Vec::new();
        for batch in BATCHES {
            let config = json!({
                "policy": "balancekv-stream", "budget": longest, "batch": batch, "sinks": 0,
                "recents": 0, "joint": joint, "gamma": gamma,
            });
            let policy = PolicyRun::of(&config)?.policy;
            let (mut worst, mut most) = (0.0f64, 0);
            for &tokens in prefixes {
                let (error, slots) = stream.measure(&*policy, tokens)?;
                let case = Case::of(name).length(tokens);
                let label = format!("{label} batch={batch}");
                let setup = (label.as_str(), None);
                bench.record(SUITE, &case, setup, metric::EPSILON, error);
                bench.record(SUITE, &case, setup, metric::SLOTS, slots as f64);
                worst = worst.max(error);
                most = most.max(slots);
                progress.step();
            }
            points.push(((most as f64).ln(), worst.ln()));
        }
        notes.push(format!("{label}: the worst ε falls as slots^{:.2}", slope(&points)));
    }
    progress.finish();
    notes.into_iter().for_each(|note| bench.note(note));
    Ok(())
}

impl Stream {
    fn draw(tokens: usize, seed: u64, device: &Device) -> Self {
        let mut draws = ChaCha8Rng::seed_from_u64(seed);
        let radius = (HEAD_DIM as f32).sqrt().sqrt();
        let mut rows = |count: usize, lengths: &[f32]| {
            let mut rows: Vec<f32> =
                (0..count * HEAD_DIM).map(|_| draws.sample(StandardNormal)).collect();
            for (at, row) in rows.chunks_mut(HEAD_DIM).enumerate() {
                let own = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                let length = lengths[at * 7 % lengths.len()];
                row.iter_mut().for_each(|x| *x *= length / own);
            }
            let flat = Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32));
            flat.reshape([1, 1, count, HEAD_DIM])
        };
        Self {
            keys: rows(tokens, &[radius]),
            values: rows(tokens, &[1.0, 0.5, 0.25]),
            queries: rows(QUERIES, &[radius]),
        }
    }

    /// ε, the largest over queries, and slots, of the first `tokens` tokens.
    fn measure(&self, policy: &dyn Policy, tokens: usize) -> anyhow::Result<(f64, usize)> {
        let full = PolicyRun::of(&json!({"policy": FULL}))?.policy;
        let exact = self.cache(&*full, tokens)?;
        let held = self.cache(policy, tokens)?;
        let values = self.values.clone().narrow(2, 0, tokens).square().sum();
        let norm = f64::from(read_f32("norm", values)?[0]).sqrt();
        let mut worst = 0.0f64;
        for query in 0..QUERIES {
            let query = self.queries.clone().narrow(2, query, 1).squeeze_dim::<3>(2);
            let wanted = DecodeAttentionOptions { probabilities: true, ..Default::default() };
            let attended = exact.attend(query.clone(), wanted)?;
            let probabilities = attended.probabilities.context("they were asked for")?;
            let probabilities = read_f32("probabilities", probabilities.square().sum())?;
            let expected = read_f32("output", attended.output)?;
            let actual = held.attend(query, DecodeAttentionOptions::default())?.output;
            let actual = read_f32("output", actual)?;
            let difference = actual.iter().zip(&expected).map(|(a, e)| f64::from(a - e).powi(2));
            let bound = f64::from(probabilities[0]).sqrt() * norm;
            worst = worst.max(difference.sum::<f64>().sqrt() / bound);
        }
        Ok((worst, held.layout().used()))
    }

    fn cache(&self, policy: &dyn Policy, tokens: usize) -> anyhow::Result<LayerCache> {
        let device = self.keys.device();
        let first = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
        let (keys, values) = (first(&self.keys), first(&self.values));
        let positions = positions.unsqueeze();
        let observation = Observation::new(&keys, &values, &positions).with_seeds(&[0]);
        Ok(policy.prefill(&observation, 0, CacheOptions::new(&device, DType::F32))?)
    }
}

/// The slope of a straight line through points.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    let (x, y) = (x / count, y / count);
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    covariance / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}
