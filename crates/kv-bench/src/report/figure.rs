//! Figures: panels, a legend and a caption, as elements of a page.

use super::axis::Axis;
use super::bars::{self, Bar};
use super::lines::{self, Panel};
use super::policies::key;
use crate::format::{Kind, escape};

/// What the captions of charts with error bars add.
const ERRORS_OF_BARS: &str = " Error bars: 95 % confidence intervals.";
// `style.css` hides them.
const ERRORS_OF_LINES: &str = " Error bars: 95 % confidence intervals; where there are more than \
    ten policies, only the full cache's and those of the policy whose key is pointed at.";

/// A part of the page with a heading of its own.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    /// Its anchor, unique within a suite.
    pub(crate) id: String,
    /// Its heading.
    pub(crate) title: String,
    /// Its elements.
    pub(crate) html: String,
}

/// The title, caption and keys around the panels of a figure.
#[derive(Clone, Debug)]
pub(crate) struct Frame<'a> {
    /// The figure's anchor.
    pub(crate) id: &'a str,
    /// The figure's heading.
    pub(crate) title: &'a str,
    /// The caption: what a reader should look for.
    pub(crate) caption: &'a str,
}

impl Frame<'_> {
    /// The figure of some panels; the legend, if any, stands beside them, and `more` behind the
    /// caption.
    fn around(&self, panels: &[String], legend: &str, more: &str) -> Figure {
        let count = if panels.len() == 1 { "one" } else { "many" };
        let html = format!(
            r#"<figure class="plots"><div class="panels {count}">{}</div>{legend}
<figcaption>{}{}</figcaption></figure>"#,
            panels.concat(),
            escape(self.caption),
            escape(more)
        );
        Figure { id: self.id.into(), title: self.title.into(), html }
    }

    /// A figure of line charts with one y axis, each with its own x axis.
    ///
    /// # Errors
    /// If plotters cannot draw.
    pub(crate) fn lines(
        &self,
        panels: &[(Panel, Axis)],
        y: &Axis,
        higher_is_better: bool,
    ) -> anyhow::Result<Figure> {
        let size = if panels.len() == 1 { (820, 440) } else { (470, 400) };
        let images: Vec<String> = panels
            .iter()
            .map(|(panel, x)| lines::draw(panel, x, y, size))
            .collect::<anyhow::Result<_>>()?;
        let mut points =
            panels.iter().flat_map(|(panel, _)| &panel.series).flat_map(|series| &series.points);
        let errors = points.any(|point| point.y.interval.is_some());
        let more = if errors { ERRORS_OF_LINES } else { "" };
        Ok(self.around(&images, &legend(panels, higher_is_better), more))
    }

    /// A figure of many small line charts with equal axes, each with the keys of its own lines.
    ///
    /// # Errors
    /// If plotters cannot draw.
    pub(crate) fn small_multiples(
        &self,
        panels: &[(Panel, Axis)],
        y: &Axis,
    ) -> anyhow::Result<Figure> {
        let draw = |own: &(Panel, Axis)| {
            let image = lines::draw(&own.0, &own.1, y, (370, 300))?;
            let keys = legend(std::slice::from_ref(own), true);
            Ok(format!(r#"<div class="small">{image}{keys}</div>"#))
        };
        let images: Vec<String> = panels.iter().map(draw).collect::<anyhow::Result<_>>()?;
        let mut points =
            panels.iter().flat_map(|(panel, _)| &panel.series).flat_map(|series| &series.points);
        let errors = points.any(|point| point.y.interval.is_some());
        Ok(self.around(&images, "", if errors { ERRORS_OF_LINES } else { "" }))
    }

    /// A figure of bar charts with one axis.
    ///
    /// # Errors
    /// If plotters cannot draw.
    pub(crate) fn bars(
        &self,
        panels: &[(String, Vec<Bar>)],
        axis: &Axis,
        kind: Kind,
    ) -> anyhow::Result<Figure> {
        let width = if panels.len() == 1 { 820 } else { 560 };
        let images: Vec<String> = panels
            .iter()
            .map(|(title, bars)| bars::draw(title, bars, axis, kind, width))
            .collect::<anyhow::Result<_>>()?;
        let mut bars = panels.iter().flat_map(|(_, bars)| bars);
        let errors = bars.any(|bar| bar.value.interval.is_some());
        Ok(self.around(&images, "", if errors { ERRORS_OF_BARS } else { "" }))
    }
}

/// The policies of all panels: the full cache, then the best first, by the mean of their points.
fn legend(panels: &[(Panel, Axis)], higher_is_better: bool) -> String {
    let mut entries: Vec<(Option<usize>, &str, Vec<f64>)> = Vec::new();
    for series in panels.iter().flat_map(|(panel, _)| &panel.series) {
        let values = series.points.iter().map(|point| point.y.mean).filter(|v| v.is_finite());
        match entries.iter_mut().find(|entry| entry.0 == series.policy) {
            Some(entry) => entry.2.extend(values),
            None => entries.push((series.policy, &series.name, values.collect())),
        }
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    entries.sort_by(|a, b| {
        let order = mean(&a.2).total_cmp(&mean(&b.2));
        let order = if higher_is_better { order.reverse() } else { order };
        a.0.is_some().cmp(&b.0.is_some()).then(order)
    });
    let keys: String = entries.iter().map(|(policy, name, _)| key(*policy, name)).collect();
    format!(r#"<ul class="legend">{keys}</ul>"#)
}
