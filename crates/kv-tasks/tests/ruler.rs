//! RULER's tasks.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

use kv_tasks::{Question, QuestionOptions, Task, TaskError, Tokens};
use tempfile::TempDir;

use crate::words::{Pieces, Words};

/// Files that the tasks read: a text, SQuAD and HotpotQA in their own forms and in the hub's.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let text: String = (0..900)
        .map(|n| format!("Sentence {n} is short, as Mr. Smith said. Was it? \"Yes!\"\n"))
        .collect();
    fs::write(at("text.txt"), &text).expect("a file");
    fs::write(at("text.json"), serde_json::json!({"text": text}).to_string()).expect("a file");

    let paragraph = |article: usize, n: usize| {
        let qas = serde_json::json!([
            {"question": format!("What is {article}-{n}?"), "is_impossible": false,
             "answers": [{"text": format!("fact{article}x{n}"), "answer_start": 0}]},
            {"question": "What is not?", "is_impossible": true, "answers": []},
        ]);
        let context =
            format!("The fact of {article}-{n} is fact{article}x{n} {}", "and ".repeat(40));
        serde_json::json!({"context": context, "qas": qas})
    };
    let articles: Vec<_> = (0..8)
        .map(|article| {
            let paragraphs: Vec<_> = (0..6).map(|n| paragraph(article, n)).collect();
            serde_json::json!({"title": format!("t{article}"), "paragraphs": paragraphs})
        })
        .collect();
    let squad = serde_json::json!({"version": "v2.0", "data": articles});
    fs::write(at("squad.json"), squad.to_string()).expect("a file");
    let hotpot: Vec<_> = (0..9)
        .map(|n| {
            let context: Vec<_> = (0..10)
                .map(|d| {
                    let sentences = [format!("Fact{n}y{d}. "), "More of it.".to_owned()];
                    serde_json::json!([format!("Title {n} {d}"), sentences])
                })
                .collect();
            serde_json::json!({"question": format!("q{n}?"), "answer": format!("fact{n}y3"),
                "context": context})
        })
        .collect();
    fs::write(at("hotpotqa.json"), serde_json::json!(hotpot).to_string()).expect("a file");
    folder
}

fn options(folder: &TempDir, length: usize) -> QuestionOptions {
    QuestionOptions {
        folder: Some(folder.path().into()),
        text: Some(folder.path().join("text.txt")),
        length: Some(length),
        limit: Some(3),
        seed: 5,
        ..QuestionOptions::default()
    }
}

fn ruler() -> impl Iterator<Item = Task> {
    let names = Task::names().filter(|name| name.starts_with("ruler/"));
    names.map(|name| Task::named(name).expect("a task"))
}

/// The tokens that the smallest step of a task's size has, by either tokenizer of the tests.
fn step(task: &Task) -> usize {
    match task.name.as_str() {
        "ruler/niah_multikey_3" => 180,
        "ruler/qa_1" | "ruler/qa_2" => 100,
        "ruler/niah_single_1" | "ruler/niah_multikey_2" | "ruler/vt" | "ruler/cwe" => 60,
        // Its words are other ones at each size.
        "ruler/fwe" => 24,
        _ => 8,
    }
}

fn check(tokens: &dyn Tokens, lengths: &[usize]) {
    let folder = folder();
    assert_eq!(ruler().count(), 13);
    for task in ruler() {
        for &length in lengths {
            let asked = options(&folder, length);
            let questions = match task.questions(&asked, tokens) {
                Ok(questions) => questions,
                Err(error) => panic!("{} at {length}: {error}", task.name),
            };
            assert_eq!(questions.len(), 3);
            for question in &questions {
                check_question(&task, question, length, tokens);
            }
            let distinct: HashSet<_> = questions.iter().map(|question| &question.context).collect();
            assert_eq!(distinct.len(), 3, "{}", task.name);
            assert_eq!(questions, task.questions(&asked, tokens).expect("again"));
            let other = QuestionOptions { seed: 6, limit: Some(1), ..asked };
            assert_ne!(questions[..1], task.questions(&other, tokens).expect("another seed"));
        }
    }
}

fn check_question(task: &Task, question: &Question, length: usize, tokens: &dyn Tokens) {
    let prompt = format!("{}{}{}", question.context, question.question, question.answer_prefix);
    let whole = tokens.encode(&prompt).expect("tokens").len();
    let parts = [&question.context, &question.question, &question.answer_prefix]
        .map(|part| tokens.encode(part).expect("tokens").len());
    let used = whole.max(parts.iter().sum());
    assert_eq!(question.length, Some(used));
    let left = (length - task.max_new_tokens).checked_sub(used);
    let left = left.unwrap_or_else(|| panic!("{}: {used} of {length}", task.name));
    assert!(left <= step(task), "{} at {length}: {left} tokens are not used", task.name);

    assert!(!question.answer.references.is_empty());
    let lower = question.context.to_lowercase();
    for reference in &question.answer.references {
        assert!(lower.contains(&reference.to_lowercase()), "{}: {reference}", task.name);
        assert!(!question.question.contains(reference));
        assert!(!question.answer_prefix.contains(reference));
    }
    let grade = |output: &str| task.grader.grade(output, &question.answer).expect("a grade");
    assert_eq!(grade(&question.answer.references.join(", ")), 1.0);
    assert_eq!(grade("nothing that was asked"), 0.0);
    assert_eq!(format!("ruler/{}", question.subset), task.name);
}

#[test]
fn prompts_fill_their_length_in_words() {
    check(&Words::default(), &[700, 5000]);
}

#[test]
fn prompts_fill_their_length_in_pieces() {
    let Some(pieces) = Pieces::load() else {
        println!("skipped: the repository has no tokenizer");
        return;
    };
    check(&pieces, &[2048, 4500]);
}

fn one(name: &str, length: usize) -> Question {
    let folder = folder();
    let task = Task::named(name).expect("a task");
    task.questions(&options(&folder, length), &Words::default()).expect("questions").remove(0)
}

#[test]
fn prompts_have_the_words_of_ruler() {
    let question = one("ruler/niah_single_1", 1000);
    let key = question.question.split(" for ").nth(1).expect("a key");
    let key = key.split(" mentioned").next().expect("a key");
    let value = &question.answer.references[0];
    assert!(question.context.starts_with(
        "A special magic number is hidden within the following text. Make sure to memorize it. I \
         will quiz you about the number afterwards.\nThe grass is green. The sky is blue."
    ));
    let needle = format!("\nOne of the special magic numbers for {key} is: {value}.\nThe grass");
    assert!(question.context.contains(&needle));
    assert_eq!(
        question.question,
        format!("\nWhat is the special magic number for {key} mentioned in the provided text?")
    );
    assert_eq!(
        question.answer_prefix,
        format!(" The special magic number for {key} mentioned in the provided text is")
    );

    let question = one("ruler/niah_multiquery", 1000);
    assert!(question.context.starts_with("Some special magic numbers are hidden within the"));
    assert!(question.question.starts_with("\nWhat are all the special magic numbers for "));
    assert!(question.question.contains(", and "));
    assert!(question.answer_prefix.ends_with(" mentioned in the provided text are"));
    assert_eq!(question.answer.references.len(), 4);
    assert_eq!(one("ruler/niah_multivalue", 1000).answer.references.len(), 4);
    let question = one("ruler/niah_multikey_1", 1000);
    assert_eq!(question.context.matches("One of the special magic numbers for ").count(), 4);
    let uuid = one("ruler/niah_multikey_3", 1000).answer.references.remove(0);
    let parts: Vec<_> = uuid.split('-').map(str::len).collect();
    assert_eq!((parts, &uuid[14..15]), (vec![8, 4, 4, 4, 12], "4"));

    let question = one("ruler/vt", 2000);
    assert_eq!(question.answer.references.len(), 5);
    assert_eq!(question.context.matches("Memorize and track the chain(s) of variable").count(), 2);
    let chain: Vec<_> = question.answer.references.windows(2).collect();
    for pair in chain {
        assert!(question.context.contains(&format!("\nVAR {} = VAR {} \n", pair[1], pair[0])));
    }
    let value = question.question.split("assigned the value ").nth(1).expect("a value");
    let value = value.split(' ').next().expect("a value");
    let first = format!("VAR {} = {value}\n", question.answer.references[0]);
    assert!(question.context.contains(&first), "{first}");

    let question = one("ruler/fwe", 2000);
    let count = |word: &str| question.context.split(' ').filter(|other| *other == word).count();
    let counts: Vec<_> = question.answer.references.iter().map(|word| count(word)).collect();
    assert!(count("...") > counts[0] && counts.is_sorted_by(|a, b| a >= b), "{counts:?}");

    let question = one("ruler/cwe", 5000);
    let (example, list) = question.context.rsplit_once("Below is a").expect("an example");
    assert!(example.starts_with("Below is a numbered list of words."));
    for word in &question.answer.references {
        assert_eq!(list.split(' ').filter(|other| other == word).count(), 30, "{word}");
    }

    let question = one("ruler/qa_2", 700);
    assert!(
        question.context.contains("\n\nThe following are given documents.\n\nDocument 1:\nTitle ")
    );
    assert!(question.question.ends_with("any other words.\n\nQuestion: q0?"));
}

#[test]
fn what_is_missing_is_named() {
    let folder = folder();
    let words = Words::default();
    let ask = |name: &str, options: QuestionOptions| {
        let task = Task::named(name).expect("a task");
        task.questions(&options, &words).expect_err("should be refused")
    };
    let all = options(&folder, 1000);
    let error = ask("ruler/vt", QuestionOptions { length: None, ..all.clone() });
    assert!(matches!(error, TaskError::NoLength { .. }), "{error}");
    let error = ask("ruler/niah_single_2", QuestionOptions { text: None, ..all.clone() });
    assert!(matches!(error, TaskError::NoText { .. }), "{error}");
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, " \n").expect("a file");
    let error = ask("ruler/niah_single_2", QuestionOptions { text: Some(empty), ..all.clone() });
    assert!(matches!(error, TaskError::EmptyText { .. }), "{error}");
    let json = folder.path().join("squad.json");
    let error = ask("ruler/niah_single_2", QuestionOptions { text: Some(json), ..all.clone() });
    assert!(matches!(error, TaskError::Json { .. }), "{error}");
    let error = ask("ruler/niah_single_2", QuestionOptions { length: Some(150), ..all.clone() });
    assert!(matches!(error, TaskError::TooLong { length: 150, needed: 151.., .. }), "{error}");
    let error = ask("ruler/niah_single_2", QuestionOptions { length: Some(0), ..all.clone() });
    assert!(matches!(error, TaskError::TooLong { length: 0, .. }), "{error}");

    let other = tempfile::tempdir().expect("a folder");
    let here = QuestionOptions { folder: Some(other.path().into()), ..all };
    let error = ask("ruler/qa_1", here.clone());
    assert!(matches!(error, TaskError::NoFile { .. }), "{error}");
    assert!(error.to_string().contains("squad.json"), "{error}");
    fs::write(other.path().join("squad.json"), r#"[{"paragraphs":[{"qas":[]}]}]"#).expect("a file");
    let error = ask("ruler/qa_1", here.clone());
    assert!(
        matches!(&error, TaskError::MissingColumn { column, .. } if column == "context"),
        "{error}"
    );
    fs::write(other.path().join("squad.json"), "[]").expect("a file");
    let error = ask("ruler/qa_1", here);
    assert!(matches!(error, TaskError::NoQuestions { .. }), "{error}");
}

#[test]
fn the_hubs_tables_have_the_same_questions() {
    let folder = tempfile::tempdir().expect("a folder");
    let squad = [
        serde_json::json!({"title": "t", "context": "Rain is wet.", "question": "What is rain?",
            "answers": {"text": ["wet"], "answer_start": [8]}}),
        serde_json::json!({"title": "t", "context": "Snow is white.", "question": "Who?",
            "answers": {"text": [], "answer_start": []}}),
    ];
    let hotpot = [serde_json::json!({"question": "Which?", "answer": "blue",
        "context": {"title": ["Sky", "Sea"], "sentences": [["It is ", "blue."], ["Deep."]]}})];
    let write = |name: &str, rows: &[serde_json::Value]| -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, serde_json::json!(rows).to_string()).expect("a file");
        path
    };
    write("squad.json", &squad);
    write("hotpotqa.json", &hotpot);
    let asked = options(&folder, 150);
    let ask = |name: &str| {
        let task = Task::named(name).expect("a task");
        task.questions(&asked, &Words::default()).expect("questions")
    };
    let questions = ask("ruler/qa_1");
    assert_eq!(questions.len(), 1);
    assert!(
        questions[0].context.contains("Rain is wet.") && questions[0].question.contains("rain?")
    );
    assert!(questions[0].context.contains("Snow is white."));
    let questions = ask("ruler/qa_2");
    assert!(questions[0].context.contains(":\nSky\nIt is blue."), "{}", questions[0].context);
}

#[test]
fn json_and_plain_texts_are_the_same_haystack() {
    let folder = folder();
    let task = Task::named("ruler/niah_single_3").expect("a task");
    let plain = options(&folder, 800);
    let json = QuestionOptions { text: Some(folder.path().join("text.json")), ..plain.clone() };
    let words = Words::default();
    let ask = |options: &QuestionOptions| task.questions(options, &words).expect("questions");
    assert_eq!(ask(&plain), ask(&json));
    // The first questions are the same however many there are.
    let one = ask(&QuestionOptions { limit: Some(1), ..plain.clone() });
    assert_eq!(one, ask(&plain)[..1]);
    // A text that is too short comes again.
    let short = folder.path().join("short.txt");
    fs::write(&short, "One two. Three four").expect("a file");
    let questions = ask(&QuestionOptions { text: Some(short), ..plain });
    assert!(questions[0].context.matches("Three four One two.").count() > 100);
}
