//! Saved sessions of earlier versions, which store integers of policies' states as f32, write slots
//! as a tensor of the cache's own, and a policy's options under other names.

use std::collections::HashMap;
use std::path::Path;

use kv_models::Session;
use kv_policies::build;
use kv_testing::devices;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use super::support::embedded;

/// Writes a saved session as an earlier version did; returns how many tensors and names differ.
fn as_before(from: &Path, to: &Path) -> usize {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let header = metadata.metadata().as_ref().unwrap()["burn-kv"].clone();
    // KVReviver had one form, and an option of it had another name.
    let header = header.replace(",\"vague\":\"sketch\"", "").replace("\"candidates\":null,", "");
    let renamed = usize::from(header.contains("\"sketch_share\""));
    let header = header.replace("\"sketch_share\"", "\"vague\"");
    let mut header: Value = serde_json::from_str(&header).unwrap();
    for layer in header["layers"].as_array_mut().unwrap() {
        let layer = layer.as_object_mut().unwrap();
        layer["state"].as_array_mut().unwrap().retain(|name| name != "balancekv-longest");
        let next = layer.remove("write_slots").is_some();
        layer.insert("next".into(), next.into());
    }
    let mut tensors: Vec<(String, Vec<usize>, Dtype, Vec<u8>)> = Vec::new();
    let mut changed = renamed;
    for (name, view) in file.iter() {
        let integers = view.dtype() == Dtype::I32
            && (name.contains(".state.") || name.ends_with(".lists.table"));
        let mut shape = view.shape().to_vec();
        if let Some(layer) = name.strip_suffix(".write_slots.slots") {
            changed += 1;
            tensors.push((format!("{layer}.next"), shape, view.dtype(), view.data().to_vec()));
            continue;
        }
        if !integers {
            if !name.ends_with("balancekv-longest") {
                tensors.push((name.to_string(), shape, view.dtype(), view.data().to_vec()));
            }
            continue;
        }
        changed += 1;
        let four = |bytes: &[u8]| [bytes[0], bytes[1], bytes[2], bytes[3]];
        let own = view.data().chunks(4).map(|bytes| i32::from_le_bytes(four(bytes)) as f32);
        let mut numbers: Vec<f32> = own.collect();
        if name.ends_with("balancekv-stream") {
            let longest = file.tensor(&name.replace("stream", "longest")).unwrap();
            let longest = longest.data().chunks(4).map(|bytes| f32::from_le_bytes(four(bytes)));
            let heads = numbers.chunks(8).zip(longest);
            numbers = heads
                .flat_map(|(head, longest)| [&head[..6], &[longest], &head[6..]].concat())
                .collect();
            shape[2] = 9;
        }
        let data = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        tensors.push((name.to_string(), shape, Dtype::F32, data));
    }
    let views = tensors.iter().map(|(name, shape, dtype, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let metadata = HashMap::from([("burn-kv".to_string(), header.to_string())]);
    serialize_to_file(views, Some(metadata), to).unwrap();
    changed
}

#[test]
fn files_of_earlier_versions_go_on_identically() {
    let tested = &devices()[0];
    let model = embedded(tested);
    let heads = model.config().num_kv_heads;
    let alpha = vec![vec![0.0; heads]; model.config().num_layers];
    let prompt: Vec<u32> = (0..120).map(|at| 3 + at * 7 % 50).collect();
    for config in [
        json!({"policy": "quest", "budget": 24, "page": 4}),
        json!({"policy": "double-sparsity", "budget": 24}),
        json!({"policy": "hshare", "budget": 48}),
        json!({"policy": "duo-attention", "alpha": alpha, "sinks": 4, "recents": 30}),
        json!({"policy": "longflow", "budget": 40}),
        json!({"policy": "kvreviver", "vague": "sketch", "budget": 60}),
        json!({"policy": "cam", "budget": 40}),
        json!({"policy": "pyramidinfer", "budget": 60}),
        json!({"policy": "balancekv-stream", "budget": 60}),
    ] {
        let policy = build(&config).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let [now, before] = ["now", "before"].map(|name| folder.path().join(name));
        let prompts = std::slice::from_ref(&prompt);
        let mut session = Session::start(&model, policy.clone(), prompts, &[5], 60).unwrap();
        (0..20).for_each(|at| session.step(&[3 + at]).unwrap());
        session.save(&now).unwrap();
        assert!(as_before(&now, &before) > 0, "{config}");
        let logits = [&now, &before].map(|path| {
            let mut session = Session::resume(&model, policy.clone(), path, &[30]).unwrap();
            (0..30).for_each(|at| session.step(&[9 + at]).unwrap());
            session.read_logits().unwrap()
        });
        assert_eq!(logits[0], logits[1], "{config}");
    }
}
