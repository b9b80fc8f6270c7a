//! How numbers, budgets and names are written, in the terminal and in the report.

use crate::interval::Interval;

/// How the numbers of a metric are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A share of one, in percent.
    Share,
    /// A share of one, in percent to the two decimals that papers print.
    Score,
    /// Bytes, in binary multiples.
    Bytes,
    /// A log-probability, to three decimals.
    LogProb,
    /// Any other number, to three significant digits.
    Plain,
}

/// A number of a metric, with its unit unless the metric's name carries it.
pub(crate) fn value(kind: Kind, value: f64) -> String {
    match kind {
        _ if value.is_nan() => "nan".into(),
        _ if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.into(),
        Kind::Share => signed(format!("{:.1} %", value * 100.0)),
        Kind::Score => signed(format!("{:.2} %", value * 100.0)),
        Kind::Bytes => bytes(value),
        Kind::LogProb => signed(format!("{value:.3}")),
        Kind::Plain => significant(value),
    }
}

/// The interval of a metric's mean, as it stands behind the mean: `± 0.31`, or `(44–97)`.
pub(crate) fn interval(kind: Kind, interval: Interval) -> String {
    // Shares to whole per cents, and to a tenth where the interval is narrow.
    let percent = |share: f64, width: f64| {
        let decimals = usize::from(width < 0.1);
        signed(format!("{:.decimals$}", share * 100.0))
    };
    match (interval, kind) {
        (Interval::Around(half), Kind::Share | Kind::Score) => format!("± {:.1}", half * 100.0),
        (Interval::Around(half), Kind::Bytes) => format!("± {}", bytes(half)),
        (Interval::Around(half), Kind::LogProb) => format!("± {half:.3}"),
        (Interval::Around(half), _) => format!("± {}", rounded(half, 2)),
        (Interval::Between(low, high), Kind::Share | Kind::Score) => {
            format!("({}–{})", percent(low, high - low), percent(high, high - low))
        }
        (Interval::Between(low, high), _) => {
            format!("({}–{})", significant(low), significant(high))
        }
    }
}

/// Three significant digits, whole numbers in full with their thousands apart.
pub(crate) fn significant(value: f64) -> String {
    rounded(value, 3)
}

/// Some significant digits, whole numbers in full with their thousands apart.
fn rounded(value: f64, digits: i32) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".into()
    } else if !(1e-4..1e12).contains(&size) {
        signed(format!("{value:.1e}"))
    } else if size >= 999.5 {
        whole(value)
    } else {
        // `round` first, so that 9.996 is "10.0" rather than "10.00".
        let decimals = |size: f64| digits - 1 - (size.log10() + 1e-9).floor() as i32;
        let scale = 10f64.powi(decimals(size));
        let decimals = decimals((size * scale).round() / scale);
        signed(format!("{value:.*}", decimals.max(0) as usize))
    }
}

/// A whole number with its thousands apart.
pub(crate) fn whole(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "−" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in binary multiples, to three significant digits.
pub(crate) fn bytes(value: f64) -> String {
    let mut scaled = value;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if scaled.abs() < 999.5 {
            return format!("{} {unit}", significant(scaled));
        }
        scaled /= 1024.0;
    }
    format!("{} TiB", significant(scaled))
}

/// A budget: a share in percent, or tokens.
pub(crate) fn budget(budget: Option<f64>) -> String {
    match budget {
        None => "–".into(),
        Some(share) if share <= 1.0 => percent(share),
        Some(tokens) => whole(tokens),
    }
}

/// A share in percent, with as few digits as it needs.
pub(crate) fn percent(share: f64) -> String {
    let text = format!("{:.2}", share * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

/// A number of tokens. Multiples of 1024 are written as such.
pub(crate) fn tokens(tokens: usize) -> String {
    if tokens >= 1024 && tokens.is_multiple_of(1024) {
        format!("{}k", tokens / 1024)
    } else {
        tokens.to_string()
    }
}

/// Writes a leading hyphen as a minus sign, which is as wide as a digit.
fn signed(text: String) -> String {
    match text.strip_prefix('-') {
        Some(rest) => format!("−{rest}"),
        None => text,
    }
}

/// Escapes text for HTML, in elements and in quoted attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_to_three_digits() {
        let cases = [(0.0, "0"), (0.012345, "0.0123"), (9.996, "10.0"), (1.0, "1.00")];
        let more = [(-2.5, "−2.50"), (999.7, "1,000"), (1234567.0, "1,234,567"), (2e-5, "2.0e-5")];
        for (number, text) in cases.into_iter().chain(more) {
            assert_eq!(significant(number), text);
        }
        assert_eq!(value(Kind::Share, 0.8312), "83.1 %");
        assert_eq!(value(Kind::Share, -0.027), "−2.7 %");
        assert_eq!(value(Kind::LogProb, -0.25), "−0.250");
        assert_eq!(value(Kind::Plain, f64::NAN), "nan");
    }

    #[test]
    fn bytes_and_budgets_are_human() {
        assert_eq!(bytes(512.0), "512 B");
        assert_eq!(bytes(1.5 * 1024.0 * 1024.0), "1.50 MiB");
        assert_eq!(bytes(1023.0 * 1024.0), "0.999 MiB");
        assert_eq!(budget(Some(0.125)), "12.5 %");
        assert_eq!(budget(Some(1.0)), "100 %");
        assert_eq!(budget(Some(2048.0)), "2,048");
        assert_eq!(tokens(4096), "4k");
        assert_eq!(tokens(1000), "1000");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a b='c'>&\""), "&lt;a b=&#39;c&#39;&gt;&amp;&quot;");
    }
}
