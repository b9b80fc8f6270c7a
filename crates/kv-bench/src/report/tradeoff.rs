//! Accuracy against bytes held: a small plot for each family of policies, all with equal axes.

use super::answers::{Answers, Setup};
use super::axis::Axis;
use super::charts::shown;
use super::figure::{Figure, Frame};
use super::lines::{Panel, Point, Series};
use super::policies::Policies;
use crate::families::{self, FAMILIES};
use crate::format::{self, Kind};

const CAPTION: &str = "Mean of the tasks' averages against the bytes held once the prompt is \
    compressed; a line a policy, a point a budget. A policy has no point at a budget where it \
    lacks a task. Every plot has the full cache's point, and its level. Look for lines that stay \
    high to the left. A point far right of its budget says that a policy's metadata and state, or \
    its rounding, take the bytes. Point at a mark for its policy, budget, score and bytes.";

/// The figure; `None` where the full cache did not run, or nothing ran beside it.
///
/// # Errors
/// If plotters cannot draw.
pub(super) fn figure(answers: &Answers<'_>, policies: &Policies) -> anyhow::Result<Option<Figure>> {
    let full_bytes = answers.full_bytes();
    let point = |setup: &Setup<'_>| {
        let y = setup.average().filter(|_| !answers.lacks_tasks(setup))?;
        let [bytes, full] = setup.bytes(&full_bytes);
        let x = Some(bytes / full).filter(|share| share.is_finite())?;
        let budget = setup.budget.map(|budget| format!(" at {}", format::budget(Some(budget))));
        let interval = y.interval.map(|own| format!(" {}", format::interval(Kind::Share, own)));
        let text = format!(
            "{}{}: {}{}, {} held, {} of the full cache",
            setup.policy,
            budget.unwrap_or_default(),
            format::value(Kind::Share, y.mean),
            interval.unwrap_or_default(),
            format::bytes(bytes),
            format::percent(x),
        );
        Some(Point { x: Some(x), y, text })
    };
    let line = |setups: &[&Setup<'_>]| {
        let mut points: Vec<Point> = setups.iter().copied().filter_map(point).collect();
        if setups[0].is_full() {
            // The level, without another error bar.
            let level = points.iter().map(|point| Point {
                x: None,
                y: point.y.mean.into(),
                ..point.clone()
            });
            points.extend(level.collect::<Vec<_>>());
        }
        Series { policy: policies.number(setups[0].policy), name: setups[0].policy.into(), points }
    };
    let lines: Vec<(&str, Series)> = answers
        .setups
        .iter()
        .collect::<Vec<_>>()
        .chunk_by(|a, b| a.policy == b.policy)
        .map(|setups| (setups[0].family(), line(setups)))
        .filter(|(_, series)| !series.points.is_empty())
        .collect();
    let (full, others): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|(_, series)| series.policy.is_none());
    let points = full.iter().chain(&others).flat_map(|(_, series)| &series.points);
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    for point in points {
        xs.extend(point.x);
        ys.push(point.y);
    }
    let label = "bytes held, of the full cache's (log scale)".into();
    let x = Axis::round(label, Kind::Share, true, &xs);
    let values = shown(ys.into_iter(), Kind::Share, false);
    let y = Axis::round("average score".into(), Kind::Share, false, &values);
    let names = FAMILIES.map(families::name).into_iter().chain(["others"]);
    let panels: Vec<(Panel, Axis)> = names
        .filter_map(|family| {
            let own = others.iter().filter(|(of, _)| *of == family);
            let series: Vec<Series> = own.chain(&full).map(|(_, series)| series.clone()).collect();
            let panel = Panel { title: family.into(), series };
            (panel.series.len() > full.len()).then(|| (panel, x.clone()))
        })
        .collect();
    if panels.is_empty() || full.is_empty() {
        return Ok(None);
    }
    let does = FAMILIES.map(|own| format!("{} {}", families::name(own), families::does(own)));
    let caption = format!("{CAPTION} Families: {}.", does.join("; "));
    let frame =
        Frame { id: "accuracy-by-bytes", title: "Accuracy against bytes held", caption: &caption };
    frame.small_multiples(&panels, &y).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::report::test_records::evaluation;

    #[test]
    fn a_family_has_a_plot_with_the_full_cache_in_it() {
        let mut records = evaluation();
        records.iter_mut().filter(|r| r.policy == "h2o").for_each(|r| r.policy = "cis".into());
        let policies = Policies::of(&records);
        let records: Vec<&Record> = records.iter().collect();
        let html = figure(&Answers::of(&records), &policies).unwrap().unwrap().html;
        assert_eq!(html.matches("<svg viewBox=\"0 0 740").count(), 2);
        assert!(html.contains("Families: drop removes tokens; "));
        assert_eq!(html.matches("<title>full: 100.0 %, 0.977 KiB held").count(), 2);
        let text = "<title>snapkv at 50 %: 62.5 % ± ";
        assert_eq!(html.matches(text).count(), 1, "{html}");
        // Means over fewer tasks do not compare.
        let of_h2o = |r: &&Record| r.policy == "cis" && r.case.task.as_deref() == Some("sums");
        let fewer: Vec<&Record> = records.iter().copied().filter(|r| !of_h2o(r)).collect();
        let html = figure(&Answers::of(&fewer), &policies).unwrap().unwrap().html;
        assert_eq!(html.matches("<svg viewBox=\"0 0 740").count(), 1);
        assert!(!html.contains("<title>cis at") && html.contains("where it lacks a task."));
        let alone: Vec<&Record> = records.iter().copied().filter(|r| r.policy == "full").collect();
        assert!(figure(&Answers::of(&alone), &policies).unwrap().is_none());
        let lacking: Vec<&Record> =
            records.iter().copied().filter(|r| r.policy != "full").collect();
        assert!(figure(&Answers::of(&lacking), &policies).unwrap().is_none());
    }
}
