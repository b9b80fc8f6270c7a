use super::*;

fn prompt(task: &str, length: usize, id: usize) -> Prompt {
    let (prompt, answer) = ("a\nQuestion: b".into(), "c".into());
    let (id, task, line) = (id.to_string(), task.into(), id + 1);
    Prompt { id, line, task, length, depth: None, prompt, question_at: Some(1), answer }
}

#[test]
fn embedded_prompts_have_context_and_question() {
    for prompt in Prompts::load(None).unwrap().list {
        let (context, question) = prompt.split().unwrap();
        assert!(context.len() > question.len(), "{}", prompt.id);
        assert!(question.starts_with("\nQuestion:") || question.starts_with("\nKey: \""));
    }
}

#[test]
fn lines_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompts.jsonl");
    std::fs::write(&path, "\n{\"task\": 3}\n").unwrap();
    let error = format!("{:#}", Prompts::load(Some(&path)).unwrap_err());
    assert!(error.contains("prompts.jsonl, line 2"), "{error}");
    let line = r#"{"task": "t", "length": 3, "prompt": "a", "answer": "b"}"#;
    std::fs::write(&path, format!("\n{line}\n")).unwrap();
    let prompts = Prompts::load(Some(&path)).unwrap();
    assert_eq!((prompts.list[0].id.as_str(), prompts.source.as_str()), ("line 2", "prompts.jsonl"));
}

/// A file of prompts with these fields beside task and length.
fn file(folder: &Path, fields: &[&str]) -> std::path::PathBuf {
    let path = folder.join("prompts.jsonl");
    let line = |fields: &&str| format!("{{\"task\": \"t\", \"length\": 3, {fields}}}\n");
    std::fs::write(&path, fields.iter().map(line).collect::<String>()).unwrap();
    path
}

#[test]
fn a_file_says_where_questions_begin() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(
        folder.path(),
        &[
            r#""context": "A dog. ", "question": "Who?", "answer": "b""#,
            r#""prompt": "A dog. Who? Who?", "question": "Who?", "answer": "b""#,
            r#""prompt": "A dog.\nQuestion: who?", "answer": "b""#,
            r#""prompt": "Who is a dog?", "answer": "b""#,
            r#""prompt": "\nQuestion: who?", "answer": "b""#,
        ],
    );
    let prompts = Prompts::load(Some(&path)).unwrap().list;
    assert_eq!(prompts[0].prompt, "A dog. Who?");
    assert_eq!(prompts[0].split(), Some(("A dog. ", "Who?")));
    assert_eq!(prompts[1].split(), Some(("A dog. Who? ", "Who?")));
    assert_eq!(prompts[2].split(), Some(("A dog.", "\nQuestion: who?")));
    // With neither a field nor a mark, and with nothing before the mark.
    assert_eq!([&prompts[3], &prompts[4]].map(Prompt::split), [None, None]);
}

#[test]
fn lines_that_are_no_prompts_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let good = r#""context": "a", "question": "b", "answer": "c""#;
    for (fields, part) in [
        (r#""prompt": "a", "question": "b", "answer": "c""#, "does not end with its `question`"),
        (r#""context": "a", "answer": "c""#, "expected `context` and `question`"),
        (r#""question": "a", "answer": "c""#, "expected `context` and `question`"),
        (r#""prompt": "ab", "context": "a", "question": "b", "answer": "c""#, "expected `context`"),
        (r#""context": "", "question": "b", "answer": "c""#, "`context` is \"\", expected more"),
        (r#""context": "a", "question": "  ", "answer": "c""#, "`question` is \"  \", expected"),
        (r#""prompt": "a  ", "question": "  ", "answer": "c""#, "`question` is \"  \", expected"),
        (r#""prompt": "\n", "answer": "c""#, "`prompt` is \"\\n\", expected more"),
        (r#""prompt": "a", "answer": " ""#, "`answer` is \" \", expected more"),
        (r#""context": "a", "questoin": "b", "answer": "c""#, "unknown field `questoin`"),
        (r#""context": "a", "questoin": "b", "answer": "c""#, "`context`, `question`, `answer`"),
        (r#""prompt": "a""#, "missing field `answer`"),
        (
            r#""prompt": "a", "question": "a", "answer": "c""#,
            "the whole `prompt`, expected a context",
        ),
        (r#""prompt": "a", "answer": "c", "depth": 7.5"#, "`depth` is 7.5, expected 0 to 1"),
    ] {
        let path = file(folder.path(), &[good, fields]);
        let error = format!("{:#}", Prompts::load(Some(&path)).unwrap_err());
        assert!(error.contains("prompts.jsonl, line 2: ") && error.contains(part), "{error}");
    }
}

#[test]
fn notes_of_a_prompt_s_maker_may_stand_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let fields = r#""prompt": "a", "answer": "b", "prompt_tokens": 3, "hops": null"#;
    assert_eq!(Prompts::load(Some(&file(folder.path(), &[fields]))).unwrap().list.len(), 1);
}

#[test]
fn prompts_without_a_depth_say_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), &[r#""prompt": "a", "answer": "b""#]);
    let wanted = Wanted { file: Some(&path), with_depth: true, ..Wanted::default() };
    let error = Prompts::read(&wanted).unwrap_err().to_string();
    assert!(error.contains("give each prompt a `depth` from 0 to 1"), "{error}");
    assert!(error.contains("or run `quality`"), "{error}");
    let error = Prompts::read(&Wanted { lengths: &[9], with_depth: false, ..wanted });
    assert!(!error.unwrap_err().to_string().contains("depth"));
}

#[test]
fn modes_that_cannot_be_had_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let marked = r#""context": "a", "question": "b", "answer": "c""#;
    let path = file(folder.path(), &[marked, r#""prompt": "a b", "answer": "c""#]);
    let read = |mode| Prompts::read(&Wanted { file: Some(&path), mode, ..Wanted::default() });
    for mode in [Mode::QuestionAgnostic, Mode::Both] {
        let error = format!("{:#}", read(Some(mode)).unwrap_err());
        assert!(error.contains("prompts.jsonl, line 2: "), "{error}");
        assert!(error.contains("`context` and `question`") && error.contains("question-aware"));
    }
    for mode in [None, Some(Mode::QuestionAware)] {
        assert_eq!(read(mode).unwrap().list.len(), 2);
    }
    // Those that are left out may lack a question.
    let wanted = Wanted { file: Some(&path), limit: Some(1), ..Wanted::default() };
    assert_eq!(Prompts::read(&wanted).unwrap().list.len(), 1);
}

#[test]
fn a_limit_is_exact_and_fair() {
    // As in files: by length, then by task, with more of one task.
    let tasks = [("needle", 11), ("key", 8), ("line", 8), ("trace", 8), ("kv", 8)];
    let mut list = Vec::new();
    for length in [512, 1024, 2048] {
        for (task, count) in tasks {
            list.extend((0..count).map(|id| prompt(task, length, id)));
        }
    }
    assert_eq!(list.len(), 129);
    for limit in [1, 2, 5, 7, 15, 16, 65, 100, 128, 129, 500] {
        let mut prompts = Prompts { source: EMBEDDED.into(), list: list.clone() };
        prompts.limit(limit);
        assert_eq!(prompts.list.len(), limit.min(129));
        if limit >= 120 {
            continue;
        }
        let even = |count: &dyn Fn(usize) -> usize, of: usize| {
            let counts: Vec<usize> = (0..of).map(count).collect();
            let (low, high) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(high - low <= 1, "limit {limit}: {counts:?}");
        };
        let of =
            |wanted: &dyn Fn(&Prompt) -> bool| prompts.list.iter().filter(|p| wanted(p)).count();
        even(&|task| of(&|p| p.task == tasks[task].0), tasks.len());
        even(&|length| of(&|p| p.length == 512 << length), 3);
    }
    let mut prompts = Prompts { source: EMBEDDED.into(), list: list[..11].to_vec() };
    prompts.limit(2);
    assert_eq!(prompts.list.iter().map(|p| p.id.as_str()).collect::<Vec<_>>(), ["2", "8"]);
}

#[test]
fn prompts_that_are_too_long_are_left_out_by_name() {
    let device = kv_core::select_device("cpu".parse().unwrap()).unwrap();
    let model = Model::load(EMBEDDED_FOR, &device, None).unwrap();
    let mut long = prompt("t", 1, 7);
    long.prompt = "many words ".repeat(model.config().max_positions);
    let mut list = vec![prompt("t", 1, 3), long.clone()];
    let mut prompts = Prompts { source: "p.jsonl".into(), list: list.clone() };
    let note = prompts.fit(&model).unwrap().unwrap();
    assert!(note.starts_with("1 of 2 prompts of p.jsonl") && note.ends_with(": 7"), "{note}");
    assert_eq!(prompts.list[0].id, "3");
    assert_eq!(prompts.fit(&model).unwrap(), None);
    list[0] = long;
    let error = Prompts { source: "p.jsonl".into(), list }.fit(&model).unwrap_err().to_string();
    assert!(error.contains("none is left: 7, 7"), "{error}");
}
