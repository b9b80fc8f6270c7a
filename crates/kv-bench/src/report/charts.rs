//! Charts of records: a metric against the budget, along a case, or as bars.

use super::axis::Axis;
use super::bars::Bar;
use super::figure::{Figure, Frame};
use super::lines::{Panel, Point, Series};
use super::policies::Policies;
use crate::format::{self, Kind};
use crate::interval::Estimate;
use crate::record::{Record, by_setup, group_by, metric, summary};

/// Records and the metric of them that a figure shows.
pub(crate) struct Chart<'a> {
    /// The records of one suite.
    pub(crate) records: &'a [&'a Record],
    /// The policies of the report.
    pub(crate) policies: &'a Policies,
    /// The metric shown.
    pub(crate) metric: &'a str,
    /// The label of the metric's axis.
    pub(crate) label: &'a str,
    /// The label of the metric's axis.
    pub(crate) scale: Scale,
}

/// The range that an axis shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// The values and little more.
    Fit,
    /// The values down to zero, for amounts whose ratios matter.
    Zero,
    /// The logarithms.
    Log,
}

impl Scale {
    /// Logarithms where a metric spans more than a factor of twenty, and `otherwise` elsewhere.
    pub(crate) fn of(records: &[&Record], metric: &str, otherwise: Self) -> Self {
        let values = records.iter().filter(|r| r.metric == metric).map(|r| r.number());
        let values = values.filter(|v| v.is_finite());
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
        if low > 0.0 && high / low > 20.0 { Self::Log } else { otherwise }
    }
}

impl Chart<'_> {
    /// The metric against the budget: a line a policy, a panel a mode; bars where there is one
    /// budget. `None` without data.
    pub(crate) fn by_budget(&self, frame: &Frame) -> anyhow::Result<Option<Figure>> {
        let mut budgets = self.taken().filter_map(|r| r.budget);
        if budgets.next().is_some_and(|first| budgets.all(|budget| budget == first)) {
            let modes = group_by(self.taken(), |r| r.case.mode.as_deref()).into_iter();
            let panel = |(mode, records): (Option<&str>, Vec<&Record>)| {
                (mode.unwrap_or_default().to_string(), self.bars_of(&records))
            };
            return self.draw_bars(frame, &modes.map(panel).collect::<Vec<_>>()).map(Some);
        }
        let mut panels = Vec::new();
        for (mode, records) in group_by(self.taken(), |r| r.case.mode.as_deref()) {
            for shares in [true, false] {
                let fits = |r: &&Record| r.budget.is_none_or(|b| (b <= 1.0) == shares);
                let records: Vec<_> = records.iter().copied().filter(fits).collect();
                let budgets: Vec<f64> = records.iter().filter_map(|r| r.budget).collect();
                if budgets.is_empty() {
                    continue;
                }
                let x = if shares {
                    Axis::at(
                        "share of the cache kept (log scale)".into(),
                        &budgets,
                        format::percent,
                    )
                } else {
                    Axis::at("tokens kept (log scale)".into(), &budgets, |b| {
                        format::budget(Some(b))
                    })
                };
                let title = mode.unwrap_or_default().to_string();
                panels.push((
                    Panel { title, series: self.series(&records, |r| r.budget, budget_text) },
                    x,
                ));
            }
        }
        self.lines(frame, panels)
    }

    /// The metric along the case: a line a policy, a panel a budget. `None` if `along` has fewer
    /// than two values.
    pub(crate) fn by_case(
        &self,
        frame: &Frame,
        along: impl Fn(&Record) -> Option<f64>,
        axis: impl Fn(&[f64]) -> Axis,
    ) -> anyhow::Result<Option<Figure>> {
        let records: Vec<_> = self.taken().filter(|r| along(r).is_some()).collect();
        let values: Vec<f64> = records.iter().filter_map(|r| along(r)).collect();
        if values.iter().all(|v| *v == values[0]) {
            return Ok(None);
        }
        let panel = |(title, records): (String, Vec<&Record>)| {
            (
                Panel { title, series: self.series(&records, &along, format::significant) },
                axis(&values),
            )
        };
        let panels = panels(&records).into_iter().map(panel).collect();
        self.lines(frame, panels)
    }

    /// The metric along a number that is an option of policies: a line for policies that differ in
    /// it alone, and levels for policies without it, a panel a budget. `None` if it has fewer than
    /// two values at any.
    pub(crate) fn by_option(
        &self,
        frame: &Frame,
        option: &str,
        label: &str,
    ) -> anyhow::Result<Option<Figure>> {
        let of = |r: &Record| option_of(&r.policy, option).map(|(value, _)| value);
        let name = |r: &Record| option_of(&r.policy, option).map_or(r.policy.clone(), |(_, n)| n);
        let line = |(name, records): (String, Vec<&Record>)| {
            let policy = self.policies.number(&records[0].policy);
            let text = |value: f64| value.to_string();
            Series { policy, points: self.points(&name, records, of, text), name }
        };
        let taken: Vec<_> = self.taken().collect();
        let panel = |(title, records): (String, Vec<&Record>)| {
            let values: Vec<f64> = records.iter().filter_map(|r| of(r)).collect();
            if values.iter().all(|value| *value == values[0]) {
                return None;
            }
            let series = group_by(records, name).into_iter().map(line).collect();
            let x = Axis::at(label.into(), &values, |value| value.to_string());
            Some((Panel { title, series }, x))
        };
        self.lines(frame, panels(&taken).into_iter().filter_map(panel).collect())
    }

    /// The metric as bars, a panel a task, named by the text behind the figure's name. `None`
    /// without data.
    pub(crate) fn by_task(&self, frame: &Frame) -> anyhow::Result<Option<Figure>> {
        let tasks = group_by(self.taken(), |r| r.case.task.as_deref()).into_iter();
        let panel = |(task, records): (Option<&str>, Vec<&Record>)| {
            let part = task.and_then(|task| task.split_once(", ")).map_or("", |(_, part)| part);
            (part.to_string(), self.bars_of(&records))
        };
        let panels: Vec<_> = tasks.map(panel).collect();
        if panels.is_empty() {
            return Ok(None);
        }
        self.draw_bars(frame, &panels).map(Some)
    }

    /// A bar a policy.
    fn bars_of(&self, records: &[&Record]) -> Vec<Bar> {
        let bar = |(policy, _, records): (&str, Option<f64>, Vec<&Record>)| {
            let value = Estimate::of(&records, self.metric)?;
            let number = self.policies.number(policy);
            Some(Bar { policy: number, name: policy.into(), value, behind: None })
        };
        by_setup(records).into_iter().filter_map(bar).collect()
    }

    fn draw_bars(&self, frame: &Frame, panels: &[(String, Vec<Bar>)]) -> anyhow::Result<Figure> {
        let values = panels.iter().flat_map(|(_, bars)| bars).map(|bar| bar.value);
        let (label, kind) = (self.label.to_string(), metric::info(self.metric).kind);
        let below = values.clone().any(|value| value.mean < 0.0);
        let mut ends = shown(values, kind, false);
        let axis = if below {
            ends.push(0.0);
            Axis::round(label, kind, false, &ends)
        } else {
            Axis::from_zero(label, kind, &ends)
        };
        frame.bars(panels, &axis, kind)
    }

    /// The metric as bars, a panel a budget, with another metric drawn behind it. `None` without
    /// data.
    pub(crate) fn bars(&self, frame: &Frame, behind: &str) -> anyhow::Result<Option<Figure>> {
        let taken: Vec<_> = self.taken().collect();
        // Bars compare one case: the one that most policies ran, and the largest if there are
        // several.
        let case = |r: &Record| (r.case.length, r.case.batch);
        let cases = group_by(taken.iter().copied(), case);
        let coverage = |records: &[&Record]| by_setup(records).len();
        let Some((chosen, records)) =
            cases.iter().max_by_key(|((length, batch), r)| (coverage(r), *batch, *length))
        else {
            return Ok(None);
        };
        let others: Vec<_> = self
            .records
            .iter()
            .copied()
            .filter(|r| r.metric == behind && case(r) == *chosen)
            .collect();
        let bar = |(policy, budget, records): (&str, Option<f64>, Vec<&Record>)| {
            let alike = |r: &&Record| r.policy == policy && r.budget == budget;
            let others: Vec<_> = others.iter().copied().filter(alike).collect();
            let value = Estimate::of(&records, self.metric)?;
            let number = self.policies.number(policy);
            let behind = summary(&others, behind);
            Some(Bar { policy: number, name: policy.into(), value, behind })
        };
        let panels: Vec<_> = panels(records)
            .into_iter()
            .map(|(title, records)| {
                (title, by_setup(&records).into_iter().filter_map(bar).collect::<Vec<_>>())
            })
            .collect();
        let ends = panels.iter().flat_map(|(_, bars)| bars);
        let ends = ends.flat_map(|bar| [bar.value, bar.behind.unwrap_or(0.0).into()]);
        let kind = metric::info(self.metric).kind;
        let ends = shown(ends, kind, false);
        let axis = Axis::from_zero(self.label.into(), kind, &ends);
        let case: Vec<String> = [("context length", chosen.0), ("batch", chosen.1)]
            .iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", format::tokens((*value)?))))
            .collect();
        let case =
            if case.is_empty() { String::new() } else { format!(" At {}.", case.join(", ")) };
        let caption = frame.caption.to_string() + &case;
        Frame { caption: &caption, ..frame.clone() }.bars(&panels, &axis, kind).map(Some)
    }

    fn taken(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().copied().filter(|r| r.metric == self.metric)
    }

    /// A line a policy over the records' x, the mean where several records share one.
    fn series(
        &self,
        records: &[&Record],
        x: impl Fn(&Record) -> Option<f64>,
        text: impl Fn(f64) -> String,
    ) -> Vec<Series> {
        let policies = group_by(records.iter().copied(), |r| r.policy.as_str());
        let line = |(policy, records): (&str, Vec<&Record>)| Series {
            policy: self.policies.number(policy),
            name: policy.into(),
            points: self.points(policy, records, &x, &text),
        };
        policies.into_iter().map(line).collect()
    }

    /// The points of a line. Their texts have the line's name, and x as `text` writes it.
    fn points<'a>(
        &self,
        name: &str,
        records: Vec<&'a Record>,
        x: impl Fn(&Record) -> Option<f64>,
        text: impl Fn(f64) -> String,
    ) -> Vec<Point> {
        let kind = metric::info(self.metric).kind;
        let point = |(x, records): (Option<f64>, Vec<&'a Record>)| {
            let y = Estimate::of(&records, self.metric)?;
            let at = x.map_or(String::new(), |x| format!(" at {}", text(x)));
            let interval = y.interval.map(|interval| format::interval(kind, interval));
            let value = [Some(format::value(kind, y.mean)), interval];
            let value: Vec<String> = value.into_iter().flatten().collect();
            Some(Point { x, y, text: format!("{name}{at}: {}", value.join(" ")) })
        };
        group_by(records, x).into_iter().filter_map(point).collect()
    }

    fn lines(
        &self,
        frame: &Frame,
        mut panels: Vec<(Panel, Axis)>,
    ) -> anyhow::Result<Option<Figure>> {
        let series = panels.iter().flat_map(|(panel, _)| &panel.series);
        let points = series.flat_map(|series| &series.points);
        let info = metric::info(self.metric);
        let values = shown(points.map(|point| point.y), info.kind, self.scale == Scale::Log);
        let label = self.label.to_string();
        let y = match self.scale {
            Scale::Fit => Axis::round(label, info.kind, false, &values),
            Scale::Zero => Axis::from_zero(label, info.kind, &values),
            Scale::Log => Axis::round(label + " (log scale)", info.kind, true, &values),
        };
        for (panel, _) in &mut panels {
            panel.series.retain(|s| s.points.iter().any(|p| y.coordinate(p.y.mean).is_some()));
        }
        panels.retain(|(panel, _)| !panel.series.is_empty());
        if panels.is_empty() {
            return Ok(None);
        }
        frame.lines(&panels, &y, info.higher_is_better.unwrap_or(true)).map(Some)
    }
}

/// A budget in a text of a point.
fn budget_text(budget: f64) -> String {
    format::budget(Some(budget))
}

/// The values that an axis shows: the means, and the ends of their intervals. Error bars are cut
/// off where they are further from the means than the means are from each other, and shares where
/// they leave 0 to 1.
pub(super) fn shown(estimates: impl Iterator<Item = Estimate>, kind: Kind, log: bool) -> Vec<f64> {
    let estimates: Vec<Estimate> = estimates.collect();
    let place = |value: f64| if log { value.ln() } else { value };
    let means = estimates.iter().map(|estimate| place(estimate.mean)).filter(|v| v.is_finite());
    let (low, high) =
        means.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    let span = (high - low).max(high.abs() / 2.0);
    let near = |end: &f64| {
        (low - span..=high + span).contains(&place(*end))
            && (kind != Kind::Share || (0.0..=1.0).contains(end))
    };
    let ends = estimates.iter().filter_map(Estimate::ends).flatten().filter(near);
    estimates.iter().map(|estimate| estimate.mean).chain(ends).collect()
}

/// The number that a policy's label gives an option, and the label with a blank in its place.
fn option_of(label: &str, option: &str) -> Option<(f64, String)> {
    let words = label.split(' ');
    let value = |word: &str| word.strip_prefix(option)?.strip_prefix('=')?.parse().ok();
    let number = words.clone().find_map(value)?;
    let blank = |word: &str| match value(word) {
        Some(_) => format!("{option}=…"),
        None => word.into(),
    };
    Some((number, words.map(blank).collect::<Vec<String>>().join(" ")))
}

/// The records of each budget, with the records that have none; a panel each, largest budget first.
fn panels<'a>(records: &[&'a Record]) -> Vec<(String, Vec<&'a Record>)> {
    let mut budgets: Vec<f64> = records.iter().filter_map(|r| r.budget).collect();
    // Token counts come before shares, as all descend.
    budgets.sort_by(|a, b| b.total_cmp(a));
    budgets.dedup();
    if budgets.is_empty() {
        return vec![(String::new(), records.to_vec())];
    }
    let panel = |budget: f64| {
        let of = |r: &&Record| r.budget.is_none_or(|b| b == budget);
        let unit = if budget > 1.0 { "tokens" } else { "of the cache" };
        let title = format!("budget {} {unit}", format::budget(Some(budget)));
        (title, records.iter().copied().filter(of).collect())
    };
    budgets.into_iter().map(panel).collect()
}
