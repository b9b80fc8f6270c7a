//! `fisher` and `calibrate`: measure a model on windows of a text, and write the numbers down where
//! policies read them.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{CellAlignment, Table};
use kv_core::{counted, device_name, select_device};
use kv_models::{Calibration, Fisher, Model, TextWindows};

use crate::console::{print, say};
use crate::files::check_writable;
use crate::options::{CalibrateOptions, Common, FisherOptions, TextSample};
use crate::progress::Progress;
use crate::prompts;

/// Why a run without `--output` ends.
const NEEDED: &str = "--output is needed";
/// Channels of a head that are shown.
const SHOWN: usize = 8;

/// Runs `fisher`: how much each layer's keys and values matter.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn fisher(common: &Common, options: &FisherOptions) -> anyhow::Result<()> {
    check(common, "fisher", "numbers")?;
    let output = output(options.output.as_deref(), || Ok(Fisher::beside(common.model())?))?;
    let measure = |model: &Model, source: &str, windows: &TextWindows, step: &mut dyn FnMut()| {
        Ok(Fisher::measure(model, source, windows, step)?)
    };
    measured(common, &options.sample, measure, |fisher, source| {
        fisher.save(&output)?;
        say!("written to {}", output.display());
        Ok(format!(
            "Fisher information of {} on {source}\nmean of {} of {}\n{}\n",
            fisher.model,
            counted(fisher.samples, "window"),
            counted(fisher.window, "token"),
            table(fisher)
        ))
    })
}

/// Runs `calibrate`: the channels of queries and keys that matter most.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn calibrate(common: &Common, options: &CalibrateOptions) -> anyhow::Result<()> {
    check(common, "calibrate", "channels")?;
    let output = output(options.output.as_deref(), || Ok(Calibration::beside(common.model())?))?;
    let measure = |model: &Model, source: &str, windows: &TextWindows, step: &mut dyn FnMut()| {
        Ok(Calibration::measure(model, source, windows, options.statistic.into(), step)?)
    };
    measured(common, &options.sample, measure, |found, source| {
        found.save(&output)?;
        say!("written to {}", output.display());
        let mut text = format!(
            "channels of {} on {source}\nmean of {} of {}\n",
            found.model,
            counted(found.samples, "window"),
            counted(found.window, "token")
        );
        for (layer, heads) in found.layers.iter().enumerate() {
            let first = heads.first().map_or(&[][..], |head| &head[..SHOWN.min(head.len())]);
            text += &format!("layer {layer}, head 0: {first:?} ...\n");
        }
        Ok(text)
    })
}

/// Refuses the options of suites.
fn check(common: &Common, name: &str, numbers: &str) -> anyhow::Result<()> {
    ensure!(common.policy.is_none(), "--policy: {name} measures a model, not policies");
    ensure!(common.budget.is_none(), "--budget: {name} measures a model, not policies");
    ensure!(common.matrices.is_none(), "--matrices: {name} measures a model's own matrices");
    ensure!(common.json.is_none(), "--json: {name} writes its {numbers} to --output");
    ensure!(common.merge.is_empty(), "--merge: {name} has no records");
    ensure!(common.report.is_none(), "--report: {name} has none");
    ensure!(!common.quick, "--quick: give fewer --samples instead");
    Ok(())
}

/// The file that the numbers go to: the file of `--output`, or the file beside the model. It is
/// tried before anything is measured, as a file that cannot be written must not cost a measurement.
fn output(
    asked: Option<&Path>,
    beside: impl FnOnce() -> anyhow::Result<PathBuf>,
) -> anyhow::Result<PathBuf> {
    let path = asked.map_or_else(|| beside().context(NEEDED), |path| Ok(path.into()))?;
    check_writable(&path).context(if asked.is_none() { NEEDED } else { "--output" })?;
    Ok(path)
}

/// Measures windows of a text, saves the measurements, and prints the text that `save` returns.
/// `measure` calls its last argument after each window.
fn measured<M>(
    common: &Common,
    sample: &TextSample,
    measure: impl FnOnce(&Model, &str, &TextWindows, &mut dyn FnMut()) -> anyhow::Result<M>,
    save: impl FnOnce(&M, &str) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    let (source, text) = prompts::text(Some(&sample.text))?;
    let device = select_device(common.device)?;
    say!("loading {} on {}", common.model(), device_name(&device));
    let model = Model::load(common.model(), &device, common.dtype.map(Into::into))
        .with_context(|| format!("model {}", common.model()))?;
    let windows = TextWindows::new(&model, &text, sample.window, sample.samples)?;
    let mut progress = Progress::new(sample.samples, "windows");
    let found = measure(&model, &source, &windows, &mut || progress.step())?;
    progress.finish();
    let text = save(&found, &source)?;
    say!("{:.0} s in all", started.elapsed().as_secs_f64());
    print(&text)
}

/// One row a layer.
fn table(fisher: &Fisher) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    table.set_header(["layer", "keys", "values", "share"]);
    for (index, (layer, share)) in fisher.layers.iter().zip(fisher.shares()).enumerate() {
        let number = |x: f32| format!("{x:.3e}");
        let share = format!("{:.1} %", 100.0 * share);
        table.add_row([index.to_string(), number(layer.keys), number(layer.values), share]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use kv_models::LayerFisher;
    use kv_policies::build;
    use serde_json::{Value, json};

    use super::*;
    use crate::args::Args;

    fn run_line(name: &str, line: &[&str]) -> anyhow::Result<()> {
        crate::run::run(&Args::try_parse_from(["kv-bench", name].iter().chain(line))?).map(drop)
    }

    #[test]
    fn a_model_is_calibrated_into_a_file_that_policies_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).display().to_string();
        let (text, out) = (file("text.txt"), file("out.json"));
        std::fs::write(&text, "The sea was calm, and the boat lay on the sand. ".repeat(4))
            .unwrap();
        let small = ["--text", &text, "--device", "cpu"];
        let size = ["--window", "16", "--samples", "2"];
        for (statistic, heads) in [("product", 4), ("query", 4), ("key", 2)] {
            let line = [&small[..], &size, &["--output", &out, "--statistic", statistic]].concat();
            run_line("calibrate", &line).unwrap();
            let found: Value =
                serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
            assert_eq!(found["statistic"], statistic);
            let layers = found["layers"].as_array().unwrap();
            assert_eq!((layers.len(), layers[0].as_array().unwrap().len()), (4, heads));
            let mut all: Vec<u64> =
                layers[3][1].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
            all.sort_unstable();
            assert_eq!(all, (0..32).collect::<Vec<_>>());
            let config = json!({"policy": "double-sparsity", "budget": 64, "channels": out});
            assert_eq!(build(&config).unwrap().config()["channels"], found["layers"]);
        }
        // Reports say where the channels are another model's.
        let report = file("report.html");
        let noted = || {
            let config =
                format!(r#"{{"policy": "double-sparsity", "budget": 64, "channels": "{out}"}}"#);
            let line = ["kv-bench", "throughput", "--quick", "--steps", "4", "--lengths", "100"];
            let more = ["--device", "cpu", "--report", &report, "--policy", &config];
            let args = Args::try_parse_from(line.iter().chain(&more)).unwrap();
            crate::run::run(&args).unwrap();
            std::fs::read_to_string(&report).unwrap().contains("has the channels of other (")
        };
        assert!(!noted(), "they are needle-1m's");
        let text = std::fs::read_to_string(&out).unwrap();
        let mut other: Value = serde_json::from_str(&text).unwrap();
        other["model"] = json!("other (4 x 2 x 32, 0123456789abcdef)");
        std::fs::write(&out, other.to_string()).unwrap();
        assert!(noted());
        std::fs::write(&out, json!({"layers": other["layers"]}).to_string()).unwrap();
        assert!(!noted(), "channels alone say of no model");
        for (more, part) in [
            (&[][..], "--output is needed: needle-1m is no local folder"),
            (&["--output", &file("no/out.json")], "cannot write to"),
            (&["--output", &out, "--window", "16", "--samples", "900"], "900 windows need"),
            (&["--output", &out, "--policy", "h2o"], "not policies"),
            (&["--output", &out, "--matrices", "bf16"], "a model's own matrices"),
        ] {
            let error =
                format!("{:#}", run_line("calibrate", &[&small, more].concat()).unwrap_err());
            assert!(error.contains(part), "{more:?}: {error}");
        }
    }

    #[test]
    fn a_model_is_measured_into_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).display().to_string();
        let (text, output) = (file("text.txt"), file("out.json"));
        std::fs::write(&text, "The sea was calm, and the boat lay on the sand. ".repeat(4))
            .unwrap();
        let small = ["--text", &text, "--device", "cpu"];
        let size = ["--window", "16", "--samples", "2"];
        run_line("fisher", &[&small[..], &size, &["--output", &output]].concat()).unwrap();
        let fisher = Fisher::load(&output).unwrap();
        assert_eq!((fisher.layers.len(), fisher.text.as_str()), (4, "text.txt"));

        for (more, part) in [
            (&[][..], "--output is needed: needle-1m is no local folder"),
            (&["--model", "random:qwen3-1.7b"], "--output is needed"),
            (&["--output", &file("no/out.json")], "cannot write to"),
            (&["--output", &output, "--window", "16", "--samples", "900"], "900 windows need"),
            (&["--output", &output, "--window", "4096"], "2 to 2048"),
            (&["--output", &output, "--policy", "h2o"], "not policies"),
        ] {
            let error = format!("{:#}", run_line("fisher", &[&small, more].concat()).unwrap_err());
            assert!(error.contains(part), "{more:?}: {error}");
        }
    }

    #[test]
    fn the_table_has_a_row_a_layer() {
        let layers = [(1.5e-7, 4.5e-7), (2e-7, 2e-7)];
        let layers = layers.map(|(keys, values)| LayerFisher { keys, values }).to_vec();
        let (model, text) = ("m".into(), "t".into());
        let text = table(&Fisher { model, text, window: 2, samples: 1, layers }).to_string();
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        let row = |cells: [&str; 7]| rows.iter().any(|row| row[..] == cells);
        assert!(row(["│", "0", "1.500e-7", "4.500e-7", "60.0", "%", "│"]), "{text}");
        assert!(row(["│", "1", "2.000e-7", "2.000e-7", "40.0", "%", "│"]), "{text}");
    }
}
