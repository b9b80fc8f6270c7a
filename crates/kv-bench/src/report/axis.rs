//! Axes: the range they show, their ticks, and the labels of the ticks.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use crate::format::{self, Kind};

/// One axis. Its coordinates are the values, or their logarithms on a logarithmic axis.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    /// The quantity, with the unit.
    pub(crate) label: String,
    /// The lowest coordinate.
    pub(crate) low: f64,
    /// The highest coordinate.
    pub(crate) high: f64,
    /// Coordinates of the ticks, and their texts.
    pub(crate) ticks: Vec<(f64, String)>,
    log: bool,
}

/// Ticks for which there is room on an axis whose ticks stand at given values.
const MOST_TICKS: f64 = 9.0;

impl Axis {
    /// An axis with round ticks over all the values.
    pub(crate) fn round(label: String, kind: Kind, log: bool, values: &[f64]) -> Self {
        let usable = |v: &f64| v.is_finite() && (!log || *v > 0.0);
        let (low, high) = range(values.iter().copied().filter(usable));
        if log {
            Self::decades(label, kind, low, high)
        } else {
            Self::linear(label, kind, low, high)
        }
    }

    /// An axis from zero with round ticks, for bars.
    pub(crate) fn from_zero(label: String, kind: Kind, values: &[f64]) -> Self {
        let (_, high) = range(values.iter().copied().filter(|v| v.is_finite()));
        Self::linear(label, kind, 0.0, high)
    }

    /// A logarithmic axis whose ticks stand at the values themselves.
    pub(crate) fn at(label: String, values: &[f64], text: impl Fn(f64) -> String) -> Self {
        let mut values: Vec<f64> = values.iter().copied().filter(|v| *v > 0.0).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (low, high) = range(values.iter().map(|v| v.log2()));
        let pad = ((high - low) * 0.04).max(0.1);
        let mut ticks: Vec<(f64, String)> = Vec::new();
        for value in values.into_iter().rev() {
            let apart = |last: &(f64, String)| last.0 - value.log2() > (high - low) / MOST_TICKS;
            if ticks.last().is_none_or(apart) {
                ticks.push((value.log2(), text(value)));
            }
        }
        Self { label, low: low - pad, high: high + pad, ticks, log: true }
    }

    /// A linear axis whose ticks stand at some of the values, all of them whole numbers.
    pub(crate) fn whole(label: String, values: &[f64]) -> Self {
        let (low, high) = range(values.iter().copied());
        let step = nice((high - low) / 6.0).max(1.0);
        let pad = (high - low).max(1.0) * 0.03;
        let ticks = steps(low, high, step).map(|v| (v, format!("{v:.0}"))).collect();
        Self { label, low: low - pad, high: high + pad, ticks, log: false }
    }

    fn linear(label: String, kind: Kind, low: f64, high: f64) -> Self {
        // Shares that span much of the range show all of it; others are looked at closely.
        let whole = kind == Kind::Share && high <= 1.0 && low >= 0.0 && high - low > 0.3;
        let (low, high) = if whole { (0.0, 1.0) } else { (low, high) };
        let span = if high > low { high - low } else { high.abs().max(1e-3) * 0.2 };
        let step = match kind {
            Kind::Bytes => 2f64.powf((span / 5.0).log2().ceil()),
            _ => nice(span / 5.0),
        };
        let pad = span * 0.05;
        let bottom = if low >= 0.0 && low < pad { low - pad.min(low) } else { low - pad };
        let top = high + pad;
        let ticks = steps(bottom, top, step).map(|v| (v, text(kind, v, step))).collect();
        let bottom = if whole { -0.02 } else { bottom };
        Self { label, low: bottom, high: top, ticks, log: false }
    }

    fn decades(label: String, kind: Kind, low: f64, high: f64) -> Self {
        let (bottom, top) = (low.log2(), high.log2());
        let pad = ((top - bottom) * 0.05).max(0.15);
        let (bottom, top) = (bottom - pad, top + pad);
        let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
        // All of 1, 2 and 5 where there is room for them.
        let factors: &[f64] = if top - bottom < 12.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let ticks = decades
            .flat_map(|decade| factors.iter().map(move |f| f * 10f64.powi(decade)))
            .filter(|v| (bottom..=top).contains(&v.log2()))
            .map(|v| (v.log2(), text(kind, v, v)))
            .collect();
        Self { label, low: bottom, high: top, ticks, log: true }
    }

    /// The coordinate of a value, if it has one.
    pub(crate) fn coordinate(&self, value: f64) -> Option<f64> {
        let coordinate = if self.log { value.log2() } else { value };
        coordinate.is_finite().then_some(coordinate)
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let share = (value - self.low) / (self.high - self.low);
        first + (f64::from(last - first) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        // Asked for minor ticks too, there are none.
        let ticks = if hint.weight().allow_light_points() { &[][..] } else { &self.ticks };
        ticks.iter().map(|tick| tick.0).collect()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, coordinate: &f64) -> String {
        let near = |tick: &&(f64, String)| (tick.0 - coordinate).abs() < 1e-9;
        self.ticks.iter().find(near).map(|tick| tick.1.clone()).unwrap_or_default()
    }
}

/// The lowest and highest value, made to differ.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    // Without values, any range does that logarithms can show too.
    if low <= high { (low, high) } else { (0.1, 1.0) }
}

/// The next of 1, 2, 5 times a power of ten.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= step * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// The multiples of a step within a range.
fn steps(low: f64, high: f64, step: f64) -> impl Iterator<Item = f64> {
    let (first, last) = ((low / step - 1e-9).ceil() as i64, (high / step + 1e-9).floor() as i64);
    (first..=last).map(move |i| i as f64 * step)
}

/// A tick's text, with the decimals that its step needs.
fn text(kind: Kind, value: f64, step: f64) -> String {
    let decimals = |step: f64| (-(step.log10() + 1e-9).floor()).max(0.0) as usize;
    match kind {
        Kind::Share | Kind::Score => format!("{:.*} %", decimals(step * 100.0), value * 100.0),
        Kind::Bytes if value == 0.0 => "0".into(),
        Kind::Bytes => format::bytes(value).replace(".00", "").replace(".0 ", " "),
        _ if value.abs() >= 1e3 => format::significant(value),
        _ if value == 0.0 => "0".into(),
        _ if value.abs() < 1e-4 => format!("{value:.0e}").replace('-', "−"),
        _ => format!("{value:.*}", decimals(step)).replace('-', "−"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.1.as_str()).collect()
    }

    #[test]
    fn ticks_are_round() {
        let share = Axis::round(String::new(), Kind::Share, false, &[0.2, 0.97]);
        assert_eq!(texts(&share), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        let error = Axis::round(String::new(), Kind::Plain, true, &[0.004, 0.11, 0.0, f64::NAN]);
        assert_eq!(texts(&error), ["0.005", "0.01", "0.02", "0.05", "0.1"]);
        let close = Axis::round(String::new(), Kind::Share, false, &[0.99, 0.999]);
        assert_eq!(texts(&close)[..2], ["99.0 %", "99.2 %"]);
        let bytes = Axis::from_zero(String::new(), Kind::Bytes, &[3e6]);
        assert_eq!(texts(&bytes), ["0", "1 MiB", "2 MiB", "3 MiB"]);
    }

    #[test]
    fn empty_and_constant_data_have_an_axis() {
        for values in [&[][..], &[0.0], &[5.0, 5.0]] {
            let axis = Axis::round(String::new(), Kind::Plain, false, values);
            assert!(axis.low < axis.high && !axis.ticks.is_empty(), "{axis:?}");
        }
        let axis = Axis::at(String::new(), &[0.25], format::percent);
        assert_eq!(texts(&axis), ["25 %"]);
        assert!(axis.low < axis.high);
    }
}
