//! The page around tables and figures.

use std::path::Path;

use anyhow::Context;

use super::policies::Policies;
use super::questions::ShownQuestion;
use super::samples::samples;
use super::{evaluation, layouts, suites};
use crate::files::replace;
use crate::format::{self, escape};
use crate::record::{Record, group_by};
use crate::table::Table;

/// What a page shows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'a> {
    /// The title.
    pub(crate) title: &'a str,
    /// Notes above the numbers.
    pub(crate) notes: &'a [String],
    /// The records. This run's records stand before merged ones.
    pub(crate) records: &'a [Record],
    /// The table before all others, if there is one.
    pub(crate) first: Option<&'a Table>,
    /// Questions of this run.
    pub(crate) questions: &'a [ShownQuestion],
}

impl Page<'_> {
    /// Writes the page. The folder of `path` must exist.
    ///
    /// # Errors
    /// If a figure cannot be drawn or the file cannot be written.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let html = html(self)?;
        replace(path, |file| file.write_all(html.as_bytes()))
            .with_context(|| format!("writing the report to {}", path.display()))
    }
}

/// The whole page.
///
/// # Errors
/// If a figure cannot be drawn.
fn html(page: &Page<'_>) -> anyhow::Result<String> {
    let Page { title, notes, records, first, questions } = *page;
    let policies = Policies::of(records);
    let (mut contents, mut body) = (String::new(), String::new());
    if let Some(table) = first {
        let title = escape(&table.title);
        contents += &format!(r##"<li><a href="#first">{title}</a></li>"##);
        body += &format!(
            r#"<section id="first"><h2>{title}</h2>{}<p class="note">{}{}</p></section>"#,
            rows_html(table, &policies),
            means_over(table),
            legend(table)
        );
    }
    let mut means = Vec::new();
    let settings = group_by(records, |r| (r.model.as_str(), r.device.as_str()));
    for (i, ((model, device), of_setting)) in settings.iter().enumerate() {
        for (suite, records) in group_by(of_setting.iter().copied(), |r| r.suite.as_str()) {
            let mut heading = escape(&capital(suite));
            if settings.len() > 1 {
                heading += &format!(" <small>{} · {}</small>", escape(model), escape(device));
            }
            let over = format!("{suite}: {}", samples(&records));
            if !over.ends_with(": ") && !means.contains(&over) {
                means.push(over);
            }
            // This run's records have the first setting.
            let questions = if i == 0 { questions } else { &[] };
            let (id, links, section) = suite_section(suite, &records, questions, &policies, i)?;
            contents += &format!(r##"<li><a href="#{id}">{heading}</a>{links}</li>"##);
            body += &format!(r#"<section id="{id}"><h2>{heading}</h2>{section}</section>"#);
        }
    }
    let distinct = |key: fn(&Record) -> &str| {
        let names: Vec<_> = group_by(records, key).into_iter().map(|(name, _)| name).collect();
        names.join(", ")
    };
    let facts = [
        ("model", distinct(|r| &r.model)),
        ("device", distinct(|r| &r.device)),
        ("samples", means.join(" · ")),
        ("policies", policies.len().to_string()),
        ("records", format::whole(records.len() as f64)),
    ]
    .into_iter()
    .filter(|(_, text)| !text.is_empty())
    .map(|(name, text)| format!("<div><dt>{name}</dt><dd>{}</dd></div>", escape(&text)));
    let notes = notes.iter().map(|note| format!(r#"<p class="note">{}</p>"#, escape(note)));
    let body = if records.is_empty() { "<p>No records.</p>".into() } else { body };
    let scripts = match records.iter().any(|record| record.suite == evaluation::SUITE) {
        true => format!("<script>\n{}</script>\n", evaluation::SCRIPTS.concat()),
        false => String::new(),
    };
    Ok(format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}{evaluation}{hover}</style>
</head>
<body>
<header><h1>{title}</h1><dl>{facts}</dl>{notes}</header>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
<main>
{body}
</main>
{scripts}</body>
</html>
"#,
        title = escape(title),
        style = include_str!("style.css"),
        evaluation = if scripts.is_empty() { "" } else { include_str!("evaluation.css") },
        hover = policies.hover_rules(),
        facts = facts.collect::<String>(),
        notes = notes.collect::<String>(),
    ))
}

/// One suite's anchor, the links to its figures, and its tables and figures.
fn suite_section(
    suite: &str,
    records: &[&Record],
    questions: &[ShownQuestion],
    policies: &Policies,
    setting: usize,
) -> anyhow::Result<(String, String, String)> {
    let id = format!("{}-{setting}", slug(suite));
    let (mut html, mut links) = (String::new(), String::new());
    let evaluates = suite == evaluation::SUITE;
    if evaluates {
        let part = evaluation::part(&id, records, questions, policies)?;
        html += &part.html;
        links += &part.links;
    }
    // A paper's tables are shown first: the run asked for them.
    let open = if suite == "paper" { " open" } else { "" };
    for (i, table) in layouts::of_suite(suite, records, false).iter().enumerate() {
        // The first table sums up, unless a leaderboard does; others are there to be looked up.
        html += &match i {
            0 if !evaluates => table_html(table, policies),
            _ => format!(
                "<details{open}><summary>{}</summary>{}</details>",
                escape(&table.title),
                table_html(table, policies)
            ),
        };
    }
    for figure in suites::figures(records, policies)? {
        let (anchor, title) = (format!("{id}-{}", slug(&figure.id)), escape(&figure.title));
        links += &format!(r##"<li><a href="#{anchor}">{title}</a></li>"##);
        html += &format!(r#"<section id="{anchor}"><h3>{title}</h3>{}</section>"#, figure.html);
    }
    let links = if links.is_empty() { links } else { format!("<ul>{links}</ul>") };
    Ok((id, links, html))
}

fn table_html(table: &Table, policies: &Policies) -> String {
    format!(
        r#"{}
<p class="note">{}Bold: the best policies at a budget, unless most are.{}</p>"#,
        rows_html(table, policies),
        means_over(table),
        legend(table)
    )
}

fn means_over(table: &Table) -> String {
    match table.means_over.as_str() {
        "" => String::new(),
        over => format!("Means over {}. ", escape(over)),
    }
}

fn legend(table: &Table) -> String {
    table.legend().map(|line| format!("<br>{}", escape(line))).collect()
}

fn rows_html(table: &Table, policies: &Policies) -> String {
    let heads: String = table
        .keys
        .iter()
        .chain(table.columns.iter().map(|column| &column.head))
        .map(|head| format!(r#"<th scope="col">{}</th>"#, escape(head).replace('\n', "<br>")))
        .collect();
    let mut bodies = String::new();
    let mut first = 0;
    for rows in table.rows.chunk_by(|a, b| a.keys[0] == b.keys[0]) {
        bodies += "<tbody>";
        for (i, row) in rows.iter().enumerate() {
            bodies += "<tr>";
            if i == 0 {
                let class = super::svg::Ink::of(policies.number(&row.keys[0])).class();
                bodies += &format!(
                    r#"<th scope="rowgroup" rowspan="{}"><i class="dot {class}"></i>{}</th>"#,
                    rows.len(),
                    escape(&row.keys[0])
                );
            }
            for text in &row.keys[1..] {
                bodies += &format!("<td>{}</td>", escape(text));
            }
            for column in 0..table.columns.len() {
                let text = escape(&table.text(first + i, column));
                let best = table.is_best(first + i, column);
                let text = if best { format!("<b>{text}</b>") } else { text };
                let interval = table.interval(first + i, column);
                let interval = interval.map(|text| format!(" <small>{text}</small>"));
                bodies += &format!("<td>{text}{}</td>", interval.unwrap_or_default());
            }
            bodies += "</tr>";
        }
        bodies += "</tbody>";
        first += rows.len();
    }
    format!(
        r#"<div class="table" tabindex="0"><table><thead><tr>{heads}</tr></thead>
{bodies}</table></div>"#
    )
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

/// A text as an anchor: letters and digits, and hyphens for the rest.
fn slug(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    text.chars().map(plain).collect()
}
