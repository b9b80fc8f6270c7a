//! What is refused, and what the errors say.

use std::fs;
use std::path::Path;

use kv_tasks::{QuestionOptions, Task, TaskError, Tokens};
use parquet::basic::Compression;

use crate::words::Words;

fn error_of(name: &str, contents: &[u8]) -> TaskError {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, contents).expect("a file");
    match Task::of_file(&path) {
        Ok(task) => task
            .questions(&QuestionOptions::default(), &Words::default())
            .expect_err("the file should be refused"),
        Err(error) => error,
    }
}

fn says(error: &TaskError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} should say {part:?}");
    }
}

#[test]
fn unknown_tasks_name_the_nearest() {
    let error = Task::named("gsm8").expect_err("unknown");
    assert!(matches!(error, TaskError::UnknownTask { nearest: "gsm8k", .. }), "{error}");
    says(&error, &["gsm8", "\"gsm8k\""]);
}

#[test]
fn examples_of_tasks_without_any_are_refused() {
    for name in ["cnn-dailymail", "ruler/vt"] {
        let task = Task::named(name).expect("a task");
        assert!(!task.takes_examples());
        let options = QuestionOptions { few_shot: Some(3), ..QuestionOptions::default() };
        let error = task.questions(&options, &Words::default()).expect_err("no examples");
        says(&error, &[name, "0 solved examples, expected at least 3"]);
    }
    assert!(Task::named("xsum").expect("a task").takes_examples());
}

#[test]
fn misspelt_columns_are_refused_and_others_are_not() {
    for (column, nearest) in
        [("contxt", "context"), ("max_new_token", "max_new_tokens"), ("graders", "grader")]
    {
        let row = format!(r#"{{"question":"q","answers":"a","{column}":"c"}}"#);
        let error = error_of("a.jsonl", row.as_bytes());
        says(&error, &["a.jsonl, line 1", column, &format!("did you mean {nearest:?}?")]);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.jsonl");
    let row = r#"{"question":"q","answer":"a","context":"c","contexts":1,"answers_of":2,"idx":3}"#;
    fs::write(&path, row).expect("a file");
    let task = Task::of_file(&path).expect("a task");
    let questions = task.questions(&QuestionOptions::default(), &Words::default());
    assert_eq!(questions.expect("questions").len(), 1);
}

#[test]
fn faulty_rows_are_named() {
    let good = r#"{"question":"q","answers":"a"}"#;
    let error = error_of("a.jsonl", format!("{good}\n\n{{\"question\": }}").as_bytes());
    assert!(matches!(error, TaskError::Json { .. }), "{error}");
    says(&error, &["a.jsonl, line 3", "column 14"]);
    let error = error_of("a.jsonl", format!("{good}\n[1]").as_bytes());
    says(&error, &["object on line 2", "an array"]);
    let error = error_of("a.jsonl", format!("{good}\n{{\"answers\":\"a\"}}").as_bytes());
    assert!(
        matches!(&error, TaskError::MissingColumn { column, .. } if column == "question"),
        "{error}"
    );
    says(&error, &["line 2", "\"question\"", "it has answers"]);
    let error = error_of("a.jsonl", br#"{"question":"q"}"#);
    says(&error, &["\"answers\"", "it has question"]);
    let error = error_of("a.jsonl", b"{\"answer\":1,\"question\":\"q\"}\n{\"question\":\"q\"}");
    says(&error, &["\"answer\"", "line 2"]);
    let error = error_of("a.json", br#"[{"question":"q","answers":["", " \n"]}]"#);
    assert!(matches!(error, TaskError::EmptyAnswer { .. }), "{error}");
    says(&error, &["row 1"]);
    let error = error_of("a.json", br#"[{"question":"q","answers":{"text":"a"}}]"#);
    assert!(matches!(error, TaskError::NotText { .. }), "{error}");
    let error = error_of("a.json", br#"[{"question":"q","answers":[["a"]]}]"#);
    assert!(matches!(error, TaskError::NotText { .. }), "{error}");
    let error = error_of("a.jsonl", b"{\"question\":\"\xff\"}");
    assert!(matches!(error, TaskError::Json { .. }), "{error}");
}

#[test]
fn faulty_tables_are_named() {
    let error = error_of("a.json", br#"{"question":["q","r"],"answers":["a"]}"#);
    // Either column may come first, by how `serde_json` is built.
    let numbers = match &error {
        TaskError::Uneven { expected, actual, .. } => {
            [*expected.min(actual), *expected.max(actual)]
        }
        _ => panic!("{error}"),
    };
    assert_eq!(numbers, [1, 2]);
    let error = error_of("a.json", br#"{"question":"q"}"#);
    says(&error, &["an array under \"question\"", "a string"]);
    assert!(matches!(error_of("a.json", b""), TaskError::NoRows { .. }));
    assert!(matches!(error_of("a.json", b"[]"), TaskError::NoQuestions { .. }));
    assert!(matches!(error_of("a.json", b"{\"a\": [1"), TaskError::Json { .. }));
    assert!(matches!(error_of("a.jsonl", b"\n"), TaskError::NoQuestions { .. }));
    assert!(matches!(error_of("a.txt", b"x"), TaskError::Format { .. }));
    let error = error_of("a.csv", b"question,answers\nq\n");
    assert!(matches!(error, TaskError::Malformed { format: "CSV", .. }), "{error}");
    let error = Task::of_file(Path::new("/no/such.jsonl")).expect_err("no file");
    assert!(matches!(error, TaskError::Io { .. }), "{error}");
}

#[test]
fn faulty_parquet_files_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("good.parquet");
    crate::files::parquet(&path, Compression::SNAPPY);
    let good = fs::read(&path).expect("bytes");
    for bytes in [&b""[..], b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1", &good[..good.len() - 1]] {
        let error = error_of("bad.parquet", bytes);
        assert!(matches!(error, TaskError::Malformed { format: "Parquet", .. }), "{error}");
    }
    // No damage of a byte may end the program. Some of it gives other texts, which no reader sees.
    for position in 0..good.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[position] ^= flip;
            fs::write(&path, &bytes).expect("a file");
            if let Ok(task) = Task::of_file(&path) {
                drop(task.questions(&QuestionOptions::default(), &Words::default()));
            }
        }
    }
}

#[test]
fn faulty_archives_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let toml = TASK.replace("x.jsonl", "x.zip").replace("[data]", "[data]\nmember = 'x.jsonl'");
    let task = Task::from_toml(&toml).expect("a task");
    let here = QuestionOptions { folder: Some(folder.path().into()), ..Default::default() };
    let ask = |bytes: &[u8]| {
        fs::write(folder.path().join("x.zip"), bytes).expect("a file");
        task.questions(&here, &Words::default())
    };
    let mut good = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    good.start_file("x.jsonl", zip::write::SimpleFileOptions::default()).expect("a member");
    std::io::Write::write_all(&mut good, br#"{"q":"a","a":"b"}"#).expect("written");
    let good = good.finish().expect("finished").into_inner();
    assert_eq!(ask(&good).expect("questions").len(), 1);
    // The central directory's claim of the length is 24 bytes behind its signature.
    let directory = good.windows(4).rposition(|bytes| bytes == b"PK\x01\x02").expect("a directory");
    let mut claims = good.clone();
    claims[directory + 24..directory + 28].copy_from_slice(&[0xff, 0xff, 0xff, 0x7f]);
    for bytes in [&b""[..], &good[..good.len() / 2], &claims] {
        let error = ask(bytes).expect_err("a bad archive");
        assert!(matches!(error, TaskError::Malformed { format: "ZIP", .. }), "{error}");
    }
    let other = Task::from_toml(&toml.replace("'x.jsonl'", "'y.jsonl'")).expect("a task");
    fs::write(folder.path().join("x.zip"), &good).expect("a file");
    let error = other.questions(&here, &Words::default()).expect_err("no member");
    says(&error, &["x.zip", "y.jsonl"]);
}

#[test]
fn users_files_are_uniform() {
    let first = r#"{"question":"q","answers":"a","grader":"exact"}"#;
    let error =
        error_of("a.jsonl", format!("{first}\n{}", first.replace("exact", "f1")).as_bytes());
    assert!(matches!(&error, TaskError::Mixed { key: "grader", .. }), "{error}");
    says(&error, &["line 2", "f1", "exact"]);
    let error = error_of("a.jsonl", first.replace("exact", "exactly").as_bytes());
    says(&error, &["line 1", "exactly", "\"exact\""]);
    let error = error_of("a.jsonl", first.replace("\"exact\"", "7").as_bytes());
    assert!(matches!(&error, TaskError::NotText { .. }), "{error}");
    let error = error_of("a.json", br#"[{"question":"q","answers":"a","max_new_tokens":-1}]"#);
    assert!(matches!(&error, TaskError::NotCount { .. }), "{error}");
}

const TASK: &str = "name = 'x'\nfamily = 'x'\nabout = 'x'\nmax_new_tokens = 1\ngrader = 'exact'\n\
    [data]\nfiles = ['x.jsonl']\n[template]\nquestion = '{{ q }}'\n[answer]\nreferences = 'a'\n";

#[test]
fn faulty_tasks_are_refused() {
    assert!(Task::from_toml(TASK).is_ok());
    let error = Task::from_toml(&TASK.replace("'exact'", "'exakt'")).expect_err("grader");
    says(&error, &["line 5", "exakt", "\"exact\""]);
    let error = Task::from_toml(&TASK.replace("about", "abuot")).expect_err("key");
    says(&error, &["line 3", "abuot"]);
    let error = Task::from_toml(&TASK.replace("= 1", "= 0")).expect_err("tokens");
    assert!(matches!(&error, TaskError::Invalid { key, .. } if key == "max_new_tokens"), "{error}");
    let error = Task::from_toml(&TASK.replace("{{ q", "{{ q +")).expect_err("template");
    assert!(matches!(&error, TaskError::Template { part: "template.question", .. }), "{error}");
    let error = Task::from_toml(&TASK.replace("= 'a'", "= 'a b'")).expect_err("expression");
    assert!(matches!(&error, TaskError::Template { part: "answer.references", .. }), "{error}");
    let error = Task::from_toml(&TASK.replace("['x.jsonl']", "[]")).expect_err("files");
    assert!(matches!(&error, TaskError::Invalid { .. }), "{error}");
    let error = Task::from_toml(&TASK.replace("x.jsonl", "***")).expect_err("a pattern");
    says(&error, &["data.files", "***"]);
    let repository = TASK.replace("[data]", "[data]\nrepository = '../x'");
    says(&Task::from_toml(&repository).expect_err("a path"), &["organisation/name", "../x"]);
    let ruler = TASK.replace("[data]", "[ruler]\nkind = 'frequent-words'\nalpha = 2.0\n[data]");
    says(&Task::from_toml(&ruler).expect_err("two sources"), &["template", "ruler"]);
    let (head, _) = TASK.split_once("[data]").expect("a head");
    let ruler = |rest: &str| Task::from_toml(&format!("{head}[ruler]\n{rest}"));
    assert!(ruler("kind = 'frequent-words'\nalpha = 2.0").is_ok());
    for (rest, part) in [
        ("kind = 'frequent-words'\nalpha = 1.0", "alpha"),
        ("kind = 'frequent-words'\nalpha = nan", "alpha"),
        ("kind = 'frequent-words'\nalpha = 2.0\nbeta = 1", "beta"),
        ("kind = 'rare-words'", "rare-words"),
        ("kind = 'variables'\nchains = 0\nhops = 4", "chains"),
        ("kind = 'common-words'\ncommon = 10\ncommon_repeats = 3\nother_repeats = 3", "10 words"),
        ("kind = 'documents'\ndataset = 'squad'", "data"),
    ] {
        says(&ruler(rest).expect_err(rest), &[part]);
    }
}

#[test]
fn missing_files_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let task = Task::from_toml(TASK).expect("a task");
    let ask = |options: &QuestionOptions| {
        task.questions(options, &Words::default()).expect_err("no file")
    };
    let error = ask(&QuestionOptions::default());
    says(&error, &["give a folder", "x.jsonl"]);
    let here = QuestionOptions { folder: Some(folder.path().into()), ..Default::default() };
    assert!(matches!(ask(&here), TaskError::NoFile { .. }));
    says(&ask(&here), &["x.jsonl"]);
    let nowhere = QuestionOptions { folder: Some("/no/such/folder".into()), ..Default::default() };
    assert!(matches!(ask(&nowhere), TaskError::Io { .. }));
    fs::write(folder.path().join("x.jsonl"), r#"{"q":"a b c d","a":"e"}"#).expect("a file");
    let error = ask(&QuestionOptions { length: Some(3), ..here.clone() });
    assert!(matches!(error, TaskError::TooLong { length: 3, needed: 4, .. }), "{error}");

    struct Broken;
    impl Tokens for Broken {
        fn encode(&self, _: &str) -> Result<Vec<u32>, String> {
            Err("no vocabulary".into())
        }
        fn decode(&self, _: &[u32]) -> Result<String, String> {
            Err("no vocabulary".into())
        }
    }
    let error = task.questions(&QuestionOptions { length: Some(3), ..here }, &Broken);
    says(&error.expect_err("a tokenizer"), &["no vocabulary"]);
}
