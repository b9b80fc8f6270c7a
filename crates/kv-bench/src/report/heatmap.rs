//! Heat maps of retrieval: how often the answer was found, by length and depth of the context.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::svg::{self, Canvas, Ink, font, px};
use crate::format;
use crate::record::{Record, group_by, mean};

/// From never found to always found: a ramp that red-green colour blindness does not blur.
const RAMP: [(u8, u8, u8); 7] = [
    (142, 16, 50),
    (205, 62, 56),
    (240, 132, 78),
    (250, 199, 115),
    (188, 214, 178),
    (84, 158, 184),
    (35, 92, 153),
];

/// The lengths and depths that all the maps of a figure show.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    lengths: Vec<usize>,
    depths: Vec<f64>,
}

impl Frame {
    /// The lengths and depths of some records, in order.
    pub(crate) fn of(records: &[&Record]) -> Self {
        let mut lengths: Vec<_> = records.iter().filter_map(|r| r.case.length).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let mut depths: Vec<_> = records.iter().filter_map(|r| r.case.depth).collect();
        depths.sort_by(f64::total_cmp);
        depths.dedup();
        Self { lengths, depths }
    }
}

/// The ramp's colour of a share, as red, green and blue.
pub(crate) fn color(share: f64) -> (u8, u8, u8) {
    let at = share.clamp(0.0, 1.0) * (RAMP.len() - 1) as f64;
    let i = (at as usize).min(RAMP.len() - 2);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (at - i as f64)) as u8;
    let (a, b) = (RAMP[i], RAMP[i + 1]);
    (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// The ramp as a CSS gradient.
pub(crate) fn gradient() -> String {
    let stops = RAMP.map(|(r, g, b)| format!("rgb({r} {g} {b})"));
    format!("linear-gradient(90deg, {})", stops.join(", "))
}

/// Draws the map of one policy at one budget.
///
/// # Errors
/// If plotters cannot draw.
pub(crate) fn draw(
    label: &str,
    frame: &Frame,
    records: &[&Record],
    size: (u32, u32),
) -> anyhow::Result<String> {
    svg::draw(size, label, &[], |canvas| paint(canvas, frame, records, size).map(|()| Vec::new()))
}

fn paint(
    canvas: &Canvas,
    frame: &Frame,
    records: &[&Record],
    (width, height): (u32, u32),
) -> anyhow::Result<()> {
    let (left, bottom) = (38.0, f64::from(height) - 19.0);
    let (columns, rows) = (frame.lengths.len(), frame.depths.len());
    let cell = ((f64::from(width) - left) / columns as f64, bottom / rows as f64);
    let corner = |i: usize, j: usize| (px(left + cell.0 * i as f64), px(cell.1 * j as f64));
    let cells = group_by(records.iter().copied(), |r| (r.case.length, r.case.depth));
    for (i, length) in frame.lengths.iter().enumerate() {
        for (j, depth) in frame.depths.iter().enumerate() {
            let key = (Some(*length), Some(*depth));
            let found = cells.iter().find(|(k, _)| *k == key).and_then(|(_, cell)| mean(cell));
            let (a, b) = (corner(i, j), corner(i + 1, j + 1));
            let area = [a, (b.0 - px(1.0), b.1 - px(1.0))];
            let style = match found.filter(|v| v.is_finite()) {
                Some(share) => {
                    let (red, green, blue) = color(share);
                    RGBColor(red, green, blue).filled()
                }
                None => Ink::Grid.color().filled(),
            };
            canvas.draw(&Rectangle::new(area, style))?;
        }
    }
    for (i, length) in thinned(&frame.lengths, (f64::from(width) - left) / 34.0) {
        let at = (px(left + cell.0 * (i as f64 + 0.5)), px(bottom + 9.0));
        let style = font(11.0, HPos::Center, VPos::Center);
        canvas.draw(&Text::new(format::tokens(*length), at, style))?;
    }
    for (j, depth) in thinned(&frame.depths, bottom / 17.0) {
        let at = (px(left - 5.0), px(cell.1 * (j as f64 + 0.5)));
        let style = font(11.0, HPos::Right, VPos::Center);
        canvas.draw(&Text::new(format!("{:.0} %", depth * 100.0), at, style))?;
    }
    Ok(())
}

/// Evenly spread items, about as many as there is room for, each with its place.
fn thinned<T>(items: &[T], room: f64) -> impl Iterator<Item = (usize, &T)> {
    let step = (items.len() as f64 / room.max(1.0)).ceil().max(1.0) as usize;
    items.iter().enumerate().step_by(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::metric;
    use crate::report::test_records::record;

    #[test]
    fn the_ramp_runs_from_red_to_blue() {
        assert_eq!(color(-1.0), RAMP[0]);
        assert_eq!(color(1.0), RAMP[6]);
        assert_eq!(color(0.5), RAMP[3]);
    }

    #[test]
    fn every_cell_is_drawn() {
        let mut records = [record("a", None, metric::EXACT_MATCH, 1.0); 1].to_vec();
        records[0].case.length = Some(2048);
        records[0].case.depth = Some(0.5);
        let mut other = records[0].clone();
        (other.case.length, other.case.depth) = (Some(1024), Some(0.0));
        records.push(other);
        let records: Vec<_> = records.iter().collect();
        let image = draw("map", &Frame::of(&records), &records, (200, 100)).unwrap();
        assert_eq!(image.matches("<rect").count(), 4);
        assert_eq!(image.matches("grid area").count(), 2);
        assert!(image.contains("2k") && image.contains("50 %"));
    }
}
