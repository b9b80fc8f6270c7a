//! The built-in tasks on tiny files with the columns of their data sets.

use std::fs;

use kv_tasks::{Question, QuestionOptions, Task};
use serde_json::{Value, json};

use crate::words::Words;

/// The questions of a task from one file.
fn questions(name: &str, file: &str, contents: &str) -> (Task, Vec<Question>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, contents).expect("a file");
    let task = Task::named(name).expect("a task");
    let folder = Some(folder.path().into());
    let options = QuestionOptions { folder, few_shot: Some(0), ..QuestionOptions::default() };
    let questions = task.questions(&options, &Words::default());
    (task, questions.unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// The prompt of the first question, after a right and a wrong output were graded.
fn prompt(name: &str, file: &str, contents: &str, right: &str, wrong: &str) -> String {
    let (task, questions) = questions(name, file, contents);
    let question = &questions[0];
    let grade = |output: &str| {
        let grade = task.grader.grade(task.cut.apply(output), &question.answer);
        grade.unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    // LongBench's ROUGE has a small number in its denominator.
    assert!(grade(right) > 1.0 - 1e-6, "{name}: {right:?} for {:?}", question.answer);
    assert_eq!(grade(wrong), 0.0, "{name}: {wrong:?} for {:?}", question.answer);
    format!("{}{}{}", question.context, question.question, question.answer_prefix)
}

fn longbench(name: &str, answers: &[&str], classes: Value) -> String {
    let row = json!({"input": "INPUT", "context": "CONTEXT", "answers": answers, "length": 1,
        "dataset": name, "language": "en", "all_classes": classes, "_id": "42"});
    row.to_string()
}

#[test]
fn longbench_asks_as_its_own_code() {
    let row = longbench("narrativeqa", &["a cat", "the cat"], Value::Null);
    let text = prompt("longbench/narrativeqa", "narrativeqa.jsonl", &row, "The cat.", "dog");
    assert_eq!(
        text,
        "You are given a story, which can be either a novel or a movie script, and a question. \
         Answer the question asconcisely as you can, using a single phrase if possible. Do not \
         provide any explanation.\n\nStory: CONTEXT\n\nNow, answer the question based on the \
         story asconcisely as you can, using a single phrase if possible. Do not provide any \
         explanation.\n\nQuestion: INPUT\n\nAnswer:"
    );
    let row = longbench("trec", &["City"], json!(["City", "Date"]));
    let (task, asked) = questions("longbench/trec", "data/trec.jsonl", &row);
    assert!(!task.chat);
    assert_eq!((asked[0].id.as_str(), asked[0].subset.as_str()), ("42", "trec"));
    assert!(asked[0].context.ends_with(" examples of questions.\n\nCONTEXT"));
    assert_eq!(asked[0].question, "\nINPUT");
    let text = prompt("longbench/trec", "trec.jsonl", &row, "\nCity\nType: Date", "Date");
    assert!(text.starts_with("Please determine the type of the question below. Here are some"));
    let row = longbench("passage_count", &["7"], Value::Null);
    let text = prompt("longbench/passage_count", "passage_count.jsonl", &row, "7", "8");
    assert!(text.ends_with("\n\nThe final answer is: "));
    let row = longbench("lcc", &["return x + 1"], Value::Null);
    let text = prompt("longbench/lcc", "lcc.jsonl", &row, "return x + 1\n}", "%");
    assert_eq!(text, "Please complete the code given below. \nCONTEXTNext line of code:\n");
}

#[test]
fn every_set_of_longbench_reads_its_file() {
    let answer = |set: &str| match set {
        "passage_count" => "3",
        "passage_retrieval_en" => "Paragraph 3",
        _ => "word",
    };
    let mut count = [0, 0];
    for name in Task::names() {
        let (set, file, family) = match name.split_once('/') {
            Some(("longbench", set)) => (set, format!("{set}.jsonl"), 0),
            Some(("longbench-e", set)) => (set, format!("{set}_e.jsonl"), 1),
            _ => continue,
        };
        count[family] += 1;
        let answer = answer(set);
        let row = longbench(set, &[answer], json!(["word", "other"]));
        let text = prompt(name, &file, &row, answer, "");
        assert_eq!(text.matches("CONTEXT").count(), 1, "{name}");
        let summaries = ["gov_report", "multi_news", "passage_count", "lcc"];
        assert_eq!(text.contains("INPUT"), !summaries.contains(&set), "{name}");
    }
    assert_eq!(count, [16, 13]);
}

#[test]
fn longbench_v2_asks_for_a_letter() {
    let row = json!([{"_id": "x", "domain": "Law", "sub_domain": "s", "difficulty": "hard",
        "length": "short", "question": " Q? ", "choice_A": "one", "choice_B": "two",
        "choice_C": "three", "choice_D": "four ", "answer": "C", "context": " TEXT\n"}]);
    let row = row.to_string();
    let right = "The correct answer is (C).";
    let text = prompt("longbench-v2", "data.json", &row, right, "The correct answer is (A)");
    assert_eq!(
        text,
        "Please read the following text and answer the question below.\n\n<text>\nTEXT\n</text>\n\n\
         What is the correct answer to this question: Q?\nChoices:\n(A) one\n(B) two\n(C) three\n\
         (D) four\n\nFormat your response as follows: \"The correct answer is (insert answer \
         here)\"."
    );
}

#[test]
fn mathematics_is_asked_and_graded() {
    let boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}.";
    let row = json!({"question": "6*7?", "answer": "Six times\n#### 1,042"}).to_string();
    let text = prompt("gsm8k", "test.jsonl", &row, "It is 1042.", "41");
    assert_eq!(text, "Question: 6*7?\nAnswer:");
    let text = prompt("gsm8k-boxed", "test.jsonl", &row, "so \\boxed{1042}", "\\boxed{41}");
    assert_eq!(text, format!("6*7?{boxed}"));
    let check = |name: &str, file: &str, row: Value, right: &str| {
        let right = format!("so \\boxed{{{right}}}");
        let text = prompt(name, file, &row.to_string(), &right, "\\boxed{77}");
        assert_eq!(text, format!("Find $x$.{boxed}"), "{name}");
    };
    let row = json!({"problem": "Find $x$.", "solution": "s", "answer": "\\frac{1}{2}",
        "subject": "Algebra", "level": 2, "unique_id": "test/a/1.json"});
    check("math-500", "test.jsonl", row, "0.5");
    let row = json!({"id": 60, "problem": "Find $x$.", "solution": "s", "answer": "204"});
    check("aime24", "test.jsonl", row, "204");
    check("aime25", "test.jsonl", json!({"problem": "Find $x$.", "answer": 70}), "70");
    check("amc23", "test.jsonl", json!({"question": "Find $x$.", "answer": 27.0}), "27");
    let row = json!({"problem": "Find $x$.", "solution": "s=\\boxed{1.6} \\mathrm{~cm}"});
    check("minerva", "minerva_math/test.jsonl", row, "1.6");
    check("minerva", "test.jsonl", json!({"question": "Find $x$.", "answer": "1.6"}), "1.6");
    let row = json!({"id": 1606, "subfield": "Algebra", "question": "Find $x$.",
        "final_answer": ["$2$"]});
    check("olympiadbench", "olympiadbench/test.jsonl", row, "2");
}

#[test]
fn gpqa_shows_its_choices_in_a_random_order() {
    let csv = "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,\
               Incorrect Answer 3,Subdomain\nrec1,Why?,right ,w1 [title]more,\"w2,\",w3,Optics\n";
    let (task, asked) = questions("gpqa-diamond", "gpqa_diamond.csv", csv);
    let question = &asked[0];
    assert!(question.question.starts_with("What is the correct answer to this question:Why?\n"));
    assert!(question.question.contains("w1. more\n"));
    assert!(question.question.ends_with("\nLet's think step by step: "));
    let reference = &question.answer.references[0];
    assert!(question.question.contains(&format!("{reference} right\n")), "{reference}");
    let grade = |output: &str| task.grader.grade(output, &question.answer).expect("a grade");
    assert_eq!(grade(&format!("So the answer is {reference}.")), 1.0);
    assert_eq!(grade("The answer is unknown"), 0.0);
    assert_eq!((question.id.as_str(), question.subset.as_str()), ("rec1", "Optics"));
}

#[test]
fn coqa_reads_both_of_its_forms() {
    let hub = json!({"id": "a", "source": "wiki", "story": "Ann has a dog.",
        "questions": {"input_text": ["Who?", "What?"], "turn_id": [1, 2]},
        "answers": {"input_text": ["Ann", "a dog"], "answer_start": [0, 8]},
        "additional_answers": {"0": {"input_text": ["Ann", "A Dog"]},
            "1": {"input_text": ["Ann", "one dog"]}}});
    let turns = |texts: [&str; 2]| json!([{"input_text": texts[0]}, {"input_text": texts[1]}]);
    let own = json!({"version": "1.0", "data": [{"id": "a", "source": "wiki",
        "story": "Ann has a dog.", "questions": turns(["Who?", "What?"]),
        "answers": turns(["Ann", "a dog"]),
        "additional_answers": {"0": turns(["Ann", "A Dog"]), "1": turns(["Ann", "one dog"])}}]});
    let (_, asked) = questions("coqa", "coqa-dev-v1.0.json", &own.to_string());
    assert_eq!(asked, questions("coqa", "x.jsonl", &hub.to_string()).1);
    assert_eq!(asked[0].context, "Ann has a dog.\n\n");
    assert_eq!(asked[0].question, "Q: Who?\n\nA: Ann\n\nQ: What?\n\nA:");
    assert_eq!(asked[0].answer.references, ["a dog", "one dog"]);
    let alone = json!({"story": "s", "questions": {"input_text": ["q"]},
        "answers": {"input_text": ["yes"]}, "additional_answers": null});
    prompt("coqa", "x.jsonl", &alone.to_string(), " Yes\nno", "no");
}

#[test]
fn truthfulqa_has_right_and_wrong_answers() {
    let row = json!({"category": "Myths", "question": "Is it? ", "best_answer": "It is not",
        "correct_answers": ["It is not ", ""], "incorrect_answers": ["Green cheese."]});
    let (_, asked) = questions("truthfulqa", "truthfulqa.jsonl", &row.to_string());
    assert_eq!(asked[0].answer.references, ["It is not.", "I have no comment."]);
    assert_eq!(asked[0].answer.wrong, ["Green cheese."]);
    let row = row.to_string();
    let text = prompt("truthfulqa", "truthfulqa.jsonl", &row, "It is not.", "Green cheese.");
    assert!(text.starts_with("Q: What is human life expectancy in the United States?\nA: Human"));
    assert!(text.ends_with("held in Barcelona, Spain.\n\nQ: Is it?"));
}

#[test]
fn articles_are_summarised_as_in_helm() {
    let row = json!({"id": "7", "document": "DOCUMENT", "summary": "A boat lay on the sand."});
    let text = prompt("xsum", "xsum.jsonl", &row.to_string(), "A boat lay on the sand.", "No.");
    assert_eq!(text, "###\nArticle: DOCUMENT\n\nSummarize the above article in 1 sentence.\n");
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("xsum.jsonl"), row.to_string()).expect("a file");
    let example = json!({"id": "8", "document": "OTHER", "summary": "Other."}).to_string();
    fs::write(folder.path().join("validation.jsonl"), example).expect("a file");
    let options = QuestionOptions {
        folder: Some(folder.path().into()),
        few_shot: Some(1),
        ..QuestionOptions::default()
    };
    let asked = Task::named("xsum").expect("a task").questions(&options, &Words::default());
    assert_eq!(
        asked.expect("questions")[0].context,
        "###\nArticle: OTHER\n\nSummarize the above article in 1 sentence.\nOther.\n\n###\n\
         Article: DOCUMENT"
    );
    let row = json!({"id": "7", "article": "ARTICLE", "highlights": "The sea was calm ."});
    let text = prompt(
        "cnn-dailymail",
        "cnn-dailymail.jsonl",
        &row.to_string(),
        "The sea was calm.",
        "Yes.",
    );
    assert!(text.ends_with("ARTICLE\n\nSummarize the above article in 3 sentences.\n"));
}

#[test]
fn choices_are_shown_and_a_letter_is_asked_for() {
    let choices = json!({"text": ["sun", "ice", "wood", "sand"], "label": ["A", "B", "C", "D"]});
    let row = json!({"id": "7", "question_stem": "What melts", "choices": choices,
        "answerKey": "B"});
    let text = prompt("openbookqa", "openbookqa.jsonl", &row.to_string(), " B. ice", " A");
    assert_eq!(text, "Question: What melts\nA. sun\nB. ice\nC. wood\nD. sand\nAnswer:");
    let choices = json!([{"text": "sun", "label": "A"}, {"text": "ice", "label": "B"}]);
    let row = json!({"id": "7", "question": {"stem": "What melts", "choices": choices},
        "answerKey": "B"});
    let text = prompt("openbookqa", "test.jsonl", &row.to_string(), "B", "A");
    assert_eq!(text, "Question: What melts\nA. sun\nB. ice\nAnswer:");
    let row = json!({"Problem": "two and two", "options": "a ) 3 , b ) 4", "correct": "b"});
    let text = prompt("mathqa", "mathqa.jsonl", &row.to_string(), " B", " A");
    assert_eq!(text, "Question: two and two\nA. 3\nB. 4\nAnswer:");
}

#[test]
fn infinitebench_asks_as_its_own_code() {
    let row = |input: &str, answer: Value, options: Value| {
        json!({"id": 0, "context": "TEXT", "input": input, "answer": answer, "options": options})
            .to_string()
    };
    let check = |set: &str, row: &str, right: &str| {
        let name = format!("infinitebench/{set}");
        let file = format!("{set}.jsonl");
        let text = prompt(&name, &file, row, right, "nothing");
        assert_eq!(text.matches("TEXT").count(), 1, "{name}");
        text
    };
    let none = json!([]);
    let text = check("passkey", &row("What?", json!("71432"), none.clone()), " 71432.");
    assert!(text.ends_with("\n\nTEXT\n\nWhat?\n\nThe pass key is"));
    check("number_string", &row("What?", json!(["9"]), none.clone()), "9");
    check("kv_retrieval", &row("Key: \"a\"", json!("c14cb8ba"), none.clone()), "\"c14cb8ba\"");
    check("longbook_sum_eng", &row("", json!("a b"), none.clone()), "a b");
    check("longbook_qa_eng", &row("Who?", json!(["Bo", "Boo"]), none.clone()), "Boo");
    check("longdialogue_qa_eng", &row("", json!(["ACE", "ACE R"]), none.clone()), "Ace");
    let options = json!(["p", "q", "r", "s"]);
    let text = check("longbook_choice_eng", &row("Who?", json!(["r"]), options.clone()), "C. r");
    assert!(text.contains("Question: Who?\nA. p\nB. q\nC. r\nD. s\n"), "{text}");
    check("longbook_choice_eng", &row("Who?", json!("r"), options.clone()), "C");
    check("code_debug", &row("", json!(["r", "C"]), options), "C");
    let input = "Please give me the exact number of the return value of func_13(-4). Be concise.";
    let text = check("code_run", &row(input, json!(-7), none.clone()), "-7");
    assert!(text.starts_with("There is a function called func_13 in the following Python code."));
    assert!(text.ends_with("the exact value of func_13(-4). The value of func_13(-4) is"));
    let input = "You should answer with only one number. The second largest number of the list is:";
    let text = check("math_find", &row(input, json!(88), none), "88");
    assert!(text.starts_with("What is the second largest number in the following list?\n\nTEXT"));
}

#[test]
fn loogle_reads_pairs_of_either_form() {
    let pairs = json!([{"Q": "Who?", "A": "Ann", "S": ["s"]}, {"Q": "It's?", "A": "a \"b\""}]);
    let python = "[{'Q': 'Who?', 'A': 'Ann', 'S': ['s']}, {'Q': \"It's?\", 'A': 'a \"b\"'}]";
    let row = |pairs: Value| json!({"input": "TEXT", "title": "t", "qa_pairs": pairs}).to_string();
    let (_, asked) = questions("loogle/longdep_qa", "longdep_qa.jsonl", &row(pairs));
    let text = row(json!(python));
    assert_eq!(asked, questions("loogle/longdep_qa", "longdep_qa.jsonl", &text).1);
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[1].question, "\nQuestion: It's?\nAnswer: ");
    assert_eq!(asked[1].answer.references, ["a \"b\""]);
    prompt("loogle/shortdep_qa", "shortdep_qa.jsonl", &text, "Ann", "Bob");
    let flat = json!({"context": "TEXT", "question": "Who?", "answer": "Ann"}).to_string();
    let flat = prompt("loogle/shortdep_qa", "shortdep_qa.jsonl", &flat, "Ann", "Bob");
    let nested = prompt("loogle/shortdep_qa", "shortdep_qa.jsonl", &text, "Ann", "Bob");
    assert_eq!(flat, nested);
    let masks = "[{'Q': '<mask-0> met <mask-1>.', 'A': {'<mask-0>': 'Ann', '<mask-1>': 'Bo'}}]";
    let text = row(json!(masks));
    let right = "{'<mask-0>': 'Ann', '<mask-1>': 'Bo'}";
    let text = prompt("loogle/shortdep_cloze", "shortdep_cloze.jsonl", &text, right, "{}");
    assert!(text.contains("for example: {'<mask-0>': 'Bob', '<mask-1>'"));
    let row = json!({"input": "TEXT", "qa_pairs": "none", "output": "a sum"}).to_string();
    let file = "longdep_summarization.jsonl";
    let text = prompt("loogle/longdep_summarization", file, &row, "a sum", "x");
    assert!(text.ends_with("TEXT\n Summarization: "));
}

#[test]
fn zeroscrolls_splits_its_input() {
    let input = "Né. Long text.\n\nQuestion:\nWho?\n\nAnswer:\n";
    let start = input.chars().position(|letter| letter == 'Q').expect("a question");
    for (set, output, right) in [
        ("gov_report", "a b", "a b"),
        ("summ_screen_fd", "a b", "a b"),
        ("qmsum", "a b", "a b"),
        ("squality", "a b", "a b"),
        ("qasper", "Ann", "Ann"),
        ("narrative_qa", "Ann", "ann."),
        ("quality", "B", "(B)"),
        ("musique", "Ann", "Ann"),
    ] {
        let row = json!({"id": "i", "pid": "i_0", "input": input, "output": output,
            "query_start_index": start, "query_end_index": 9});
        let (name, file) = (format!("zeroscrolls/{set}"), format!("{set}/validation.jsonl"));
        let text = prompt(&name, &file, &row.to_string(), right, "nothing");
        assert_eq!(text, input);
        let (_, asked) = questions(&name, &file, &row.to_string());
        assert!(asked[0].question.starts_with("Question:"));
    }
}
