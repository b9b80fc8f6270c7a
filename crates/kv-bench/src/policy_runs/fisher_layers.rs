//! Layers that share a budget by Fisher information: `"layers": "fisher"` in a configuration stands
//! for the file beside the model, `{"fisher": PATH}` for another.

use std::path::PathBuf;

use anyhow::Context;
use kv_models::{Fisher, ModelConfig};
use serde_json::{Value, json};

/// The option of the family that says how layers share a budget.
const LAYERS: &str = "layers";

const FISHER: &str = "fisher";

/// The model whose layers share.
pub(super) struct FisherLayers<'a> {
    model: &'a str,
}

impl<'a> FisherLayers<'a> {
    /// For configurations of policies that run on a model.
    pub(super) fn of(model: &'a str) -> Self {
        Self { model }
    }

    /// A configuration with weights, in the policies within it too.
    ///
    /// # Errors
    /// Where a file is missing, is none, or is of a model with another number of layers.
    pub(super) fn resolved(&self, mut config: Value) -> anyhow::Result<Value> {
        each_layers(&mut config, &mut |layers| {
            let Some(path) = self.file(layers)? else { return Ok(()) };
            let count = ModelConfig::from_name(self.model)?.num_layers;
            let allocation = Fisher::load(&path)?.allocation(count);
            *layers = json!(allocation.with_context(|| path.display().to_string())?);
            Ok(())
        })?;
        Ok(config)
    }

    /// The file that an allocation names, if it names one.
    fn file(&self, layers: &Value) -> anyhow::Result<Option<PathBuf>> {
        if layers == FISHER {
            let else_name = r#"`"layers": "fisher"`: give {"fisher": "PATH"}"#;
            return Ok(Some(Fisher::beside(self.model).context(else_name)?));
        }
        Ok(layers.get(FISHER).and_then(Value::as_str).map(PathBuf::from))
    }
}

/// Visits the allocations of a policy and of the policies within it.
fn each_layers(
    config: &mut Value,
    visit: &mut dyn FnMut(&mut Value) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for (key, value) in config.as_object_mut().into_iter().flatten() {
        match key == LAYERS {
            true => visit(value)?,
            false => each_layers(value, visit)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use kv_models::{Fisher, LayerFisher};
    use serde_json::{Value, json};

    use crate::args::Args;
    use crate::policy_runs::PolicyRun;

    fn policy_runs(model: &str, policy: &Value) -> anyhow::Result<Vec<PolicyRun>> {
        let policy = policy.to_string();
        let args = ["kv-bench", "--policy", &policy, "--budget", "0.5", "--model", model];
        Args::try_parse_from(args)?.common.policy_runs(&[])
    }

    fn save(layers: &[f64], path: &std::path::Path) {
        let layer = |&sum: &f64| LayerFisher { keys: 0.25 * sum as f32, values: 0.75 * sum as f32 };
        let layers = layers.iter().map(layer).collect();
        let (model, text) = ("m".into(), "t".into());
        Fisher { model, text, window: 2, samples: 1, layers }.save(path).unwrap();
    }

    #[test]
    fn files_become_weights_and_keep_their_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("measured.json");
        save(&[3.0, 1.0, 4.0, 2.0], &path);
        let name = path.display().to_string();
        let layers = json!({"fisher": name});
        let list = json!([
            {"policy": "snapkv", "layers": layers},
            {"policy": "keepkv", "evictor": {"policy": "h2o", "layers": layers}},
            {"policy": "combine", "decode": {"policy": "h2o"},
             "prefill": {"policy": "snapkv", "layers": layers}},
        ]);
        let found = policy_runs("needle-1m", &list).unwrap();
        let weights = json!({"weights": [0.3, 0.1, 0.4, 0.2]});
        let configs: Vec<Value> = found[1..].iter().map(|c| c.policy.config()).collect();
        assert_eq!(configs[0]["layers"], weights);
        assert_eq!(configs[1]["evictor"]["layers"], weights);
        assert_eq!(configs[2]["prefill"]["layers"], weights);
        let label = |index: usize| found[index + 1].label.as_str();
        assert_eq!(label(0), format!("snapkv layers(fisher={name})"));
        assert_eq!(label(1), format!("keepkv(h2o layers(fisher={name}))"));
        assert_eq!(label(2), format!("snapkv layers(fisher={name}) + h2o"));
    }

    #[test]
    fn a_model_folder_holds_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().to_string_lossy().into_owned();
        let config = include_str!("../../../kv-models/assets/needle-1m/config.json");
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let policy = json!({"policy": "h2o", "layers": "fisher"});
        let error = format!("{:#}", policy_runs(&model, &policy).unwrap_err());
        assert!(error.contains("cargo xtask bench fisher --model"), "{error}");
        let path = folder.path().join("fisher.json");
        save(&[1.0, 1.0, 2.0, 4.0], &path);
        let found = policy_runs(&model, &policy).unwrap();
        assert_eq!(found[1].label, "h2o layers=fisher");
        let weights = json!({"weights": [0.125, 0.125, 0.25, 0.5]});
        assert_eq!(found[1].policy.config()["layers"], weights);
        save(&[1.0, 1.0, 2.0], &path);
        let error = format!("{:#}", policy_runs(&model, &policy).unwrap_err());
        assert!(error.contains("has 3 layers, the model 4"), "{error}");
        let error = format!("{:#}", policy_runs("needle-1m", &policy).unwrap_err());
        assert!(error.contains(r#"give {"fisher": "PATH"}"#), "{error}");
    }
}
