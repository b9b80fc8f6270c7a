//! The samples that numbers are means over, in words.

use std::collections::BTreeSet;

use crate::prompts::{EMBEDDED, EMBEDDED_FOR};
use crate::record::{Record, by_setup, group_by, metric};

/// The prompts and the text behind a suite's records, as far as they say; empty otherwise.
pub(crate) fn samples(records: &[&Record]) -> String {
    let of = |metric: &str| -> Vec<&Record> {
        records.iter().copied().filter(|r| r.metric == metric).collect()
    };
    let prompts = [metric::EXACT_MATCH, metric::SCORE, metric::RELATIVE_ERROR].map(of).concat();
    let mut text = of(metric::PERPLEXITY);
    text.retain(|r| r.case.position.is_none());
    let prompts = count(&prompts).map(|count| {
        let unit = unit(&count);
        match source(&prompts) {
            Some(source) if source == EMBEDDED => {
                format!("{count} embedded {unit}{}", foreign(&prompts))
            }
            Some(source) => format!("{count} {unit} of {source}"),
            None => format!("{count} {unit}"),
        }
    });
    let text = count(&text).map(|count| {
        let over = format!("perplexity over {count} tokens");
        match source(&text) {
            Some(source) if source == EMBEDDED => format!("{over} of embedded text"),
            Some(source) => format!("{over} of {source}"),
            None => over,
        }
    });
    [prompts, text].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// The samples of each policy, budget, mode and layer: `7`, or `5 to 7` where they differ. `None`
/// where the records do not say.
pub(crate) fn count(records: &[&Record]) -> Option<String> {
    let mut counts = Vec::new();
    for (.., records) in by_setup(records) {
        for (_, records) in group_by(records, |r| (r.case.mode.as_deref(), r.case.layer)) {
            let sum = records.iter().map(|r| r.case.samples).sum::<Option<usize>>()?;
            // A prompt counts once, whatever its questions.
            let name = |r: &&Record| Some((r.case.source.clone(), r.case.prompt.clone()?));
            let names: Option<BTreeSet<_>> = records.iter().map(name).collect();
            counts.push(names.map_or(sum, |names| names.len()));
        }
    }
    let (low, high) = (counts.iter().min()?, counts.iter().max()?);
    Some(if low == high { low.to_string() } else { format!("{low} to {high}") })
}

/// `prompt` or `prompts`.
pub(crate) fn unit(count: &str) -> &'static str {
    if count == "1" { "prompt" } else { "prompts" }
}

/// The names of all sources, where the records say.
fn source(records: &[&Record]) -> Option<String> {
    let sources = group_by(records.iter().copied(), |r| r.case.source.as_deref());
    let sources: Vec<_> = sources.into_iter().filter_map(|(source, _)| source).collect();
    (!sources.is_empty()).then(|| sources.join(" and "))
}

/// A warning where the embedded prompts ran on another model than the model that they are made for.
fn foreign(records: &[&Record]) -> String {
    match records.iter().any(|r| r.model != EMBEDDED_FOR) {
        true => format!(" (made for {EMBEDDED_FOR}, not for this model)"),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::mode;
    use crate::report::test_records::record;

    fn of(policy: &str, mode: &str, source: &str) -> Record {
        let mut record = record(policy, None, metric::EXACT_MATCH, 1.0);
        record.case.mode = Some(mode.into());
        record.case.source = Some(source.into());
        record.case.samples = Some(1);
        record
    }

    #[test]
    fn prompts_are_counted_once_for_all_modes_and_policies() {
        let mut records = Vec::new();
        for (policy, mode) in [("full", mode::AWARE), ("full", mode::AGNOSTIC), ("a", mode::AWARE)]
        {
            records.extend([of(policy, mode, EMBEDDED), of(policy, mode, EMBEDDED)]);
        }
        let text = |records: &[Record]| samples(&records.iter().collect::<Vec<_>>());
        assert_eq!(text(&records), "2 embedded prompts");
        records.iter_mut().for_each(|r| r.model = "other".into());
        assert!(text(&records).ends_with("(made for needle-1m, not for this model)"));
        records.iter_mut().for_each(|r| r.case.source = Some("a.jsonl".into()));
        records.push(of("a", mode::AWARE, "b.jsonl"));
        assert_eq!(text(&records), "2 to 3 prompts of a.jsonl and b.jsonl");
        // Two questions of one prompt.
        records.iter_mut().for_each(|r| r.case.prompt = Some("1".into()));
        assert_eq!(text(&records[..2]), "1 prompt of a.jsonl");
        records[0].case.samples = None;
        assert_eq!(text(&records), "");
    }

    #[test]
    fn a_text_is_counted_in_tokens() {
        let mut whole = record("full", None, metric::PERPLEXITY, 3.0);
        (whole.case.source, whole.case.samples) = (Some(EMBEDDED.into()), Some(128));
        let mut part = whole.clone();
        (part.case.position, part.case.samples) = (Some(512), Some(64));
        assert_eq!(samples(&[&whole, &part]), "perplexity over 128 tokens of embedded text");
    }
}
