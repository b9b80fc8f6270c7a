//! `fisher`: measures how much each layer's keys and values matter, and writes it down.

use std::time::Instant;

use anyhow::Context;
use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{CellAlignment, Table};
use kv_core::{counted, device_name, select_device};
use kv_models::{Fisher, Model, TextWindows};

use crate::args::FisherArgs;
use crate::console::{print, say};
use crate::files::check_writable;
use crate::options::Common;
use crate::progress::Progress;
use crate::prompts;

/// Why a run without `--output` ends.
const NEEDED: &str = "--output is needed";

/// Runs `fisher`.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn run(common: &Common, options: &FisherArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    options.check(common)?;
    // Whatever could fail in the end fails now.
    let output = match &options.output {
        Some(path) => path.clone(),
        None => Fisher::beside(&common.model).context(NEEDED)?,
    };
    check_writable(&output).context(if options.output.is_none() { NEEDED } else { "--output" })?;
    let (source, text) = prompts::text(Some(&options.text))?;
    let device = select_device(common.device)?;
    say!("loading {} on {}", common.model, device_name(&device));
    let model = Model::load(&common.model, &device, common.dtype.map(Into::into))
        .with_context(|| format!("model {}", common.model))?;
    let windows = TextWindows::new(&model, &text, options.window, options.samples)?;
    let mut progress = Progress::new(options.samples, "windows");
    let fisher = Fisher::measure(&model, &source, &windows, || progress.step())?;
    progress.finish();
    fisher.save(&output)?;
    say!("written to {}", output.display());
    say!("{:.0} s in all", started.elapsed().as_secs_f64());
    print(&format!(
        "Fisher information of {} on {source}\nmean of {} of {}\n{}\n",
        fisher.model,
        counted(fisher.samples, "window"),
        counted(fisher.window, "token"),
        table(&fisher)
    ))
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

    use super::*;
    use crate::args::{Args, Suite};

    fn run_line(line: &[&str]) -> anyhow::Result<()> {
        let args = Args::try_parse_from(["kv-bench", "fisher"].iter().chain(line))?;
        let Some(Suite::Fisher(options)) = &args.suite else { panic!("no fisher") };
        run(&args.common, options)
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
        run_line(&[&small[..], &size, &["--output", &output]].concat()).unwrap();
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
            let error = format!("{:#}", run_line(&[&small, more].concat()).unwrap_err());
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
