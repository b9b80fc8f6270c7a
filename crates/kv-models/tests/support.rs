use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use burn::tensor::DType;
use kv_models::{Generated, Model, Request, generate};
use kv_policies::{POLICIES, build};
use kv_testing::TestDevice;
use serde_json::{Value, json};

/// The embedded model on a device.
pub(crate) fn embedded(tested: &TestDevice) -> Model {
    Model::load("needle-1m", &tested.device, None).unwrap()
}

/// The same with weights and cache in f32, for tests that compare what is computed in different
/// orders: in bf16 a logit's last bit is more than many differences between tokens.
pub(crate) fn embedded_in_f32(tested: &TestDevice) -> Model {
    Model::load("needle-1m", &tested.device, Some(DType::F32)).unwrap()
}

/// The embedded model as a folder of its own, for tests that change it. The files are compiled in,
/// so that the tests run on machines without the sources.
pub(crate) fn embedded_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files: [(&str, &[u8]); 3] = [
        ("config.json", include_bytes!("../assets/needle-1m/config.json")),
        ("model.safetensors", include_bytes!("../assets/needle-1m/model.safetensors")),
        ("tokenizer.json", include_bytes!("../assets/needle-1m/tokenizer.json")),
    ];
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// Changes the configuration of a copy.
pub(crate) fn configure(folder: &Path, key: &str, value: Value) {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config[key] = value;
    std::fs::write(&path, config.to_string()).unwrap();
}

/// A larger model's folder in the folder that `KV_MODELS_DIR` names. A relative one counts from the
/// workspace.
pub(crate) fn model_folder(name: &str) -> Option<PathBuf> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = workspace.join(std::env::var("KV_MODELS_DIR").ok()?).join(name);
    folder.is_dir().then_some(folder)
}

/// Gates of the embedded model's heads for DuoAttention, which were not trained.
pub(crate) const GATES: [[f64; 2]; 4] = [[0.1, 0.7], [0.9, 0.2], [0.4, 0.5], [0.3, 0.8]];

/// Every policy of the registry at a budget, and some that combine or space out decisions. On
/// devices that do not [run everything](TestDevice::runs_everything), one of each mechanism.
pub(crate) fn every_policy(budget: f64, tested: &TestDevice) -> Vec<Value> {
    let mechanisms = ["full", "h2o", "longflow", "quest"];
    let everything = tested.runs_everything();
    let named = POLICIES
        .iter()
        .filter(|entry| entry.needs_no_more())
        .filter(|entry| everything || mechanisms.contains(&entry.name));
    let mut configs: Vec<Value> =
        named.map(|entry| json!({"policy": entry.name, "budget": budget})).collect();
    configs.push(json!({"policy": "streaming-llm", "budget": budget, "rerotate": true}));
    if everything {
        configs.push(json!({"policy": "duo-attention", "budget": budget, "alpha": GATES}));
        configs.push(json!({"policy": "r-kv", "budget": budget, "interval": 8}));
        // By default, three of the embedded model's four layers are as they are.
        configs.push(json!({"policy": "psaw", "phi": 0.2, "start": 0, "free": true}));
        configs.push(json!({"policy": "etf", "psi": 0.3, "start": 1}));
        configs.push(json!({"policy": "h2o", "budget": budget, "interval": 8}));
        configs.push(json!({
            "policy": "combine",
            "prefill": {"policy": "snapkv", "budget": budget},
            "decode": {"policy": "h2o", "budget": budget},
        }));
    }
    configs
}

/// Prompts of different lengths, with something to find in each.
pub(crate) fn prompts(model: &Model) -> Vec<Vec<u32>> {
    let filler = "The sea was calm that day, and the old boat lay upon the sand. ";
    [("clever fiddle", "21963", 9), ("green lamp", "70415", 14), ("old door", "38820", 9)]
        .iter()
        .map(|(what, number, repeats)| {
            let before = filler.repeat(repeats / 2);
            let after = filler.repeat(repeats - repeats / 2);
            let text = format!(
                "{before}\nThe secret number of the {what} is {number}.\n{after}\nQuestion: What \
                 is the secret number of the {what}?\nAnswer: "
            );
            model.encode(&text).unwrap()
        })
        .collect()
}

pub(crate) fn run(
    model: &Model,
    config: &Value,
    prompts: &[Vec<u32>],
    count: usize,
) -> Vec<Generated> {
    let requests: Vec<Request> = prompts
        .iter()
        .enumerate()
        .map(|(seed, prompt)| {
            let mut request = Request::greedy(prompt.clone(), count);
            // Policies that draw must depend on the request, not on its row.
            request.sampling.seed = prompt.len() as u64 + 7 * seed as u64;
            request.stop_at_end = false;
            request
        })
        .collect();
    run_requests(model, config, &requests)
}

pub(crate) fn run_requests(model: &Model, config: &Value, requests: &[Request]) -> Vec<Generated> {
    let policy = build(config).unwrap();
    generate(model, policy, requests, |_| std::ops::ControlFlow::Continue(()))
        .unwrap_or_else(|error| panic!("{config}: {error}"))
}

/// What is logged as a warning meanwhile.
pub(crate) fn warnings_of(run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}
