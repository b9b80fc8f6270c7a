//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode};
use kv_serve::{EngineArgs, ModelArgs, PolicyArgs};

use crate::error::SetupError;

/// Serves a model with compressed KV caches to NVIDIA Dynamo's front end.
#[derive(Debug, Clone, Parser)]
#[command(name = "kv-dynamo", version)]
pub struct Args {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The policies of requests.
    #[command(flatten)]
    pub policies: PolicyArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// The most new tokens of a request. The front end asks for all that fit where its client gives
    /// no number; longer answers end here
    #[arg(long, default_value_t = 4096)]
    pub max_tokens: u32,
    /// The most time of a request, in the queue and until its last token
    #[arg(long, default_value = "10min", value_parser = humantime::parse_duration)]
    #[arg(value_name = "TIME")]
    pub request_timeout: Duration,
    /// The time that running requests have to end after SIGTERM or Ctrl-C, less than Dynamo's
    /// `DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT`
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    #[arg(value_name = "TIME")]
    pub drain_timeout: Duration,
    /// Where the files that the front end reads of the model are written: its tokenizer and chat
    /// template. The front end takes workers for one model's only where this path is the same; by
    /// default `.cache/kv-dynamo/MODEL` in the home folder
    #[arg(long, value_name = "FOLDER")]
    pub card: Option<PathBuf>,
    /// Dynamo's own options.
    #[command(flatten)]
    pub dynamo: CommonArgs,
}

impl Args {
    /// The folder of the files for the front end.
    pub(crate) fn card_folder(&self) -> PathBuf {
        self.card.clone().unwrap_or_else(|| {
            let plain = |letter: char| match letter {
                'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '-' | '_' => letter,
                _ => '_',
            };
            let home = std::env::home_dir().map(|home| home.join(".cache"));
            let name: String = self.model.model.chars().map(plain).collect();
            home.unwrap_or_else(std::env::temp_dir).join("kv-dynamo").join(name)
        })
    }

    /// Checks Dynamo's options, not all of which this worker has.
    ///
    /// # Errors
    /// [`SetupError::Option`].
    pub(crate) fn check(&self) -> Result<(), SetupError> {
        let unsupported = [
            (
                "disaggregation-mode",
                self.dynamo.disaggregation_mode != DisaggregationMode::Aggregated,
            ),
            ("route-to-encoder", self.dynamo.route_to_encoder),
            ("enable-rl", self.dynamo.enable_rl),
        ];
        match unsupported.into_iter().find(|(_, is_set)| *is_set) {
            Some((option, _)) => Err(SetupError::Option { option }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_both_sides_parse() {
        let args = |line: &str| Args::try_parse_from(line.split(' '));
        let parsed = args(
            "kv-dynamo --policy h2o --budget 64 --rows 4 --drain-timeout 2s \
             --discovery-backend file --namespace own",
        );
        let parsed = parsed.unwrap();
        assert_eq!((parsed.model.model.as_str(), parsed.engine.rows), ("needle-1m", 4));
        assert_eq!(
            (parsed.policies.policy.as_str(), parsed.dynamo.namespace.as_str()),
            ("h2o", "own")
        );
        assert_eq!(parsed.dynamo.runtime.discovery_backend.as_deref(), Some("file"));
        assert_eq!(parsed.drain_timeout, Duration::from_secs(2));
        assert!(parsed.check().is_ok());
        for (line, option) in [
            ("kv-dynamo --disaggregation-mode prefill", "disaggregation-mode"),
            ("kv-dynamo --route-to-encoder", "route-to-encoder"),
            ("kv-dynamo --enable-rl", "enable-rl"),
        ] {
            let error = args(line).unwrap().check().unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        let folder = args("kv-dynamo models/own:1").unwrap().card_folder();
        assert!(folder.ends_with("kv-dynamo/models_own_1"), "{}", folder.display());
        let help = args("kv-dynamo --help").unwrap_err().to_string();
        assert!(help.starts_with("Serves a model"), "{help}");
    }
}
