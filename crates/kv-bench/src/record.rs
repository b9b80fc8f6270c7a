//! Records: a measured number each, with its metric, unit, policy, budget, model, device and case.

use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Deserializer, Serialize};

use crate::console::say;
use crate::files::replace;

/// The name of the policy that keeps everything, and to which the others are compared.
pub(crate) const FULL: &str = "full";

/// Whether a policy is the full cache, of this run or of another (`full · other`).
pub(crate) fn is_full(policy: &str) -> bool {
    policy.strip_prefix(FULL).is_some_and(|rest| rest.is_empty() || rest.starts_with(" · "))
}

/// Names of metrics. They are stable: `--json` files of different versions compare, and files that
/// have a name of [`OLD_NAMES`] are read as if they had the new one.
pub(crate) mod metric {
    /// Share of the answers that are right, 0 to 1.
    pub(crate) const EXACT_MATCH: &str = "exact_match";
    /// Log-probability of the right answer, in nats.
    pub(crate) const ANSWER_LOGPROB: &str = "answer_logprob";
    /// Exponential of the mean negative log-likelihood of a token.
    pub(crate) const PERPLEXITY: &str = "perplexity";
    /// Perplexity of a prompt's own tokens in prefill, as policies change it.
    pub(crate) const PREFILL_PERPLEXITY: &str = "prefill_perplexity";
    /// Share of an answer's tokens on which the policy and the full cache agree, 0 to 1.
    pub(crate) const AGREEMENT: &str = "agreement";
    /// Agreement with the full cache over the tokens of the text whose perplexity is measured.
    pub(crate) const TEXT_AGREEMENT: &str = "text_agreement";
    /// Kullback-Leibler divergence of the policy's next-token distributions from the full cache's,
    /// in nats, a mean over an answer's tokens.
    pub(crate) const KL_DIVERGENCE: &str = "kl_divergence";
    /// KL divergence from the full cache, a mean over the tokens of the text whose perplexity is
    /// measured.
    pub(crate) const TEXT_KL_DIVERGENCE: &str = "text_kl_divergence";
    /// Relative Frobenius error of the attention output.
    pub(crate) const RELATIVE_ERROR: &str = "relative_error";
    /// Standard deviation of the relative error over seeds.
    pub(crate) const ERROR_DEVIATION: &str = "relative_error_deviation";
    /// Error of the attention output over the softmax's norm times the values', BalanceKV's ε.
    pub(crate) const EPSILON: &str = "epsilon";
    /// Mean norms of queries, of keys less their head's mean, and of values, and half the widths of
    /// the means' 95 % confidence intervals.
    pub(crate) const QUERY_NORM: &str = "query_norm";
    pub(crate) const QUERY_NORM_INTERVAL: &str = "query_norm_interval";
    pub(crate) const SHIFTED_KEY_NORM: &str = "shifted_key_norm";
    pub(crate) const SHIFTED_KEY_NORM_INTERVAL: &str = "shifted_key_norm_interval";
    pub(crate) const VALUE_NORM: &str = "value_norm";
    pub(crate) const VALUE_NORM_INTERVAL: &str = "value_norm_interval";
    /// `LSE − LSE_full` of a query's weighted logits over the slots and its logits over all tokens,
    /// a mean; 0 where nothing is lost.
    pub(crate) const LSE_ERROR: &str = "lse_error";
    /// The [`LSE_ERROR`] furthest from 0.
    pub(crate) const WORST_LSE_ERROR: &str = "lse_error_worst";
    /// Relative Frobenius error of one query's attention output.
    pub(crate) const QUERY_ERROR: &str = "relative_error_of_a_query";
    /// Share of tokens that no slot represents any more, where slots count the tokens they
    /// represent.
    pub(crate) const DROPPED_VOTES: &str = "dropped_votes";
    /// Relative error of predicted scores, the median over slots and steps.
    pub(crate) const PREDICTION_MEDIAN: &str = "prediction_error_median";
    /// Relative error of predicted scores, a mean weighted by attention.
    pub(crate) const PREDICTION_MEAN: &str = "prediction_error_mean";
    /// Variance of a sketch's estimates, over the variance of the estimated keys or values.
    pub(crate) const VARIANCE: &str = "variance";
    /// The bound that this variance exceeds with little probability only.
    pub(crate) const VARIANCE_BOUND: &str = "variance_bound";
    /// Share of sketches whose variance exceeds the bound.
    pub(crate) const ABOVE_BOUND: &str = "above_bound";
    /// The share of sketches above the bound that the paper predicts at most.
    pub(crate) const ABOVE_BOUND_PREDICTED: &str = "above_bound_predicted";
    /// Slots held.
    pub(crate) const SLOTS: &str = "slots";
    /// Bound of the error of LongFlow's measure of a slot, a median over heads and steps.
    pub(crate) const ERROR_BOUND: &str = "error_bound";
    /// The error that [`ERROR_BOUND`] bounds.
    pub(crate) const OBSERVED_ERROR: &str = "observed_error";
    /// The part of an eviction's effect on the output that LongFlow's measure leaves out, and its
    /// bound.
    pub(crate) const EVICTION_RESIDUAL: &str = "eviction_residual";
    pub(crate) const EVICTION_RESIDUAL_BOUND: &str = "eviction_residual_bound";
    /// The largest change of a logit from one query to the next, and its bound.
    pub(crate) const LOGIT_CHANGE: &str = "logit_change";
    pub(crate) const LOGIT_CHANGE_BOUND: &str = "logit_change_bound";
    /// Share of the full cache's attention that goes to the tokens that a policy reads, 0 to 1.
    pub(crate) const RETAINED_MASS: &str = "retained_mass";
    /// Share of a step's heads that chose the tokens to read, rather than reading the tokens that
    /// an earlier step or another head chose.
    pub(crate) const RETRIEVAL_RATIO: &str = "retrieval_ratio";
    /// Share of the budget's best tokens that steps read; the best tokens have most attention.
    pub(crate) const OVERLAP: &str = "overlap";
    /// Tokens that a head attends to in a step.
    pub(crate) const TOKENS_READ: &str = "tokens_read";
    /// Mean cosine of query heads with themselves a decode step before.
    pub(crate) const QUERY_COSINE: &str = "query_cosine";
    /// Share of the cosines of [`QUERY_COSINE`] that reach CIS's threshold.
    pub(crate) const QUERIES_ALIKE: &str = "queries_alike";
    /// Attention to the best tokens, as many as a step read, less the attention to the tokens that
    /// it read.
    pub(crate) const ORACLE_GAP: &str = "oracle_gap";
    /// Bound on the information that the dropped attention carries, in nats.
    pub(crate) const INFORMATION_LOSS: &str = "information_loss";
    /// Share of the full cache's attention that goes to tokens outside of a layer's window, and its
    /// bound.
    pub(crate) const WINDOW_DROPPED_MASS: &str = "window_dropped_mass";
    pub(crate) const WINDOW_DROPPED_BOUND: &str = "window_dropped_mass_bound";
    /// Total variation between the attention over the layer's own keys and the attention with keys
    /// frozen from the layer below, and its bound.
    pub(crate) const FROZEN_KEY_TV: &str = "frozen_key_tv";
    pub(crate) const FROZEN_KEY_TV_BOUND: &str = "frozen_key_tv_bound";
    /// The total variation of [`FROZEN_KEY_TV`] in a run in which the policy freezes tokens in all
    /// layers.
    pub(crate) const RUN_FROZEN_KEY_TV: &str = "frozen_key_tv_of_run";
    /// Share of the attention to visible tokens that a step did not read, over the steps with a
    /// certificate.
    pub(crate) const DROPPED_MASS: &str = "dropped_mass";
    /// Bound on [`DROPPED_MASS`] by the paper's Lipschitz constant; above 1 it says nothing.
    pub(crate) const DROPPED_BOUND: &str = "dropped_bound";
    /// The share of bounds above 1, which say nothing.
    pub(crate) const BOUND_GT_1_SHARE: &str = "bound_gt_1_share";
    /// Bound on [`DROPPED_MASS`] by odds, which is never above 1.
    pub(crate) const ODDS_BOUND: &str = "odds_bound";
    /// Attention to the best tokens among the candidates of a shared set, as many as the set has,
    /// less the attention to the set; and the paper's bound on the difference.
    pub(crate) const ORACLE_GAP_IN_SET: &str = "oracle_gap_in_set";
    pub(crate) const ORACLE_GAP_IN_SET_BOUND: &str = "oracle_gap_in_set_bound";
    /// The share of steps that dropped, hid or moved more than a bound.
    pub(crate) const BROKEN: &str = "broken_bounds";
    /// Prompt tokens processed in a second, over the batch.
    pub(crate) const PREFILL_TOKENS_PER_SECOND: &str = "prefill_tokens_per_second";
    /// Tokens generated in a second, over the batch.
    pub(crate) const DECODE_TOKENS_PER_SECOND: &str = "decode_tokens_per_second";
    /// Tokens generated in a second, over the full cache's number of tokens.
    pub(crate) const SPEED_UP: &str = "speed_up";
    /// Share of a decode step that merging takes.
    pub(crate) const MERGING_SHARE: &str = "merging_share";
    /// Time from the request to its first token.
    pub(crate) const TIME_TO_FIRST_TOKEN: &str = "time_to_first_token";
    /// Time of a decode step of the whole batch.
    pub(crate) const STEP_TIME: &str = "step_time";
    /// Time of the slowest of the decode steps that were timed, in milliseconds.
    pub(crate) const SLOWEST_STEP: &str = "slowest_step";
    /// Time in which a layer's tokens come back from host memory, in milliseconds.
    pub(crate) const COPY_TIME: &str = "copy_time";
    /// The part of [`COPY_TIME`] that a step waits for, in milliseconds.
    pub(crate) const COPY_WAIT: &str = "copy_wait";
    /// Most memory that a GPU's pool reserved at any time of the run, weights included.
    pub(crate) const PEAK_BYTES: &str = "peak_bytes";
    /// Bytes of weights and caches.
    pub(crate) const TOTAL_BYTES: &str = "total_bytes";
    /// Bytes of the slots that hold a token, of all slots' metadata, and of the policy's state.
    pub(crate) const LIVE_BYTES: &str = "live_bytes";
    /// [`LIVE_BYTES`] and the bytes of the slots that are free to decode into.
    pub(crate) const CACHE_BYTES: &str = "cache_bytes";
    /// Bytes of the slots that hold a token.
    pub(crate) const BYTES_IN_USE: &str = "bytes_in_use";
    /// Bytes that the cache has allocated.
    pub(crate) const BYTES_ALLOCATED: &str = "bytes_allocated";
    /// Bytes of positions, lengths and offsets.
    pub(crate) const METADATA_BYTES: &str = "metadata_bytes";
    /// Bytes of the scratch memory that layers share.
    pub(crate) const SCRATCH_BYTES: &str = "scratch_bytes";
    /// Bytes of the slots that are free to decode into.
    pub(crate) const ROOM_BYTES: &str = "room_bytes";
    /// Bytes of the policy's own state.
    pub(crate) const POLICY_BYTES: &str = "policy_bytes";
    /// Bytes of keys and values that are kept in host memory.
    pub(crate) const HOST_BYTES: &str = "host_bytes";
    /// Sequences that would fit into a given memory, from the bytes measured.
    pub(crate) const LARGEST_BATCH: &str = "largest_batch";
    /// Time of one launch, in microseconds.
    pub(crate) const TIME_US: &str = "time_us";
    /// Arithmetic, in 10^12 operations a second.
    pub(crate) const TERAFLOPS: &str = "tflops";
    /// Bytes that must move.
    pub(crate) const MOVED_BYTES: &str = "moved_bytes";
    /// Bytes that must move over the time, in 10^9 a second.
    pub(crate) const BANDWIDTH: &str = "bandwidth";
    /// The bandwidth as a share of the bandwidth of a copy.
    pub(crate) const BANDWIDTH_FRACTION: &str = "bandwidth_fraction";
}

/// Names that metrics had before, with the names that they have.
const OLD_NAMES: [(&str, &str); 15] = [
    ("attention_sag", metric::LSE_ERROR),
    ("attention_sag_worst", metric::WORST_LSE_ERROR),
    ("remainder", metric::EVICTION_RESIDUAL),
    ("remainder_bound", metric::EVICTION_RESIDUAL_BOUND),
    ("drift", metric::LOGIT_CHANGE),
    ("drift_bound", metric::LOGIT_CHANGE_BOUND),
    ("hidden_mass", metric::WINDOW_DROPPED_MASS),
    ("hidden_bound", metric::WINDOW_DROPPED_BOUND),
    ("moved_mass", metric::FROZEN_KEY_TV),
    ("moved_bound", metric::FROZEN_KEY_TV_BOUND),
    ("run_moved_mass", metric::RUN_FROZEN_KEY_TV),
    ("vacuous_bounds", metric::BOUND_GT_1_SHARE),
    ("set_gap", metric::ORACLE_GAP_IN_SET),
    ("set_gap_bound", metric::ORACLE_GAP_IN_SET_BOUND),
    ("held_bytes", metric::LIVE_BYTES),
];

/// Values of [`Case::mode`].
pub(crate) mod mode {
    /// The policy sees the question when it compresses.
    pub(crate) const AWARE: &str = "question-aware";
    /// The context is compressed before the question is known.
    pub(crate) const AGNOSTIC: &str = "question-agnostic";
}

/// One measured number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The suite that measured it.
    pub(crate) suite: String,
    /// The case: prompt, layer, batch and so on.
    pub(crate) case: Case,
    /// The model's name.
    pub(crate) model: String,
    /// The device's name.
    pub(crate) device: String,
    /// The policy's name.
    pub(crate) policy: String,
    /// Share of the cache kept (at most 1) or tokens kept (above 1); `None` for the full cache.
    pub(crate) budget: Option<f64>,
    /// The metric, one of [`metric`].
    #[serde(deserialize_with = "current_name")]
    pub(crate) metric: String,
    /// The number; one that is not finite is `null` in JSON and comes back as NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub(crate) value: f64,
    /// The number's unit.
    pub(crate) unit: String,
}

/// The case of a measurement; fields that do not apply are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Case {
    /// The task's name, or the op's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) task: Option<String>,
    /// Tokens of the context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) length: Option<usize>,
    /// Where the answer lies in the context, 0 (its start) to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) depth: Option<f64>,
    /// Whether the question is known at compression, one of [`mode`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mode: Option<String>,
    /// The layer's index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer: Option<usize>,
    /// The query head's index in the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) head: Option<usize>,
    /// Token position at which a bucket of the perplexity starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) position: Option<usize>,
    /// Sequences in the batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch: Option<usize>,
    /// Where the prompts or the text are from: a file's name, or `embedded`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<String>,
    /// The number of prompts, or of a text's tokens, that the number is a mean over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<usize>,
}

impl Case {
    /// The case of a task.
    pub(crate) fn of(task: impl Into<String>) -> Self {
        Self { task: Some(task.into()), ..Self::default() }
    }

    /// The case with a context of so many tokens.
    pub(crate) fn length(self, length: usize) -> Self {
        Self { length: Some(length), ..self }
    }

    /// The case of so many sequences at once.
    pub(crate) fn batch(self, batch: usize) -> Self {
        Self { batch: Some(batch), ..self }
    }

    /// The case of one layer.
    pub(crate) fn layer(self, layer: usize) -> Self {
        Self { layer: Some(layer), ..self }
    }

    /// The case whose numbers are means over so many samples.
    pub(crate) fn samples(self, samples: usize) -> Self {
        Self { samples: Some(samples), ..self }
    }

    /// The case whose numbers are means over so many samples of a file.
    pub(crate) fn samples_of(self, source: &str, samples: usize) -> Self {
        Self { source: Some(source.into()), ..self.samples(samples) }
    }
}

impl Record {
    /// The value in its metric's usual unit: times to a first token in milliseconds.
    pub(crate) fn number(&self) -> f64 {
        match (self.metric.as_str(), self.unit.as_str()) {
            (metric::TIME_TO_FIRST_TOKEN, "s" | "seconds") => self.value * 1e3,
            (metric::TIME_TO_FIRST_TOKEN, "us" | "µs") => self.value * 1e-3,
            (metric::TIME_TO_FIRST_TOKEN, "ns") => self.value * 1e-6,
            _ => self.value,
        }
    }
}

fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// A metric's name today, for metrics that had another name before.
fn current_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    let renamed = OLD_NAMES.iter().find(|(old, _)| *old == name);
    Ok(renamed.map_or(name, |(_, new)| (*new).into()))
}

/// Writes the records as a JSON list, one record a line.
///
/// # Errors
/// If the file cannot be written. A file that was there stays as it was.
pub(crate) fn write_json(path: &Path, records: &[Record]) -> anyhow::Result<()> {
    let written = replace(path, |mut file| {
        for (i, record) in records.iter().enumerate() {
            file.write_all(if i == 0 { b"[\n" } else { b",\n" })?;
            serde_json::to_writer(&mut file, record)?;
        }
        file.write_all(if records.is_empty() { b"[]\n" } else { b"\n]\n" })
    });
    written.with_context(|| format!("writing records to {}", path.display()))
}

/// The forms of a file of records.
const HINT: &str = "this takes files that `--json` writes, or the scripts in `peers`";

/// Reads a JSON list of records, or records one after the other. A run that ended early leaves the
/// second form: a last record that is cut off is then left out.
///
/// # Errors
/// If the file cannot be read or does not hold records.
pub(crate) fn read_json(path: &Path) -> anyhow::Result<Vec<Record>> {
    let context = || format!("reading records from {}", path.display());
    let text = std::fs::read_to_string(path).with_context(context)?;
    if !text.trim_start().starts_with('{') {
        return serde_json::from_str(&text).with_context(context).context(HINT);
    }
    let mut records = Vec::new();
    for record in serde_json::Deserializer::from_str(&text).into_iter() {
        match record {
            Err(error) if error.is_eof() && !records.is_empty() => {
                say!("{}: the last record is cut off", path.display())
            }
            record => records.push(record.with_context(context).context(HINT)?),
        }
    }
    Ok(records)
}

/// Groups records by a key; the groups, and the records in each, keep the order of first sight.
pub(crate) fn group_by<'a, K: PartialEq>(
    records: impl IntoIterator<Item = &'a Record>,
    key: impl Fn(&'a Record) -> K,
) -> Vec<(K, Vec<&'a Record>)> {
    let mut groups: Vec<(K, Vec<&Record>)> = Vec::new();
    for record in records {
        let key = key(record);
        // Neighbours are mostly alike, so the latest groups are looked at first.
        match groups.iter_mut().rev().find(|group| group.0 == key) {
            Some(group) => group.1.push(record),
            None => groups.push((key, vec![record])),
        }
    }
    groups
}

/// Groups by policy and budget: the full cache first, the policies as first seen, and the budgets
/// of a policy together.
pub(crate) fn by_setup<'a>(records: &[&'a Record]) -> Vec<(&'a str, Option<f64>, Vec<&'a Record>)> {
    let mut policies = group_by(records.iter().copied(), |r| r.policy.as_str());
    policies.sort_by_key(|(policy, _)| !is_full(policy));
    let setups = |(policy, records)| {
        group_by(records, |r| r.budget).into_iter().map(move |(b, records)| (policy, b, records))
    };
    policies.into_iter().flat_map(setups).collect()
}

/// The mean of the records' numbers, or `None` without records. Perplexities are averaged as
/// log-likelihoods, which is the perplexity of equally long texts taken together.
pub(crate) fn mean(records: &[&Record]) -> Option<f64> {
    let metric = records.first()?.metric.as_str();
    let geometric = [metric::PERPLEXITY, metric::PREFILL_PERPLEXITY].contains(&metric);
    let number = |r: &&Record| if geometric { r.number().ln() } else { r.number() };
    let mean = records.iter().map(number).sum::<f64>() / records.len() as f64;
    Some(if geometric { mean.exp() } else { mean })
}

/// The mean of one metric over whole runs. Records of single layers or positions count only where
/// no record of the whole run exists. Records of single heads count only where no record of their
/// layer exists.
pub(crate) fn summary(records: &[&Record], metric: &str) -> Option<f64> {
    let depth = |r: &Record| match &r.case {
        Case { head: Some(_), .. } => 2,
        Case { layer: None, position: None, .. } => 0,
        _ => 1,
    };
    let all: Vec<_> = records.iter().copied().filter(|r| r.metric == metric).collect();
    let least = all.iter().map(|r| depth(r)).min()?;
    mean(&all.into_iter().filter(|r| depth(r) == least).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::record;

    #[test]
    fn groups_keep_the_order_of_first_sight() {
        let policies = ["b", "a", "full", "b", "c", "a"];
        let records = policies.map(|policy| record(policy, Some(0.5), metric::EXACT_MATCH, 1.0));
        let groups = group_by(&records, |r| r.policy.as_str());
        let sizes: Vec<_> = groups.iter().map(|(key, group)| (*key, group.len())).collect();
        assert_eq!(sizes, [("b", 2), ("a", 2), ("full", 1), ("c", 1)]);
        let setups = by_setup(&records.iter().collect::<Vec<_>>());
        let order: Vec<_> = setups.iter().map(|setup| setup.0).collect();
        assert_eq!(order, ["full", "b", "a", "c"]);
    }

    #[test]
    fn perplexities_are_averaged_as_likelihoods() {
        let records = [2.0, 8.0].map(|value| record("a", None, metric::PERPLEXITY, value));
        let mean = mean(&records.iter().collect::<Vec<_>>()).unwrap();
        assert!((mean - 4.0).abs() < 1e-12);
        assert_eq!(super::mean(&[]), None);
    }

    #[test]
    fn parts_do_not_count_beside_the_whole() {
        let whole = record("a", None, metric::RELATIVE_ERROR, 0.25);
        let mut part = record("a", None, metric::RELATIVE_ERROR, 0.75);
        part.case.layer = Some(3);
        let mut head = record("a", None, metric::RELATIVE_ERROR, 0.5);
        head.case = Case { head: Some(1), ..part.case.clone() };
        assert_eq!(summary(&[&head, &whole, &part], metric::RELATIVE_ERROR), Some(0.25));
        assert_eq!(summary(&[&part, &head], metric::RELATIVE_ERROR), Some(0.75));
        assert_eq!(summary(&[&head], metric::RELATIVE_ERROR), Some(0.5));
        assert_eq!(summary(&[&part], metric::PERPLEXITY), None);
    }

    #[test]
    fn times_are_milliseconds() {
        let mut time = record("a", None, metric::TIME_TO_FIRST_TOKEN, 0.5);
        time.unit = "s".into();
        assert_eq!(time.number(), 500.0);
    }

    #[test]
    fn json_comes_back_without_nones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let mut records = vec![record("full", None, metric::PERPLEXITY, 3.5)];
        records[0].case.depth = Some(0.5);
        write_json(&path, &records).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(r#""case":{"depth":0.5}"#), "{text}");
        assert_eq!(read_json(&path).unwrap(), records);

        records[0].value = f64::INFINITY;
        write_json(&path, &records).unwrap();
        assert!(read_json(&path).unwrap()[0].value.is_nan());
        write_json(&path, &[]).unwrap();
        assert!(read_json(&path).unwrap().is_empty());
    }

    #[test]
    fn metrics_are_read_by_their_old_names_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json");
        let now = record("h2o", Some(0.5), metric::LIVE_BYTES, 3.5);
        write_json(&path, std::slice::from_ref(&now)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(r#""metric":"live_bytes""#), "{text}");
        let old = text.replace("live_bytes", "held_bytes");
        std::fs::write(&path, old).unwrap();
        assert_eq!(read_json(&path).unwrap(), [now]);
        let renamed = |name: &&str| OLD_NAMES.iter().any(|(old, _)| old == name);
        assert!(!OLD_NAMES.iter().map(|(_, new)| *new).any(|new| renamed(&new)));
    }

    #[test]
    fn a_record_that_is_cut_off_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records.json.partial");
        let whole = record("full", None, metric::PERPLEXITY, 3.5);
        let line = serde_json::to_string(&whole).unwrap();
        std::fs::write(&path, format!("{line}\n{line}\n{}", &line[..line.len() - 10])).unwrap();
        assert_eq!(read_json(&path).unwrap(), [whole.clone(), whole]);
        std::fs::write(&path, &line[..line.len() - 10]).unwrap();
        assert!(read_json(&path).is_err());
        std::fs::write(&path, format!("{line}\n{{\"suite\": \"x\"}}\n")).unwrap();
        let error = format!("{:#}", read_json(&path).unwrap_err());
        assert!(error.contains("missing field"), "{error}");
        std::fs::write(&path, "").unwrap();
        assert!(read_json(&path).is_err());
    }
}
