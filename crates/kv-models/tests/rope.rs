//! Scaled rotary embeddings against transformers: `fixtures/rope.py` made the numbers.

use std::fs;

use burn::tensor::DType;
use kv_core::read_f32;
use kv_models::{Model, ModelConfig, ModelError, Session};
use kv_policies::{RAW_QUERIES, build};
use kv_testing::{devices, quick_exact_devices};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

const GOLDEN: [(&str, &str); 5] = [
    ("yarn", include_str!("../../../fixtures/rope-yarn.json")),
    ("yarn-options", include_str!("../../../fixtures/rope-yarn-options.json")),
    ("yarn-attention-factor", include_str!("../../../fixtures/rope-yarn-attention-factor.json")),
    ("yarn-qwen", include_str!("../../../fixtures/rope-yarn-qwen.json")),
    ("dynamic", include_str!("../../../fixtures/rope-dynamic.json")),
];

fn goldens() -> impl Iterator<Item = (&'static str, Value)> {
    GOLDEN.into_iter().map(|(name, text)| (name, serde_json::from_str(text).unwrap()))
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Numbers that `fixtures/rope.py` computes alike.
fn weight(name: &str, count: usize, around: f64) -> Vec<u8> {
    let seed = name.bytes().map(u64::from).sum::<u64>() % 1000;
    let value = |index: u64| {
        let bits = ((index + 1) * 7919 + seed * 104_729) % 65_521;
        (around + (bits as f64 / 65_521.0 - 0.5) * 0.6) as f32
    };
    (0..count as u64).flat_map(|index| value(index).to_le_bytes()).collect()
}

/// A folder with a model of these weights.
fn folder(config: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let config = ModelConfig::from_json(&config.to_string()).unwrap();
    let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (queries, keys) = (config.num_query_heads * dim, config.num_kv_heads * dim);
    let mut shapes = vec![
        ("model.embed_tokens".to_string(), vec![config.vocab_size, hidden]),
        ("model.norm".to_string(), vec![hidden]),
        ("lm_head".to_string(), vec![config.vocab_size, hidden]),
    ];
    for layer in 0..config.num_layers {
        for (part, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{part}"), shape));
        }
    }
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let name = format!("{name}.weight");
            let around = if shape.len() == 1 { 1.0 } else { 0.0 };
            let data = weight(&name, shape.iter().product(), around);
            (name, shape, data)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
    });
    serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Prompts within the trained context and beyond it, then tokens one by one.
#[test]
fn logits_are_those_of_transformers() {
    for (name, golden) in goldens() {
        let Some(rows) = golden["logits"].as_object() else { continue };
        let folder = folder(&golden["config"]);
        let tokens: Vec<u32> = numbers(&golden["tokens"]).iter().map(|x| *x as u32).collect();
        for tested in quick_exact_devices("rope") {
            let model =
                Model::from_folder(folder.path(), &tested.device, Some(DType::F32)).unwrap();
            for (prompt, rows) in rows {
                let (prompt, rest) = tokens.split_at(prompt.parse().unwrap());
                let full = build(&json!({"policy": "full"})).unwrap();
                let prompts = [prompt.to_vec()];
                let mut session = Session::start(&model, full, &prompts, &[0], rest.len()).unwrap();
                let mut rows = rows.as_array().unwrap().iter();
                for step in 0..=rest.len() {
                    if step % 5 == 0 {
                        let actual = &session.read_logits().unwrap()[0];
                        let expected = numbers(rows.next().unwrap());
                        let pairs = actual.iter().zip(&expected);
                        let worst =
                            pairs.map(|(a, e)| (f64::from(*a) - e).abs()).fold(0.0, f64::max);
                        let context = format!("{name} on {}", tested.name);
                        assert!(worst < 1e-4, "{context}, {prompt:?} + {step}: {worst}");
                    }
                    if let Some(token) = rest.get(step) {
                        session.step(&[*token]).unwrap();
                    }
                }
                assert!(rows.next().is_none());
            }
        }
    }
}

/// YaRN's attention factor is in the queries that Expected Attention remembers of decode steps, as
/// in those of a prompt: the last one is the same whether its token came in a prompt or in a step.
#[test]
fn queries_of_steps_have_the_attention_factor_of_a_prompt_s() {
    let (_, golden) = goldens().find(|(name, _)| *name == "yarn").unwrap();
    let folder = folder(&golden["config"]);
    let tokens: Vec<u32> = numbers(&golden["tokens"]).iter().map(|x| *x as u32).collect();
    let tokens = &tokens[..24];
    for tested in quick_exact_devices("rope") {
        let model = Model::from_folder(folder.path(), &tested.device, Some(DType::F32)).unwrap();
        let factor = model.config().rope_scaling.attention_factor();
        assert!(factor > 1.05, "{factor}");
        let config = json!({"policy": "expected-attention", "budget": 64});
        let start = |prompt: &[u32]| {
            let policy = build(&config).unwrap();
            Session::start(&model, policy, &[prompt.to_vec()], &[0], 4).unwrap()
        };
        let last = |session: &Session<'_>| {
            let queries = session.cache().layers[0].state(RAW_QUERIES).unwrap().clone();
            let ([_, _, width], dim) = (queries.dims(), model.config().head_dim);
            let last = queries.narrow(2, width - dim, dim);
            let [batch, heads, dim] = last.dims();
            read_f32("queries", last.reshape([batch * heads * dim])).unwrap()
        };
        let whole = last(&start(tokens));
        let mut session = start(&tokens[..23]);
        session.step(&tokens[23..]).unwrap();
        let stepped = last(&session);
        let size = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
        let worst = whole.iter().zip(&stepped).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(size > 0.01 && worst < 1e-4 * size, "{}: {worst} of {size}", tested.name);
    }
}

/// Each sequence of a batch has the frequencies of its own length.
#[test]
fn dynamic_frequencies_are_a_sequence_s_own() {
    let (_, golden) = goldens().find(|(name, _)| *name == "dynamic").unwrap();
    let folder = folder(&golden["config"]);
    let tested = devices().remove(0);
    let model = Model::from_folder(folder.path(), &tested.device, Some(DType::F32)).unwrap();
    assert_eq!(model.config().max_positions, 72);
    let full = build(&json!({"policy": "full"})).unwrap();
    let prompts: Vec<Vec<u32>> =
        [40, 10, 30].iter().map(|count| (0..*count).map(|x| x % 53).collect()).collect();
    let logits = |prompts: &[Vec<u32>]| {
        let seeds = vec![0; prompts.len()];
        let mut session = Session::start(&model, full.clone(), prompts, &seeds, 20).unwrap();
        for token in 0..20 {
            session.step(&vec![token; prompts.len()]).unwrap();
        }
        session.read_logits().unwrap()
    };
    let together = logits(&prompts);
    for (row, prompt) in prompts.iter().enumerate() {
        assert_eq!(logits(std::slice::from_ref(prompt))[0], together[row], "row {row}");
    }
}

/// Keys of a prompt beyond the trained context cannot be rotated to other positions later on.
#[test]
fn dynamic_frequencies_and_new_positions_exclude_each_other() {
    let (_, golden) = goldens().find(|(name, _)| *name == "dynamic").unwrap();
    let folder = folder(&golden["config"]);
    let tested = devices().remove(0);
    let model = Model::from_folder(folder.path(), &tested.device, Some(DType::F32)).unwrap();
    let policy = json!({"policy": "streaming-llm", "budget": 12, "rerotate": true});
    let start = |tokens: usize| {
        Session::start(&model, build(&policy).unwrap(), &[vec![7; tokens]], &[0], 4)
    };
    assert!(start(24).is_ok());
    let error = start(25).unwrap_err();
    assert!(
        matches!(error, ModelError::LengthDependentRope { tokens: 25, trained: 24 }),
        "{error}"
    );
}
