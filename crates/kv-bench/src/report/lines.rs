//! Line charts: one line a policy, in one panel or several that share their axes.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::axis::Axis;
use super::svg::{self, Canvas, Hover, Ink, error_bar, font, marker, px};
use crate::interval::Estimate;

/// The points of one policy.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// The policy's number, `None` being the full cache.
    pub(crate) policy: Option<usize>,
    /// The policy's name.
    pub(crate) name: String,
    /// Its points.
    pub(crate) points: Vec<Point>,
}

/// A point of a line.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    /// Where it stands. A point without an x holds everywhere, such as the full cache's at all
    /// budgets.
    pub(crate) x: Option<f64>,
    /// Its value.
    pub(crate) y: Estimate,
    /// The text that is shown where it is pointed at.
    pub(crate) text: String,
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
    let policies = panel.series.iter().map(|series| series.policy);
    let inks: Vec<Ink> =
        policies.flat_map(|policy| [Ink::of(policy), Ink::Error(policy)]).collect();
    let label = format!("{} by {} {}", y.label, x.label, panel.title);
    svg::draw(size, &label, &inks, |canvas| paint(canvas, panel, x, y))
}

fn paint(canvas: &Canvas, panel: &Panel, x: &Axis, y: &Axis) -> anyhow::Result<Vec<Hover>> {
    let mut hovers = Vec::new();
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
    // Error bars at one x stand side by side, others at their points.
    let step = (24.0 / panel.series.len() as f64).min(4.0);
    let bars_at = |at: f64| {
        let points = panel.series.iter().flat_map(|series| &series.points);
        points.filter(|point| point.x == Some(at) && point.y.interval.is_some()).count()
    };
    let aside = |index: usize, at: f64| match bars_at(at) {
        1 => 0.0,
        _ => step * (index as f64 - (panel.series.len() - 1) as f64 / 2.0),
    };
    for (index, series) in order(false).chain(order(true)).enumerate() {
        let color = Ink::of(series.policy).color();
        let place = |point: &Point| {
            let (at, value) = (x.coordinate(point.x?)?, y.coordinate(point.y.mean)?);
            Some(chart.plotting_area().map_coordinate(&(at, value)))
        };
        let level = |point: &Point| match point.x {
            None => y.coordinate(point.y.mean),
            Some(_) => None,
        };
        // Levels have theirs at the right end, beside the points.
        let error = |point: &Point| {
            let value = point.y;
            let (at, aside) = match point.x {
                Some(at) => (x.coordinate(at)?, px(aside(index, at))),
                None => (x.high, 0),
            };
            y.coordinate(value.mean)?;
            // An end without a coordinate is below a logarithmic axis.
            let place = |end| y.coordinate(end).unwrap_or(y.low).clamp(y.low, y.high);
            let ends = value.ends()?.map(place);
            Some(ends.map(|end| {
                let (x, y) = chart.plotting_area().map_coordinate(&(at, end));
                (x + aside, y)
            }))
        };
        for ends in series.points.iter().filter_map(error) {
            canvas.draw(&error_bar(ends, true, Ink::Error(series.policy)))?;
        }
        for value in series.points.iter().filter_map(level) {
            let ends = [x.low, x.high];
            let line = ends.map(|at| chart.plotting_area().map_coordinate(&(at, value)));
            canvas.draw(&PathElement::new(line, color.stroke_width(px(1.75) as u32)))?;
        }
        let hover = |point: &Point| Some(Hover { at: place(point)?, text: point.text.clone() });
        hovers.extend(series.points.iter().filter_map(hover));
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
    Ok(hovers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Kind;
    use crate::interval::Interval;

    /// A point and a level have their error bars; one that is out of the axis ends with it.
    #[test]
    fn error_bars_span_the_interval() {
        let point = |x, interval| {
            let text = "<a>".to_string();
            Point { x, y: Estimate { mean: 0.5, interval }, text }
        };
        let inner = Some(Interval::Between(0.25, 0.75));
        let series = |policy, points| Series { policy, name: "a".into(), points };
        let axis = || Axis::round(String::new(), Kind::Plain, false, &[0.0, 1.0]);
        let draw = |points| {
            let series = vec![series(Some(0), points), series(None, vec![point(None, inner)])];
            draw(&Panel { title: String::new(), series }, &axis(), &axis(), (400, 400)).unwrap()
        };
        let heights = |svg: &str, class: &str| -> Vec<i32> {
            let bars = svg.split("<polyline").filter(|line| line.contains(class));
            let height = |line: &str| {
                let (_, points) = line.split_once("points=\"").unwrap();
                let points = points.split_once('"').unwrap().0.split_whitespace();
                let ys =
                    points.map(|point| point.split_once(',').unwrap().1.parse::<i32>().unwrap());
                let ys: Vec<i32> = ys.collect();
                ys.iter().max().unwrap() - ys.iter().min().unwrap()
            };
            bars.map(height).collect()
        };
        let policy = "\"s k0 c0 error line\"";
        let svg = draw(vec![point(Some(0.2), inner), point(Some(0.8), None)]);
        let [height] = heights(&svg, policy)[..] else { panic!("{svg}") };
        // Both points have a text; the level has no place.
        assert_eq!(svg.matches("<title>&lt;a&gt;</title>").count(), 2);
        assert_eq!(heights(&svg, "\"s full error line\""), [height]);
        let svg = draw(vec![point(Some(0.2), Some(Interval::Around(9.0)))]);
        let [cut] = heights(&svg, policy)[..] else { panic!("{svg}") };
        assert!(cut > 2 * height && cut < 400 * 2, "{cut} and {height}");
    }
}
