//! `calibrate`: finds the channels that matter most, and writes them down.

use std::time::Instant;

use anyhow::Context;
use kv_core::{counted, device_name, select_device};
use kv_models::{Calibration, Model, TextWindows};

use crate::args::CalibrateArgs;
use crate::console::{print, say};
use crate::files::check_writable;
use crate::options::Common;
use crate::progress::Progress;
use crate::prompts;

/// Why a run without `--output` ends.
const NEEDED: &str = "--output is needed";
/// Channels of a head that are shown.
const SHOWN: usize = 8;

/// Runs `calibrate`.
///
/// # Errors
/// Where something is missing or unsupported; the error names it.
pub(crate) fn run(common: &Common, options: &CalibrateArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    options.check(common)?;
    // Whatever could fail in the end fails now.
    let output = match &options.output {
        Some(path) => path.clone(),
        None => Calibration::beside(&common.model).context(NEEDED)?,
    };
    check_writable(&output).context(if options.output.is_none() { NEEDED } else { "--output" })?;
    let (source, text) = prompts::text(Some(&options.text))?;
    let device = select_device(common.device)?;
    say!("loading {} on {}", common.model, device_name(&device));
    let model = Model::load(&common.model, &device, common.dtype.map(Into::into))
        .with_context(|| format!("model {}", common.model))?;
    let windows = TextWindows::new(&model, &text, options.window, options.samples)?;
    let mut progress = Progress::new(options.samples, "windows");
    let statistic = options.statistic.into();
    let found = Calibration::measure(&model, &source, &windows, statistic, || progress.step())?;
    progress.finish();
    found.save(&output)?;
    say!("written to {}", output.display());
    say!("{:.0} s in all", started.elapsed().as_secs_f64());
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
    print(&text)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use kv_policies::build;
    use serde_json::{Value, json};

    use super::*;
    use crate::args::{Args, Suite};

    fn run_line(line: &[&str]) -> anyhow::Result<()> {
        let args = Args::try_parse_from(["kv-bench", "calibrate"].iter().chain(line))?;
        let Some(Suite::Calibrate(options)) = &args.suite else { panic!("no calibrate") };
        run(&args.common, options)
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
            run_line(&line).unwrap();
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
        ] {
            let error = format!("{:#}", run_line(&[&small, more].concat()).unwrap_err());
            assert!(error.contains(part), "{more:?}: {error}");
        }
    }
}
