//! Prompts that are shorter than what policies observe, protect or need.

use burn::tensor::{Device, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_policies::{Policy, Step};
use kv_testing::{Numbers, devices};
use serde_json::{Value, json};

use super::policies::all;
use super::support::{LAYER, Prompt, kept, policy, step};

const STEPS: usize = 12;

/// A prompt of so many tokens, and steps behind it.
struct Run {
    prompt: Prompt,
    steps: Vec<Step>,
}

fn run(tokens: usize, device: &Device) -> Run {
    let mut numbers = Numbers::new(tokens as u64);
    let mut draw =
        |heads: usize, count: usize| -> Tensor<4> { numbers.tensor([1, heads, count, 16], device) };
    let query = draw(4, tokens);
    let prompt = Prompt {
        raw_query: Some(query.clone()),
        frequencies: (0..8).map(|pair| 0.5f64.powi(pair)).collect(),
        ..Prompt::new(query, draw(2, tokens), draw(2, tokens))
    };
    let (query, keys, values) = (draw(4, STEPS), draw(2, STEPS), draw(2, STEPS));
    let steps = (0..STEPS).map(|index| {
        let mut step = step(&query, &keys, &values, index, tokens + index);
        step.inverse_frequencies = prompt.frequencies.clone().into();
        step
    });
    let steps = steps.collect();
    Run { prompt, steps }
}

fn decode(policy: &dyn Policy, cache: &mut LayerCache, steps: &[Step]) -> Vec<f32> {
    let outputs = steps.iter().map(|step| {
        let output = policy.step(LAYER, cache, step.clone()).unwrap();
        read_f32("output", output).unwrap()
    });
    outputs.flatten().collect()
}

/// A budget that is a share may come to next to nothing.
#[test]
fn shares_of_any_prompt_work() {
    let device = &devices()[0].device;
    let ends = [
        json!({"policy": "streaming-llm", "budget": 0.25, "sinks": 8}),
        json!({"policy": "h2o", "budget": 0.25, "sinks": 4, "recents": 16}),
        json!({"policy": "longflow", "budget": 0.25, "sinks": 4, "recents": 16}),
        json!({"policy": "balancekv", "budget": 0.25, "sinks": 32, "recents": 32}),
        json!({"policy": "cis", "budget": 0.25, "sinks": 8, "recents": 32}),
        json!({"policy": "hshare", "budget": 0.25, "sinks": 8, "recents": 32}),
    ];
    for config in all(json!(0.25)).into_iter().chain(ends) {
        let policy = policy(config.clone());
        for tokens in [1, 2, 3, 5, 7, 12, 19, 20, 33, 63, 64] {
            let run = run(tokens, device);
            let mut cache = run.prompt.compress(&*policy, STEPS);
            let outputs = decode(&*policy, &mut cache, &run.steps);
            assert!(outputs.iter().all(|x| x.is_finite()), "{config} behind {tokens} tokens");
        }
    }
}

/// A budget below twice the observation window keeps the first tokens beside a smaller window.
#[test]
fn short_budgets_keep_their_sinks() {
    for tested in devices() {
        let run = run(58, &tested.device);
        for name in ["snapkv", "pyramidkv", "adakv", "longflow"] {
            let config = |fit: bool| match name {
                "longflow" => {
                    json!({"policy": name, "budget": 0.5, "prefill": {"fit_window": fit}})
                }
                _ => json!({"policy": name, "budget": 0.5, "fit_window": fit}),
            };
            let cache = run.prompt.compress(&*policy(config(true)), STEPS);
            let context = format!("{name} on {}", tested.name);
            for range in 0..2 {
                let kept = kept(&cache, range);
                assert!((0..4).all(|first| kept.contains(&first)), "{context}: {kept:?}");
                // A window of half of 29 slots.
                assert!((44..58).all(|last| kept.contains(&last)), "{context}: {kept:?}");
                let between = kept.iter().filter(|token| (4..44).contains(*token)).count();
                assert!(between > 0, "{context}: {kept:?}");
            }
            // The paper's form: the last tokens alone.
            let cache = run.prompt.compress(&*policy(config(false)), STEPS);
            assert_eq!(kept(&cache, 0), (29..58).collect::<Vec<u32>>(), "{context}");
        }
        // Windows that fit stay as they are.
        let [fitted, paper] = [true, false].map(|fit| {
            let config = json!({"policy": "snapkv", "budget": 16, "window": 8, "fit_window": fit});
            kept(&run.prompt.compress(&*policy(config), STEPS), 0)
        });
        assert_eq!(fitted, paper);
    }
}

/// Policies that remember queries, of prompts with fewer than they remember.
#[test]
fn short_and_long_prompts_go_together() {
    for tested in devices() {
        for config in [
            json!({"policy": "r-kv", "budget": 6, "interval": 2, "window": 8}),
            json!({"policy": "r-kv", "budget": 12, "interval": 4}),
            json!({"policy": "expected-attention", "budget": 8, "interval": 4}),
            json!({"policy": "keydiff", "budget": 8, "interval": 4}),
        ] {
            let policy = policy(config.clone());
            let runs = [7, 20, 2].map(|tokens| run(tokens, &tested.device));
            let caches = runs.iter().map(|run| run.prompt.compress(&*policy, STEPS));
            let mut joint = LayerCache::concat(caches.collect()).unwrap();
            let mut together = Vec::new();
            for index in 0..STEPS {
                let steps = runs.iter().map(|run| &run.steps[index]);
                let output = policy.step(LAYER, &mut joint, side_by_side(steps)).unwrap();
                together.push(read_f32("output", output).unwrap());
            }
            for (row, run) in runs.iter().enumerate() {
                let mut alone = run.prompt.compress(&*policy, STEPS);
                let expected = decode(&*policy, &mut alone, &run.steps);
                let width = expected.len() / STEPS;
                let own = together.iter().flat_map(|step| &step[row * width..][..width]);
                let apart = own.zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < 1e-5, "{config} on {}: row {row} off by {apart}", tested.name);
                for range in 0..2 {
                    assert_eq!(kept(&joint, 2 * row + range), kept(&alone, range), "{config}");
                }
            }
        }
    }
}

/// One step of several sequences.
fn side_by_side<'a>(steps: impl Iterator<Item = &'a Step>) -> Step {
    let (mut queries, mut keys, mut values, mut positions) = (vec![], vec![], vec![], vec![]);
    let mut frequencies = None;
    for step in steps {
        let kv_policies::Qkv::Rotated { query, key, value, .. } = &step.heads else {
            panic!("steps are of rotated heads")
        };
        queries.push(query.clone());
        keys.push(key.clone());
        values.push(value.clone());
        positions.push(step.position.clone());
        frequencies = Some(step.inverse_frequencies.clone());
    }
    let join = |parts| Tensor::cat(parts, 0);
    let mut step = Step::new(join(queries), join(keys), join(values), Tensor::cat(positions, 0));
    step.inverse_frequencies = frequencies.unwrap_or_default();
    step
}

/// What a policy cannot do with a budget in tokens is an error when it is built.
#[test]
fn budgets_in_tokens_must_hold_what_they_protect() {
    let refused = |config: Value| kv_policies::build(&config).unwrap_err().to_string();
    for config in [
        json!({"policy": "h2o", "budget": 16, "sinks": 4, "recents": 16}),
        json!({"policy": "cis", "budget": 16, "sinks": 4, "recents": 16}),
        json!({"policy": "hshare", "budget": 16, "sinks": 4, "recents": 16}),
    ] {
        let error = refused(config.clone());
        assert!(error.contains("exceed the budget of 16"), "{config}: {error}");
    }
    let quest = json!({"policy": "quest", "budget": 8, "fit_page": false});
    assert!(refused(quest).contains("below a page"));
    assert!(
        refused(json!({"policy": "kvreviver", "vague": "sketch", "budget": 4}))
            .contains("at least 5")
    );
}
