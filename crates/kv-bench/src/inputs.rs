//! Files that a suite will read, tried before a model is loaded: a path that is not there must not
//! cost minutes.

use crate::args::Suite;
use crate::options::{Common, Task};
use crate::prompts::{self, Prompts};

/// Reads the files of prompts and texts that a suite is given, and builds the policies.
///
/// # Errors
/// Where a policy is refused, a file cannot be read, a line is no prompt, or the prompts cannot be
/// asked as they should be.
pub(crate) fn check(common: &Common, suite: Option<&Suite>) -> anyhow::Result<()> {
    match suite {
        // Papers' tables have policies of their own.
        Some(Suite::Paper(_)) => common.check_configurations()?,
        _ => drop(common.policy_runs(&[0.5])?),
    }
    let (wanted, text) = match suite {
        Some(Suite::Quality(options)) => {
            options.check()?;
            let asks = options.task != Some(Task::LongOutput);
            (asks.then(|| options.wanted(common.quick)), options.text.as_deref())
        }
        Some(Suite::Attention(options)) => (Some(options.wanted()), None),
        Some(Suite::Paper(options)) => {
            options.check(common)?;
            (options.wanted(common.quick), options.options.text.as_deref())
        }
        _ => (None, None),
    };
    if let Some(wanted) = wanted {
        Prompts::read(&wanted)?;
    }
    if text.is_some() {
        prompts::text(text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Args;

    #[test]
    fn bad_paths_are_told_before_a_model_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let unmarked = folder.path().join("unmarked.jsonl");
        let line = r#"{"task": "t", "length": 3, "prompt": "a b", "answer": "c"}"#;
        std::fs::write(&unmarked, line).unwrap();
        let unmarked = unmarked.display().to_string();
        let report = folder.path().join("report.html").display().to_string();
        for (line, part) in [
            ("quality --prompts no-prompts.jsonl", "no-prompts.jsonl"),
            ("quality --text no-text.txt", "no-text.txt"),
            ("quality --task long-output --text no-text.txt", "no-text.txt"),
            ("quality --task conversation --mode question-aware", "none of the other options"),
            ("attention --prompts no-prompts.jsonl", "no-prompts.jsonl"),
            ("paper keepkv-fig5-needles --prompts no-prompts.jsonl", "no-prompts.jsonl"),
            ("paper prhs-table6-needles --text no-text.txt", "no-text.txt"),
            (
                "paper kvreviver-fig5 --policy \
                 {\"policy\":\"duo-attention\",\"alpha\":\"no-gates.tsv\"}",
                "no-gates.tsv",
            ),
            (&format!("quality --prompts {unmarked}"), "unmarked.jsonl, line 1"),
        ] {
            let common = ["--model", "no-model", "--device", "cpu", "--report", &report];
            let words = std::iter::once("kv-bench").chain(line.split(' ')).chain(common);
            let error = crate::run::run(&Args::try_parse_from(words).unwrap()).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(part) && !error.contains("no-model"), "{line}: {error}");
        }
    }
}
