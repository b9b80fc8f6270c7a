//! The overview's first table: the best policy of each family, beside the full cache.

use super::samples;
use crate::families::{self, FAMILIES};
use crate::format;
use crate::interval::Estimate;
use crate::record::{Record, by_setup, group_by, is_full, metric, mode, summary};
use crate::table::{Column, Row, Table};

/// The suite that asks prompts.
const SUITE: &str = "quality";

/// The columns: metric, mode, and a heading in plain words.
const COLUMNS: [(&str, Option<&str>, &str); 6] = [
    (metric::EXACT_MATCH, Some(mode::AWARE), "question\nseen"),
    (metric::EXACT_MATCH, Some(mode::AGNOSTIC), "question\nunseen"),
    (metric::KL_DIVERGENCE, None, "KL\nnats"),
    (metric::PERPLEXITY, None, "per-\nplexity"),
    (metric::LIVE_BYTES, None, "live\nmemory"),
    (metric::DECODE_TOKENS_PER_SECOND, None, "decode\ntok/s"),
];

/// The legend of the column of policies.
const BEST_IS: [&str; 2] = [
    "best: most right answers, question seen and unseen together; among equals the lowest KL \
     divergence of answers",
    "cam comes last of its family: by default it merges nothing of a prompt, only tokens that \
     decode steps evict",
];

/// The legend of the columns.
const COLUMNS_ARE: [&str; 4] = [
    "question seen: share of right answers where the question is known when the prompt is \
     compressed",
    "question unseen: share of right answers where the prompt is compressed before the question",
    "KL: divergence of the answer's tokens from the full cache's; perplexity: of a text",
    "decode: tokens generated in a second",
];

/// A row a family: its policy with most right answers, the mean of all modes, at the smallest
/// budget that most policies ran at. Of policies with equally many right answers, the policy
/// closest to the full cache stands in the row. Policies that do nothing of the family to a prompt
/// come last, as answers cannot say anything about them. `None` where no family ran.
pub(crate) fn table(records: &[Record]) -> Option<Table> {
    let records: Vec<&Record> = records.iter().collect();
    let setups = by_setup(&records);
    let budgets = setups.iter().filter_map(|(_, budget, _)| *budget);
    let budget = budgets.min_by(f64::total_cmp)?;
    let row = |family: &str, policy: &str, budget: Option<f64>, records: &[&Record]| {
        let cell = |(metric, mode, _): &(&str, Option<&str>, &str)| {
            let fits = |r: &&Record| mode.is_none() || r.case.mode.as_deref() == *mode;
            let taken: Vec<_> = records.iter().copied().filter(fits).collect();
            // Without an interval, which would not count that the best were chosen by their means.
            summary(&taken, metric).map(Estimate::from)
        };
        Row {
            keys: vec![family.into(), policy.into(), format::budget(budget)],
            cells: COLUMNS.iter().map(cell).collect(),
        }
    };
    let mut rows = Vec::new();
    if let Some((policy, budget, records)) = setups.iter().find(|(policy, ..)| is_full(policy)) {
        rows.push(row("all tokens", policy, *budget, records));
    }
    let of_full = rows.len();
    for family in FAMILIES {
        let own = setups.iter().filter(|(policy, own, _)| {
            *own == Some(budget) && families::of_label(policy) == Some(family)
        });
        // NaN is no merit.
        let number = |records: &[&Record], metric| {
            summary(records, metric).filter(|value| value.is_finite())
        };
        let ranked = own.filter_map(|(policy, budget, records)| {
            let right = number(records, metric::EXACT_MATCH)?;
            let distance = number(records, metric::KL_DIVERGENCE).unwrap_or(f64::INFINITY);
            Some(((!families::spares_prompts(policy), right, -distance), (policy, budget, records)))
        });
        let best = ranked.max_by(|((acts, a, b), _), ((other, c, d), _)| {
            acts.cmp(other).then(a.total_cmp(c)).then(b.total_cmp(d))
        });
        if let Some((_, (policy, budget, records))) = best {
            rows.push(row(families::name(family), policy, *budget, records));
        }
    }
    let column = |(metric, _, head): &(&str, Option<&str>, &str)| {
        let info = metric::info(metric);
        let head = (*head).into();
        Column { head, kind: info.kind, higher_is_better: info.higher_is_better }
    };
    let quality: Vec<&Record> = records.iter().copied().filter(|r| r.suite == SUITE).collect();
    let models = group_by(quality.iter().copied(), |r| r.model.as_str());
    let models: Vec<&str> = models.into_iter().map(|(model, _)| model).collect();
    let means_over = [format!("model {}", models.join(" and ")), samples::samples(&quality)];
    let families =
        FAMILIES.map(|family| format!("{}: {}", families::name(family), families::does(family)));
    let columns = BEST_IS.into_iter().chain(COLUMNS_ARE).chain(metric::legend(metric::LIVE_BYTES));
    let table = Table {
        title: format!("The best of each family at {}", format::budget(Some(budget))),
        means_over: means_over.join(": "),
        legend: families.into_iter().chain(columns.map(Into::into)).collect(),
        keys: ["family", "best", "budget"].map(Into::into).to_vec(),
        columns: COLUMNS.iter().map(column).collect(),
        rows,
    };
    (table.rows.len() > of_full).then(|| table.without_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::record;

    #[test]
    fn a_family_is_shown_by_its_best_policy() {
        let at = |policy: &str, budget, metric: &str, value| record(policy, budget, metric, value);
        let quarter = Some(0.25);
        let mut records = vec![
            at("full", None, metric::EXACT_MATCH, 1.0),
            at("snapkv", quarter, metric::EXACT_MATCH, 0.5),
            at("h2o", quarter, metric::EXACT_MATCH, 0.5),
            at("tova", quarter, metric::EXACT_MATCH, 0.25),
            // Records at another budget, and of no method.
            at("tova", Some(0.5), metric::EXACT_MATCH, 1.0),
            at("top-k-oracle", quarter, metric::EXACT_MATCH, 1.0),
            at("psaw", None, metric::EXACT_MATCH, 1.0),
            at("cis", quarter, metric::EXACT_MATCH, 0.75),
            at("kvreviver", quarter, metric::EXACT_MATCH, f64::NAN),
            // What its evictor answers is no merit of merging.
            at("cam", quarter, metric::EXACT_MATCH, 0.5),
            at("d2o", quarter, metric::EXACT_MATCH, 0.25),
        ];
        records.iter_mut().for_each(|r| r.case.mode = Some(mode::AWARE.into()));
        records.push(at("snapkv", quarter, metric::KL_DIVERGENCE, 0.2));
        records.push(at("h2o", quarter, metric::KL_DIVERGENCE, 0.1));
        let table = table(&records).unwrap();
        let keys: Vec<_> = table.rows.iter().map(|row| row.keys.join(" ")).collect();
        let expected = ["all tokens full –", "drop h2o 25 %", "merge d2o 25 %", "read cis 25 %"];
        assert_eq!(keys, expected);
        assert_eq!(table.text(1, 0), "50.0 %");
        let heads: Vec<_> = table.columns.iter().map(|column| column.head.as_str()).collect();
        assert_eq!(heads, ["question\nseen", "KL\nnats"]);
        let text = table.to_text();
        assert!(text.contains("\nread: keeps all tokens and attends to some of them\n"));
        assert!(text.contains("\nlive memory: keys and values in use"), "{text}");
        assert!(super::table(&records[..1]).is_none());
    }

    /// The two prompts of a model are counted once for all policies.
    #[test]
    fn the_model_and_its_prompts_are_named() {
        let mut records = Vec::new();
        for (policy, budget) in [("full", None), ("h2o", Some(0.25))] {
            records.extend([1.0, 0.0].map(|right| {
                let mut record = record(policy, budget, metric::EXACT_MATCH, right);
                record.case.mode = Some(mode::AWARE.into());
                record.case.source = Some("embedded".into());
                record.case.samples = Some(1);
                record
            }));
        }
        let line = |records: &[Record]| table(records).unwrap().means_over;
        assert_eq!(line(&records), "model needle-1m: 2 embedded prompts");
        records[3].model = "other".into();
        assert!(line(&records).starts_with("model needle-1m and other: "), "{}", line(&records));
    }
}
