//! The report of `evaluate` in a real browser: what its scripts make of the page.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{program, stderr};

/// Programs that open the page, whichever is there.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
const POLICIES: &str = r#"["snapkv", "streaming-llm", "cis", "snapkv", "uniform",
    {"policy": "knorm", "rerotate": true}]"#;

/// A browser's name. Without one, the test is skipped, or fails where CI runs it.
fn browser() -> Option<&'static str> {
    let starts = |name: &&str| {
        let mut command = Command::new(name);
        let quiet = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        quiet.status().is_ok_and(|status| status.success())
    };
    let found = BROWSERS.into_iter().find(starts);
    if found.is_none() {
        let why = format!("no browser: none of {}", BROWSERS.join(", "));
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
        kv_testing::skip("the_report_works_in_a_browser", &why);
    }
    found
}

/// Questions of needles, which the embedded model finds. The texts try to end their element.
fn questions(path: &Path, count: usize, sentence: &str) {
    let line = |index: usize| {
        let [before, after] = [3 + 9 * index, 9].map(|count| sentence.repeat(count));
        let number = 21_963 + 7_411 * index;
        let context = format!(
            "{before}\nThe secret number of the old door is {number}.\n{after}</script><!--"
        );
        let question = "\nQuestion: What is the secret number of the old door?\nAnswer: ";
        // The first question of a file is a subset of its own.
        let subset = if index == 0 { "first" } else { "rest" };
        let line: Value = json!({"id": format!("<b>{index}</b>"), "context": context,
            "subset": subset,
            "question": question, "answers": [number.to_string()], "grader": "contains",
            "max_new_tokens": 5});
        line.to_string() + "\n"
    };
    std::fs::write(path, (0..count).map(line).collect::<String>()).unwrap();
}

/// The page behind its scripts, in the view that a hash names.
fn opened(browser: &str, report: &Path, hash: &str) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg("--dump-dom")
        .arg(format!("file://{}{hash}", report.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let page = String::from_utf8(output.stdout).unwrap();
    let root = page.split_once("<head>").unwrap().0;
    assert!(root.contains("data-ready=\"true\"") && !root.contains("data-error"), "{root}");
    page
}

/// The texts of the cells of a table's rows, behind its head.
fn rows(page: &str, class: &str) -> Vec<Vec<String>> {
    let table = page.split_once(&format!("<table class=\"{class}\">")).unwrap().1;
    let table = table.split_once("</table>").unwrap().0.split_once("</thead>").unwrap().1;
    let cells = |row: &str| {
        let row = row.replace("<th", "<td");
        row.split("<td").skip(1).map(|cell| text(&format!("<td{cell}"))).collect()
    };
    table.split("<tr").skip(1).map(cells).collect()
}

/// The text between tags.
fn text(html: &str) -> String {
    let parts = html.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text));
    parts.collect::<String>().trim().into()
}

#[test]
fn the_report_works_in_a_browser() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [report, answers] = ["report.html", "a.jsonl"].map(|name| folder.path().join(name));
    let tasks = [
        ("needles", 3, "The sea was calm that day, and the old boat lay upon the sand. "),
        ("others", 2, "There was nothing more to be done before the fog came. "),
    ];
    let files: Vec<String> = tasks
        .iter()
        .map(|(name, count, sentence)| {
            let path = folder.path().join(format!("{name}.jsonl"));
            questions(&path, *count, sentence);
            path.display().to_string()
        })
        .collect();
    let output = program()
        .args(["evaluate", "--device", "cpu", "--budget", "0.5,0.25", "--task", &files.join(",")])
        .args(["--policy", POLICIES, "--report"])
        .arg(&report)
        .arg("--answers")
        .arg(&answers)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let page = std::fs::read_to_string(&report).unwrap();
    // Nothing is loaded from elsewhere.
    assert!(!page.contains("://") && !page.contains(" src="));

    // Without a filter, scripts come to the numbers that the page has without them.
    let all = rows(&page, "board");
    assert_eq!(all.len(), 1 + 5 * 2);
    assert_eq!(all[0][..4], ["–", "full", "all tokens", "–"]);
    assert!(all.iter().any(|row| row[4].contains("± ")), "{all:?}");
    assert_eq!(rows(&opened(browser, &report, ""), "board"), all);

    // Ranks are those among the rows that are shown.
    let page = opened(browser, &report, "#family=drop&budget=0.25&task=needles+rest");
    let drop = rows(&page, "board");
    let ranks: Vec<&str> = drop.iter().map(|row| row[0].as_str()).collect();
    assert_eq!((drop.len(), ranks[0], ranks[1]), (1 + 3, "–", "1"), "{drop:?}");
    assert!(drop[1..].iter().all(|row| row[2] == "drop" && row[3] == "25 %" && row[8] == "–"));
    // The average of one task is its mean.
    let alone = |row: &Vec<String>| row[4].starts_with(&row[9]);
    assert!(drop.iter().all(alone), "{drop:?}");
    let sorted = rows(&opened(browser, &report, "#sort=-5"), "board");
    let bytes = |name: &str| sorted.iter().position(|row| row[1] == name && row[3] != "25 %");
    assert!(bytes("full") < bytes("snapkv") && sorted.last().unwrap()[3] == "25 %", "{sorted:?}");

    // A question's page has the outputs of all policies, each with its strip.
    let list = rows(&opened(browser, &report, "#find=door"), "list");
    assert_eq!(list.len(), 5);
    assert_eq!(list[0][..2], ["&lt;b&gt;0&lt;/b&gt;", "needles first"]);
    // A word opens no question, and links go through the questions that the view shows.
    assert_eq!(rows(&opened(browser, &report, "#question=length"), "list").len(), 5);
    let page = opened(browser, &report, "#task=needles+rest");
    let link = "href=\"#task=needles+rest&amp;question=";
    let number = |own: &str| own.split_once('"').unwrap().0.to_string();
    let listed: Vec<String> = page.split(link).skip(1).map(number).collect();
    let [first, second] = &listed[..] else { panic!("{listed:?}") };
    for (own, other, text, none) in
        [(first, second, "next →", "← before"), (second, first, "← before", "next →")]
    {
        let page = opened(browser, &report, &format!("#task=needles+rest&question={own}"));
        assert!(page.contains(&format!("{link}{other}\">{text}")));
        // The script has the text too.
        assert!(!page.contains(&format!("\">{none}")));
    }
    let page = opened(browser, &report, "#question=1");
    let shown = rows(&page, "answers");
    assert_eq!(shown.len(), 1 + 5 * 2);
    assert!(shown.iter().all(|row| row[3].len() >= 5), "{shown:?}");
    assert!(page.contains("&lt;/script&gt;&lt;!--") && page.contains("characters left out"));
    let strips: Vec<&str> =
        page.split("data-kept=\"").skip(1).map(|strip| strip.split_once('"').unwrap().0).collect();
    // A policy that numbers its tokens anew has none.
    assert_eq!(strips.len(), 1 + 4 * 2);
    assert!(strips.iter().all(|strip| strip.len() == 96));
    let whole = strips.iter().filter(|strip| strip.chars().all(|digit| digit == 'f'));
    // The full cache, and CIS at both budgets.
    assert_eq!(whole.count(), 3);
    let recent = strips.iter().filter(|strip| strip.contains("00000") && strip.ends_with("fff"));
    assert!(recent.count() >= 2, "{strips:?}");
}
