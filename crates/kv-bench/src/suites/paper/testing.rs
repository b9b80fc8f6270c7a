//! What tests of figures share.

use clap::Parser;

use crate::args::Args;
use crate::record::{Record, read_json};

/// The records and the report of a figure's quick form, on the CPU.
pub(super) fn quick(figure: &str) -> (Vec<Record>, String) {
    let folder = tempfile::tempdir().unwrap();
    let [json, report] = ["records.json", "report.html"].map(|name| folder.path().join(name));
    let line = ["kv-bench", "paper", figure, "--quick", "--device", "cpu", "--json"];
    let line = line.into_iter().map(Into::into).chain([json.clone().into_os_string()]);
    let line = line.chain(["--report".into(), report.clone().into_os_string()]);
    crate::run::run(&Args::try_parse_from(line).unwrap()).unwrap();
    (read_json(&json).unwrap(), std::fs::read_to_string(report).unwrap())
}
