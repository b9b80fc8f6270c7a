//! Runs of the program, for tests.

use std::ffi::OsString;

use clap::Parser;

use crate::args::Args;
use crate::record::{Record, read_json};

/// The records and the report of a command line behind `kv-bench`, on the CPU.
pub(crate) fn ran(words: &[&str]) -> anyhow::Result<(Vec<Record>, String)> {
    let folder = tempfile::tempdir()?;
    let [json, report] = ["records.json", "report.html"].map(|name| folder.path().join(name));
    let mut line: Vec<OsString> = ["kv-bench"].iter().chain(words).map(Into::into).collect();
    line.extend(["--device".into(), "cpu".into(), "--json".into(), json.clone().into()]);
    line.extend(["--report".into(), report.clone().into()]);
    crate::run::run(&Args::try_parse_from(line)?)?;
    Ok((read_json(&json)?, std::fs::read_to_string(report)?))
}

/// The records and the report of a figure's quick form, on the CPU.
pub(crate) fn quick(figure: &str) -> (Vec<Record>, String) {
    ran(&["paper", figure, "--quick"]).unwrap()
}
