//! The graders agree with the public graders on the pairs of `fixtures/`.

use std::fs;
use std::path::Path;

use kv_graders::{Answer, Grader};
use serde::Deserialize;

#[derive(Deserialize)]
struct Table {
    grader: Grader,
    public: String,
    /// The decimals that the public grader rounds to.
    decimals: Option<i32>,
    pairs: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    output: String,
    references: Vec<String>,
    #[serde(default)]
    classes: Vec<String>,
    #[serde(default)]
    wrong: Vec<String>,
    score: f64,
    /// The score of this crate where it departs from the public grader.
    ours: Option<f64>,
    why: Option<String>,
}

#[test]
fn agrees_with_the_public_graders() {
    let mut wrong = Vec::new();
    for grader in Grader::all() {
        let path = Path::new("fixtures").join(format!("{grader}.json"));
        let text = fs::read_to_string(&path).unwrap();
        let table: Table = serde_json::from_str(&text).unwrap();
        assert_eq!(table.grader, *grader, "{}", path.display());
        assert!(table.pairs.len() >= 30, "{grader} has {} pairs", table.pairs.len());
        for pair in table.pairs {
            let answer = Answer::any(pair.references).with_classes(pair.classes);
            let answer = answer.with_wrong(pair.wrong);
            let score = grader.grade(&pair.output, &answer).unwrap();
            assert!((0.0..=1.0).contains(&score), "{grader} scored {score}");
            assert_eq!(pair.ours.is_some(), pair.why.is_some(), "{grader}: {:?}", pair.output);
            let rounded = table.decimals.map_or(score, |decimals| {
                let scale = 10_f64.powi(decimals);
                (score * scale).round_ties_even() / scale
            });
            let expected = pair.ours.unwrap_or(pair.score);
            if (rounded - expected).abs() > 1e-9 {
                wrong.push(format!(
                    "{grader} ({}): {:?} against {:?} scored {score}, expected {expected}",
                    table.public, pair.output, answer.references,
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} pairs differ:\n{}", wrong.len(), wrong.join("\n"));
}
