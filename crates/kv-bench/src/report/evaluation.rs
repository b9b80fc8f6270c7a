//! The parts of the page that only `evaluate` has: the leaderboard, accuracy against bytes, and
//! the questions, with the data from which scripts filter and sort them.

use serde::Serialize;

use super::answers::{Answers, Setup};
use super::policies::Policies;
use super::questions::{MOST_ANSWERS, MOST_QUESTIONS, ShownQuestion, chosen};
use super::svg::Ink;
use super::{leaderboard, tradeoff};
use crate::format::{self, whole};
use crate::interval;
use crate::record::Record;

/// The suite.
pub(super) const SUITE: &str = "evaluate";

/// The scripts of the page, in the order in which they depend on each other.
pub(super) const SCRIPTS: [&str; 3] =
    [include_str!("evaluation.js"), include_str!("leaderboard.js"), include_str!("questions.js")];

/// Steps of the page's table of quantiles. Between them, a line is right to three decimals.
const QUANTILES: usize = 200;

/// The part's elements, and the links to them.
pub(super) struct Part {
    pub(super) html: String,
    pub(super) links: String,
}

/// What scripts read: the page's data, in which things refer to each other by number.
#[derive(Serialize)]
struct Data<'a> {
    setups: Vec<SetupData<'a>>,
    /// Tasks, those with several subsets once for each of them.
    tasks: &'a [&'a str],
    /// The whole task that each of these is a part of.
    whole_tasks: &'a [&'a str],
    modes: &'a [&'a str],
    /// Task, name, and tokens of the prompt.
    questions: Vec<(usize, &'a str, usize)>,
    /// Setup, question, mode, score, bytes, new tokens, seconds.
    answers: Vec<(usize, usize, usize, f64, f64, f64, f64)>,
    /// Student's quantiles, by the inverse of the degrees of freedom from 0 to 1.
    quantiles: Vec<f64>,
    /// Questions with their texts and answers.
    shown: Vec<&'a ShownQuestion>,
}

#[derive(Serialize)]
struct SetupData<'a> {
    policy: &'a str,
    family: &'a str,
    budget: Option<f64>,
    /// The budget as text.
    label: String,
    full: bool,
    /// The policy's classes in the style sheet.
    class: String,
}

/// The part of a suite's section whose anchor is `id`.
///
/// # Errors
/// If plotters cannot draw.
pub(super) fn part(
    id: &str,
    records: &[&Record],
    questions: &[ShownQuestion],
    policies: &Policies,
) -> anyhow::Result<Part> {
    let answers = Answers::of(records);
    if answers.setups.is_empty() {
        return Ok(Part { html: String::new(), links: String::new() });
    }
    let shown = chosen(questions);
    let mut sections = vec![(
        "leaderboard".to_string(),
        "Leaderboard".to_string(),
        format!(
            r#"<form class="filters" hidden></form>{}<p class="note">{}</p>"#,
            leaderboard::html(&answers, policies),
            leaderboard::LEGEND
        ),
    )];
    if let Some(figure) = tradeoff::figure(&answers, policies)? {
        sections.push((figure.id, figure.title, figure.html));
    }
    if !shown.is_empty() {
        sections.push(("questions".into(), "Questions".into(), of_questions(&shown, questions)));
    }
    let section = |(name, title, html): &(String, String, String)| {
        format!(r#"<section id="{id}-{name}"><h3>{title}</h3>{html}</section>"#)
    };
    let link = |(name, title, _): &(String, String, String)| {
        format!(r##"<li><a href="#{id}-{name}">{title}</a></li>"##)
    };
    let html: String = sections.iter().map(section).collect();
    let data = embedded(&data(&answers, shown, policies))?;
    Ok(Part {
        html: format!(
            r#"<div class="evaluation">{html}
<script type="application/json" class="data">{data}</script></div>"#
        ),
        links: sections.iter().map(link).collect(),
    })
}

/// The place of the questions, which a script fills.
fn of_questions(shown: &[&ShownQuestion], all: &[ShownQuestion]) -> String {
    let count = match shown.len() == all.len() {
        true => String::new(),
        false => format!(
            "The page shows {} of {} questions, spread over tasks: at most {MOST_QUESTIONS}, and \
             at most {} answers. All are in the file of answers. ",
            whole(shown.len() as f64),
            whole(all.len() as f64),
            whole(MOST_ANSWERS as f64)
        ),
    };
    format!(
        r#"<noscript><p>Questions are shown by a script, which this browser does not run. The file
of answers has all outputs.</p></noscript>
<div class="question" hidden></div><div class="list"></div>
<p class="note">{count}Long texts are cut, which "…" and a number of characters say. Held: the
prompt from its beginning on the left to its end on the right, in a stronger colour where more
layers and key-value heads hold its tokens in slots once it is compressed. A policy that keeps
all tokens and reads some of them has a full strip. Tokens in a sketch, in an archive or as means
do not count here, but their bytes do. A policy that numbers its tokens anew has no strip. In the
mode question-agnostic the strip is of the context alone.</p>"#
    )
}

fn data<'a>(
    answers: &'a Answers<'a>,
    shown: Vec<&'a ShownQuestion>,
    policies: &Policies,
) -> Data<'a> {
    let setup = |setup: &'a Setup<'a>| SetupData {
        policy: setup.policy,
        family: setup.family(),
        budget: setup.budget,
        label: format::budget(setup.budget),
        full: setup.is_full(),
        class: Ink::of(policies.number(setup.policy)).class(),
    };
    let of_setup = |(index, setup): (usize, &'a Setup<'a>)| {
        setup.answers.iter().map(move |own| {
            (index, own.question, own.mode, own.score, own.bytes, own.tokens, own.seconds)
        })
    };
    let rounded = |quantile: f64| (quantile * 1e5).round() / 1e5;
    Data {
        setups: answers.setups.iter().map(setup).collect(),
        tasks: &answers.tasks,
        whole_tasks: &answers.whole_tasks,
        modes: &answers.modes,
        questions: answers.questions.iter().map(|own| (own.task, own.name, own.length)).collect(),
        answers: answers.setups.iter().enumerate().flat_map(of_setup).collect(),
        quantiles: interval::quantiles(QUANTILES).into_iter().map(rounded).collect(),
        shown,
    }
}

/// JSON as the text of a script element: no text in it can end the element or begin a comment.
fn embedded(data: &impl Serialize) -> anyhow::Result<String> {
    // Outside of strings JSON has none of these characters.
    Ok(serde_json::to_string(data)?
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::test_records::evaluation;

    #[test]
    fn data_cannot_end_its_element() {
        let text = "</script><!-- <script> & \u{2028}";
        let json = embedded(&[text]).unwrap();
        assert!(!json.contains(['<', '>', '&']), "{json}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&json).unwrap(), [text]);
    }

    #[test]
    fn data_refers_to_its_own_lists() {
        let records = evaluation();
        let records: Vec<&Record> = records.iter().collect();
        let answers = Answers::of(&records);
        let data = serde_json::to_value(data(&answers, Vec::new(), &Policies::of(&[]))).unwrap();
        let list = |name: &str| data[name].as_array().unwrap().clone();
        assert_eq!(list("setups").len(), 5);
        assert_eq!(list("answers").len(), 5 * 6);
        assert_eq!(list("answers")[0], serde_json::json!([0, 0, 0, 1.0, 1000.0, 4.0, 0.5]));
        assert_eq!((list("quantiles").len(), &list("quantiles")[200]), (201, &12.7062.into()));
        let none = part("evaluate-0", &[], &[], &Policies::of(&[])).unwrap();
        assert!(none.html.is_empty() && none.links.is_empty());
    }
}
