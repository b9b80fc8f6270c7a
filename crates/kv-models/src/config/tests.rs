use std::path::PathBuf;

use burn::tensor::DType;
use serde_json::{Value, json};

use super::{Architecture, ModelConfig, RopeScaling};
use crate::error::ModelError;

/// A small config of the architecture with `changes` on top; `"absent"` removes a key.
fn config(architecture: &str, changes: Value) -> Result<ModelConfig, ModelError> {
    let mut config = json!({
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": null,
    });
    let map = config.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::String(text) if text == "absent" => map.remove(key),
            value => map.insert(key.clone(), value.clone()),
        };
    }
    ModelConfig::from_json(&config.to_string())
}

fn llama(changes: Value) -> Result<ModelConfig, ModelError> {
    config("LlamaForCausalLM", changes)
}

#[track_caller]
fn assert_refused(result: Result<ModelConfig, ModelError>, name: &str) {
    match result {
        Err(ModelError::UnsupportedSetting { setting, .. }) => assert_eq!(setting, name),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn reads_a_real_model() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/needle-1m");
    let config = ModelConfig::from_folder(folder).unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.num_query_heads, config.num_kv_heads, config.head_dim), (4, 2, 32));
    assert_eq!((config.max_positions, config.vocab_size), (2048, 1024));
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(0), &[0][..]));
    assert!(config.tie_embeddings && !config.qkv_bias && !config.qk_norm);
    assert_eq!(config.dtype, Some(DType::BF16));
    // The file holds two bytes a parameter behind an 8-byte length and a header.
    assert_eq!(config.parameter_count(), 869_504);
    assert_eq!(config.group_size(), 2);
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let absent = json!({"num_key_value_heads": "absent", "head_dim": "absent"});
    let c = llama(absent.clone()).unwrap();
    assert_eq!((c.num_kv_heads, c.head_dim, c.max_positions), (8, 8, 2048));
    assert_eq!((c.rms_norm_eps, c.rope_theta, c.rope_scaling), (1e-6, 1e4, RopeScaling::None));
    assert_eq!((c.bos_token_id, c.eos_token_ids), (Some(1), vec![]));
    assert!(!c.tie_embeddings && !c.mlp_bias && !c.output_bias);
    assert_eq!(c.dtype, None);
    assert_eq!(llama(json!({"torch_dtype": "auto"})).unwrap().dtype, None);
    assert_eq!(llama(json!({"dtype": "torch.float16"})).unwrap().dtype, Some(DType::F16));
    assert_eq!(config("Qwen3ForCausalLM", absent).unwrap().head_dim, 128);
    let null = json!({"num_key_value_heads": null, "head_dim": null, "eos_token_id": null});
    let c = config("MistralForCausalLM", null).unwrap();
    assert_eq!((c.num_kv_heads, c.head_dim, c.max_positions), (8, 8, 131_072));
    assert!(c.eos_token_ids.is_empty());
}

#[test]
fn architectures_differ_in_biases_and_norms() {
    let flags = |config: Result<ModelConfig, ModelError>| {
        let config = config.unwrap();
        (config.qkv_bias, config.output_bias, config.qk_norm)
    };
    for (architecture, changes, expected) in [
        ("Qwen2ForCausalLM", json!({}), (true, false, false)),
        ("Qwen3ForCausalLM", json!({}), (false, false, true)),
        ("MistralForCausalLM", json!({}), (false, false, false)),
        ("LlamaForCausalLM", json!({"attention_bias": true}), (true, true, false)),
    ] {
        assert_eq!(flags(config(architecture, changes)), expected);
    }
    let by_type = llama(json!({"architectures": "absent", "model_type": "qwen2"})).unwrap();
    assert_eq!(by_type.architecture, Architecture::Qwen2);
}

#[test]
fn rope_settings_of_both_transformers() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let old = llama(json!({"rope_theta": 500000.0, "rope_scaling": scaling})).unwrap();
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500000);
    let new = llama(json!({"rope_parameters": parameters})).unwrap();
    assert_eq!(old, new);
    assert_eq!(new.rope_theta, 5e5);
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    assert_eq!(new.rope_scaling, llama3);
    let linear = llama(json!({"rope_scaling": {"type": "linear", "factor": 2}})).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let default = llama(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}));
    assert_eq!(default.unwrap().rope_theta, 7.0);
}

#[test]
fn yarn_in_old_and_new_spelling() {
    let yarn = |attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions: 32_768,
        attention_factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
    };
    let parameters = json!({
        "factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"
    });
    let mut old = parameters.clone();
    old.as_object_mut().unwrap().remove("rope_type");
    old["type"] = json!("yarn");
    for changes in [
        json!({"rope_scaling": old, "max_position_embeddings": 32768}),
        json!({"rope_scaling": parameters, "max_position_embeddings": 40960}),
        json!({"rope_parameters": parameters, "max_position_embeddings": 131072}),
        // The factor follows from both contexts.
        json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768},
            "max_position_embeddings": 131072}),
        // A first context beside the object.
        json!({"rope_scaling": {"type": "yarn", "factor": 4},
            "original_max_position_embeddings": 32768, "max_position_embeddings": 40960}),
    ] {
        let config = llama(changes.clone()).unwrap();
        assert_eq!(config.rope_scaling, yarn(0.1 * 4f64.ln() + 1.0), "{changes}");
        assert_eq!(config.max_positions, 131_072, "{changes}");
    }
    // A context that is longer than the scaled one stays.
    let longer = json!({"rope_scaling": parameters, "max_position_embeddings": 200_000});
    assert_eq!(llama(longer).unwrap().max_positions, 200_000);
    let with = |key: &str, value: Value| {
        let mut parameters = parameters.clone();
        parameters[key] = value;
        llama(json!({"rope_scaling": parameters, "max_position_embeddings": 32768}))
    };
    assert_eq!(with("attention_factor", json!(0.5)).unwrap().rope_scaling, yarn(0.5));
    for (key, value) in [
        ("factor", json!(-4.0)),
        ("factor", json!(0.5)),
        ("factor", json!(1e9)),
        ("beta_fast", json!(0.5)),
        ("beta_slow", json!("1")),
        ("truncate", json!(1)),
        ("mscale", json!(-1.0)),
        ("short_factor", json!([1.0])),
    ] {
        assert_refused(with(key, value), &format!("rope_scaling.{key}"));
    }
}

#[test]
fn factors_below_one_are_refused() {
    for kind in ["linear", "llama3", "yarn", "dynamic"] {
        let scaling = json!({
            "rope_type": kind, "factor": 0.5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        });
        let error = llama(json!({"rope_scaling": scaling})).unwrap_err();
        let told = error.to_string();
        assert!(told.contains("`rope_scaling.factor` is 0.5"), "{kind}: {told}");
        assert!(told.contains("supported: a number of at least 1"), "{kind}: {told}");
    }
    let one = json!({"type": "linear", "factor": 1.0});
    let linear = llama(json!({"rope_scaling": one})).unwrap().rope_scaling;
    assert_eq!(linear, RopeScaling::Linear { factor: 1.0 });
}

#[test]
fn dynamic_scaling_reaches_beyond_the_trained_context() {
    let scaling = json!({"type": "dynamic", "factor": 2.5});
    let config = llama(json!({"rope_scaling": scaling, "max_position_embeddings": 1001})).unwrap();
    let dynamic = RopeScaling::Dynamic { factor: 2.5, original_max_positions: 1001 };
    assert_eq!((config.rope_scaling, config.max_positions), (dynamic, 2502));
    let error = llama(json!({"rope_scaling": {"type": "dynamic"}})).unwrap_err();
    assert!(matches!(error, ModelError::MissingSetting { .. }), "{error}");
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("quantization_config", json!({"quant_method": "awq"})),
        ("partial_rotary_factor", json!(0.5)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("hidden_size", json!(0)),
        ("vocab_size", json!(-1)),
        ("num_hidden_layers", json!("two")),
        ("num_attention_heads", json!(u64::MAX)),
        ("head_dim", json!(7)),
        ("rms_norm_eps", json!(-1.0)),
        ("rope_theta", json!(0)),
        ("use_sliding_window", json!(true)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("torch_dtype", json!("float8_e4m3fn")),
        ("eos_token_id", json!("</s>")),
        ("tie_word_embeddings", json!("yes")),
    ] {
        assert_refused(llama(json!({ key: value })), key);
    }
    for kind in ["longrope", "su", "mrope", "proportional"] {
        let scaling = json!({"rope_scaling": {"type": kind, "factor": 4.0}});
        assert_refused(llama(scaling), "rope_scaling.type");
    }
    let partial =
        json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}});
    assert_refused(llama(partial), "rope_parameters.partial_rotary_factor");
    let extra = json!({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}});
    assert_refused(llama(extra), "rope_scaling.mscale");
    assert_refused(config("MistralForCausalLM", json!({"attention_bias": true})), "attention_bias");
    assert_refused(config("Qwen2ForCausalLM", json!({"attention_bias": false})), "attention_bias");
    assert_refused(config("Qwen3ForCausalLM", json!({"mlp_bias": true})), "mlp_bias");
}

/// The window, and the longest sequence.
fn window(architecture: &str, changes: Value) -> (Option<usize>, usize) {
    let config = config(architecture, changes).unwrap();
    (config.sliding_window, config.max_positions)
}

#[test]
fn sequences_end_at_the_sliding_window() {
    let mistral = |changes| window("MistralForCausalLM", changes);
    let positions = 131_072;
    assert_eq!(mistral(json!({})), (None, positions));
    assert_eq!(mistral(json!({"sliding_window": 4000})), (Some(4000), 4000));
    let windowed = config("MistralForCausalLM", json!({"sliding_window": 4000})).unwrap();
    assert_eq!(windowed.longest(), "sliding window of 4000 tokens");
    assert_eq!(config("MistralForCausalLM", json!({})).unwrap().longest(), "131072 positions");
    // Absent means 4096 in transformers.
    assert_eq!(mistral(json!({"sliding_window": "absent"})), (Some(4096), 4096));
    // A window that holds all positions is none.
    let all = json!({"sliding_window": 4096, "max_position_embeddings": 4096});
    assert_eq!(mistral(all), (None, 4096));
    // All layers of Mistral have it, those of Ministral as `layer_types` says.
    let types = |kinds: [&str; 2]| json!({"sliding_window": 512, "layer_types": kinds});
    let (full, mixed) = (
        types(["full_attention", "full_attention"]),
        types(["full_attention", "sliding_attention"]),
    );
    assert_eq!(mistral(full.clone()), (Some(512), 512));
    let ministral = |changes| window("MinistralForCausalLM", changes);
    assert_eq!(ministral(full), (None, positions));
    assert_eq!(ministral(mixed), (Some(512), 512));
    assert_eq!(ministral(json!({"sliding_window": 512})), (Some(512), 512));
    let by_type = json!({"architectures": "absent", "model_type": "ministral"});
    assert_eq!(llama(by_type).unwrap().architecture, Architecture::Ministral);

    for name in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        let qwen = |changes| window(name, changes);
        let off = json!({"sliding_window": 512, "use_sliding_window": false});
        assert_eq!(qwen(off), (None, 32_768));
        let on = |layers: usize| {
            json!({
                "sliding_window": 512, "use_sliding_window": true, "max_window_layers": layers
            })
        };
        assert_eq!(qwen(on(1)), (Some(512), 512));
        // The layers from this one on have it, and there are two.
        assert_eq!(qwen(on(2)), (None, 32_768));
    }
    let error = config("MinistralForCausalLM", json!({"layer_types": ["chunked_attention"]}));
    assert_refused(error, "layer_types");
    assert_refused(config("MistralForCausalLM", json!({"sliding_window": 0})), "sliding_window");
}

/// `architectures` and `model_type` of different families.
#[test]
fn a_window_holds_whichever_name_has_it() {
    let of = |architecture: &str, model_type: &str, sliding: Value| {
        window(architecture, json!({"model_type": model_type, "sliding_window": sliding})).0
    };
    assert_eq!(of("LlamaForCausalLM", "mistral", json!(10)), Some(10));
    assert_eq!(of("MistralForCausalLM", "llama", json!(10)), Some(10));
    assert_eq!(of("Qwen2ForCausalLM", "ministral", json!(10)), Some(10));
    // Neither has windows, or none is given.
    assert_eq!(of("LlamaForCausalLM", "llama", json!(10)), None);
    assert_eq!(of("LlamaForCausalLM", "qwen2", json!(10)), None);
    assert_eq!(of("LlamaForCausalLM", "gpt_neox", json!(10)), None);
    assert_eq!(of("LlamaForCausalLM", "mistral", Value::Null), None);
    assert_eq!(of("LlamaForCausalLM", "mistral", json!("absent")), None);
}

#[test]
fn errors_say_what_is_missing() {
    let error = llama(json!({"architectures": ["GPTNeoXForCausalLM"]})).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("GPTNeoXForCausalLM") && text.contains("Qwen2ForCausalLM"), "{text}");
    let error = llama(json!({"intermediate_size": "absent"})).unwrap_err();
    assert!(
        matches!(error, ModelError::MissingSetting { ref setting } if setting == "intermediate_size")
    );
    let scaling = json!({"rope_scaling": {"type": "linear"}});
    let error = llama(scaling).unwrap_err();
    assert!(
        matches!(error, ModelError::MissingSetting { ref setting } if setting == "rope_scaling.factor")
    );
    assert!(matches!(ModelConfig::from_json("{"), Err(ModelError::InvalidJson { .. })));
    assert!(matches!(ModelConfig::from_json("[1]"), Err(ModelError::InvalidJson { .. })));
    let folder = tempfile::tempdir().unwrap();
    let error = ModelConfig::from_folder(folder.path()).unwrap_err();
    assert!(matches!(error, ModelError::MissingFile { .. }), "{error}");
}

#[test]
fn generation_config_lists_the_end_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/needle-1m/config.json");
    std::fs::copy(source, folder.path().join("config.json")).unwrap();
    let generation = folder.path().join("generation_config.json");
    std::fs::write(&generation, r#"{"eos_token_id": [5, 6]}"#).unwrap();
    assert_eq!(ModelConfig::from_folder(folder.path()).unwrap().eos_token_ids, [5, 6]);
    std::fs::write(&generation, r#"{"temperature": 0.6}"#).unwrap();
    assert_eq!(ModelConfig::from_folder(folder.path()).unwrap().eos_token_ids, [0]);
}
