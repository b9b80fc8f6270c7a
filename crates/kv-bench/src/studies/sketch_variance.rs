//! KVReviver's error bound: the measured variance of estimates against the paper's bound of it.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::read_f32;
use kv_policies::{Sketch, SketchHead, SketchOptions};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use super::SUITE;
use crate::bench::Bench;
use crate::progress::Progress;
use crate::record::{Case, metric};

/// Buckets, as the paper has them, and entries of each.
const BUCKETS: usize = 3;
const ENTRIES: usize = 16;
/// Columns over which a variance is taken.
const COLUMNS: usize = 256;
/// Sketches that are made together.
const TOGETHER: usize = 32;

/// Estimates one token of `sketches` with hashes of their own at every load, of normal keys and
/// values. A load `a / N` is the tokens beside the one that is estimated, over all entries. A note
/// explains the records.
///
/// # Errors
/// Where the device refuses.
pub(crate) fn run(
    bench: &mut Bench,
    name: &str,
    loads: &[f64],
    sketches: usize,
) -> anyhow::Result<()> {
    let mut draws = ChaCha8Rng::seed_from_u64(bench.common.seed);
    let mut progress = Progress::new(loads.len() * sketches / TOGETHER, name);
    for &load in loads {
        let others = (load * (BUCKETS * ENTRIES) as f64).round() as usize;
        // Variances of a key's and a value's estimate, as shares of σ².
        let mut variances = [Vec::new(), Vec::new()];
        for _ in 0..sketches / TOGETHER {
            for (all, own) in variances.iter_mut().zip(estimate(&bench.device, others, &mut draws)?)
            {
                all.extend(own);
            }
            progress.step();
        }
        let case = |what: &str| Case::of(format!("{name} {what}")).length(others).samples(sketches);
        let bound = load * std::f64::consts::PI;
        for (what, variances) in ["keys", "values"].into_iter().zip(&variances) {
            let mean = variances.iter().sum::<f64>() / variances.len() as f64;
            let above = variances.iter().filter(|variance| **variance > bound).count();
            let above = above as f64 / variances.len() as f64;
            let mut record = |metric: &str, value: f64| {
                bench.record(SUITE, &case(what), ("kvreviver vague=sketch", None), metric, value)
            };
            record(metric::VARIANCE, mean);
            record(metric::VARIANCE_BOUND, bound);
            record(metric::ABOVE_BOUND, above);
            record(metric::ABOVE_BOUND_PREDICTED, (-load).exp());
        }
    }
    progress.finish();
    bench.note(format!(
        "{BUCKETS} buckets of {ENTRIES} entries; length: the tokens that share them with the one \
         that is estimated"
    ));
    Ok(())
}

/// The variance of a key's and of a value's estimate in each of some sketches.
fn estimate(
    device: &Device,
    others: usize,
    draws: &mut ChaCha8Rng,
) -> anyhow::Result<[Vec<f64>; 2]> {
    let tokens = others + 1;
    let head = SketchHead { entries: ENTRIES, limit: 0, recents: 0 };
    let seeds: Vec<[u32; 2]> = (0..TOGETHER).map(|_| draws.random()).collect();
    let options = SketchOptions {
        buckets: BUCKETS,
        signed_keys: false,
        slack: 0,
        replace_rate: None,
        rebuild: false,
    };
    let heads = vec![head; TOGETHER];
    let mut sketch = Sketch::new(heads, tokens, COLUMNS, &seeds, options, device)?;
    let mut normal = || {
        let rows = (0..TOGETHER * tokens * COLUMNS).map(|_| draws.sample(StandardNormal));
        let rows: Vec<f32> = rows.collect();
        let flat = Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32));
        flat.reshape([TOGETHER, tokens, COLUMNS])
    };
    let rows = [normal(), normal()];
    let all = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
    let all = all.unsqueeze_dim::<2>(0).expand([TOGETHER, tokens]);
    sketch.add(all, rows[0].clone(), rows[1].clone(), 1.0)?;
    let first = Tensor::<2, Int>::zeros([TOGETHER, 1], (device, DType::I32));
    let estimated = sketch.query(first, DType::F32)?;
    let mut variances = [Vec::new(), Vec::new()];
    for ((variances, rows), estimated) in variances.iter_mut().zip(rows).zip(estimated) {
        let errors = read_f32("errors", estimated - rows.narrow(1, 0, 1))?;
        *variances = errors
            .chunks(COLUMNS)
            .map(|errors| {
                errors.iter().map(|error| f64::from(*error).powi(2)).sum::<f64>() / COLUMNS as f64
            })
            .collect();
    }
    Ok(variances)
}
