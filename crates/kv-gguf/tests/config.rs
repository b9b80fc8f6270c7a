//! `config.json`, and the values of the metadata that it refuses.

use kv_gguf::{GgufError, GgufFile};
use serde_json::{Value, json};

use crate::build::{self, File, f32, list, text, u32};
use crate::{fixture, open};

fn config(file: File) -> Result<Value, GgufError> {
    open(&file.bytes())?.config()
}

#[test]
fn a_config_has_what_transformers_reads() {
    let expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null, "vocab_size": 4,
        "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false, "bos_token_id": 3,
        "eos_token_id": 3, "pad_token_id": null, "torch_dtype": "float32",
    });
    assert_eq!(config(File::small()).unwrap(), expected);
}

#[test]
fn scalings_of_the_rotary_embedding() {
    let key = |name: &str| format!("llama.rope.scaling.{name}");
    let set = |pairs: &[(&str, build::Value)]| {
        let file = pairs
            .iter()
            .fold(File::small(), |file, (name, value)| file.set(&key(name), value.clone()));
        config(file).map(|config| config["rope_scaling"].clone())
    };
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    assert_eq!(set(&[("type", text("linear")), ("factor", f32(4.0))]).unwrap(), linear);
    assert_eq!(set(&[("factor", f32(4.0))]).unwrap(), linear);
    let old = config(File::small().set("llama.rope.scale_linear", f32(4.0))).unwrap();
    assert_eq!(old["rope_scaling"], linear);
    assert_eq!(set(&[("type", text("none")), ("factor", f32(4.0))]).unwrap(), Value::Null);
    let yarn = set(&[
        ("type", text("yarn")),
        ("factor", f32(4.0)),
        ("original_context_length", u32(16)),
        ("yarn_beta_fast", f32(16.0)),
    ]);
    let expected = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
    });
    assert_eq!(yarn.unwrap(), expected);
    let error = set(&[("type", text("yarn"))]).unwrap_err();
    assert!(matches!(&error, GgufError::MissingKey { key } if key.ends_with("factor")), "{error}");
    let error = set(&[("type", text("longrope")), ("factor", f32(4.0))]).unwrap_err();
    assert!(error.to_string().contains("\"longrope\", expected none, linear or yarn"), "{error}");
}

#[test]
fn the_scaling_of_llama_3_is_found_in_its_factors() {
    let file = GgufFile::open(&fixture("llama3.gguf")).unwrap();
    let config = file.config().unwrap();
    let expected = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    assert_eq!(config["rope_scaling"], expected);
    assert_eq!(config["torch_dtype"], "bfloat16");
    assert_eq!(config["attention_bias"], true);
    assert_eq!(config["mlp_bias"], true);
    assert_eq!(config["tie_word_embeddings"], false);

    let with = |factors: [f32; 2]| {
        let mut file = File::small();
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        file.add_bytes("rope_freqs.weight", &[2], 0, &bytes);
        self::config(file)
    };
    assert_eq!(with([1.0, 1.0]).unwrap()["rope_scaling"], Value::Null);
    for wrong in [[1.0, 2.0], [1.0, f32::NAN], [1.0, f32::INFINITY], [-1.0, 1.0], [0.0, 0.0]] {
        let error = with(wrong).unwrap_err();
        assert!(matches!(error, GgufError::RopeFactors { .. }), "{wrong:?}: {error}");
    }
    let mut file = File::small();
    file.add("rope_freqs.weight", &[3]);
    let error = self::config(file).unwrap_err();
    assert!(matches!(error, GgufError::Shape { .. }), "{error}");
}

#[test]
fn generation_ends_at_every_end() {
    let file = File::small().set("tokenizer.ggml.eot_token_id", u32(1));
    assert_eq!(config(file).unwrap()["eos_token_id"], json!([3, 1]));
    let file = File::small().set("tokenizer.ggml.eot_token_id", u32(3));
    assert_eq!(config(file).unwrap()["eos_token_id"], 3);
}

#[test]
fn values_that_cannot_be_are_refused_by_key() {
    for (key, value) in [
        ("llama.embedding_length", u32(0)),
        ("llama.embedding_length", u32(u32::MAX)),
        ("llama.embedding_length", u32(9)),
        ("llama.attention.head_count", u32(3)),
        ("llama.attention.head_count", u32(8)),
        ("llama.attention.head_count_kv", u32(3)),
        ("llama.attention.key_length", u32(5)),
        ("llama.attention.value_length", u32(6)),
        ("llama.rope.dimension_count", u32(2)),
        ("llama.expert_count", u32(8)),
        ("split.count", u32(2)),
        ("llama.context_length", u32(0)),
        ("llama.rope.freq_base", f32(-1.0)),
        ("llama.rope.freq_base", f32(f32::NAN)),
        ("llama.attention.layer_norm_rms_epsilon", f32(f32::INFINITY)),
        ("tokenizer.ggml.eos_token_id", u32(4)),
        ("tokenizer.ggml.bos_token_id", u32(u32::MAX)),
    ] {
        let error = config(File::small().set(key, value)).unwrap_err();
        let refused = match &error {
            GgufError::Value { key: actual, .. } => {
                actual == key || actual == "llama.attention.head_count"
            }
            _ => false,
        };
        assert!(refused, "{key}: {error}");
    }
    for key in ["llama.block_count", "llama.attention.head_count_kv", "llama.rope.freq_base"] {
        for value in [text("four"), list(&[u32(1)]), build::flag(true)] {
            let error = config(File::small().set(key, value)).unwrap_err();
            let names = matches!(&error, GgufError::WrongType { key: actual, .. } if actual == key);
            assert!(names, "{key}: {error}");
        }
    }
}

#[test]
fn absent_keys_are_named() {
    for key in [
        "general.architecture",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.block_count",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let error = config(File::small().without(key)).unwrap_err();
        let names = matches!(&error, GgufError::MissingKey { key: actual } if actual == key);
        assert!(names, "{key}: {error}");
    }
    let file = File::small().without("llama.attention.head_count_kv");
    let error = config(file).unwrap_err();
    // As many key-value heads as query heads, which the key projection does not have.
    assert!(matches!(error, GgufError::Shape { .. }), "{error}");
}
