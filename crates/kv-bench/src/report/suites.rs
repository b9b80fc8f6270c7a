//! The figures that the report shows of a suite's records, as far as they have data.

use super::axis::Axis;
use super::charts::{Chart, Scale};
use super::figure::{Figure, Frame};
use super::heatmap;
use super::policies::{Policies, key};
use crate::format::{self, Kind, escape};
use crate::record::{Record, by_setup, group_by, metric, summary};

/// The option of policies that compress all tokens anew every so many steps.
const PERIOD: &str = "period";

/// The figures of one suite's records.
///
/// # Errors
/// If plotters cannot draw.
pub(crate) fn figures(records: &[&Record], policies: &Policies) -> anyhow::Result<Vec<Figure>> {
    let chart = |metric, label, scale| Chart { records, policies, metric, label, scale };
    let budget = |metric, label, scale, id, title, caption| {
        chart(metric, label, scale).by_budget(&Frame { id, title, caption })
    };
    let mut figures = Vec::new();
    figures.extend(budget(
        metric::EXACT_MATCH,
        "exact match",
        Scale::Fit,
        "exact-match",
        "Exact match against budget",
        "Share of the answers that are exactly right, over all tasks, lengths and depths. The \
         further left a line stays close to the full cache, the less memory its policy needs.",
    )?);
    figures.extend(budget(
        metric::ANSWER_LOGPROB,
        "log-probability of the answer (nats)",
        Scale::Fit,
        "answer-logprob",
        "Answer log-probability against budget",
        "How likely the right answer stays; higher is better. It can move before exact match does, \
         so it tells apart policies that all still answer right.",
    )?);
    figures.extend(retrieval(records, policies)?);
    let scale = Scale::of(records, metric::PERPLEXITY, Scale::Fit);
    figures.extend(budget(
        metric::PERPLEXITY,
        "perplexity",
        scale,
        "perplexity",
        "Perplexity against budget",
        "Lower is better; the full cache is the level to stay at.",
    )?);
    let frame = Frame {
        id: "perplexity-by-period",
        title: "Perplexity against the period",
        caption: "Lower is better. Every so many steps the cache is compressed anew, from all \
                  tokens; policies without such rebuilds are level lines.",
    };
    let label = "steps from one rebuild to the next (log scale)";
    figures
        .extend(chart(metric::PERPLEXITY, "perplexity", scale).by_option(&frame, PERIOD, label)?);
    let frame = Frame {
        id: "perplexity-by-position",
        title: "Perplexity by position",
        caption: "Lower is better. A line that leaves the full cache's as the position grows says \
                  that the policy dropped what later tokens need.",
    };
    let positions = |r: &Record| r.case.position.map(|position| position as f64);
    let axis = |values: &[f64]| Axis::whole("token position".into(), values);
    figures
        .extend(chart(metric::PERPLEXITY, "perplexity", scale).by_case(&frame, positions, axis)?);
    figures.extend(budget(
        metric::KL_DIVERGENCE,
        "divergence from the full cache (nats)",
        Scale::Log,
        "kl-divergence",
        "KL divergence from the full cache",
        "How far the distributions of an answer's tokens are from the full cache's, in nats a \
         token; lower is better. 0, which has no place on a logarithmic axis, says that nothing is \
         lost.",
    )?);
    figures.extend(budget(
        metric::TEXT_KL_DIVERGENCE,
        "divergence from the full cache (nats)",
        Scale::Log,
        "text-kl-divergence",
        "KL divergence on text",
        "How far the distributions of the text's next tokens are from the full cache's, in nats a \
         token; lower is better. Perplexity judges a policy by the text, which it may hit by \
         chance; this judges it by the model that it stands for.",
    )?);
    figures.extend(budget(
        metric::AGREEMENT,
        "agreement with the full cache",
        Scale::Fit,
        "agreement",
        "Agreement with the full cache",
        "Share of an answer's tokens at which the compressed and the full cache choose the same \
         one.",
    )?);
    figures.extend(budget(
        metric::TEXT_AGREEMENT,
        "agreement with the full cache",
        Scale::Fit,
        "text-agreement",
        "Agreement on text",
        "The same, of the text whose perplexity is measured.",
    )?);
    let (error, mass) = (metric::RELATIVE_ERROR, metric::RETAINED_MASS);
    figures.extend(budget(
        error,
        "relative error",
        Scale::Log,
        "relative-error",
        "Attention error against budget",
        "Relative error of the attention output on real queries, keys and values; lower is \
         better. An exact output has no place on a logarithmic axis and is left out.",
    )?);
    let frame = Frame {
        id: "relative-error-by-period",
        title: "Attention error against the period",
        caption: "Lower is better. What decode steps lose between two rebuilds of the cache from \
            all tokens.",
    };
    let label = "steps from one rebuild to the next (log scale)";
    figures.extend(chart(error, "relative error", Scale::Log).by_option(&frame, PERIOD, label)?);
    let layers = |r: &Record| r.case.layer.map(|layer| layer as f64);
    let axis = |values: &[f64]| Axis::whole("layer".into(), values);
    let frame = Frame {
        id: "relative-error-by-layer",
        title: "Attention error by layer",
        caption: "A layer where all lines rise is hard to compress for every policy; one where a \
                  single line rises is that policy's weak spot.",
    };
    figures.extend(chart(error, "relative error", Scale::Log).by_case(&frame, layers, axis)?);
    figures.extend(budget(
        mass,
        "retained attention mass",
        Scale::Fit,
        "retained-mass",
        "Retained attention mass against budget",
        "Share of the full cache's attention that falls on what was kept; higher is better.",
    )?);
    figures.extend(merging(records, policies)?);
    figures.extend(costs(records, policies)?);
    Ok(figures)
}

/// The attention that merges lose, and how well scores are predicted.
fn merging(records: &[&Record], policies: &Policies) -> anyhow::Result<Vec<Figure>> {
    let metrics = [
        (
            metric::LSE_ERROR,
            "log-sum-exp error (nats)",
            "lse-error",
            "Log-sum-exp error",
            LSE_ERROR,
        ),
        (metric::QUERY_ERROR, "relative error", "query-error", "Error of one query", QUERY_ERROR),
        (
            metric::PREDICTION_MEDIAN,
            "relative error, median",
            "prediction-median",
            "Error of predicted scores",
            PREDICTION,
        ),
        (
            metric::PREDICTION_MEAN,
            "relative error, mean",
            "prediction-mean",
            "Error of predicted scores, weighted by attention",
            "The same, but each slot counts as much as it is attended to.",
        ),
        (metric::SPEED_UP, "times the full cache's", "speed-up", "Speed-up", SPEED_UP),
    ];
    let figure = |(metric, label, id, title, caption)| {
        let frame = Frame { id, title, caption };
        Chart { records, policies, metric, label, scale: Scale::Zero }.by_task(&frame).transpose()
    };
    metrics.into_iter().filter_map(figure).collect()
}

const LSE_ERROR: &str = "Log-sum-exp of a prompt's last query over the compressed cache, weights \
    included, less that over all tokens. 0: attention on what was merged is what it was. Below: a \
    merged slot counts less than its tokens did, or some were dropped.";
const QUERY_ERROR: &str = "Relative error of the same query's attention output; lower is better.";
const PREDICTION: &str = "Relative error of a slot's unnormalised score, predicted from those \
    before it on the full cache; lower is better. Merges are as exact as the scores are foreseen.";
const SPEED_UP: &str = "Tokens generated in a second at each policy's largest batch, over those of \
    the full cache at its own.";

/// Memory and speed.
fn costs(records: &[&Record], policies: &Policies) -> anyhow::Result<Vec<Figure>> {
    let chart = |metric, label| Chart { records, policies, metric, label, scale: Scale::Zero };
    let mut figures = Vec::new();
    let frame = Frame {
        id: "memory",
        title: "Cache memory",
        caption: "Solid: bytes of the slots in use, of all slots' metadata and of what the policy \
                  keeps beside them, and the number. Pale, where it was measured: the same with \
                  the room to decode. A pale bar much longer than its solid one is memory that \
                  compression did not give back.",
    };
    let memory = chart(metric::LIVE_BYTES, "cache");
    figures.extend(memory.bars(&frame, metric::CACHE_BYTES)?);
    let frame = Frame {
        id: "peak-memory",
        title: "Peak memory",
        caption: "The most memory that the GPU's pool reserved at any time of a run, weights \
                  included. The pool is emptied before each run.",
    };
    figures.extend(chart(metric::PEAK_BYTES, "peak memory").bars(&frame, "")?);
    let speeds = [
        (metric::DECODE_TOKENS_PER_SECOND, "tokens/s", "decode", "Decode speed", DECODE),
        (metric::PREFILL_TOKENS_PER_SECOND, "tokens/s", "prefill", "Prefill speed", PREFILL),
        (metric::TIME_TO_FIRST_TOKEN, "ms", "first-token", "Time to the first token", FIRST),
    ];
    for (metric, unit, id, title, caption) in speeds {
        let label = format!("{} ({unit})", title.to_lowercase());
        let scale = Scale::of(records, metric, Scale::Zero);
        let chart = Chart { records, policies, metric, label: &label, scale };
        let frame = Frame { id, title, caption };
        let batch = |r: &Record| r.case.batch.map(|batch| batch as f64);
        let axis = |values: &[f64]| Axis::at("batch".into(), values, format::whole);
        figures.extend(match chart.by_case(&frame, batch, axis)? {
            Some(lines) => Some(lines),
            None => chart.bars(&frame, "")?,
        });
    }
    Ok(figures)
}

const DECODE: &str = "Tokens generated in a second over the whole batch; higher is better. What a \
    smaller cache saves in memory traffic shows at large batches first.";
const PREFILL: &str = "Prompt tokens processed in a second. A policy below the full cache pays \
    here for choosing what to keep.";
const FIRST: &str = "From the request to its first token; lower is better.";

const RETRIEVAL: &str = "Across: context length in tokens. Down: where the answer lies, 0 % being \
    the start of the context. Above each map: the budget and the mean over its cells. Look for red \
    stripes: a column says that a length is too long for the budget, a row that a policy is blind \
    to a part of the context.";

/// Heat maps of exact match by length and depth: a row a policy, a column a budget.
fn retrieval(records: &[&Record], policies: &Policies) -> anyhow::Result<Vec<Figure>> {
    let placed = |r: &&Record| {
        r.metric == metric::EXACT_MATCH && r.case.length.is_some() && r.case.depth.is_some()
    };
    let records: Vec<_> = records.iter().copied().filter(placed).collect();
    let mut figures = Vec::new();
    for (mode, records) in group_by(records, |r| r.case.mode.as_deref()) {
        let frame = heatmap::Frame::of(&records);
        let mut budgets: Vec<f64> = records.iter().filter_map(|r| r.budget).collect();
        budgets.sort_by(|a, b| b.total_cmp(a));
        budgets.dedup();
        let columns = budgets.len().max(1);
        let width = (1000 / columns as u32).saturating_sub(16).clamp(130, 300);
        let mut rows = String::new();
        let setups = by_setup(&records);
        for (policy, _, _) in setups.chunk_by(|a, b| a.0 == b.0).map(|chunk| &chunk[0]) {
            rows += &format!(r#"<ul class="who">{}</ul>"#, key(policies.number(policy), policy));
            for (_, budget, records) in setups.iter().filter(|setup| setup.0 == *policy) {
                let column = budgets.iter().position(|b| Some(*b) == *budget).unwrap_or(0) + 2;
                let share = summary(records, metric::EXACT_MATCH).unwrap_or(f64::NAN);
                let text = format::budget(*budget);
                let label = format!("{policy} at {text}: exact match by length and depth");
                rows += &format!(
                    r#"<div class="map" style="grid-column:{column}">
<p><span>{}</span><b>{}</b></p>{}</div>"#,
                    escape(&if budget.is_none() { "everything".into() } else { text }),
                    format::value(Kind::Share, share),
                    heatmap::draw(&label, &frame, records, (width, 104))?,
                );
            }
        }
        let suffix = mode.map(|mode| format!(", {mode}")).unwrap_or_default();
        let html = format!(
            r#"<figure><div class="ramp"><span>never found</span><i style="background:{}"></i>
<span>always found</span></div><div class="maps" style="--columns:{columns}">{rows}</div>
<figcaption>{RETRIEVAL}</figcaption></figure>"#,
            heatmap::gradient(),
        );
        let id = format!("retrieval{}", mode.map(|m| format!("-{m}")).unwrap_or_default());
        figures.push(Figure { id, title: format!("Retrieval by length and depth{suffix}"), html });
    }
    Ok(figures)
}
