//! Questions from rows: templates, examples, choices and cutting.

use std::fs;

use kv_graders::{Cut, Grader};
use kv_tasks::{Question, QuestionOptions, Task};

use crate::words::Words;

const TASK: &str = r#"
name = "capitals"
family = "mine"
about = "names capitals"
max_new_tokens = 8
grader = "exact"
cut = "trimmed"
chat = true
system = "Be brief."
stop = ["\n"]

[data]
files = ["capitals.jsonl"]

[template]
context = "{{ text }}\n"
question = "Capital of {{ row['the land'] }}?"
answer_prefix = " It is"
id = "{{ key }}"
subset = "{{ continent }}"
where = "continent != 'Asia'"

[answer]
references = "names"
classes = "classes"
wrong = "[other]"

[few_shot]
count = 1
template = "{{ text }} -> {{ names[0] }}\n"
examples = [{ text = "a", names = ["A"] }, { text = "b", names = ["B"] }]
"#;

const ROWS: &str = concat!(
    r#"{"key":"x1","text":"Long ago.","the land":"France","continent":"Europe","#,
    r#""names":["Paris"],"classes":null,"other":3}"#,
    "\n\n",
    r#"{"key":"x2","text":"t","the land":"Japan","continent":"Asia","#,
    r#""names":["Tokyo"],"classes":null,"other":3}"#,
    "\r\n",
    r#"{"key":"x3","text":"t","the land":"Peru","continent":"America","#,
    r#""names":["Lima","Ciudad de los Reyes"],"classes":["Lima","Cusco"],"other":4.5}"#,
);

#[test]
fn templates_make_questions() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("capitals.jsonl"), ROWS).expect("a file");
    let task = Task::from_toml(TASK).expect("a task");
    assert_eq!((task.grader, task.cut, task.chat), (Grader::Exact, Cut::Trimmed, true));
    assert_eq!(task.system.as_deref(), Some("Be brief."));
    assert_eq!(task.stop, ["\n"]);
    let options =
        QuestionOptions { folder: Some(folder.path().into()), ..QuestionOptions::default() };
    let questions = task.questions(&options, &Words::default()).expect("questions");
    assert_eq!(questions.len(), 2);
    assert_eq!(questions[0].context, "a -> A\nLong ago.\n");
    assert_eq!(questions[0].question, "Capital of France?");
    assert_eq!(questions[0].answer_prefix, " It is");
    assert_eq!((questions[0].id.as_str(), questions[0].subset.as_str()), ("x1", "Europe"));
    assert_eq!(questions[0].length, None);
    assert!(questions[0].answer.classes.is_empty());
    assert_eq!(questions[0].answer.wrong, ["3"]);
    assert_eq!(questions[1].answer.references, ["Lima", "Ciudad de los Reyes"]);
    assert_eq!(questions[1].answer.classes, ["Lima", "Cusco"]);
    assert_eq!(questions[1].answer.wrong, ["4.5"]);

    let limited = QuestionOptions { limit: Some(1), few_shot: Some(2), ..options.clone() };
    let questions = task.questions(&limited, &Words::default()).expect("questions");
    assert_eq!(questions.len(), 1);
    assert_eq!(questions[0].context, "a -> A\nb -> B\nLong ago.\n");
    let none = QuestionOptions { few_shot: Some(0), ..options };
    let questions = task.questions(&none, &Words::default()).expect("questions");
    assert_eq!(questions[0].context, "Long ago.\n");
}

#[test]
fn a_folder_of_several_tasks_mixes_none_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let options =
        QuestionOptions { folder: Some(folder.path().into()), ..QuestionOptions::default() };
    let asked = |name: &str| {
        let questions = Task::named(name).expect("a task").questions(&options, &Words::default());
        questions.map(|questions| questions[0].question.clone())
    };
    let write = |file: &str, text: &str| {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        let row = format!("{{\"problem\": \"{text}\", \"answer\": \"4\"}}");
        fs::write(path, row).expect("a file");
    };
    // The pattern of AIME's files on the hub.
    write("data/test.jsonl", "of one data set");
    assert!(asked("aime25").expect("questions").starts_with("of one data set"));
    write("math-500/test.jsonl", "of MATH");
    assert!(asked("math-500").expect("questions").starts_with("of MATH"));
    let error = asked("aime25").expect_err("no file").to_string();
    assert!(error.contains("no file for the task \"aime25\""), "{error}");
    write("aime25/data/test.jsonl", "of AIME");
    assert!(asked("aime25").expect("questions").starts_with("of AIME"));
    write("minerva_math/test.jsonl", "of Minerva");
    assert!(asked("minerva").expect("questions").starts_with("of Minerva"));
}

#[test]
fn examples_are_drawn_by_the_seed_and_never_the_question() {
    let folder = tempfile::tempdir().expect("a folder");
    let row = |n: usize| format!("{{\"question\":\"q{n}\",\"answer\":\"w\\n#### {n}\"}}\n");
    let rows: String = (0..12).map(row).collect();
    fs::write(folder.path().join("test.jsonl"), &rows).expect("a file");
    fs::write(folder.path().join("train.jsonl"), &rows).expect("a file");
    let task = Task::named("gsm8k").expect("a task");
    let contexts = |seed| {
        let folder = Some(folder.path().into());
        let options = QuestionOptions { folder, seed, ..QuestionOptions::default() };
        task.questions(&options, &Words::default()).expect("questions")
    };
    let questions = contexts(1);
    assert_eq!(questions, contexts(1));
    assert_ne!(questions, contexts(2));
    for question in &questions {
        assert_eq!(question.context.matches("Question: ").count(), 5);
        let own = question.question.replace("Answer:", "");
        assert!(!question.context.contains(&own), "{own:?} is among its own examples");
    }
    assert_eq!(questions[3].answer.references, ["3"]);
}

#[test]
fn choices_are_shuffled_with_their_letter() {
    let folder = tempfile::tempdir().expect("a folder");
    let row = r#"{"right":"r","wrong":["u","v","w"]}"#;
    fs::write(folder.path().join("a.jsonl"), [row; 40].join("\n")).expect("a file");
    let toml = r#"
        name = "c"
        family = "c"
        about = "c"
        max_new_tokens = 1
        grader = "choice"
        [data]
        files = ["a.jsonl"]
        [choices]
        texts = "[right] + wrong"
        correct = 0
        [template]
        question = "{{ choices | join }}"
        [answer]
        references = "letter"
        classes = "choices"
    "#;
    let task = Task::from_toml(toml).expect("a task");
    let options =
        QuestionOptions { folder: Some(folder.path().into()), ..QuestionOptions::default() };
    let questions = task.questions(&options, &Words::default()).expect("questions");
    let mut letters = [0; 4];
    for question in &questions {
        let place = question.question.find('r').expect("the right one");
        letters[place] += 1;
        let letter = char::from(b'A' + u8::try_from(place).expect("few")).to_string();
        assert_eq!(question.answer.references, [letter]);
        assert_eq!(question.answer.classes.concat(), question.question);
    }
    assert!(letters.iter().all(|&count| count > 0), "every letter occurs: {letters:?}");
}

fn cut(question: &str, context: &str, length: usize) -> Question {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("q.json");
    let row = serde_json::json!([{"context": context, "question": question, "answers": "x"}]);
    fs::write(&path, row.to_string()).expect("a file");
    let task = Task::of_file(&path).expect("a task");
    let options = QuestionOptions { length: Some(length), ..QuestionOptions::default() };
    task.questions(&options, &Words::default()).expect("questions").remove(0)
}

#[test]
fn long_prompts_lose_their_middle() {
    let context = "1 2 3 4 5 6 7 8 9 10 ";
    assert_eq!(cut("a b", context, 12).context, context);
    // Of twelve tokens the first three and the last three stay, as LongBench has it.
    assert_eq!(cut("a b", context, 6).context, "1 2 3 10 ");
    assert_eq!(cut("a b", context, 7).context, "1 2 3 10 ");
    assert_eq!(cut("a b", context, 6).question, "a b");
    // A question of more than half of the length is kept whole.
    assert_eq!(cut("a b c d", context, 6).context, "1 10 ");
    assert_eq!(cut("a b c d", context, 4).context, "");
}
