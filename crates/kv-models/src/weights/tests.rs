mod broken;

use std::fs;
use std::path::Path;

use burn::tensor::{DType, Device};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::tempdir;

use super::{INDEX, Weights};
use crate::error::{ModelError, WeightsError};

const EMBEDDED: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/needle-1m/model.safetensors"));

const VALUES: [f32; 6] = [0.0, -1.0, 1.5, 3.140625, -0.0078125, 448.0];

/// A safetensors file of `(name, type)`, each tensor `[2, 3]` and holding [`VALUES`].
fn file(tensors: &[(&str, Dtype)]) -> Vec<u8> {
    let bytes = |dtype| -> Vec<u8> {
        match dtype {
            Dtype::F32 => VALUES.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Dtype::F16 => VALUES.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Dtype::BF16 => VALUES.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => vec![0; 48],
        }
    };
    let data: Vec<_> = tensors.iter().map(|(name, dtype)| (*name, *dtype, bytes(*dtype))).collect();
    let views = data
        .iter()
        .map(|(name, dtype, bytes)| (*name, TensorView::new(*dtype, vec![2, 3], bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

fn open(folder: &Path, name: &str, bytes: &[u8]) -> Result<Weights, ModelError> {
    fs::write(folder.join(name), bytes).unwrap();
    Weights::open(folder)
}

#[test]
fn reads_a_real_model() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/needle-1m");
    let (on_disk, in_memory) =
        (Weights::open(path).unwrap(), Weights::from_bytes(EMBEDDED).unwrap());
    assert!(on_disk.names().eq(in_memory.names()));
    assert!(on_disk.contains("model.norm.weight") && !on_disk.contains("lm_head.weight"));
    let (name, shape) = ("model.layers.3.mlp.down_proj.weight", [128, 352]);
    let device = Device::flex();
    let a = on_disk.tensor(name, shape, DType::F32, &device).unwrap().into_data();
    let b = in_memory.tensor(name, shape, DType::BF16, &device).unwrap();
    assert_eq!(b.dtype(), DType::BF16);
    a.assert_eq(&b.cast(DType::F32).into_data(), true);
    let values: Vec<f32> = a.try_to_vec().unwrap();
    assert!(values.iter().all(|v| v.is_finite()) && values.iter().any(|v| *v != 0.0));
}

#[test]
fn converts_between_all_types() {
    let folder = tempdir().unwrap();
    let types = [("a", Dtype::F32), ("b", Dtype::F16), ("c", Dtype::BF16)];
    let weights = open(folder.path(), "model.safetensors", &file(&types)).unwrap();
    for (name, _) in types {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let tensor = weights.tensor(name, [2, 3], dtype, &Device::flex()).unwrap();
            assert_eq!(tensor.dtype(), dtype);
            let values: Vec<f32> = tensor.cast(DType::F32).into_data().try_to_vec().unwrap();
            assert_eq!(values, VALUES, "{name} as {dtype:?}");
        }
    }
}

#[test]
fn a_single_file_of_another_name() {
    let folder = tempdir().unwrap();
    let bytes = file(&[("a", Dtype::F32)]);
    assert!(open(folder.path(), "consolidated.safetensors", &bytes).unwrap().contains("a"));
    assert!(Weights::open(folder.path().join("consolidated.safetensors")).unwrap().contains("a"));
    let error = open(folder.path(), "other.safetensors", &bytes).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("2 *.safetensors files") && text.contains(INDEX), "{text}");
}

#[test]
fn equal_tensors_and_the_type_of_all() {
    let folder = tempdir().unwrap();
    let bytes = file(&[("a", Dtype::I64), ("b", Dtype::F16), ("c", Dtype::F32), ("d", Dtype::F32)]);
    let weights = open(folder.path(), "model.safetensors", &bytes).unwrap();
    assert_eq!(weights.dtype(), Some(DType::F16));
    assert!(weights.are_equal("c", "d").unwrap());
    assert!(!weights.are_equal("b", "c").unwrap());
    assert!(weights.are_equal("c", "z").is_err());
    // The last number differs.
    let mut bytes = file(&[("c", Dtype::F32), ("d", Dtype::F32)]);
    *bytes.last_mut().unwrap() ^= 1;
    let weights = open(folder.path(), "model.safetensors", &bytes).unwrap();
    assert!(!weights.are_equal("c", "d").unwrap());
}

#[test]
fn shards_by_their_index() {
    let folder = tempdir().unwrap();
    let path = folder.path();
    let index = |map: &str| fs::write(path.join(INDEX), format!(r#"{{"weight_map": {map}}}"#));
    fs::write(path.join("1.safetensors"), file(&[("a", Dtype::F32), ("b", Dtype::F16)])).unwrap();
    let map = r#"{"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}"#;
    index(map).unwrap();
    let error = Weights::open(path).unwrap_err();
    assert!(
        matches!(error, ModelError::MissingFile { ref path, .. } if path.ends_with("2.safetensors")),
        "{error}"
    );
    let weights = open(path, "2.safetensors", &file(&[("c", Dtype::BF16)])).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(weights.tensor("c", [2, 3], DType::F32, &Device::flex()).is_ok());
    index(r#"{"d": "2.safetensors"}"#).unwrap();
    assert!(!Weights::open(path).unwrap().contains("d"));
    index(r#"{"a": "../1.safetensors"}"#).unwrap();
    assert!(matches!(Weights::open(path), Err(ModelError::InvalidJson { .. })));
    index("[]").unwrap();
    assert!(matches!(Weights::open(path), Err(ModelError::InvalidJson { .. })));
}

#[test]
fn wrong_tensors_are_typed_errors() {
    let folder = tempdir().unwrap();
    let bytes = file(&[("a", Dtype::F32), ("i", Dtype::I64)]);
    let weights = open(folder.path(), "model.safetensors", &bytes).unwrap();
    let device = Device::flex();
    let error = weights.tensor("a", [3, 2], DType::F32, &device).unwrap_err();
    assert!(matches!(
        error,
        ModelError::Weights(WeightsError::WrongShape { ref expected, ref actual, .. })
            if expected == &[3, 2] && actual == &[2, 3]
    ));
    assert!(weights.tensor("a", [6], DType::F32, &device).is_err());
    let error = weights.tensor("i", [2, 3], DType::F32, &device).unwrap_err();
    assert!(
        matches!(error, ModelError::Weights(WeightsError::WrongDtype { ref actual, .. }) if actual == "I64")
    );
    let error = weights.tensor("a", [2, 3], DType::F64, &device).unwrap_err();
    assert!(
        matches!(error, ModelError::Weights(WeightsError::WrongDtype { ref actual, .. }) if actual == "f64")
    );
    let error = weights.tensor("z", [1], DType::F32, &device).unwrap_err();
    assert!(matches!(
        error,
        ModelError::Weights(WeightsError::MissingTensor { files: 1, tensors: 2, .. })
    ));
}

#[test]
fn overflow_of_a_narrower_type_is_an_error() {
    let folder = tempdir().unwrap();
    let data: Vec<u8> = [1.0f32, 1e5].iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![2], &data).unwrap();
    let bytes = safetensors::serialize([("a", view)], None).unwrap();
    let weights = open(folder.path(), "model.safetensors", &bytes).unwrap();
    let error = weights.tensor("a", [2], DType::F16, &Device::flex()).unwrap_err();
    assert!(
        matches!(error, ModelError::Weights(WeightsError::OutOfRange { index: 1, .. })),
        "{error}"
    );
    assert!(weights.tensor("a", [2], DType::BF16, &Device::flex()).is_ok());
}
