//! Prompts with an answer to find, one JSON object a line.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use kv_core::counted;
use kv_models::Model;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// The source of prompts and texts that come without a file.
pub(crate) const EMBEDDED: &str = "embedded";
/// The model that the embedded prompts were made for.
pub(crate) const EMBEDDED_FOR: &str = "needle-1m";

const EMBEDDED_PROMPTS: &str = include_str!("../assets/needle-1m.jsonl");
/// Held-out book text, for perplexity without a text file.
const EMBEDDED_TEXT: &str = include_str!("../assets/books.txt");

/// Prompts, and where they come from.
#[derive(Debug)]
pub(crate) struct Prompts {
    /// The file's name, or [`EMBEDDED`].
    pub(crate) source: String,
    /// The prompts in the file's order.
    pub(crate) list: Vec<Prompt>,
}

/// One prompt.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    /// Its name; its line where the file gives none.
    pub(crate) id: String,
    /// Its line in the file, from 1.
    pub(crate) line: usize,
    /// The kind of task, such as `niah_single`.
    pub(crate) task: String,
    /// Its nominal length in tokens.
    pub(crate) length: usize,
    /// Where the answer lies, from 0 (first) to 1 (last).
    pub(crate) depth: Option<f64>,
    /// The text, context and question together.
    pub(crate) prompt: String,
    /// The byte of the text at which the question begins, where that is known.
    question_at: Option<usize>,
    /// The text that the model should say next.
    pub(crate) answer: String,
}

/// One line of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    id: String,
    task: String,
    length: usize,
    depth: Option<f64>,
    prompt: Option<String>,
    context: Option<String>,
    question: Option<String>,
    answer: String,
    /// Notes of the prompt's author, which nothing reads.
    #[serde(default, rename = "prompt_tokens")]
    _prompt_tokens: IgnoredAny,
    #[serde(default, rename = "hops")]
    _hops: IgnoredAny,
}

/// Text that begins a question, in prompts that do not say where it begins.
const MARKS: [&str; 2] = ["\nQuestion:", "\nKey: \""];

/// When compression happens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// The whole prompt is prefilled, then compressed.
    QuestionAware,
    /// Everything before the question is prefilled and compressed, then the question appended.
    QuestionAgnostic,
    /// Both.
    #[default]
    Both,
}

/// Which prompts a suite asks for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted<'a> {
    /// The file; the embedded prompts without one.
    pub(crate) file: Option<&'a Path>,
    /// Only prompts of these nominal lengths, if any are given.
    pub(crate) lengths: &'a [usize],
    /// Only prompts of these tasks, if any are given.
    pub(crate) tasks: &'a [String],
    /// Only prompts that say where their answer lies.
    pub(crate) with_depth: bool,
    /// At most this number of prompts.
    pub(crate) limit: Option<usize>,
    /// How questions are asked; `None` where no questions are asked.
    pub(crate) mode: Option<Mode>,
}

impl Line {
    /// The prompt that a line describes.
    ///
    /// # Errors
    /// For fields that do not go together, are blank or out of range.
    fn prompt(self, line: usize) -> anyhow::Result<Prompt> {
        let (prompt, question_at) = match (self.prompt, self.context, self.question) {
            (None, Some(context), Some(question)) => {
                check_text("context", &context)?;
                check_text("question", &question)?;
                (context.clone() + &question, Some(context.len()))
            }
            (Some(prompt), None, Some(question)) => {
                check_text("question", &question)?;
                let context = prompt.strip_suffix(&question);
                let context = context.context("`prompt` does not end with its `question`")?.len();
                ensure!(
                    context > 0,
                    "`question` is the whole `prompt`, expected a context before it"
                );
                (prompt, Some(context))
            }
            (Some(prompt), None, None) => {
                let at = MARKS.iter().filter_map(|mark| prompt.rfind(mark)).max();
                (prompt, at)
            }
            _ => bail!("expected `context` and `question`, or `prompt`, which `question` may end"),
        };
        check_text("prompt", &prompt)?;
        check_text("answer", &self.answer)?;
        if let Some(depth) = self.depth {
            ensure!((0.0..=1.0).contains(&depth), "`depth` is {depth}, expected 0 to 1");
        }
        let id = if self.id.is_empty() { format!("line {line}") } else { self.id };
        Ok(Prompt {
            id,
            line,
            task: self.task,
            length: self.length,
            depth: self.depth,
            prompt,
            // Nothing could be compressed before it.
            question_at: question_at.filter(|at| *at > 0),
            answer: self.answer,
        })
    }
}

/// Refuses a field without text.
fn check_text(field: &str, text: &str) -> anyhow::Result<()> {
    ensure!(!text.trim().is_empty(), "`{field}` is {text:?}, expected more than blanks");
    Ok(())
}

impl Prompt {
    /// Context and question, neither empty; `None` where the prompt does not say where its question
    /// begins.
    pub(crate) fn split(&self) -> Option<(&str, &str)> {
        Some(self.prompt.split_at(self.question_at?))
    }
}

impl Prompts {
    /// Reads the prompts that are wanted.
    ///
    /// # Errors
    /// As [`Self::load`]; where none is left, and where a mode cannot be had.
    pub(crate) fn read(wanted: &Wanted<'_>) -> anyhow::Result<Self> {
        let mut prompts = Self::load(wanted.file)?;
        prompts.list.retain(|prompt| {
            (wanted.lengths.is_empty() || wanted.lengths.contains(&prompt.length))
                && (wanted.tasks.is_empty() || wanted.tasks.contains(&prompt.task))
                && (!wanted.with_depth || prompt.depth.is_some())
        });
        let source = &prompts.source;
        let (depth, advice) = match wanted.with_depth {
            true => (
                " that says its `depth`",
                ": give each prompt a `depth` from 0 to 1, where in the context its answer lies, \
                 or run `quality`, which takes prompts without",
            ),
            false => ("", ""),
        };
        ensure!(
            !prompts.list.is_empty(),
            "{source} has no prompt{depth} of the lengths and tasks that are asked for{advice}"
        );
        if let Some(limit) = wanted.limit {
            prompts.limit(limit);
        }
        let aware_only = matches!(wanted.mode, None | Some(Mode::QuestionAware));
        if let Some(unmarked) = prompts.list.iter().find(|prompt| prompt.split().is_none())
            && !aware_only
        {
            let (source, line) = (&prompts.source, unmarked.line);
            let marks = MARKS.map(|mark| format!("{mark:?}")).join(" or ");
            bail!(
                "{source}, line {line}: nothing says where the question begins (a `question`, or \
                 one of {marks} in the prompt), so that no context can be compressed before it: \
                 give `context` and `question` in place of `prompt`, or take --mode question-aware"
            );
        }
        Ok(prompts)
    }

    /// Reads prompts from a file, or the embedded ones.
    ///
    /// # Errors
    /// Where the file cannot be read or a line is no prompt; the line is named.
    pub(crate) fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let (source, text) = read(path, EMBEDDED_PROMPTS)?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let prompt = |(index, text): (usize, &str)| {
            let line = index + 1;
            let read = serde_json::from_str::<Line>(text).map_err(anyhow::Error::from);
            read.and_then(|read| read.prompt(line))
                .with_context(|| format!("{source}, line {line}"))
        };
        let list = lines.map(prompt).collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(!list.is_empty(), "{source} holds no prompts");
        Ok(Self { source, list })
    }

    /// Keeps `limit` prompts, or all where there are fewer: as even a number as can be of each
    /// task, length, and pair of both, spread over the file.
    pub(crate) fn limit(&mut self, limit: usize) {
        let mut groups: Vec<((&str, usize), Vec<usize>)> = Vec::new();
        for (index, prompt) in self.list.iter().enumerate() {
            let key = (prompt.task.as_str(), prompt.length);
            match groups.iter_mut().find(|group| group.0 == key) {
                Some(group) => group.1.push(index),
                None => groups.push((key, vec![index])),
            }
        }
        let mut taken = vec![0; groups.len()];
        for _ in 0..limit.min(self.list.len()) {
            let of = |alike: &dyn Fn(&(&str, usize)) -> bool| {
                groups.iter().zip(&taken).filter(|(group, _)| alike(&group.0)).map(|(_, n)| n).sum()
            };
            let load = |group: usize| -> (usize, usize, usize) {
                let (task, length) = groups[group].0;
                (of(&|key| key.0 == task), of(&|key| key.1 == length), taken[group])
            };
            let open = (0..groups.len()).filter(|&group| taken[group] < groups[group].1.len());
            if let Some(next) = open.min_by_key(|&group| load(group)) {
                taken[next] += 1;
            }
        }
        let chosen = groups.iter().zip(taken).enumerate().flat_map(|(group, ((_, all), taken))| {
            // The middles of as many equal stretches, elsewhere in each group: prompts of a task
            // mostly lie in one order at every length.
            (0..taken)
                .map(move |i| all[((2 * i + 1) * all.len() / (2 * taken) + group) % all.len()])
        });
        let mut keep = vec![false; self.list.len()];
        chosen.for_each(|index| keep[index] = true);
        let mut keep = keep.into_iter();
        self.list.retain(|_| keep.next() == Some(true));
    }

    /// Leaves out the prompts that, with their answers, exceed the model's positions, and names
    /// these prompts.
    ///
    /// # Errors
    /// Where none is left, and where a text cannot be tokenized.
    pub(crate) fn fit(&mut self, model: &Model) -> anyhow::Result<Option<String>> {
        let positions = model.config().max_positions;
        let all = self.list.len();
        let mut long = Vec::new();
        let mut fitting = Vec::new();
        for prompt in std::mem::take(&mut self.list) {
            let tokens = |text: &str| anyhow::Ok(model.encode(text)?.len());
            // Apart they may be more tokens than together.
            let parts = match prompt.split() {
                Some((context, question)) => tokens(context)? + tokens(question)?,
                None => 0,
            };
            match parts.max(tokens(&prompt.prompt)?) + tokens(&prompt.answer)? <= positions {
                true => fitting.push(prompt),
                false => long.push(prompt.id),
            }
        }
        self.list = fitting;
        let which = format!("{} of {} of {}", long.len(), counted(all, "prompt"), self.source);
        let exceed = if long.len() == 1 { "exceeds" } else { "exceed" };
        let (names, longest) = (long.join(", "), model.config().longest());
        let which = format!("{which} {exceed} the model's {longest}");
        ensure!(!self.list.is_empty(), "{which}, none is left: {names}");
        Ok((!long.is_empty()).then(|| format!("{which}, left out: {names}")))
    }
}

/// Reads the text for perplexity, or the embedded one, and says where it is from.
///
/// # Errors
/// Where the file cannot be read.
pub(crate) fn text(path: Option<&Path>) -> anyhow::Result<(String, String)> {
    read(path, EMBEDDED_TEXT)
}

/// A file's name and text, or the embedded text.
fn read(path: Option<&Path>, embedded: &str) -> anyhow::Result<(String, String)> {
    let Some(path) = path else { return Ok((EMBEDDED.into(), embedded.into())) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok((name.to_string_lossy().into_owned(), text))
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            (prompts.list[0].id.as_str(), prompts.source.as_str()),
            ("line 2", "prompts.jsonl")
        );
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
            (
                r#""prompt": "a", "question": "b", "answer": "c""#,
                "does not end with its `question`",
            ),
            (r#""context": "a", "answer": "c""#, "expected `context` and `question`"),
            (r#""question": "a", "answer": "c""#, "expected `context` and `question`"),
            (
                r#""prompt": "ab", "context": "a", "question": "b", "answer": "c""#,
                "expected `context`",
            ),
            (
                r#""context": "", "question": "b", "answer": "c""#,
                "`context` is \"\", expected more",
            ),
            (
                r#""context": "a", "question": "  ", "answer": "c""#,
                "`question` is \"  \", expected",
            ),
            (
                r#""prompt": "a  ", "question": "  ", "answer": "c""#,
                "`question` is \"  \", expected",
            ),
            (r#""prompt": "\n", "answer": "c""#, "`prompt` is \"\\n\", expected more"),
            (r#""prompt": "a", "answer": " ""#, "`answer` is \" \", expected more"),
            (r#""context": "a", "questoin": "b", "answer": "c""#, "unknown field `questoin`"),
            (
                r#""context": "a", "questoin": "b", "answer": "c""#,
                "`context`, `question`, `answer`",
            ),
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
        // Prompts that are left out may lack a question.
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
            let of = |wanted: &dyn Fn(&Prompt) -> bool| {
                prompts.list.iter().filter(|p| wanted(p)).count()
            };
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
}
