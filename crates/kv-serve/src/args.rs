//! The command line.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use burn::tensor::DType;
use bytesize::ByteSize;
use clap::builder::NonEmptyStringValueParser;
use clap::{Parser, ValueEnum};
use kv_core::{Budget, DeviceChoice};

/// Serves a model by OpenAI's HTTP API, with compressed KV caches.
#[derive(Debug, Clone, Parser)]
#[command(name = "kv-serve", version)]
pub struct Args {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,

    /// The address to listen on, or a name of this machine such as `localhost`; `0.0.0.0` for all
    #[arg(long, default_value = "127.0.0.1", value_parser = address)]
    pub host: IpAddr,
    /// The port to listen on; 0 for any
    #[arg(long, default_value_t = 8000)]
    pub port: u16,

    /// The policies of requests.
    #[command(flatten)]
    pub policies: PolicyArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Memory for compressed contexts, besides --cache-bytes
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    pub context_bytes: ByteSize,
    /// Where compressed contexts are saved; without it, saving is refused
    #[arg(long, value_name = "FOLDER")]
    pub contexts: Option<PathBuf>,

    /// A key that clients send as `Authorization: Bearer KEY`; may be given several times, or hold
    /// several keys with commas between them. No key has a comma
    #[arg(long, env = "KV_SERVE_API_KEY", hide_env_values = true, value_delimiter = ',')]
    #[arg(value_name = "KEY")]
    pub api_key: Vec<String>,
    /// An origin whose pages may call the API (`https://example.org`), or `*`; none by default. May
    /// be given several times
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub cors: Vec<String>,
    /// The most new tokens of a request, and the number of a chat that gives none
    #[arg(long, default_value_t = 4096, value_parser = positive)]
    pub max_tokens: usize,
    /// The most choices of a request (`n`, times its prompts)
    #[arg(long, default_value_t = 16, value_parser = positive)]
    pub max_choices: usize,
    /// The largest body of a request
    #[arg(long, default_value = "16MiB", value_name = "SIZE", value_parser = some_bytes)]
    pub max_body: ByteSize,
    /// Memory for bodies that are being read; beyond it, requests are refused. At least one of the
    /// largest body fits
    #[arg(long, default_value = "256MiB", value_name = "SIZE", value_parser = some_bytes)]
    pub body_bytes: ByteSize,
    /// The most connections that are open at once; further clients wait
    #[arg(long, default_value_t = 16384, value_parser = positive)]
    pub max_connections: usize,
    /// The most time of a request, in the queue and until its last token
    #[arg(long, default_value = "10min", value_parser = some_time)]
    #[arg(value_name = "TIME")]
    pub request_timeout: Duration,
    /// The most time that a client takes to send a request's head, and its body, and in which it
    /// takes none of its answer's bytes
    #[arg(long, default_value = "60s", value_parser = some_time)]
    #[arg(value_name = "TIME")]
    pub client_timeout: Duration,
    /// The time that running requests have to end after SIGTERM or Ctrl-C
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    #[arg(value_name = "TIME")]
    pub drain_timeout: Duration,
    /// What to log, as `RUST_LOG` takes it: `info`, `debug`, `kv_serve=debug,warn`
    #[arg(long, default_value = "info")]
    pub log: String,
}

/// Which model is loaded, and where.
#[derive(Debug, Clone, clap::Args)]
pub struct ModelArgs {
    /// A model folder, a GGUF file, a hub id, `random:PRESET`, or `needle-1m`, which is embedded
    #[arg(default_value = "needle-1m")]
    pub model: String,
    /// The model's name in the API; by default its folder's or file's
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub name: Option<String>,
    /// `auto`, `cpu`, `wgpu[:i]`, `vulkan[:i]`, `metal[:i]` or `cuda[:i]`
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Weights, activations and cache; by default f32 on the CPU, the model's own elsewhere
    #[arg(long, value_enum)]
    pub dtype: Option<Float>,
    /// Divides the model among so many processes, each with its own GPU. If torchrun, srun, mpirun
    /// or Kubernetes has started several processes, these are used and none are started
    #[arg(long, value_name = "RANKS", value_parser = positive)]
    pub tensor_parallel: Option<usize>,
    /// A `tokenizer.json`, for models without one such as `random:PRESET`
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// A chat template (Jinja), instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
}

/// Which policies requests have.
#[derive(Debug, Clone, clap::Args)]
pub struct PolicyArgs {
    /// The policy of requests that name none: a name, or a configuration as a JSON object
    #[arg(long, default_value = "snapkv")]
    pub policy: String,
    /// The budget of requests that name none: a share of the prompt (0.25) or tokens (512)
    #[arg(long, default_value = "0.25")]
    pub budget: Budget,
    /// The least tokens that --budget leaves of a prompt where it is a share: shorter prompts are
    /// kept whole. Under policies whose decode steps only append, such as snapkv; 0 for none
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub least_budget: usize,
    /// A policy that requests may name, besides the default one; all by default, `none` for none.
    /// May be given several times
    #[arg(long, value_name = "NAME")]
    pub allow_policy: Vec<String>,
    /// The most of its prompt that a request may keep by a policy or a budget that it names: a
    /// share or tokens; all by default. A request may always keep as many tokens as --policy and
    /// --budget would keep of its prompt
    #[arg(long, value_name = "BUDGET")]
    pub most_kept: Option<Budget>,
}

/// How the engine runs.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// The most requests of a group that decode at once (`--groups`). On a GPU a step takes as long
    /// for one as for all of them
    #[arg(long, default_value_t = 16, value_parser = positive)]
    pub rows: usize,
    /// The most requests that wait; beyond them, requests are refused
    #[arg(long, default_value_t = 256, value_parser = positive)]
    pub queue: usize,
    /// Memory for the caches of requests, such as 4GiB
    #[arg(long, default_value = "4GiB", value_name = "SIZE", value_parser = some_bytes)]
    pub cache_bytes: ByteSize,
    /// Into how many equal parts --cache-bytes is divided. A part serves one kind of requests at a
    /// time. snapkv, full and most other policies are one kind; each configuration of h2o, longflow
    /// and others that drop tokens while they decode is a kind of its own (docs/serving.md)
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub groups: usize,
    /// The share of the time that prompts may take while other requests decode, 0 to 0.95: more
    /// lets requests start earlier, less lets tokens come more evenly
    #[arg(long, default_value_t = 0.5, value_name = "SHARE", value_parser = share)]
    pub prefill_share: f64,
    /// Memory for whole keys and values of prompts, for those that begin alike, besides
    /// --cache-bytes
    #[arg(long, default_value = "0B", value_name = "SIZE")]
    pub prefix_bytes: ByteSize,
}

/// Floating-point types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Float {
    /// 32 bits.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floats.
    Bf16,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::BF16,
        }
    }
}

fn address(text: &str) -> Result<IpAddr, String> {
    let named = || (text, 0).to_socket_addrs().ok()?.next().map(|found| found.ip());
    text.parse().ok().or_else(named).ok_or_else(|| {
        "expected an IP address such as 127.0.0.1, or a name that this machine knows".into()
    })
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=0.95).contains(share));
    share.ok_or_else(|| "expected a number from 0 to 0.95".into())
}

/// An origin as browsers send it, in lower case: a scheme, a host and perhaps a port.
fn origin(text: &str) -> Result<String, String> {
    let text = text.to_ascii_lowercase();
    let uri: Option<Uri> = text.parse().ok();
    let bare = uri.and_then(|uri| {
        let (scheme, host) = (uri.scheme_str()?, uri.host()?);
        Some(match uri.port_u16() {
            Some(port) => format!("{scheme}://{host}:{port}"),
            None => format!("{scheme}://{host}"),
        })
    });
    if text == "*" || bare.as_ref() == Some(&text) {
        return Ok(text);
    }
    Err("expected an origin such as `https://example.org` or `http://localhost:3000`, without a \
         path, or `*`"
        .into())
}

fn some_bytes(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>()? {
        size if size.as_u64() == 0 => Err("expected at least one byte".into()),
        size => Ok(size),
    }
}

fn some_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text).map_err(|error| error.to_string())? {
        Duration::ZERO => Err("expected more than no time".into()),
        time => Ok(time),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number, at least 1".into()),
        Ok(number) => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_parses() {
        let args = |line: &str| Args::try_parse_from(line.split(' '));
        let parsed =
            args("kv-serve --cache-bytes 1GiB --api-key a,b --request-timeout 2s").unwrap();
        assert_eq!((parsed.engine.cache_bytes.as_u64(), parsed.api_key.len()), (1 << 30, 2));
        assert_eq!((parsed.model.model.as_str(), parsed.port), ("needle-1m", 8000));
        assert_eq!(parsed.request_timeout, Duration::from_secs(2));
        assert!(args("kv-serve --host localhost").unwrap().host.is_loopback());
        let origins = "--cors https://Example.org --cors http://[::1]:3000 --cors *";
        let parsed = args(&format!("kv-serve {origins}")).unwrap();
        assert_eq!(parsed.cors, ["https://example.org", "http://[::1]:3000", "*"]);
        for (line, part) in [
            ("kv-serve --rows 0", "at least 1"),
            ("kv-serve --queue 0", "at least 1"),
            ("kv-serve --max-connections 0", "at least 1"),
            ("kv-serve --budget 1.5", "at most 1"),
            ("kv-serve --cache-bytes 0", "at least one byte"),
            ("kv-serve --request-timeout 0s", "more than no time"),
            ("kv-serve --prefill-share 1", "0.95"),
            ("kv-serve --host nowhere", "invalid"),
            ("kv-serve --device vulcan", "vulkan"),
            ("kv-serve --cache-bytes much", "invalid"),
            ("kv-serve --cors notanorigin", "expected an origin"),
            ("kv-serve --cors localhost:3000", "expected an origin"),
            ("kv-serve --cors https://example.org/", "expected an origin"),
            ("kv-serve --cors https://me@example.org", "expected an origin"),
            ("kv-serve --cors https://example.org:port", "expected an origin"),
        ] {
            let error = args(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
