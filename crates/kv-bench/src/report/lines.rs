//! Line charts: one line a policy, in one panel or several that share their axes.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::axis::Axis;
use super::svg::{self, Canvas, Ink, font, marker, px};

/// The points of one policy.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// The policy's number, `None` being the full cache.
    pub(crate) policy: Option<usize>,
    /// The policy's name.
    pub(crate) name: String,
    /// Its points by x. A point without an x holds everywhere, such as the full cache's at all
    /// budgets.
    pub(crate) points: Vec<(Option<f64>, f64)>,
}

/// One chart.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    /// The title, which sets it apart from the other panels; it may be empty.
    pub(crate) title: String,
    /// Its lines.
    pub(crate) series: Vec<Series>,
}

/// Draws a panel.
///
/// # Errors
/// If plotters cannot draw.
pub(crate) fn draw(panel: &Panel, x: &Axis, y: &Axis, size: (u32, u32)) -> anyhow::Result<String> {
    let inks: Vec<Ink> = panel.series.iter().map(|series| Ink::of(series.policy)).collect();
    let label = format!("{} by {} {}", y.label, x.label, panel.title);
    svg::draw(size, &label, &inks, |canvas| paint(canvas, panel, x, y))
}

fn paint(canvas: &Canvas, panel: &Panel, x: &Axis, y: &Axis) -> anyhow::Result<()> {
    let mut chart = ChartBuilder::on(canvas)
        .margin_top(px(if panel.title.is_empty() { 10.0 } else { 30.0 }))
        .margin_right(px(14.0))
        .x_label_area_size(px(44.0))
        .y_label_area_size(px(66.0))
        .build_cartesian_2d(x.clone(), y.clone())?;
    chart
        .configure_mesh()
        .bold_line_style(Ink::Grid.color())
        .light_line_style(TRANSPARENT)
        .axis_style(Ink::Axis.color().stroke_width(px(1.0) as u32))
        .set_all_tick_mark_size(px(4.0))
        .label_style(font(12.0, HPos::Center, VPos::Center))
        .axis_desc_style(font(12.5, HPos::Center, VPos::Center))
        .x_desc(&x.label)
        .y_desc(&y.label)
        .draw()?;
    if !panel.title.is_empty() {
        let style = font(13.5, HPos::Left, VPos::Center);
        canvas.draw(&Text::new(panel.title.clone(), (px(66.0), px(15.0)), style))?;
    }
    // The full cache last, so that nothing covers it.
    let order = |full: bool| panel.series.iter().filter(move |s| s.policy.is_none() == full);
    for series in order(false).chain(order(true)) {
        let color = Ink::of(series.policy).color();
        let place = |&(at, value): &(Option<f64>, f64)| {
            let (at, value) = (x.coordinate(at?)?, y.coordinate(value)?);
            Some(chart.plotting_area().map_coordinate(&(at, value)))
        };
        let level = |&(at, value): &(Option<f64>, f64)| match at {
            None => y.coordinate(value),
            Some(_) => None,
        };
        for value in series.points.iter().filter_map(level) {
            let ends = [x.low, x.high];
            let line = ends.map(|at| chart.plotting_area().map_coordinate(&(at, value)));
            canvas.draw(&PathElement::new(line, color.stroke_width(px(1.75) as u32)))?;
        }
        let mut points: Vec<(i32, i32)> = series.points.iter().filter_map(place).collect();
        points.sort_unstable();
        if points.len() > 1 {
            let style = color.stroke_width(px(1.75) as u32);
            canvas.draw(&PathElement::new(points.clone(), style))?;
        }
        for point in points {
            let corners = marker(series.policy.unwrap_or(0), point, px(3.5));
            canvas.draw(&Polygon::new(corners, color.filled()))?;
        }
    }
    Ok(())
}
