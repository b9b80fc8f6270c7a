//! Norms of queries, of keys shifted by their head's mean, and of values, prompt by prompt, over
//! all layers and heads: `r` and the values' bound of BalanceKV's theorem 3.1 (table 3).

use burn::tensor::{DType, Tensor};
use kv_core::read_f32;

use super::SUITE;
use super::layer::{self, LayerPrompt};
use crate::bench::ModelBench;
use crate::options::PaperOptions;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};

/// Deviations of a mean on either side of it, within which the true one lies 95 times in 100.
const WITHIN_95: f64 = 1.96;

/// Count, sum and sum of squares of some norms.
#[derive(Debug, Default, Clone, Copy)]
struct Norms {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Norms {
    /// Adds the norms of rows `[B, H, T, D]`.
    fn add(&mut self, rows: Tensor<4>) -> anyhow::Result<()> {
        let [batch, heads, tokens, _] = rows.dims();
        let norms = rows.cast(DType::F32).square().sum_dim(3).sqrt();
        for norm in read_f32("norms", norms.reshape([batch * heads * tokens]))? {
            let norm = f64::from(norm);
            self.count += 1.0;
            self.sum += norm;
            self.squares += norm * norm;
        }
        Ok(())
    }

    fn mean(&self) -> f64 {
        self.sum / self.count
    }

    /// Half the width of the mean's 95 % confidence interval.
    fn interval(&self) -> f64 {
        let variance = (self.squares / self.count - self.mean().powi(2)).max(0.0);
        WITHIN_95 * (variance / self.count).sqrt()
    }
}

/// Measures the norms of each of at most `limit` prompts, unless another number is asked for.
///
/// # Errors
/// Where the device refuses.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    options: &PaperOptions,
    limit: usize,
) -> anyhow::Result<()> {
    let (source, prompts) = layer::prompts(bench, options, limit, 0)?;
    let count = bench.model.config().num_layers;
    let layers: Vec<usize> = (0..count).collect();
    let mut progress = Progress::new(prompts.len() * count, name);
    for (index, tokens) in prompts.iter().enumerate() {
        let mut norms = [Norms::default(); 3];
        layer::observe(bench, tokens, &layers, &mut |prompt| {
            progress.step();
            add(&mut norms, prompt)
        })?;
        let case = Case::of(format!("{name}, prompt {}", index + 1))
            .length(tokens.len())
            .samples_of(&source, 1);
        let names = [
            (metric::QUERY_NORM, metric::QUERY_NORM_INTERVAL),
            (metric::SHIFTED_KEY_NORM, metric::SHIFTED_KEY_NORM_INTERVAL),
            (metric::VALUE_NORM, metric::VALUE_NORM_INTERVAL),
        ];
        for ((mean, interval), norms) in names.into_iter().zip(norms) {
            bench.record(SUITE, &case, (FULL, None), mean, norms.mean());
            bench.record(SUITE, &case, (FULL, None), interval, norms.interval());
        }
    }
    progress.finish();
    Ok(())
}

/// Adds one layer's queries, shifted keys and values.
fn add(norms: &mut [Norms; 3], prompt: &LayerPrompt) -> anyhow::Result<()> {
    let keys = prompt.keys.clone().cast(DType::F32);
    let shifted = keys.clone() - keys.mean_dim(2);
    let rows = [prompt.queries.clone(), shifted, prompt.values.clone()];
    norms.iter_mut().zip(rows).try_for_each(|(norms, rows)| norms.add(rows))
}

#[cfg(test)]
mod tests {
    use kv_core::select_device;
    use kv_policies::LayerContext;

    use super::*;
    use crate::testing::quick;

    #[test]
    fn norms_are_those_of_plain_loops() {
        let device = select_device("cpu".parse().unwrap()).unwrap();
        let rows = |values: &[f32]| {
            let flat = Tensor::<1>::from_data(values, (&device, DType::F32));
            flat.reshape([1, 1, values.len() / 2, 2])
        };
        let mut norms = [Norms::default(); 3];
        let layer = LayerContext { index: 0, count: 1 };
        // Keys whose mean is (1, 1).
        let (queries, keys) = (rows(&[3.0, 4.0, 0.0, 5.0]), rows(&[4.0, 5.0, -2.0, -3.0]));
        let prompt = LayerPrompt { queries, keys, values: rows(&[0.0, 2.0, 0.0, 4.0]), layer };
        add(&mut norms, &prompt).unwrap();
        assert!((norms[0].mean() - 5.0).abs() < 1e-6 && norms[0].interval() < 1e-6);
        assert!((norms[1].mean() - 5.0).abs() < 1e-6, "{}", norms[1].mean());
        // 3 and a deviation of 1, of two values.
        assert!((norms[2].mean() - 3.0).abs() < 1e-6);
        assert!((norms[2].interval() - 1.96 / 2f64.sqrt()).abs() < 1e-6);
    }

    #[test]
    fn every_prompt_has_its_norms() {
        let (records, report) = quick("balancekv-table3");
        for name in [metric::QUERY_NORM, metric::SHIFTED_KEY_NORM, metric::VALUE_NORM] {
            let own: Vec<f64> =
                records.iter().filter(|r| r.metric == name).map(|r| r.value).collect();
            assert!(own.len() == 2 && own.iter().all(|norm| *norm > 0.0), "{name}: {own:?}");
        }
        assert!(report.contains("prompt 2"));
    }
}
