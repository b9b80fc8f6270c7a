//! Tokens of every policy on the embedded model, against tokens that an earlier version wrote.
//!
//! A change that should change nothing must leave these tokens alone. After a change that means to
//! change what a policy does, write the file anew and look at the difference:
//!
//! ```sh
//! cargo test --release --workspace --test lib -- --ignored tokens::write_tokens
//! ```
//!
//! CPUs of different vector widths round logits differently by some 1e-5. The file must not depend
//! on that: a configuration whose decisions are nearly tied (two slots to merge or to evict with
//! almost equal scores, two tokens with almost equal logits) gives other tokens on another CPU.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kv_models::{Model, Sampling, Session};
use kv_policies::{POLICIES, build};
use kv_testing::devices;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::support::{GATES, embedded_in_f32, prompts};

/// Steps behind the prompts. CIS's blocks of 16 end within them.
const STEPS: usize = 24;
/// Seeds of the three rows, for policies that draw.
const SEEDS: [u64; 3] = [3, 4, 5];

/// What one policy did with three prompts of different lengths.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Outcome {
    /// Greedy tokens of each prompt.
    tokens: Vec<Vec<u32>>,
    /// Slots held in the end by each layer, summed over prompts and heads.
    slots: Vec<usize>,
}

/// Every policy of the registry, and options that take other paths.
fn configs() -> Vec<Value> {
    let named = POLICIES.iter().filter(|entry| entry.needs_no_more());
    let mut configs: Vec<Value> =
        named.map(|entry| json!({"policy": entry.name, "budget": 0.25})).collect();
    configs.extend([
        json!({"policy": "streaming-llm", "budget": 0.25, "rerotate": true}),
        json!({"policy": "snapkv", "budget": 24, "fit_window": false}),
        json!({"policy": "h2o", "budget": 0.25, "interval": 8}),
        json!({"policy": "r-kv", "budget": 0.25, "interval": 8}),
        json!({"policy": "longflow", "budget": 64}),
        json!({"policy": "longflow", "budget": 64, "scope": "head", "recents": 8}),
        json!({"policy": "longflow", "budget": 64, "sinks": 4}),
        json!({"policy": "balancekv-stream", "budget": 0.5, "joint": false}),
        json!({"policy": "keepkv", "budget": 0.25, "order": "evict-first"}),
        json!({"policy": "keepkv", "budget": 0.25, "evictor": "h2o"}),
        json!({"policy": "keepkv", "budget": 0.25, "evictor": "snapkv"}),
        json!({"policy": "keepkv", "budget": 0.25, "evictor": "longflow"}),
        json!({"policy": "keepkv", "budget": 0.25, "key": "additive"}),
        json!({"policy": "keepkv", "budget": 0.25, "spare_protected": true}),
        json!({"policy": "keepkv", "budget": 0.25, "pristine": 0.5}),
        json!({"policy": "keepkv", "budget": 0.25, "background": true}),
        json!({"policy": "keepkv", "budget": 0.25, "inherit": true}),
        json!({"policy": "keepkv", "budget": 0.25, "period": 6}),
        json!({"policy": "d2o", "budget": 0.25, "spare_protected": true}),
        json!({"policy": "cam", "budget": 0.25, "candidates": "all"}),
        json!({"policy": "kvreviver", "budget": 64}),
        json!({"policy": "kvreviver", "vague": "sketch", "budget": 64}),
        json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.25}),
        json!({"policy": "kvreviver", "vague": "archive", "budget": 0.25}),
        json!({"policy": "kvreviver", "budget": 0.25, "signed_keys": true}),
        json!({"policy": "kvreviver", "budget": 0.25, "replace_rate": null}),
        json!({"policy": "hshare", "budget": 0.25, "layers": 0.5}),
        json!({"policy": "duo-attention", "budget": 0.4, "alpha": GATES}),
        json!({"policy": "cis", "budget": 64, "threshold": -1.0}),
        json!({"policy": "cis", "budget": 64, "similarity": "query"}),
        json!({"policy": "cis", "budget": 64, "neighbours": "all", "compared": "retrieved"}),
        json!({"policy": "cis", "budget": 64, "target": 0.1}),
        json!({"policy": "cis", "budget": 64, "labels": 0.125}),
        json!({"policy": "psaw", "phi": 0.2, "start": 0}),
        json!({"policy": "psaw", "phi": 0.2, "start": 0, "free": true}),
        json!({"policy": "etf", "psi": 0.3, "start": 1}),
        json!({"policy": "etf", "psi": 0.3, "start": 1, "reuse": "keys-values"}),
        json!({"policy": "cpe", "budget": 64, "psaw": {"phi": 0.2, "start": 0}}),
        json!({
            "policy": "combine",
            "prefill": {"policy": "snapkv", "budget": 0.25},
            "decode": {"policy": "h2o", "budget": 0.25},
        }),
    ]);
    configs
}

fn run(model: &Model, config: &Value) -> Outcome {
    let policy = build(config).unwrap_or_else(|error| panic!("{config}: {error}"));
    let session = Session::start(model, policy, &prompts(model), &SEEDS, STEPS)
        .unwrap_or_else(|error| panic!("{config}: {error}"));
    let mut decoder = session.decoder(&SEEDS.map(|_| Sampling::default())).unwrap();
    let mut tokens = vec![Vec::new(); SEEDS.len()];
    for _ in 0..STEPS {
        let next = decoder.next_tokens().unwrap_or_else(|error| panic!("{config}: {error}"));
        tokens.iter_mut().zip(next).for_each(|(row, token)| row.push(token));
    }
    let layers = &decoder.session().cache().layers;
    let slots = layers.iter().map(|layer| layer.layout().lengths().iter().sum()).collect();
    Outcome { tokens, slots }
}

fn outcomes() -> BTreeMap<String, Outcome> {
    let cpu = devices().into_iter().find(|tested| tested.name == "cpu");
    let model = embedded_in_f32(&cpu.expect("tests are built with the CPU backend"));
    configs().iter().map(|config| (key(config), run(&model, config))).collect()
}

/// A configuration as the file has it, whatever the order of its fields is.
fn key(config: &Value) -> String {
    let mut config = config.clone();
    config.sort_all_objects();
    config.to_string()
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/tokens.json")
}

#[test]
fn every_policy_gives_the_tokens_on_file() {
    let expected: BTreeMap<String, Outcome> =
        serde_json::from_str(include_str!("tokens.json")).unwrap();
    let found = outcomes();
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "tokens.json has other policies than the registry: write it anew"
    );
    let other: Vec<&String> =
        found.iter().filter(|(config, one)| expected[*config] != **one).map(|(c, _)| c).collect();
    for config in &other {
        println!("{config}\n  on file {:?}\n  found   {:?}", expected[*config], found[*config]);
    }
    assert!(other.is_empty(), "{} of {} policies differ", other.len(), found.len());
}

/// Engines refuse prompts by this number before they compute them.
#[test]
fn every_policy_keeps_as_many_slots_as_it_says_at_least() {
    let model = embedded_in_f32(&devices().remove(0));
    let prompts = prompts(&model);
    let mut fewer = Vec::new();
    for config in configs() {
        let policy = build(&config).unwrap_or_else(|error| panic!("{config}: {error}"));
        let session = Session::start(&model, policy.clone(), &prompts, &SEEDS, STEPS)
            .unwrap_or_else(|error| panic!("{config}: {error}"));
        for (row, prompt) in prompts.iter().enumerate() {
            let (mut held, mut heads) = (0, 0);
            for layer in &session.cache().layers {
                let of_row = row * layer.layout().kv_heads();
                let lengths = &layer.layout().lengths()[of_row..][..layer.layout().kv_heads()];
                held += lengths.iter().sum::<usize>();
                heads += lengths.len();
            }
            let least = policy.least_kept(prompt.len());
            if least * heads > held || least > prompt.len() {
                fewer.push(format!(
                    "{config}: {held} slots of {heads} heads, at least {least} each"
                ));
            }
        }
    }
    assert!(fewer.is_empty(), "{fewer:#?}");
}

#[test]
#[ignore = "writes the file that the other test reads"]
fn write_tokens() {
    let outcomes = outcomes();
    // One policy a line, so that a difference shows which policies changed.
    let lines: Vec<String> = outcomes
        .iter()
        .map(|(config, outcome)| {
            let outcome = serde_json::to_string(outcome).unwrap();
            format!("{}: {outcome}", Value::from(config.as_str()))
        })
        .collect();
    std::fs::write(path(), format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
}
