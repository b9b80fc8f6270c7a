//! Matrices stored in fewer bits.

use burn::tensor::DType;
use kv_core::read_f32;
use kv_models::{Model, ModelError, PrefillPass};
use kv_testing::devices;

use super::support::embedded_in_f32;

fn logits(model: &Model) -> Vec<f32> {
    let llama = model.llama();
    let ids = model.encode("The old boat lay upon the sand, and nobody was there.").unwrap();
    let prefilled = llama.prefill(&[&ids], PrefillPass::default(), &mut |_| Ok(None)).unwrap();
    let [_, tokens, width] = prefilled.hidden.dims();
    let hidden = prefilled.hidden.reshape([tokens, width]);
    read_f32("logits", llama.logits(hidden).unwrap()).unwrap()
}

#[test]
fn halves_change_logits_by_their_rounding_and_run_on_the_cpu_alone() {
    for tested in devices() {
        let model = || embedded_in_f32(&tested);
        let whole = logits(&model());
        for (dtype, limit) in [(DType::F16, 0.01), (DType::BF16, 0.0)] {
            let stored = model().with_matrices_in(dtype);
            if tested.name != "cpu" {
                let error = stored.unwrap_err();
                assert!(matches!(error, ModelError::MatrixStorage { .. }), "{error}");
                continue;
            }
            let stored = stored.unwrap();
            assert_eq!(
                (stored.llama().dtype(), stored.llama().matrix_dtype()),
                (DType::F32, dtype)
            );
            let pairs = whole.iter().zip(logits(&stored));
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // The model's own weights are in bf16.
            assert!(worst <= limit, "{dtype:?}: logits differ by {worst}");
            let again = stored.with_matrices_in(DType::F32).unwrap();
            assert_eq!(again.llama().matrix_dtype(), DType::F32);
        }
    }
}

#[test]
fn only_models_in_f32_store_other_matrices() {
    let tested = &devices()[0];
    let model = Model::load("needle-1m", &tested.device, Some(DType::BF16)).unwrap();
    let error = model.with_matrices_in(DType::F16).unwrap_err().to_string();
    assert!(error.contains("bf16"), "{error}");
}
