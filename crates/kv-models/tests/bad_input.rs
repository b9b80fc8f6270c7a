//! Each a typed, readable error.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::DType;
use kv_models::{Model, ModelConfig, ModelError, Request, Session, WeightsError, generate};
use kv_policies::build;
use kv_testing::{TestDevice, devices, quick_devices};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;

use super::support::{configure, embedded, embedded_folder, warnings_of};

fn load(folder: &Path, tested: &TestDevice) -> Result<Model, ModelError> {
    Model::from_folder(folder, &tested.device, Some(DType::F32))
}

/// Rewrites one tensor of the copy (`None` drops it).
fn rewrite(
    folder: &Path,
    name: &str,
    change: impl Fn(Vec<u8>) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .filter_map(|(own, view)| {
            let data = view.data().to_vec();
            if own == name {
                let (dtype, shape, data) = change(data)?;
                Some((own, dtype, shape, data))
            } else {
                Some((own, view.dtype(), view.shape().to_vec(), data))
            }
        })
        .collect();
    let views: HashMap<String, TensorView<'_>> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        })
        .collect();
    serialize_to_file(views, None, &path).unwrap();
}

/// Adds a tensor of zeros in bf16.
fn add(folder: &Path, name: &str, shape: &[usize]) {
    add_bytes(folder, name, shape, vec![0; 2 * shape.iter().product::<usize>()]);
}

fn add_bytes(folder: &Path, name: &str, shape: &[usize], data: Vec<u8>) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut views: HashMap<String, TensorView<'_>> = file.tensors().into_iter().collect();
    views.insert(name.into(), TensorView::new(Dtype::BF16, shape.to_vec(), &data).unwrap());
    let written = safetensors::serialize(views, None).unwrap();
    std::fs::write(&path, written).unwrap();
}

const NORM: &str = "model.norm.weight";

#[test]
fn weights_that_are_missing_damaged_or_of_the_wrong_kind() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    let path = folder.path().join("model.safetensors");

    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = load(folder.path(), tested).unwrap_err();
    assert!(matches!(error, ModelError::Weights(WeightsError::Truncated { .. })), "{error}");
    std::fs::remove_file(&path).unwrap();
    let error = load(folder.path(), tested).unwrap_err();
    assert!(matches!(error, ModelError::MissingFile { .. }), "{error}");

    let folder = embedded_folder();
    rewrite(folder.path(), NORM, |data| Some((Dtype::BF16, vec![64, 2], data)));
    let error = load(folder.path(), tested).unwrap_err();
    assert!(matches!(error, ModelError::Weights(WeightsError::WrongShape { .. })), "{error}");
    let folder = embedded_folder();
    rewrite(folder.path(), NORM, |data| Some((Dtype::I16, vec![128], data)));
    let error = load(folder.path(), tested).unwrap_err();
    assert!(matches!(error, ModelError::Weights(WeightsError::WrongDtype { .. })), "{error}");
    let folder = embedded_folder();
    rewrite(folder.path(), NORM, |_| None);
    let error = load(folder.path(), tested).unwrap_err();
    assert!(matches!(error, ModelError::Weights(WeightsError::MissingTensor { .. })), "{error}");
    assert!(error.to_string().contains(NORM), "{error}");
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_refused() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    configure(folder.path(), "num_hidden_layers", json!(3));
    let error = load(folder.path(), tested).unwrap_err();
    let more = WeightsError::MoreLayers { expected: 3, actual: 4 };
    assert_eq!(error.to_string(), more.to_string());

    for (name, shape) in [
        ("model.layers.0.self_attn.q_proj.bias", &[128][..]),
        ("model.layers.3.mlp.down_proj.bias", &[128]),
        ("model.layers.1.self_attn.k_norm.weight", &[32]),
        ("lm_head.bias", &[1024]),
    ] {
        let folder = embedded_folder();
        add(folder.path(), name, shape);
        match load(folder.path(), tested).unwrap_err() {
            ModelError::Weights(WeightsError::NotAnnounced { names }) => assert_eq!(names, [name]),
            error => panic!("{name}: {error}"),
        }
    }
}

/// What follows from the configuration is passed over in silence, other tensors are named.
#[test]
fn tensors_that_no_part_of_the_model_uses_are_named() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    add(folder.path(), "model.layers.0.self_attn.rotary_emb.inv_freq", &[16]);
    add(folder.path(), "model.layers.0.self_attn.bias", &[1, 1, 8, 8]);
    add(folder.path(), "model.causal_mask", &[8, 8]);
    assert_eq!(warnings_of(|| drop(load(folder.path(), tested).unwrap())), "");
    add(folder.path(), "value_head.weight", &[1, 128]);
    let warnings = warnings_of(|| drop(load(folder.path(), tested).unwrap()));
    assert!(warnings.contains("value_head.weight"), "{warnings}");
    assert!(!warnings.contains("inv_freq"), "{warnings}");
}

/// A head in the file is used where it is not the embedding, as `transformers` does it.
#[test]
fn a_head_that_differs_from_the_embedding_it_is_tied_to_is_used() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    let logits = |folder: &Path| {
        let model = load(folder, tested).unwrap();
        let full = build(&json!({"policy": "full"})).unwrap();
        let session = Session::start(&model, full, &[vec![7, 8, 9]], &[0], 1).unwrap();
        (session.read_logits().unwrap(), model.config().tie_embeddings)
    };
    let (expected, tied) = logits(folder.path());
    assert!(tied);

    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let embedding = file.tensor("model.embed_tokens.weight").unwrap();
    let (shape, data) = (embedding.shape().to_vec(), embedding.data().to_vec());
    add_bytes(folder.path(), "lm_head.weight", &shape, data);
    let mut equal = (Vec::new(), false);
    assert_eq!(warnings_of(|| equal = logits(folder.path())), "");
    assert_eq!(equal, (expected.clone(), true));
    // One of the two is enough.
    rewrite(folder.path(), "model.embed_tokens.weight", |_| None);
    assert_eq!(logits(folder.path()), (expected.clone(), true));

    let folder = embedded_folder();
    add(folder.path(), "lm_head.weight", &shape);
    let mut zero = (Vec::new(), false);
    let warnings = warnings_of(|| zero = logits(folder.path()));
    assert!(warnings.contains("lm_head.weight"), "{warnings}");
    assert!(!zero.1 && zero.0[0].iter().all(|logit| *logit == 0.0));
}

/// A configuration that names no type has the weights' own.
#[test]
fn the_type_of_the_weights_is_read_from_them() {
    let tested = &devices()[0];
    let folder = embedded_folder();
    configure(folder.path(), "torch_dtype", json!("auto"));
    configure(folder.path(), "dtype", json!(null));
    assert_eq!(ModelConfig::from_folder(folder.path()).unwrap().dtype, None);
    let model = load(folder.path(), tested).unwrap();
    assert_eq!(model.config().dtype, Some(DType::BF16));
}

#[test]
fn models_that_are_not_supported_are_refused_by_name() {
    let text = std::fs::read_to_string(embedded_folder().path().join("config.json")).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[key] = value;
        ModelConfig::from_json(&config.to_string()).unwrap_err()
    };
    let error = with("architectures", json!(["GPT2LMHeadModel"]));
    assert!(error.to_string().contains("GPT2LMHeadModel"), "{error}");
    let error = with("rope_scaling", json!({"rope_type": "longrope", "factor": 4.0}));
    assert!(matches!(error, ModelError::UnsupportedSetting { .. }), "{error}");
    assert!(error.to_string().contains("longrope"), "{error}");
    let error = with("hidden_act", json!("gelu"));
    assert!(matches!(error, ModelError::UnsupportedSetting { .. }), "{error}");
}

#[test]
fn prompts_that_cannot_run() {
    for tested in quick_devices("bad_input") {
        let model = embedded(&tested);
        let full = build(&json!({"policy": "full"})).unwrap();
        let start = |prompt: Vec<u32>| {
            Session::start(&model, full.clone(), &[prompt], &[0], 1).unwrap_err()
        };
        assert!(matches!(start(vec![]), ModelError::EmptyPrompt));
        let error = start(vec![1; 2049]);
        assert!(
            matches!(error, ModelError::PromptTooLong { tokens: 2049, positions: 2048 }),
            "{error}"
        );
        let error = start(vec![5000]);
        assert!(matches!(error, ModelError::TokenOutOfRange { token: 5000, .. }), "{error}");
        assert!(matches!(
            Session::start(&model, full.clone(), &[], &[], 1).unwrap_err(),
            ModelError::EmptyPrompt
        ));
        // Generating past the positions ends with an error too, not with garbage.
        let mut session = Session::start(&model, full.clone(), &[vec![7; 2048]], &[0], 4).unwrap();
        let error = session.step(&[7]).unwrap_err();
        assert!(matches!(error, ModelError::PromptTooLong { .. }), "{error}");
    }
}

#[test]
fn running_out_of_capacity_is_an_error_and_leaves_the_session() {
    for tested in quick_devices("bad_input") {
        let model = embedded(&tested);
        let full = build(&json!({"policy": "full"})).unwrap();
        let mut session = Session::start(&model, full, &[vec![7; 20]], &[0], 2).unwrap();
        session.step(&[7]).unwrap();
        session.step(&[7]).unwrap();
        let logits = session.read_logits().unwrap();
        let error = session.step(&[7]).unwrap_err();
        assert!(error.to_string().contains("capacity is 22"), "{error}");
        assert_eq!(session.read_logits().unwrap(), logits);
    }
}

/// NaN in the weights shows at the first step; no token is emitted.
#[test]
fn nan_in_weights_is_reported_before_any_token() {
    for tested in quick_devices("bad_input") {
        let folder = embedded_folder();
        rewrite(folder.path(), "model.layers.1.input_layernorm.weight", |mut data| {
            data[..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
            Some((Dtype::BF16, vec![128], data))
        });
        let model = load(folder.path(), &tested).unwrap();
        let policy = build(&json!({"policy": "snapkv", "budget": 0.5})).unwrap();
        let requests = [Request::greedy(vec![7; 50], 4)];
        let mut emitted = 0;
        let error = generate(&model, policy, &requests, |_| {
            emitted += 1;
            std::ops::ControlFlow::Continue(())
        })
        .unwrap_err();
        assert!(matches!(error, ModelError::NonFinite { step: 0 }), "{}: {error}", tested.name);
        assert_eq!(emitted, 0);
    }
}

#[test]
fn sampling_parameters_out_of_range() {
    let tested = &devices()[0];
    let model = embedded(tested);
    let full = build(&json!({"policy": "full"})).unwrap();
    let mut request = Request::greedy(vec![7; 5], 4);
    request.sampling.temperature = -1.0;
    let error =
        generate(&model, full, &[request], |_| std::ops::ControlFlow::Continue(())).unwrap_err();
    assert!(error.to_string().contains("temperature"), "{error}");
}

#[test]
fn unknown_models_say_what_there_is() {
    let tested = &devices()[0];
    let error = Model::load("random:lama-2-7b", &tested.device, None).unwrap_err().to_string();
    assert!(error.contains("llama-2-7b"), "{error}");
    assert!(Model::load("no such model", &tested.device, None).is_err());
}
