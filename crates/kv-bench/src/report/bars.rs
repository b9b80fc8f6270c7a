//! Bar charts: one horizontal bar a policy, with its number beside it.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::axis::Axis;
use super::svg::{self, Canvas, Ink, error_bar, font, px};
use crate::format::{self, Kind};
use crate::interval::Estimate;

/// The bar of one policy.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    /// The policy's number, `None` being the full cache.
    pub(crate) policy: Option<usize>,
    /// The policy's name.
    pub(crate) name: String,
    /// The length of the bar; bars below zero go to the left of it.
    pub(crate) value: Estimate,
    /// A second value, drawn pale behind it.
    pub(crate) behind: Option<f64>,
}

const ROW: f64 = 21.0;
const TOP: f64 = 32.0;
const BOTTOM: f64 = 44.0;
/// The names' width, more where a name is longer, such as a configuration's.
const NAMES: f64 = 132.0;
const LETTER: f64 = 7.0;
const NUMBERS: f64 = 66.0;

/// Draws the bars of one panel.
///
/// # Errors
/// If plotters cannot draw.
pub(crate) fn draw(
    title: &str,
    bars: &[Bar],
    axis: &Axis,
    kind: Kind,
    width: u32,
) -> anyhow::Result<String> {
    let height = TOP + ROW * bars.len() as f64 + BOTTOM;
    let inks: Vec<Ink> = bars.iter().map(|bar| Ink::of(bar.policy)).collect();
    let label = format!("{} by policy, {title}", axis.label);
    svg::draw((width, height as u32), &label, &inks, |canvas| {
        paint(canvas, title, bars, axis, kind, f64::from(width)).map(|()| Vec::new())
    })
}

fn paint(
    canvas: &Canvas,
    title: &str,
    bars: &[Bar],
    axis: &Axis,
    kind: Kind,
    width: f64,
) -> anyhow::Result<()> {
    let longest = bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
    let names = (LETTER * longest as f64).clamp(NAMES, width / 2.0);
    let (left, right) = (names, width - NUMBERS);
    let bottom = TOP + ROW * bars.len() as f64;
    let place = |value: f64| left + (right - left) * (value - axis.low) / (axis.high - axis.low);
    let heading = font(13.5, HPos::Left, VPos::Center);
    canvas.draw(&Text::new(title, (px(left), px(15.0)), heading))?;
    for (value, text) in &axis.ticks {
        let x = px(place(*value));
        let ends = [(x, px(TOP)), (x, px(bottom))];
        canvas.draw(&PathElement::new(ends, Ink::Grid.color()))?;
        let style = font(12.0, HPos::Center, VPos::Center);
        canvas.draw(&Text::new(text.clone(), (x, px(bottom + 11.0)), style))?;
    }
    let style = font(12.5, HPos::Center, VPos::Center);
    let middle = (px((left + right) / 2.0), px(bottom + 32.0));
    canvas.draw(&Text::new(axis.label.clone(), middle, style))?;
    let zero = place(0.0f64.clamp(axis.low, axis.high));
    for (i, bar) in bars.iter().enumerate() {
        let color = Ink::of(bar.policy).color();
        let top = TOP + ROW * i as f64;
        let area = |value: f64, inset: f64| {
            let ends = [(px(zero), px(top + inset)), (px(place(value)), px(top + ROW - inset))];
            Rectangle::new(ends, color.filled())
        };
        if let Some(behind) = bar.behind.filter(|v| v.is_finite()) {
            let ends = [(px(zero), px(top + 3.0)), (px(place(behind)), px(top + ROW - 3.0))];
            canvas.draw(&Rectangle::new(ends, color.mix(0.3).filled()))?;
        }
        let value = bar.value.mean;
        if value.is_finite() {
            canvas.draw(&area(value, if bar.behind.is_some() { 6.0 } else { 4.0 }))?;
        }
        let middle = px(top + ROW / 2.0);
        let style = font(12.0, HPos::Right, VPos::Center);
        canvas.draw(&Text::new(bar.name.clone(), (px(left - 7.0), middle), style))?;
        let ends = bar.value.ends().map(|ends| ends.map(|end| end.clamp(axis.low, axis.high)));
        if let Some(ends) = ends {
            let ends = ends.map(|end| (px(place(end)), middle));
            canvas.draw(&error_bar(ends, false, Ink::Axis))?;
        }
        let longest = bar.behind.unwrap_or(value).max(value);
        let longest = ends.map_or(longest, |[_, high]| longest.max(high));
        let end = if longest.is_finite() { place(longest).max(zero) } else { zero };
        let style = font(12.0, HPos::Left, VPos::Center);
        let text = format::value(kind, value);
        canvas.draw(&Text::new(text, (px(end + 5.0), middle), style))?;
    }
    let ends = [(px(zero), px(TOP)), (px(zero), px(bottom))];
    canvas.draw(&PathElement::new(ends, Ink::Axis.color().stroke_width(px(1.0) as u32)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interval::Interval;

    #[test]
    fn the_number_stands_behind_the_error_bar() {
        let bar = |interval| {
            let value = Estimate { mean: 0.5, interval };
            let bar = Bar { policy: Some(0), name: "a".into(), value, behind: None };
            let axis = Axis::from_zero(String::new(), Kind::Share, &[1.0]);
            draw("", &[bar], &axis, Kind::Share, 560).unwrap()
        };
        let (bare, wide) = (bar(None), bar(Some(Interval::Between(0.25, 0.75))));
        let lines = |svg: &str| svg.matches("<polyline").count();
        assert_eq!(lines(&wide), lines(&bare) + 1);
        let x = |svg: &str| -> i32 {
            let (before, _) = svg.split_once("50.0 %").unwrap();
            let (_, text) = before.rsplit_once("x=\"").unwrap();
            text.split_once('"').unwrap().0.parse().unwrap()
        };
        assert!(x(&wide) > x(&bare) + 100, "{} and {}", x(&wide), x(&bare));
    }

    #[test]
    fn bars_below_zero_go_left_of_it() {
        let values = [-1.0, 2.0];
        let bar = |value| Bar {
            policy: Some(0),
            name: "a".into(),
            value: Estimate::from(value),
            behind: None,
        };
        let axis = Axis::round(String::new(), Kind::Plain, false, &values);
        let svg = draw("", &values.map(bar), &axis, Kind::Plain, 560).unwrap();
        let number = |text: &str, name: &str| -> i32 {
            let (_, rest) = text.split_once(&format!(" {name}=\"")).unwrap();
            rest.split_once('"').unwrap().0.parse().unwrap()
        };
        let bars: Vec<(i32, i32)> = svg
            .split("<rect")
            .skip(1)
            .map(|rect| (number(rect, "x"), number(rect, "width")))
            .collect();
        let [(low, below), (zero, above)] = bars[..] else { panic!("{svg}") };
        assert_eq!(low + below, zero);
        assert!((2 * below - above).abs() <= 2, "{below} and {above}");
    }
}
