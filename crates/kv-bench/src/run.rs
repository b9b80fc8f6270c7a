//! From arguments to records, tables and the report.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};
use burn::tensor::{DType, Device};
use kv_core::{available_devices, device_name, select_device};
use kv_models::{Calibration, Model, model_names};
use kv_policies::POLICIES;

use crate::args::{Args, Common, Figure, Paper, Suite};
use crate::console::{print, say};
use crate::contenders::Contender;
use crate::files::check_writable;
use crate::journal::Records;
use crate::prompts::EMBEDDED_FOR;
use crate::record::{Case, Record};
use crate::report::{format, overview};
use crate::sources::{Source, merge};
use crate::table::Table;
use crate::{calibrate, fisher, inputs, report, suites, table};

/// Tokens that share an entry of a sketch from which on estimates vary more than the keys and
/// values: the median of three sums has 0.448 of an entry's variance.
const CROWDED: f64 = 1.0 / 0.448;

/// What every suite works with.
pub(crate) struct Bench<'a> {
    pub(crate) common: &'a Common,
    pub(crate) model: Model,
    pub(crate) device: Device,
    device_name: String,
    pub(crate) records: &'a mut Records,
    notes: Vec<String>,
}

impl<'a> Bench<'a> {
    /// A model on a device, and nothing measured yet.
    pub(crate) fn new(
        common: &'a Common,
        model: Model,
        device: Device,
        device_name: String,
        records: &'a mut Records,
    ) -> Self {
        Self { common, model, device, device_name, records, notes: Vec::new() }
    }

    /// Adds a measured number.
    pub(crate) fn record(
        &mut self,
        suite: &str,
        case: &Case,
        (policy, budget): (&str, Option<f64>),
        metric: &str,
        value: f64,
        unit: &str,
    ) {
        self.records.push(Record {
            suite: suite.into(),
            case: case.clone(),
            model: self.model.name().into(),
            device: self.device_name.clone(),
            policy: policy.into(),
            budget,
            metric: metric.into(),
            value,
            unit: unit.into(),
        });
    }

    /// Notes remarks on policies in this model, behind prompts of up to so many tokens, for readers
    /// of their numbers.
    pub(crate) fn remark(&mut self, contenders: &[Contender], tokens: usize) -> anyhow::Result<()> {
        let layers = self.model.config().num_layers;
        for contender in contenders {
            for remark in contender.policy.remarks(layers) {
                self.note(remark);
            }
            if self.model.name() == EMBEDDED_FOR
                && let Some(reason) = why_it_fails(&contender.label)
            {
                self.note(reason.into());
            }
            if let Some(load) = contender.sketch_load(tokens).filter(|load| *load > CROWDED) {
                let (label, budget) = (&contender.label, format::budget(contender.budget));
                self.note(format!(
                    "{label} at {budget}: about {load:.0} tokens share an entry of the sketch, \
                     whose estimates are noise then; it does not keep answers, and is here to be \
                     studied"
                ));
            }
            let Some(path) = &contender.channels else { continue };
            // Files of channels alone, which policies take too, do not say whose they are.
            let Ok(calibration) = Calibration::load(path) else { continue };
            if !calibration.is_of(&self.model)? {
                let (found, own) = (&calibration.model, self.model.name());
                self.note(format!("{path} has the channels of {found}, not those of {own}"));
            }
        }
        Ok(())
    }

    /// Adds a note for readers of the numbers, once.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            say!("note: {note}");
            self.notes.push(note);
        }
    }
}

/// Why a policy, as it is without options, finds hardly an answer in the embedded model.
fn why_it_fails(label: &str) -> Option<&'static str> {
    Some(match label {
        "knorm" => {
            "knorm keeps the keys of smallest norm, but needle-1m attends to keys of large norm: \
             of the attention, knorm keeps a smaller share than of the tokens"
        }
        "double-sparsity" => {
            "double-sparsity chooses tokens by a sixteenth of a head's channels, in needle-1m by 2 \
             of 32, which is too few to find a token: with `\"labels\": 8` it finds most answers"
        }
        _ => return None,
    })
}

/// Runs the suite that the arguments name.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    ensure!(args.suite.is_none() || !args.all, "--all: suites show all of their tables");
    if let Some(Suite::List) = args.suite {
        return print(&list());
    }
    if let Some(Suite::Fisher(options)) = &args.suite {
        return fisher::run(common, options);
    }
    if let Some(Suite::Calibrate(options)) = &args.suite {
        return calibrate::run(common, options);
    }
    let started = Instant::now();
    // Whatever could fail in the end fails now.
    let others = Source::read_all(&common.merge)?;
    let report = match &common.report {
        Some(path) => path.clone(),
        None => default_report(&name_of(args.suite.as_ref()))?,
    };
    for path in common.json.iter().chain([&report]) {
        check_writable(path)?;
    }
    inputs::check(common, args.suite.as_ref())?;
    let mut records = Records::begin(common.json.as_deref());
    let notes = measure(args, &mut records)?;
    let (own, saved) = records.finish();
    let records = merge(own, others);
    let title = title_of(args.suite.as_ref());
    let first = args.suite.is_none().then(|| overview::table(&records)).flatten();
    let reported =
        report::write_html(&report, &format!("burn-kv: {title}"), &notes, &records, first.as_ref());
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
        text += &table::text(records, by_layer);
    } else {
        text += "All policies and budgets: in the report, or here with --all.\n";
    }
    notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    text
}

/// Runs a suite; returns notes.
fn measure(args: &Args, records: &mut Records) -> anyhow::Result<Vec<String>> {
    let common = &args.common;
    let device = select_device(common.device)?;
    let device_name = device_name(&device);
    if let Some(Suite::Paper(options)) = &args.suite {
        options.check_device(&device_name, common.quick)?;
    }
    let dtype = common.dtype.map(Into::into);
    let mut notes = match &args.suite {
        Some(Suite::Paper(options)) => options.notes(common.quick),
        _ => Vec::new(),
    };
    let more = match &args.suite {
        Some(Suite::Kernels(options)) => {
            suites::kernels::run(device, device_name, dtype, options, common.quick, records)?;
            Vec::new()
        }
        Some(Suite::Paper(Paper { figure: Figure::LongflowFig1, .. })) => {
            let quick = common.quick;
            suites::paper::longflow_fig1::run(&device, &device_name, dtype, quick, records)?;
            Vec::new()
        }
        Some(Suite::Paper(options)) if options.is_made_up(common) => {
            let quick = common.quick;
            suites::paper::balancekv_fig3::run(
                &device,
                &device_name,
                dtype,
                quick,
                common.seed,
                records,
            )?;
            Vec::new()
        }
        Some(Suite::Paper(Paper { figure: Figure::BalancekvStream, .. })) => {
            let (quick, seed) = (common.quick, common.seed);
            suites::paper::balancekv_stream::run(&device, &device_name, quick, seed, records)?
        }
        Some(Suite::Paper(Paper {
            figure: Figure::KvreviverAttention, lengths, batches, ..
        })) => {
            let cases = suites::paper::kvreviver::attention::cases(common.quick, lengths, batches)?;
            suites::paper::kvreviver::attention::run(
                &device,
                &device_name,
                dtype,
                &cases,
                records,
            )?;
            Vec::new()
        }
        Some(Suite::Paper(Paper {
            figure: figure @ (Figure::PrhsTable4 | Figure::PrhsLong),
            lengths,
            batches,
            ..
        })) => {
            let long = *figure == Figure::PrhsLong;
            let cases = suites::paper::prhs::operator::cases(long, common.quick, lengths, batches)?;
            suites::paper::prhs::operator::run(
                &device,
                &device_name,
                dtype,
                &cases,
                common,
                records,
            )?
        }
        Some(Suite::Paper(Paper { figure: Figure::KvreviverBounds, .. })) => {
            let (quick, seed) = (common.quick, common.seed);
            suites::paper::kvreviver::bounds::run(&device, &device_name, quick, seed, records)?
        }
        suite => with_model(common, suite.as_ref(), device, device_name, dtype, records)?,
    };
    notes.extend(more);
    Ok(notes)
}

/// Runs a suite that needs a model; returns notes.
fn with_model(
    common: &Common,
    suite: Option<&Suite>,
    device: Device,
    device_name: String,
    dtype: Option<DType>,
    records: &mut Records,
) -> anyhow::Result<Vec<String>> {
    let name = match suite {
        Some(Suite::Paper(options)) => options.figure.model(&common.model, common.quick),
        _ => &common.model,
    };
    say!("loading {name} on {device_name}");
    let model = Model::load(name, &device, dtype).with_context(|| format!("model {name}"))?;
    let mut bench = Bench::new(common, model, device, device_name, records);
    match suite {
        Some(Suite::Quality(options)) => suites::quality::run(&mut bench, options)?,
        Some(Suite::Attention(options)) => suites::attention::run(&mut bench, options)?,
        Some(Suite::Throughput(options)) => suites::throughput::run(&mut bench, options)?,
        Some(Suite::Paper(options)) => suites::paper::run(&mut bench, options)?,
        _ => suites::quick::run(&mut bench)?,
    }
    Ok(bench.notes)
}

/// A suite's name in titles and file names.
fn name_of(suite: Option<&Suite>) -> String {
    let name = match suite {
        Some(Suite::Quality(_)) => "quality",
        Some(Suite::Attention(_)) => "attention",
        Some(Suite::Throughput(_)) => "throughput",
        Some(Suite::Kernels(_)) => "kernels",
        Some(Suite::Paper(options)) => return format!("paper-{}", options.figure.name()),
        Some(Suite::Fisher(_)) => "fisher",
        Some(Suite::Calibrate(_)) => "calibrate",
        Some(Suite::List) | None => "overview",
    };
    name.into()
}

/// A suite's title: its name; for a paper's figure, the measured quantity too.
fn title_of(suite: Option<&Suite>) -> String {
    match suite {
        Some(Suite::Paper(options)) => {
            format!("{}: {}", options.figure.name(), options.figure.definition().measures)
        }
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
    text + &format!("devices: {}\n", available_devices().join(", "))
}

#[cfg(test)]
mod tests {
    use crate::record::{Record, mean, metric};
    use crate::testing::ran;

    fn mean_of(records: &[Record], policy: &str, metric: &str) -> f64 {
        let own = records.iter().filter(|r| r.policy == policy && r.metric == metric);
        mean(&own.collect::<Vec<_>>()).unwrap()
    }

    /// Measurements confirm the reasons that the notes give.
    #[test]
    fn reasons_of_policies_that_fail_in_the_embedded_model_are_true() {
        let policies =
            r#"["knorm", "double-sparsity", {"policy": "double-sparsity", "labels": 8}]"#;
        let run = |line: &str| {
            let words: Vec<&str> = line.split(' ').chain(["--policy", policies]).collect();
            ran(&words).unwrap()
        };
        let line = "quality --budget 0.25 --limit 4 --no-perplexity --mode question-aware";
        let (records, report) = run(line);
        let right = |policy: &str| mean_of(&records, policy, metric::EXACT_MATCH);
        assert_eq!(right("full"), 1.0);
        assert!(right("knorm") <= 0.25 && right("double-sparsity") <= 0.25);
        assert!(right("double-sparsity labels=8") >= 0.75);
        for reason in ["needle-1m attends to keys of large norm", "in needle-1m by 2 of 32"] {
            assert_eq!(report.matches(reason).count(), 1, "{reason}");
        }
        let (records, _) = run("attention --budget 0.25 --limit 2 --steps 8");
        let kept = |policy: &str| mean_of(&records, policy, metric::RETAINED_MASS);
        assert!(kept("knorm") < 0.25, "{}", kept("knorm"));
        assert!(kept("double-sparsity labels=8") > kept("double-sparsity") + 0.1);
    }
}
