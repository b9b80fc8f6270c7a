//! From arguments to records, tables and the report.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use burn::tensor::{DType, Device};
use kv_core::{available_devices, device_name, select_device};
use kv_models::{Calibration, Model, model_names};
use kv_policies::POLICIES;

use crate::args::{Args, Common, Figure, Paper, Suite};
use crate::contenders::Contender;
use crate::journal::Records;
use crate::record::{Case, Record};
use crate::sources::{Source, check_writable, merge};
use crate::{calibrate, fisher, inputs, report, suites, table};

/// What every suite works with.
pub(crate) struct Bench<'a> {
    pub(crate) common: &'a Common,
    pub(crate) model: Model,
    pub(crate) device: Device,
    device_name: String,
    pub(crate) records: &'a mut Records,
    notes: Vec<String>,
}

impl Bench<'_> {
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

    /// Notes what a reader must know of policies in this model.
    pub(crate) fn remark(&mut self, contenders: &[Contender]) -> anyhow::Result<()> {
        let layers = self.model.config().num_layers;
        for contender in contenders {
            for remark in contender.policy.remarks(layers) {
                self.note(remark);
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

    /// Adds what a reader of the numbers must know; once is enough.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            eprintln!("note: {note}");
            self.notes.push(note);
        }
    }
}

/// Runs the suite that the arguments name.
///
/// # Errors
/// With what is missing or unsupported.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    if let Some(Suite::List) = args.suite {
        list();
        return Ok(());
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
    match &args.suite {
        // Whose tables have policies of their own.
        Some(Suite::Paper(options)) => options.check(common)?,
        _ => drop(common.contenders(&[0.5])?),
    }
    inputs::check(common, args.suite.as_ref())?;
    let device = select_device(common.device)?;
    let device_name = device_name(&device);
    if let Some(Suite::Paper(options)) = &args.suite {
        options.check_device(&device_name, common.quick)?;
    }
    let dtype = common.dtype.map(Into::into);
    let mut records = Records::begin(common.json.as_deref());
    let notes = match &args.suite {
        Some(Suite::Kernels(options)) => {
            suites::kernels::run(device, device_name, dtype, options, common.quick, &mut records)?;
            Vec::new()
        }
        Some(Suite::Paper(Paper { figure: Figure::LongflowFig1, .. })) => {
            let quick = common.quick;
            suites::paper::longflow_fig1::run(&device, &device_name, dtype, quick, &mut records)?;
            Vec::new()
        }
        Some(Suite::Paper(Paper { figure: Figure::BalancekvFig3, .. })) => {
            let quick = common.quick;
            suites::paper::balancekv_fig3::run(
                &device,
                &device_name,
                dtype,
                quick,
                common.seed,
                &mut records,
            )?;
            Vec::new()
        }
        Some(Suite::Paper(Paper { figure: Figure::BalancekvStream, .. })) => {
            let (quick, seed) = (common.quick, common.seed);
            suites::paper::balancekv_stream::run(&device, &device_name, quick, seed, &mut records)?
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
                &mut records,
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
                &mut records,
            )?
        }
        Some(Suite::Paper(Paper { figure: Figure::KvreviverBounds, .. })) => {
            let (quick, seed) = (common.quick, common.seed);
            suites::paper::kvreviver::bounds::run(&device, &device_name, quick, seed, &mut records)?
        }
        suite => with_model(common, suite.as_ref(), device, device_name, dtype, &mut records)?,
    };
    let by_layer = matches!(&args.suite, Some(Suite::Attention(options)) if options.by_layer);
    let records = merge(records.finish()?, others);
    let title = format!("burn-kv: {}", name_of(args.suite.as_ref()));
    report::write_html(&report, &title, &notes, &records)?;
    table::print(&records, by_layer);
    for note in &notes {
        println!("note: {note}");
    }
    if let Some(path) = &common.json {
        eprintln!("records: {}", path.display());
    }
    eprintln!("report: {}", report.display());
    eprintln!("{:.0} s in all", started.elapsed().as_secs_f64());
    Ok(())
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
    eprintln!("loading {name} on {device_name}");
    let model = Model::load(name, &device, dtype).with_context(|| format!("model {name}"))?;
    let mut bench = Bench { common, model, device, device_name, records, notes: Vec::new() };
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

/// `kv-bench/SUITE.html` in cargo's target folder, where `cargo xtask bench` names it, or in the
/// current folder's `target`.
fn default_report(suite: &str) -> anyhow::Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = target.join("kv-bench");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(format!("{suite}.html")))
}

fn list() {
    println!("policies:");
    for entry in POLICIES {
        println!("  {:<20} {:<52} {}", entry.name, entry.summary, entry.paper);
    }
    println!("models: a folder, a hub id, or");
    for name in model_names() {
        println!("  {name}");
    }
    println!("devices: {}", available_devices().join(", "));
}
