//! The formats of files, and users' own files.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kv_graders::{Cut, Grader};
use kv_tasks::{Question, QuestionOptions, Task};
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use zip::write::SimpleFileOptions;

use crate::words::Words;

fn questions(path: &Path) -> Vec<Question> {
    let task = Task::of_file(path).expect("a task");
    task.questions(&QuestionOptions::default(), &Words::default()).expect("questions")
}

fn check(questions: &[Question]) {
    assert_eq!(questions.len(), 2);
    assert_eq!((questions[0].id.as_str(), questions[1].id.as_str()), ("7", "8"));
    assert_eq!(questions[0].question, "Où?");
    assert_eq!(questions[1].question, "who, \"then\"?\nwho?");
    assert_eq!(questions[1].answer.references, ["b"]);
    assert_eq!(questions[1].context, "");
}

/// Writes a table of two rows, as data sets on the hub are written.
pub(crate) fn parquet(path: &Path, compression: Compression) {
    let schema = "message m {
        required int64 id;
        optional binary question (UTF8);
        optional group answers (LIST) { repeated group list { optional binary element (UTF8); } }
    }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = File::create(path).expect("a file");
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    let text = |texts: [&str; 2]| texts.map(ByteArray::from);
    let mut column = group.next_column().expect("a column").expect("a column");
    column.typed::<Int64Type>().write_batch(&[7, 8], None, None).expect("values");
    column.close().expect("closed");
    let mut column = group.next_column().expect("a column").expect("a column");
    let values = text(["Où?", "who, \"then\"?\nwho?"]);
    column.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 1]), None).expect("values");
    column.close().expect("closed");
    let mut column = group.next_column().expect("a column").expect("a column");
    let values = ["a", "c", "b"].map(ByteArray::from);
    let (defined, repeated) = ([3, 3, 3], [0, 1, 0]);
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&values, Some(&defined), Some(&repeated)).expect("values");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
}

#[test]
fn every_format_gives_the_same_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let rows = serde_json::json!([
        {"id": 7, "question": "Où?", "answers": ["a", "c"]},
        {"id": 8, "question": "who, \"then\"?\nwho?", "answers": ["b"]},
    ]);
    let lines = format!("\u{feff}{}\n\n{}\n", rows[0], rows[1]);
    fs::write(at("lines.jsonl"), &lines).expect("a file");
    fs::write(at("array.json"), rows.to_string()).expect("a file");
    fs::write(at("stream.json"), format!("{}\n{}\n", rows[0], rows[1])).expect("a file");
    let columns = serde_json::json!({
        "id": [7, 8], "question": [rows[0]["question"], rows[1]["question"]],
        "answers": [["a", "c"], ["b"]],
    });
    fs::write(at("columns.json"), columns.to_string()).expect("a file");
    let csv = "\u{feff}id,question,answers\n7,Où?,a\n8,\"who, \"\"then\"\"?\nwho?\",b\n";
    fs::write(at("table.csv"), csv).expect("a file");
    parquet(&at("plain.parquet"), Compression::UNCOMPRESSED);
    parquet(&at("snappy.parquet"), Compression::SNAPPY);
    parquet(&at("zstd.parquet"), Compression::ZSTD(ZstdLevel::default()));
    parquet(&at("gzip.parquet"), Compression::GZIP(GzipLevel::default()));
    for entry in fs::read_dir(folder.path()).expect("a folder") {
        check(&questions(&entry.expect("an entry").path()));
    }
    let lists = questions(&at("zstd.parquet"));
    assert_eq!(lists[0].answer.references, ["a", "c"]);
}

/// Writes a table of one row of texts.
fn row_of_texts(path: &Path, columns: &[(&str, &str)]) {
    let fields = columns.iter().map(|(name, _)| format!("required binary {name} (UTF8);"));
    let schema = format!("message m {{ {} }}", fields.collect::<String>());
    let schema = Arc::new(parse_message_type(&schema).expect("a schema"));
    let file = File::create(path).expect("a file");
    let properties = Arc::new(WriterProperties::default());
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    for (_, text) in columns {
        let mut column = group.next_column().expect("a column").expect("a column");
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&[ByteArray::from(*text)], None, None).expect("values");
        column.close().expect("closed");
    }
    group.close().expect("closed");
    writer.close().expect("closed");
}

#[test]
fn questions_are_of_the_test_split_alone() {
    for (name, columns) in [
        ("xsum", &[("id", "SPLIT"), ("document", "D"), ("summary", "S")][..]),
        ("mathqa", &[("Problem", "SPLIT"), ("options", "a ) 1 , b ) 2"), ("correct", "a")]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        for split in ["test", "train", "validation"] {
            let own: Vec<(&str, &str)> = columns
                .iter()
                .map(|&(column, text)| (column, if text == "SPLIT" { split } else { text }))
                .collect();
            let file = format!("{split}-00000-of-00001.parquet");
            row_of_texts(&folder.path().join(file), &own);
        }
        let options =
            QuestionOptions { folder: Some(folder.path().into()), ..QuestionOptions::default() };
        let task = Task::named(name).expect("a task");
        let questions = task.questions(&options, &Words::default()).expect("questions");
        assert_eq!(questions.len(), 1, "{name}");
        assert!(questions[0].id == "test" || questions[0].question.contains("test"), "{name}");
    }
}

#[test]
fn archives_and_keys_hold_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut archive = zip::ZipWriter::new(File::create(folder.path().join("d.zip")).expect("zip"));
    archive.start_file("data/x.jsonl", SimpleFileOptions::default()).expect("a member");
    archive.write_all(br#"{"q":"one","a":1}"#).expect("written");
    archive.finish().expect("finished");
    fs::write(folder.path().join("x.json"), r#"{"version":"1","rows":[{"q":"two","a":2}]}"#)
        .expect("a file");
    let task = |files: &str| {
        let toml = format!(
            "name = 'x'\nfamily = 'x'\nabout = 'x'\nmax_new_tokens = 1\ngrader = 'exact'\n\
             [data]\nfiles = ['{files}']\nmember = 'data/x.jsonl'\nrecords = 'rows'\n\
             [template]\nquestion = '{{{{ q }}}}'\n[answer]\nreferences = 'a'\n"
        );
        let task = Task::from_toml(&toml).expect("a task");
        let folder = Some(folder.path().into());
        let options = QuestionOptions { folder, ..QuestionOptions::default() };
        task.questions(&options, &Words::default()).expect("questions").remove(0)
    };
    assert_eq!(task("*.zip").question, "one");
    assert_eq!(task("*.zip").answer.references, ["1"]);
    assert_eq!(task("x.json").question, "two");
}

#[test]
fn users_files_name_their_grader() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine.jsonl");
    let row = r#"{"context":"c","question":"q","answers":4,"answer_prefix":"p","subset":"s",
        "grader":"number","cut":"first-line","max_new_tokens":9,"classes":["k"],"wrong":["w"]}"#;
    let more = r#"{"question":"q2","answers":[5,"five"]}"#;
    fs::write(&path, format!("{}\n{more}\n", row.replace('\n', " "))).expect("a file");
    let task = Task::of_file(&path).expect("a task");
    assert_eq!(
        (task.name.as_str(), task.grader, task.cut),
        ("mine", Grader::Number, Cut::FirstLine)
    );
    assert_eq!(task.max_new_tokens, 9);
    let questions = questions(&path);
    assert_eq!(questions[0].answer.references, ["4"]);
    assert_eq!(questions[0].answer.classes, ["k"]);
    assert_eq!(questions[0].answer.wrong, ["w"]);
    assert_eq!((questions[0].id.as_str(), questions[0].subset.as_str()), ("1", "s"));
    assert_eq!((questions[1].id.as_str(), questions[1].subset.as_str()), ("2", "mine"));
    assert_eq!(questions[1].answer.references, ["5", "five"]);
}
