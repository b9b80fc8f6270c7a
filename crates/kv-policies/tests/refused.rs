//! Configurations and observations that must be refused.

use kv_core::{Budget, CacheOptions};
use kv_policies::{Observation, PolicyError, build, leaves_budget_open, with_budget};
use kv_testing::{Numbers, devices};
use serde_json::json;

use super::support::{Prompt, policy};

#[test]
fn unknown_names_suggest_the_nearest() {
    let error = build(&json!({"policy": "snapvk", "budget": 0.5})).unwrap_err();
    assert!(matches!(error, PolicyError::UnknownPolicy { .. }));
    let text = error.to_string();
    assert!(text.contains("did you mean `snapkv`") && text.contains("streaming-llm"), "{text}");
}

#[test]
fn a_combination_takes_names_of_policies() {
    let config = json!({"policy": "combine", "prefill": "snapkv", "decode": "h2o"});
    assert!(leaves_budget_open(&config));
    let built = build(&with_budget(&config, Budget::Tokens(48))).unwrap();
    for part in ["prefill", "decode"] {
        assert_eq!(built.config()[part]["budget"], 48);
    }
}

#[test]
fn bad_configurations_name_the_parameter() {
    for (config, expected) in [
        (json!({"policy": "snapkv"}), "`budget` is missing"),
        (json!({"policy": "snapkv", "budget": 0}), "at least one token"),
        (json!({"policy": "snapkv", "budget": -0.5}), "above 0"),
        (json!({"policy": "snapkv", "budget": 0.5, "windw": 3}), "windw"),
        (json!({"policy": "h2o", "budget": 0.5, "interval": 0}), "`interval` is 0"),
        (
            json!({"policy": "streaming-llm", "budget": 8, "sinks": 4, "recents": 5}),
            "exceed the budget of 8",
        ),
        (json!({"policy": "pyramidinfer", "budget": 0.5, "gamma": 2.0}), "`gamma` is 2"),
        (json!({"policy": "combine", "prefill": {"policy": "full"}}), "`decode` is missing"),
        (json!({"policy": "combine", "prefill": 3, "decode": "full"}), "`prefill`: expected"),
        (
            json!({
                "policy": "combine",
                "prefill": {"policy": "knorm", "budget": 0.5, "rerotate": true},
                "decode": {"policy": "full"},
            }),
            "`rerotate` of `prefill`",
        ),
        (json!({"policy": "lagkv", "budget": 0.5, "lag": 0}), "`lag` is 0"),
        (json!({"policy": "snapkv", "budget": 0.5, "kernel": 4}), "`kernel` is 4"),
        (json!({"policy": "snapkv", "budget": 0.5, "window": 0}), "`window` is 0"),
        (json!({"policy": "r-kv", "budget": 0.5, "window": 0}), "`window` is 0"),
        (json!({"policy": "vatp", "budget": 0.5, "history": 0}), "`history` is 0"),
        (json!({"policy": "expected-attention", "budget": 0.5, "future": 0}), "`future` is 0"),
        (json!({"policy": "h2o", "budget": 0.5, "heads": {"ada": {"floor": 7.0}}}), "floor is 7"),
        (json!({"policy": "psaw", "phi": 0.0}), "`phi` is 0"),
        (json!({"policy": "psaw", "phi": 1.5}), "`phi` is 1.5"),
        (json!({"policy": "psaw", "alpha": -1.0}), "`alpha` is -1"),
        (json!({"policy": "psaw", "psi": 0.5}), "psi"),
        (json!({"policy": "psaw", "start": -1}), "-1"),
        (json!({"policy": "etf", "psi": -0.5}), "`psi` is -0.5"),
        (json!({"policy": "etf", "gamma": -0.1}), "`gamma` is -0.1"),
        (json!({"policy": "etf", "reuse": "values"}), "keys-values"),
        (json!({"budget": 0.5}), "`policy` is missing"),
        (json!("snapkv"), "expected an object"),
    ] {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{config}: {error}");
    }
}

#[test]
fn protected_tokens_over_a_budget_in_tokens_are_an_error() {
    let device = &devices()[0].device;
    let mut numbers = Numbers::new(1);
    let mut draw = || numbers.tensor([1, 1, 40, 8], device);
    let prompt = Prompt::new(draw(), draw(), draw());
    for config in [
        json!({"policy": "uniform", "budget": 10, "sinks": usize::MAX, "recents": 1}),
        json!({"policy": "vatp", "budget": 10, "sinks": 20}),
    ] {
        let refused = |error: &PolicyError| {
            matches!(error, PolicyError::ProtectedOverBudget { budget: 10, .. })
        };
        let error = match build(&config) {
            Err(error) => error,
            Ok(policy) => {
                let options = CacheOptions::new(device, burn::tensor::DType::F32);
                prompt.observed(|seen| policy.prefill(seen, 0, options)).unwrap_err()
            }
        };
        assert!(refused(&error), "{config}: {error}");
    }
}

#[test]
fn a_missing_observation_is_named() {
    let device = &devices()[0].device;
    let mut numbers = Numbers::new(1);
    let mut draw = || numbers.tensor([1, 1, 40, 8], device);
    let prompt = Prompt::new(draw(), draw(), draw());
    for name in ["snapkv", "h2o", "tova", "expected-attention", "r-kv", "pyramidinfer"] {
        let policy = policy(json!({"policy": name, "budget": 10}));
        let error = prompt.observed(|seen| {
            let bare =
                Observation { window: None, column_sums: None, raw_queries: None, ..seen.clone() };
            let options = CacheOptions::new(device, burn::tensor::DType::F32);
            policy.prefill(&bare, 0, options).unwrap_err()
        });
        assert!(matches!(error, PolicyError::MissingObservation { .. }), "{name}: {error}");
    }
}
