//! From arguments to records, tables and the report.

use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use burn::tensor::Device;
use kv_core::{available_devices, device_name, select_device};
use kv_models::{Model, model_names};
use kv_policies::POLICIES;

use crate::args::{Args, Common, Suite};
use crate::record::{Case, Record, read_json, write_json};
use crate::{report, suites, table};

/// What every suite works with.
pub(crate) struct Bench<'a> {
    pub(crate) common: &'a Common,
    pub(crate) model: Model,
    pub(crate) device: Device,
    device_name: String,
    pub(crate) records: Vec<Record>,
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

    /// Adds what a reader of the numbers must know.
    pub(crate) fn note(&mut self, note: String) {
        eprintln!("note: {note}");
        self.notes.push(note);
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
    let started = Instant::now();
    let device = select_device(common.device)?;
    let name = device_name(&device);
    eprintln!("loading {} on {name}", common.model);
    let model = Model::load(&common.model, &device, common.dtype.map(Into::into))
        .with_context(|| format!("model {}", common.model))?;
    let mut bench =
        Bench { common, model, device, device_name: name, records: Vec::new(), notes: Vec::new() };
    let mut by_layer = false;
    let suite = match &args.suite {
        Some(Suite::Quality(options)) => {
            suites::quality::run(&mut bench, options)?;
            "quality"
        }
        Some(Suite::Attention(options)) => {
            by_layer = options.by_layer;
            suites::attention::run(&mut bench, options)?;
            "attention"
        }
        Some(Suite::Throughput(options)) => {
            suites::throughput::run(&mut bench, options)?;
            "throughput"
        }
        Some(Suite::List) | None => {
            suites::quick::run(&mut bench)?;
            "overview"
        }
    };
    for path in &common.merge {
        bench.records.extend(read_json(path)?);
    }
    table::print(&bench.records, by_layer);
    if let Some(path) = &common.json {
        write_json(path, &bench.records)?;
        eprintln!("records: {}", path.display());
    }
    let path = match &common.report {
        Some(path) => path.clone(),
        None => default_report(suite)?,
    };
    let title = format!("burn-kv: {suite}");
    report::write_html(&path, &title, &today(), &bench.records)?;
    eprintln!("report: {}", path.display());
    eprintln!("{:.0} s in all", started.elapsed().as_secs_f64());
    Ok(())
}

/// `target/kv-bench/SUITE.html` of the workspace that is built, or of the current folder.
fn default_report(suite: &str) -> anyhow::Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let folder = target.join("kv-bench");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(format!("{suite}.html")))
}

/// Today's date (UTC), by the civil-from-days algorithm.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let days = (seconds / 86_400) as i64 + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
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
