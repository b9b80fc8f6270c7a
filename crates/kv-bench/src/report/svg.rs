//! Drawing with plotters, in ink whose colour the page's style sheet decides.
//!
//! Plotters writes a colour into every element. The colours here only stand for a role: they are
//! replaced by classes, so that one drawing serves light and dark pages and can react to a hover.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::format::escape;

/// Drawing units in a pixel of the page. Plotters draws on whole units; two of them keep lines
/// smooth.
const UNITS: i32 = 2;

/// The area that is drawn on.
pub(crate) type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A role that the style sheet gives a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ink {
    /// Text.
    Text,
    /// Axes.
    Axis,
    /// Grid lines.
    Grid,
    /// The full cache.
    Full,
    /// The policy with this number, in the order of first sight.
    Policy(usize),
    /// Error bars of the policy with this number, `None` being the full cache.
    Error(Option<usize>),
}

impl Ink {
    /// The ink of a policy's number, `None` being the full cache.
    pub(crate) fn of(policy: Option<usize>) -> Self {
        policy.map_or(Self::Full, Self::Policy)
    }

    /// The colour that stands for it while drawing.
    pub(crate) fn color(self) -> RGBColor {
        match self {
            Self::Text => RGBColor(1, 0, 0),
            Self::Axis => RGBColor(1, 0, 1),
            Self::Grid => RGBColor(1, 0, 2),
            Self::Full => RGBColor(1, 0, 3),
            Self::Policy(i) => RGBColor(2, (i / 256 % 256) as u8, (i % 256) as u8),
            Self::Error(None) => RGBColor(1, 0, 4),
            Self::Error(Some(i)) => RGBColor(3, (i / 256 % 256) as u8, (i % 256) as u8),
        }
    }

    /// The classes that the style sheet knows it by.
    pub(crate) fn class(self) -> String {
        match self {
            Self::Text => "text".into(),
            Self::Axis => "axis".into(),
            Self::Grid => "grid".into(),
            Self::Full => "s full".into(),
            Self::Policy(i) => format!("s k{i} c{}", i % PALETTE),
            Self::Error(policy) => format!("{} error", Self::of(policy).class()),
        }
    }
}

/// Colours that the style sheet has for policies.
pub(crate) const PALETTE: usize = 18;

/// Drawing units of a length in pixels.
pub(crate) fn px(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS)).round() as i32
}

/// Text of a size in pixels.
pub(crate) fn font(pixels: f64, h: HPos, v: VPos) -> TextStyle<'static> {
    const INK: RGBColor = RGBColor(1, 0, 0);
    // The SVG backend writes sizes divided by 1.24.
    let size = pixels * f64::from(UNITS) * 1.24;
    TextStyle::from(("sans-serif", size).into_font()).color(&INK).pos(Pos::new(h, v))
}

/// A text that a browser shows where a point of the image is pointed at.
#[derive(Clone, Debug)]
pub(crate) struct Hover {
    /// The point, in drawing units.
    pub(crate) at: (i32, i32),
    /// The text.
    pub(crate) text: String,
}

impl Hover {
    /// A circle that nobody sees, larger than a marker so that it is easily hit.
    fn element(&self) -> String {
        let ((x, y), radius) = (self.at, px(7.0));
        let text = escape(&self.text);
        format!(
            r#"<circle class="hover" cx="{x}" cy="{y}" r="{radius}"><title>{text}</title></circle>"#
        )
    }
}

/// Draws an image of a size in pixels and returns it as an element of a page.
///
/// # Errors
/// If plotters cannot draw.
pub(crate) fn draw(
    (width, height): (u32, u32),
    label: &str,
    inks: &[Ink],
    paint: impl FnOnce(&Canvas) -> anyhow::Result<Vec<Hover>>,
) -> anyhow::Result<String> {
    let mut image = String::new();
    let units = (width * UNITS as u32, height * UNITS as u32);
    let hovers = {
        let canvas = SVGBackend::with_string(&mut image, units).into_drawing_area();
        let hovers = paint(&canvas)?;
        canvas.present()?;
        hovers
    };
    for ink in [Ink::Text, Ink::Axis, Ink::Grid, Ink::Full].iter().chain(inks) {
        let RGBColor(r, g, b) = ink.color();
        let class = ink.class();
        for (attribute, way) in [("stroke", "line"), ("fill", "area")] {
            let color = format!("{attribute}=\"#{r:02X}{g:02X}{b:02X}\"");
            image = image.replace(&color, &format!("class=\"{class} {way}\""));
        }
    }
    let body = image.split_once('>').map_or("", |(_, body)| body);
    let body = body.trim_end().strip_suffix("</svg>").unwrap_or(body);
    let hovers: String = hovers.iter().map(Hover::element).collect();
    let head = format!(
        r#"<svg viewBox="0 0 {} {}" width="{width}" height="{height}" role="img" aria-label="{}">"#,
        units.0,
        units.1,
        escape(label)
    );
    Ok(format!("{head}{body}{hovers}</svg>\n"))
}

/// An error bar with caps from one point to another, both on a vertical or a horizontal line.
pub(crate) fn error_bar(
    [from, to]: [(i32, i32); 2],
    vertical: bool,
    ink: Ink,
) -> PathElement<(i32, i32)> {
    let cap = px(3.0);
    let (dx, dy) = if vertical { (cap, 0) } else { (0, cap) };
    let ends = |(x, y): (i32, i32)| [(x - dx, y - dy), (x + dx, y + dy)];
    let ([a, b], [c, d]) = (ends(from), ends(to));
    PathElement::new([a, b, from, to, c, d], ink.color().stroke_width(px(1.25) as u32))
}

/// The corners of a policy's marker around a point: the shape tells policies apart where their
/// colours do not.
pub(crate) fn marker(policy: usize, (x, y): (i32, i32), radius: i32) -> Vec<(i32, i32)> {
    let r = f64::from(radius);
    // Corners as (turns from the top, distance), chosen to look equally large.
    let polygon = |corners: usize, turn: f64, size: f64, inner: f64| -> Vec<(i32, i32)> {
        (0..corners)
            .map(|i| {
                let angle = std::f64::consts::TAU * (i as f64 / corners as f64 + turn);
                let size = r * if i % 2 == 1 { size * inner } else { size };
                let (dx, dy) = (size * angle.sin(), -size * angle.cos());
                (x + dx.round() as i32, y + dy.round() as i32)
            })
            .collect()
    };
    match policy % 5 {
        0 => polygon(16, 0.0, 1.0, 1.0),
        1 => polygon(4, 0.125, 1.25, 1.0),
        2 => polygon(3, 0.0, 1.35, 1.0),
        3 => polygon(4, 0.0, 1.3, 1.0),
        _ => polygon(8, 0.0, 1.5, 0.45),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inks_become_classes() {
        let inks = [Ink::Policy(20)];
        let image = draw((10, 10), "<label>", &inks, |canvas| {
            canvas.draw(&PathElement::new([(0, 0), (5, 5)], inks[0].color()))?;
            canvas.draw(&Rectangle::new([(0, 0), (5, 5)], Ink::Grid.color().filled()))?;
            Ok(vec![Hover { at: (3, 4), text: "<hover>".into() }])
        });
        let image = image.unwrap();
        assert!(image.contains(r#"class="s k20 c2 line""#), "{image}");
        assert!(image.contains(r#"class="grid area""#), "{image}");
        assert!(image.contains(r#"cx="3" cy="4""#), "{image}");
        assert!(image.contains("<title>&lt;hover&gt;</title>") && image.ends_with("</svg>\n"));
        assert_eq!(image.matches("</svg>").count(), 1);
        assert!(
            image.contains("&lt;label&gt;") && image.starts_with(r#"<svg viewBox="0 0 20 20""#)
        );
    }
}
