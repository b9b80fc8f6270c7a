//! From arguments to records, tables and the report.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, ensure};
use kv_core::available_devices;
use kv_models::model_names;
use kv_parallel::{Ranks, Role};
use kv_policies::POLICIES;
use kv_tasks::Task;

use crate::args::{Args, Suite};
use crate::bench::{Bench, ModelBench};
use crate::console::{print, say, silence};
use crate::files::check_writable;
use crate::merge_records::{RecordFile, merge};
use crate::options::Common;
use crate::record::Record;
use crate::record_log::RecordLog;
use crate::report::{Page, layouts, overview};
use crate::table::Table;
use crate::{figures, inputs, measure, suites, table};

/// Runs the suite that the arguments name.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let ranks = match &args.suite {
        Some(Suite::Throughput(options)) => match Ranks::join(options.tensor_parallel)? {
            Role::Starter(code) => return Ok(code),
            Role::Rank(ranks) => ranks,
        },
        _ => Ranks::alone(),
    };
    match ranks.shard().is_first() {
        true => measured(args, ranks.clone())?,
        // The first rank tells what all have measured.
        false => {
            silence();
            let mut bench = Bench::new(&args.common, ranks.clone(), RecordLog::begin(None))?;
            run_suite(args.suite.as_ref(), &mut bench)?;
        }
    }
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

/// Measures, prints and reports.
fn measured(args: &Args, ranks: Ranks) -> anyhow::Result<()> {
    let common = &args.common;
    ensure!(args.suite.is_none() || !args.all, "--all: suites show all of their tables");
    ensure!(
        common.matrices.is_none() || runs_model(args.suite.as_ref()),
        "--matrices: {} runs no model",
        name_of(args.suite.as_ref())
    );
    if let Some(Suite::List) = args.suite {
        return print(&list());
    }
    if let Some(Suite::Fisher(options)) = &args.suite {
        return measure::fisher(common, options);
    }
    if let Some(Suite::Calibrate(options)) = &args.suite {
        return measure::calibrate(common, options);
    }
    let started = Instant::now();
    // Whatever could fail in the end fails now.
    let others = RecordFile::read_all(&common.merge)?;
    let report = match &common.report {
        Some(path) => path.clone(),
        None => default_report(&name_of(args.suite.as_ref()))?,
    };
    for path in common.json.iter().chain([&report]) {
        check_writable(path)?;
    }
    inputs::check(common, args.suite.as_ref())?;
    let mut bench = Bench::new(common, ranks, RecordLog::begin(common.json.as_deref()))?;
    let mut notes = Vec::new();
    if let Some(Suite::Paper(options)) = &args.suite {
        options.check_device(&bench.device_name, common)?;
        notes = options.notes(common.quick);
    }
    run_suite(args.suite.as_ref(), &mut bench)?;
    let finished = bench.finish();
    notes.extend(finished.notes);
    let (saved, records) = (finished.saved, merge(finished.records, others));
    let title = title_of(args.suite.as_ref(), common);
    let first = args.suite.is_none().then(|| overview::table(&records)).flatten();
    let page = Page {
        title: &format!("burn-kv: {title}"),
        notes: &notes,
        records: &records,
        first: first.as_ref(),
        questions: &finished.questions,
    };
    let reported = page.write(&report);
    // Numbers that were measured are shown, whatever became of the files.
    let printed = print(&text(args, &title, &notes, &records, first.as_ref()));
    if let (Some(path), Ok(())) = (&common.json, &saved) {
        say!("records: {}", path.display());
    }
    if reported.is_ok() {
        say!("report: {}", report.display());
    }
    say!("{:.0} s in all", started.elapsed().as_secs_f64());
    let mut failures = [saved, reported, printed].into_iter().filter_map(Result::err);
    let Some(last) = failures.next_back() else { return Ok(()) };
    failures.for_each(|error| say!("error: {error:#}"));
    Err(last)
}

/// The text that a run prints. The overview prints its first table alone, unless `--all` is given.
fn text(
    args: &Args,
    title: &str,
    notes: &[String],
    records: &[Record],
    first: Option<&Table>,
) -> String {
    let by_layer = matches!(&args.suite, Some(Suite::Attention(options)) if options.by_layer);
    let mut text = format!("{title}\n\n");
    if let Some(table) = first {
        text += &(table.to_text() + "\n");
    }
    if first.is_none() || args.all {
        text += &table::text(&layouts::tables(records, by_layer));
    } else {
        text += "All policies and budgets: in the report, or here with --all.\n";
    }
    notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    text
}

/// Runs a suite.
fn run_suite(suite: Option<&Suite>, bench: &mut Bench) -> anyhow::Result<()> {
    match suite {
        Some(Suite::Kernels(options)) => return suites::kernels::run(bench, options),
        Some(Suite::Paper(options)) => return figures::run(bench, options),
        _ => {}
    }
    let name = bench.common.model().to_string();
    let mut bench = ModelBench::load(bench, &name)?;
    match suite {
        Some(Suite::Quality(options)) => suites::quality::run(&mut bench, options),
        Some(Suite::Evaluate(options)) => suites::evaluate::run(&mut bench, options),
        Some(Suite::Attention(options)) => suites::attention::run(&mut bench, options),
        Some(Suite::Throughput(options)) => suites::throughput::run(&mut bench, options),
        _ => suites::overview::run(&mut bench),
    }
}

/// Whether a suite loads a model.
fn runs_model(suite: Option<&Suite>) -> bool {
    match suite {
        Some(Suite::Kernels(_) | Suite::List) => false,
        Some(Suite::Paper(options)) => options.figure.runs_model(),
        _ => true,
    }
}

/// A suite's name in titles and file names.
fn name_of(suite: Option<&Suite>) -> String {
    let name = match suite {
        Some(Suite::Quality(_)) => "quality",
        Some(Suite::Evaluate(_)) => "evaluate",
        Some(Suite::Attention(_)) => "attention",
        Some(Suite::Throughput(_)) => "throughput",
        Some(Suite::Kernels(_)) => "kernels",
        Some(Suite::Paper(options)) => return format!("paper-{}", options.figure.name),
        Some(Suite::Fisher(_)) => "fisher",
        Some(Suite::Calibrate(_)) => "calibrate",
        Some(Suite::List) => "list",
        None => "overview",
    };
    name.into()
}

/// A suite's title: its name; for a paper's figure, the measured quantity too, and what stands in
/// for the paper's model or data.
fn title_of(suite: Option<&Suite>, common: &Common) -> String {
    match suite {
        Some(Suite::Paper(options)) => options.title(common),
        suite => name_of(suite),
    }
}

/// `kv-bench/SUITE.html` in cargo's target folder, where `cargo xtask bench` names it, or in the
/// current folder's `target`.
fn default_report(suite: &str) -> anyhow::Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = target.join("kv-bench");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(format!("{suite}.html")))
}

/// Policies, models and devices, as lines.
fn list() -> String {
    let mut text = String::from("policies:\n");
    for entry in POLICIES {
        text += &format!("  {:<20} {:<52} {}\n", entry.name, entry.summary, entry.paper);
    }
    text += "models: a folder, a hub id, or\n";
    for name in model_names() {
        text += &format!("  {name}\n");
    }
    text += "tasks of `evaluate`: a file of questions or TOML, or\n";
    for name in Task::names() {
        text += &format!("  {name}\n");
    }
    text + &format!("devices: {}\n", available_devices().join(", "))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Args;

    #[test]
    fn matrices_are_those_of_a_model() {
        for line in ["list", "kernels", "paper prhs-table4", "paper kvreviver-bounds"] {
            let words = ["kv-bench", "--matrices", "bf16"].into_iter().chain(line.split(' '));
            let error = super::run(&Args::try_parse_from(words).unwrap()).unwrap_err().to_string();
            assert!(error.starts_with("--matrices: "), "{line}: {error}");
            assert!(error.ends_with(" runs no model"), "{line}: {error}");
        }
    }
}
