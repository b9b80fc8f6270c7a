//! How numbers, budgets and names are written, in the terminal and in the report.

use crate::record::metric;

/// How the numbers of a metric are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A share of one, in percent.
    Share,
    /// Bytes, in binary multiples.
    Bytes,
    /// A log-probability, to three decimals.
    LogProb,
    /// Any other number, to three significant digits.
    Plain,
}

/// How a metric is named, written and compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Info<'a> {
    /// Its name in a heading.
    pub(crate) label: &'a str,
    /// How its numbers are written.
    pub(crate) kind: Kind,
    /// Whether more is better, where that can be said.
    pub(crate) higher_is_better: Option<bool>,
}

/// The label and form of a metric; an unknown metric is shown under its own name.
pub(crate) fn info(name: &str) -> Info<'_> {
    use Kind::{Bytes, LogProb, Plain, Share};
    let (label, kind, higher_is_better) = match name {
        metric::EXACT_MATCH => ("exact match", Share, Some(true)),
        metric::ANSWER_LOGPROB => ("answer logprob", LogProb, Some(true)),
        metric::PERPLEXITY => ("perplexity", Plain, Some(false)),
        metric::PREFILL_PERPLEXITY => ("prefill perplexity", Plain, Some(false)),
        metric::AGREEMENT => ("agreement", Share, Some(true)),
        metric::TEXT_AGREEMENT => ("agreement on text", Share, Some(true)),
        metric::KL_DIVERGENCE => ("KL nats", Plain, Some(false)),
        metric::TEXT_KL_DIVERGENCE => ("KL on text", Plain, Some(false)),
        metric::RELATIVE_ERROR => ("relative error", Plain, Some(false)),
        metric::RETAINED_MASS => ("retained mass", Share, Some(true)),
        metric::RETRIEVAL_RATIO => ("retrieval ratio", Plain, Some(false)),
        metric::OVERLAP => ("overlap with the best", Share, Some(true)),
        metric::TOKENS_READ => ("tokens read", Plain, Some(false)),
        metric::QUERY_COSINE => ("cosine of queries", Plain, None),
        metric::QUERIES_ALIKE => ("queries alike", Share, None),
        metric::DROPPED_MASS => ("dropped mass", Plain, Some(false)),
        metric::DROPPED_BOUND => ("paper's bound", Plain, Some(false)),
        metric::BOUND_GT_1_SHARE => ("bounds above 1", Share, Some(false)),
        metric::ODDS_BOUND => ("bound by odds", Plain, Some(false)),
        metric::ORACLE_GAP_IN_SET => ("gap in the set", Plain, Some(false)),
        metric::ORACLE_GAP_IN_SET_BOUND => ("gap's bound", Plain, Some(false)),
        // A share of a per cent must not read as none.
        metric::BROKEN => ("bounds broken", Plain, Some(false)),
        metric::ORACLE_GAP => ("above the least", Plain, Some(false)),
        metric::INFORMATION_LOSS => ("information nats", Plain, Some(false)),
        metric::WINDOW_DROPPED_MASS => ("outside the window", Plain, Some(false)),
        metric::WINDOW_DROPPED_BOUND => ("window's bound", Plain, Some(false)),
        metric::FROZEN_KEY_TV => ("frozen keys' TV", Plain, Some(false)),
        metric::FROZEN_KEY_TV_BOUND => ("TV's bound", Plain, Some(false)),
        metric::RUN_FROZEN_KEY_TV => ("TV in a run", Plain, Some(false)),
        metric::PREFILL_TOKENS_PER_SECOND => ("prefill tok/s", Plain, Some(true)),
        metric::DECODE_TOKENS_PER_SECOND => ("decode tok/s", Plain, Some(true)),
        metric::TIME_TO_FIRST_TOKEN => ("first token ms", Plain, Some(false)),
        metric::EVICTION_RESIDUAL => ("eviction residual", Plain, Some(false)),
        metric::EVICTION_RESIDUAL_BOUND => ("residual's bound", Plain, Some(false)),
        metric::LOGIT_CHANGE => ("logit change", Plain, Some(false)),
        metric::LOGIT_CHANGE_BOUND => ("change's bound", Plain, Some(false)),
        metric::ERROR_BOUND => ("error bound", Plain, Some(false)),
        metric::ERROR_DEVIATION => ("deviation over seeds", Plain, None),
        metric::EPSILON => ("precision ε", Plain, Some(false)),
        metric::QUERY_NORM => ("query norm", Plain, None),
        metric::QUERY_NORM_INTERVAL => ("± 95 %", Plain, None),
        metric::SHIFTED_KEY_NORM => ("shifted key", Plain, None),
        metric::SHIFTED_KEY_NORM_INTERVAL => ("± 95 %", Plain, None),
        metric::VALUE_NORM => ("value norm", Plain, None),
        metric::VALUE_NORM_INTERVAL => ("± 95 %", Plain, None),
        metric::LSE_ERROR => ("LSE error", Plain, None),
        metric::DROPPED_VOTES => ("dropped votes", Share, Some(false)),
        metric::WORST_LSE_ERROR => ("worst LSE error", Plain, None),
        metric::QUERY_ERROR => ("relative error", Plain, Some(false)),
        metric::PREDICTION_MEDIAN => ("median error", Plain, Some(false)),
        metric::PREDICTION_MEAN => ("mean error", Plain, Some(false)),
        metric::SPEED_UP => ("speed-up over full", Plain, Some(true)),
        metric::MERGING_SHARE => ("merging's share", Share, Some(false)),
        metric::SLOTS => ("slots held", Plain, Some(false)),
        metric::VARIANCE => ("variance / σ²", Plain, Some(false)),
        metric::VARIANCE_BOUND => ("bound / σ²", Plain, None),
        metric::ABOVE_BOUND => ("above it", Share, Some(false)),
        metric::ABOVE_BOUND_PREDICTED => ("predicted below", Share, None),
        metric::OBSERVED_ERROR => ("observed error", Plain, Some(false)),
        metric::STEP_TIME => ("last step ms", Plain, Some(false)),
        metric::SLOWEST_STEP => ("slowest step ms", Plain, Some(false)),
        metric::COPY_TIME => ("copy ms", Plain, None),
        metric::COPY_WAIT => ("waited ms", Plain, Some(false)),
        metric::HOST_BYTES => ("host memory", Bytes, Some(false)),
        metric::PEAK_BYTES => ("peak memory", Bytes, Some(false)),
        metric::TOTAL_BYTES => ("weights and caches", Bytes, Some(false)),
        metric::LIVE_BYTES => ("live memory", Bytes, Some(false)),
        metric::CACHE_BYTES => ("cache and room", Bytes, Some(false)),
        metric::BYTES_IN_USE => ("KV in use", Bytes, Some(false)),
        metric::BYTES_ALLOCATED => ("KV allocated", Bytes, Some(false)),
        metric::METADATA_BYTES => ("metadata", Bytes, Some(false)),
        metric::SCRATCH_BYTES => ("scratch", Bytes, Some(false)),
        metric::ROOM_BYTES => ("room", Bytes, None),
        metric::POLICY_BYTES => ("policy state", Bytes, Some(false)),
        metric::LARGEST_BATCH => ("largest batch", Plain, Some(true)),
        metric::TIME_US => ("time µs", Plain, Some(false)),
        metric::TERAFLOPS => ("TFLOP /s", Plain, Some(true)),
        metric::MOVED_BYTES => ("bytes moved", Bytes, None),
        metric::BANDWIDTH => ("bandwidth GB/s", Plain, Some(true)),
        metric::BANDWIDTH_FRACTION => ("of the copy's", Share, Some(true)),
        _ => (name, Plain, None),
    };
    Info { label, kind, higher_is_better }
}

/// A line of a table's legend for a metric whose heading does not explain it.
pub(crate) fn legend(name: &str) -> Option<&'static str> {
    Some(match name {
        metric::RETAINED_MASS => {
            "retained mass: share of the full cache's attention that goes to the tokens that a \
             policy reads"
        }
        metric::RETRIEVAL_RATIO => {
            "retrieval ratio: share of the heads that choose in a step what to read, as others \
             share a choice"
        }
        metric::DROPPED_VOTES => {
            "dropped votes: share of a prompt's tokens for which no slot stands any more"
        }
        metric::LIVE_BYTES => {
            "live memory: keys and values in use, all slots' metadata and the policy's own state"
        }
        _ => return None,
    })
}

/// A number of a metric, with its unit unless the metric's name carries it.
pub(crate) fn value(kind: Kind, value: f64) -> String {
    match kind {
        _ if value.is_nan() => "nan".into(),
        _ if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.into(),
        Kind::Share => signed(format!("{:.1} %", value * 100.0)),
        Kind::Bytes => bytes(value),
        Kind::LogProb => signed(format!("{value:.3}")),
        Kind::Plain => significant(value),
    }
}

/// Three significant digits, whole numbers in full with their thousands apart.
pub(crate) fn significant(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".into()
    } else if !(1e-4..1e12).contains(&size) {
        signed(format!("{value:.1e}"))
    } else if size >= 999.5 {
        whole(value)
    } else {
        // `round` first, so that 9.996 is "10.0" rather than "10.00".
        let digits = (size.log10() + 1e-9).floor() as i32;
        let rounded = (size * 10f64.powi(2 - digits)).round() / 10f64.powi(2 - digits);
        let digits = (rounded.log10() + 1e-9).floor() as i32;
        signed(format!("{value:.*}", (2 - digits).max(0) as usize))
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
