use super::*;
use crate::record::{Record, metric, mode};
use test_records::record;

fn html(records: &[Record]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.html");
    let first = overview::table(records);
    let notes = ["A <note>".into()];
    let title = "A <title>";
    let page = Page { title, notes: &notes, records, first: first.as_ref(), questions: &[] };
    page.write(&path).unwrap();
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn every_section_has_one_figure() {
    let html = html(&test_records::records());
    let quality = ["exact-match", "answer-logprob", "perplexity", "perplexity-by-position"];
    let more = ["retrieval-question-aware", "retrieval-question-agnostic", "agreement", "memory"];
    let text = ["text-agreement", "kl-divergence", "text-kl-divergence"];
    let attention = ["relative-error", "relative-error-by-layer", "retained-mass"];
    let throughput = ["memory", "peak-memory", "decode", "prefill", "first-token"];
    let sections = [("quality", &quality[..]), ("quality", &more), ("quality", &text)];
    let mut count = 0;
    for (suite, ids) in
        sections.into_iter().chain([("attention", &attention[..]), ("throughput", &throughput)])
    {
        for id in ids {
            let section = format!(r#"<section id="{suite}-0-{id}">"#);
            let (_, rest) = html.split_once(&section).unwrap_or_else(|| panic!("{section}"));
            let rest = rest.split_once("</section>").unwrap().0;
            assert_eq!(rest.matches("<figure").count(), 1, "{section}");
            assert_eq!(rest.matches("<figcaption>").count(), 1, "{section}");
            assert!(rest.contains("<svg"), "{section}");
            count += 1;
        }
    }
    assert_eq!(html.matches("<figure").count(), count);
    assert!(html.contains("A &lt;title&gt;") && html.contains("A &lt;note&gt;"));
    assert!(html.contains("<dt>samples</dt><dd>quality: 80 embedded prompts"));
    assert!(html.contains(r#"<section id="first"><h2>The best of each family at 5 %</h2>"#));
    assert!(!html.contains("http://www.w3.org") && !html.contains("<script"));
    assert!(html.contains("<title>snapkv at 50 %: ") && html.contains("svg .hover {"));
}

#[test]
fn tables_and_charts_show_intervals() {
    let of = |policy: &str, budget, values: [f64; 3]| {
        let record = move |(i, value): (usize, f64)| {
            let record = record(policy, budget, metric::ANSWER_LOGPROB, value);
            test_records::of_prompt(record, &i.to_string())
        };
        values.into_iter().enumerate().map(record).collect::<Vec<_>>()
    };
    let half = of("a", Some(0.5), [-1.0, -2.0, -3.0]);
    let mut records = [half.clone(), of("a", Some(0.25), [-2.0, -3.0, -4.0])].concat();
    let lines = html(&records);
    // The quantile of 2 degrees of freedom, 4.303, over √3.
    assert!(lines.contains("<td>−2.000 <small>± 2.484</small></td>"), "{lines}");
    assert_eq!(lines.matches("k0 c0 error line").count(), 2);
    assert!(lines.contains("Error bars: 95 % confidence intervals; where there are more"));
    let bars = html(&half);
    assert!(bars.contains("Error bars: 95 % confidence intervals.</figcaption>"));
    records.iter_mut().for_each(|record| record.case.prompt = None);
    let bare = html(&records);
    assert!(!bare.contains("error line") && !bare.contains("Error bars: "));
}

#[test]
fn sections_without_data_are_left_out() {
    let empty = html(&[]);
    assert!(empty.contains("No records.") && !empty.contains("<figure"));
    let full = html(&[record("full", None, metric::PERPLEXITY, 3.0)]);
    assert!(full.contains("<table>") && !full.contains("<figure"));
}

#[test]
fn what_differs_in_a_number_alone_is_a_line_along_it() {
    let at = |policy: &str, value| record(policy, Some(0.2), metric::PERPLEXITY, value);
    let mut records: Vec<_> = [(1, 16.5), (4, 16.75), (64, 17.5)]
        .map(|(period, value)| at(&format!("keepkv(h2o) period={period} window=1"), value))
        .into();
    records.extend([at("keepkv", 17.25), record("full", None, metric::PERPLEXITY, 16.25)]);
    let html = html(&records);
    let section = r#"<section id="quality-0-perplexity-by-period">"#;
    let (_, figure) = html.split_once(section).unwrap();
    let figure = figure.split_once("</section>").unwrap().0;
    assert!(figure.contains("keepkv(h2o) period=… window=1"), "{figure}");
    for tick in ["\n1\n", "\n4\n", "\n64\n"] {
        assert!(figure.contains(tick), "{tick:?}");
    }
    // One period is no line, and another budget another panel.
    let one = self::html(&records[2..]);
    assert!(!one.contains("perplexity-by-period"));
    let other = |period, value| {
        record(&format!("keepkv period={period}"), Some(0.5), metric::PERPLEXITY, value)
    };
    records.extend([other(2, 16.5), other(8, 17.0)]);
    let both = self::html(&records);
    let (_, figure) = both.split_once(section).unwrap();
    let figure = figure.split_once("</section>").unwrap().0;
    assert!(figure.contains("budget 20 % of the cache") && figure.contains("budget 50 %"));
}

#[test]
fn odd_values_are_drawn_around() {
    let mut records: Vec<_> = [f64::NAN, f64::INFINITY, 0.0, 2.0]
        .into_iter()
        .flat_map(|value| {
            let budgets = [Some(0.5), Some(256.0), None].into_iter();
            budgets.map(move |budget| record("<x>", budget, metric::RELATIVE_ERROR, value))
        })
        .collect();
    records.push(record("y", Some(0.5), metric::LIVE_BYTES, f64::NAN));
    records.push(record("<x>", Some(0.5), metric::EXACT_MATCH, 1.0));
    records[0].case.mode = Some(mode::AWARE.into());
    let html = html(&records);
    assert!(!html.contains("<x>") && html.contains("&lt;x&gt;"));
    assert!(!html.contains("NaN"), "coordinates must be numbers");
}
