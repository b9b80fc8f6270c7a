//! LongFlow on the queries, keys and values of a real model.

use burn::tensor::{DType, Tensor};
use kv_models::{Model, PrefillPass};
use kv_policies::Needs;
use kv_testing::{devices, quick_devices, skip};

use super::followed::{Rule, Trace, follow};
use super::support::model_folder;

const PROMPT: usize = 300;
const STEPS: usize = 1_000;
const BUDGET: usize = 200;
/// Layers at the beginning, in the middle and at the end.
const LAYERS: [usize; 3] = [0, 4, 7];

/// Over a thousand steps the same slots are overwritten as by an unfused reference in f64, and the
/// outputs agree.
#[test]
fn a_thousand_real_steps_give_up_the_slots_of_an_f64_reference() {
    let Some(folder) = model_folder("needle-25m") else {
        skip("longflow_on_real_queries", "no model needle-25m; set KV_MODELS_DIR");
        return;
    };
    let cpu = devices().remove(0);
    let name = folder.display().to_string();
    let model = Model::load(&name, &cpu.device, Some(DType::F32)).unwrap();
    let text = include_str!("../../kv-bench/assets/books.txt");
    let tokens = model.encode(text).unwrap()[..PROMPT + STEPS].to_vec();
    let mut traces = Vec::new();
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, ..Needs::default() },
        ..PrefillPass::default()
    };
    let mut observe = |seen: &kv_policies::Observation<'_>| {
        if LAYERS.contains(&seen.layer.index) {
            let query = seen.window.clone().unwrap();
            traces.push((seen.layer.index, [query, seen.keys.clone(), seen.values.clone()]));
        }
        Ok(None)
    };
    model.llama().prefill(&[&tokens], pass, &mut observe).unwrap();
    for tested in quick_devices("longflow") {
        for (layer, tensors) in &traces {
            let [query, keys, values] = tensors.clone().map(|tensor: Tensor<4>| {
                let shape = tensor.dims();
                let data = tensor.into_data();
                Tensor::<4>::from_data(data, (&tested.device, DType::F32)).reshape(shape)
            });
            let trace = Trace { query, keys, values };
            let heads = Rule::default();
            let together = Rule { layer: true, ..heads };
            let remembering = Rule { memory: Some(0.99), ..together };
            for rule in [together, heads, remembering, Rule { ties: Some(4.0), ..together }] {
                let context = format!("layer {layer}, {rule:?}, on {}", tested.name);
                let near = follow(&trace, PROMPT, BUDGET, rule, &context);
                assert!(near <= STEPS / 100, "{context}: {near} near-ties");
            }
        }
    }
}
