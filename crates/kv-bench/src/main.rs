//! `kv-bench`: what each KV-cache compression policy costs and keeps, measured.

mod args;
mod calibrate;
mod console;
mod contenders;
mod families;
mod files;
mod fisher;
mod inputs;
mod interrupt;
mod journal;
mod progress;
mod prompts;
mod record;
mod report;
mod run;
mod sources;
mod suites;
mod table;
#[cfg(test)]
mod testing;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    let args = args::Args::parse();
    match interrupt::tell().and_then(|()| run::run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::say!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
