//! Records: a measured number each, with its metric, unit, policy, budget, model, device and case.

pub(crate) mod metric;

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
    /// The one prompt that was measured, by its name in the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt: Option<String>,
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

    /// The case of one prompt of a file.
    pub(crate) fn prompt_of(self, source: &str, prompt: &str) -> Self {
        Self { prompt: Some(prompt.into()), ..self.samples_of(source, 1) }
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
    let renamed = metric::OLD_NAMES.iter().find(|(old, _)| *old == name);
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
        let renamed = |name: &&str| metric::OLD_NAMES.iter().any(|(old, _)| old == name);
        assert!(!metric::OLD_NAMES.iter().map(|(_, new)| *new).any(|new| renamed(&new)));
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
