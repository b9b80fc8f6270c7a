//! `cargo xtask conformance`: other people's clients against `kv-serve`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::util;

/// Run OpenAI's own clients, a fuzzer and a load generator against a server on loopback.
///
/// Nothing but loopback is reached. What cannot run is left out, and named with what it needs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A Python with the packages openai, schemathesis and aiperf
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: PathBuf,
    /// Fails where a tool is missing
    #[arg(long)]
    require_all: bool,
    /// A model, as kv-serve takes it; with --url, the one that the server has
    #[arg(long, default_value = "needle-1m")]
    model: String,
    /// A server that runs already, instead of one that this starts. The fuzzer waits a minute for
    /// an answer: on a CPU, start the server with `--max-tokens 512`. Clients try tools: unless the
    /// model's template takes them, add `--chat-template
    /// crates/kv-serve/conformance/chat_template.jinja`
    #[arg(long, value_name = "http://HOST:PORT")]
    url: Option<String>,
}

/// A server that ends with this.
struct Server {
    child: Child,
    url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client, fuzzer or load generator.
struct Tool {
    name: &'static str,
    /// What it needs.
    needs: &'static str,
    /// What it runs; `None` where something is missing.
    command: Option<Command>,
    /// Runs it, and fails where it has found something wrong.
    run: fn(&mut Command) -> Result<()>,
}

/// Runs the command.
///
/// # Errors
///
/// When the server does not start, or a tool finds something wrong.
pub(crate) fn run(args: &Args) -> Result<()> {
    let scripts = util::root().join("crates/kv-serve/conformance");
    let server = match &args.url {
        Some(_) => None,
        None => Some(start(&args.model, &scripts)?),
    };
    let url = args.url.clone().or_else(|| server.as_ref().map(|server| server.url.clone()));
    let url = url.unwrap_or_default();
    let (mut failed, mut missing) = (Vec::new(), Vec::new());
    for tool in tools(args, &scripts, &url) {
        let Some(mut command) = tool.command else {
            eprintln!("== {}: left out", tool.name);
            missing.push(format!("{}: {}", tool.name, tool.needs));
            continue;
        };
        eprintln!("== {}", tool.name);
        if let Err(error) = (tool.run)(&mut command) {
            eprintln!("{error:#}");
            failed.push(tool.name);
        }
    }
    for tool in &missing {
        eprintln!("left out: {tool}");
    }
    if !failed.is_empty() {
        bail!("something is wrong, say {}", failed.join(", "));
    }
    if args.require_all && !missing.is_empty() {
        bail!("tools are missing");
    }
    Ok(())
}

/// Builds a server, and starts it on a port of its own.
fn start(model: &str, scripts: &Path) -> Result<Server> {
    let program = util::build_program("kv-serve", "")?;
    let mut command = Command::new(program);
    command.args([model, "--device", "cpu", "--port", "0", "--chat-template"]);
    // The embedded model has no template, and clients try tools.
    command.arg(scripts.join("chat_template.jinja"));
    // Schemathesis asks for several choices without a limit, and waits a minute for the answer.
    command.args(["--max-tokens", "512"]);
    command.env_remove("KV_SERVE_API_KEY").stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start kv-serve")?;
    let log = child.stderr.take().context("kv-serve has no log")?;
    let mut server = Server { child, url: String::new() };
    let mut lines = BufReader::new(log).lines();
    for line in lines.by_ref() {
        let line = line?;
        eprintln!("{line}");
        if let Some((_, rest)) = line.split_once("listening on ") {
            server.url = rest.split(',').next().unwrap_or(rest).trim().to_string();
            break;
        }
    }
    if server.url.is_empty() {
        bail!("kv-serve did not start");
    }
    // A log that nobody reads would hold the server up.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("{line}")));
    Ok(server)
}

fn tools(args: &Args, scripts: &Path, url: &str) -> [Tool; 6] {
    let python = &args.python;
    let program = python.display().to_string();
    let has = |package: &str| util::succeeds(&program, &["-c", &format!("import {package}")]);
    let modules = util::target_dir().join("conformance/node_modules");
    let node = modules.join("openai").is_dir() && util::succeeds("node", &["--version"]);
    // Programs of Python packages lie beside the Python that has them.
    let beside = |name: &str| python.with_file_name(name);
    let schemathesis = || {
        let mut command = Command::new(beside("schemathesis"));
        command.args(["run", &format!("{url}/openapi.json"), "--max-examples", "60"]);
        command.args(["--checks", "not_a_server_error,content_type_conformance"]);
        command.args(["--seed", "1", "--request-timeout", "60", "--workers", "2"]);
        command.current_dir(std::env::temp_dir());
        command
    };
    [
        Tool {
            name: "openai for Python",
            needs: "pip install openai, and name its Python by --python",
            command: has("openai").then(|| {
                let mut command = Command::new(python);
                command.arg(scripts.join("client.py")).arg(url);
                command
            }),
            run: util::run,
        },
        Tool {
            name: "openai for JavaScript",
            needs: "npm install --prefix target/conformance openai (and node itself)",
            command: node.then(|| {
                let mut command = Command::new("node");
                command.arg(scripts.join("client.cjs")).arg(url).env("NODE_PATH", &modules);
                command
            }),
            run: util::run,
        },
        Tool {
            name: "schemathesis",
            needs: "pip install schemathesis, and name its Python by --python",
            command: has("schemathesis").then(schemathesis),
            run: util::run,
        },
        Tool {
            name: "64 clients",
            needs: "install Python 3",
            command: util::succeeds(&program, &["--version"]).then(|| {
                let mut command = Command::new(python);
                command.arg(scripts.join("load.py")).arg(url);
                command
            }),
            run: util::run,
        },
        oha(url),
        aiperf(args, url, has("aiperf")),
    ]
}

/// Load by oha, which ends well also where answers are errors.
fn oha(url: &str) -> Tool {
    const REQUESTS: u64 = 200;
    let body = r#"{"messages": [{"role": "user", "content": "The sea was calm."}],
        "max_tokens": 32}"#;
    let command = util::succeeds("oha", &["--version"]).then(|| {
        let mut command = Command::new("oha");
        command.args(["-n", &REQUESTS.to_string(), "-c", "16", "-m", "POST", "-d", body]);
        command.args(["-H", "content-type: application/json"]);
        command.args(["--no-tui", "--output-format", "json"]);
        command.arg(format!("{url}/v1/chat/completions"));
        command
    });
    let run = |command: &mut Command| {
        let found: Value = serde_json::from_str(&util::output(command)?)?;
        let (codes, errors) = (&found["statusCodeDistribution"], &found["errorDistribution"]);
        if codes["200"] != REQUESTS {
            bail!("of {REQUESTS} requests: status codes {codes}, errors {errors}");
        }
        let [rate, half, most] = [
            &found["summary"]["requestsPerSec"],
            &found["latencyPercentiles"]["p50"],
            &found["latencyPercentiles"]["p99"],
        ]
        .map(|number| number.as_f64().unwrap_or(f64::NAN));
        eprintln!(
            "{REQUESTS} answers, {rate:.1} a second; {half:.3} s each (median), {most:.3} s (p99)"
        );
        Ok(())
    };
    Tool { name: "oha", needs: "cargo install oha", command, run }
}

/// Load by aiperf, which counts tokens by the served model's tokenizer. Its own tokenizer's
/// vocabulary would have to be downloaded.
fn aiperf(args: &Args, url: &str, is_there: bool) -> Tool {
    let needs = "pip install aiperf, name its Python by --python, and by --model a folder with the \
                 model's tokenizer.json";
    let folder = model_folder(&args.model).filter(|_| is_there);
    let command = folder.map(|folder| {
        let mut command = Command::new(args.python.with_file_name("aiperf"));
        command.args(["profile", "--url", url, "--endpoint-type", "chat", "--streaming"]);
        command.arg("--model").arg(folder.file_name().unwrap_or(folder.as_os_str()));
        command.arg("--tokenizer").arg(&folder);
        command.args(["--concurrency", "8", "--request-count", "64"]);
        command.args(["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32"]);
        command.args(["--ui", "none", "--artifact-dir"]);
        command.arg(util::target_dir().join("conformance/aiperf"));
        command
    });
    Tool { name: "aiperf", needs, command, run: util::run }
}

/// The folder of a model with a tokenizer.
fn model_folder(model: &str) -> Option<PathBuf> {
    let folder = match model {
        "needle-1m" => util::root().join("crates/kv-models/assets/needle-1m"),
        model => std::path::absolute(model).ok()?,
    };
    folder.join("tokenizer.json").is_file().then_some(folder)
}
