//! Models from GGUF files, beside folders with the dequantised weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use kv_gguf::GgufFile;
use kv_models::{Model, ModelError, Session};
use kv_policies::build;
use kv_testing::{devices, quick_devices};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kv-gguf/fixtures").join(name)
}

/// Writes a folder in the Hugging Face layout with a GGUF file's numbers in f32.
fn write_folder(file: &GgufFile, folder: &Path) {
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
    write("config.json", file.config().unwrap().to_string());
    write("tokenizer.json", file.tokenizer().unwrap().to_string());
    let tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = file
        .tensors()
        .map(|info| {
            let bytes = file.read(&info.name).unwrap().into_iter().flat_map(f32::to_le_bytes);
            (info.name, (info.shape, bytes.collect()))
        })
        .collect();
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let policy = build(&json!({"policy": "full"})).unwrap();
    let session = Session::start(model, policy, &[tokens.to_vec()], &[0], 1).unwrap();
    session.read_logits().unwrap().remove(0)
}

#[test]
fn files_and_folders_of_equal_numbers_are_equal_models() {
    for name in ["bpe-smollm.gguf", "spm.gguf"] {
        let path = fixture(name);
        let folder = tempfile::tempdir().unwrap();
        write_folder(&GgufFile::open(&path).unwrap(), folder.path());
        for tested in quick_devices("gguf") {
            let model =
                Model::load(path.to_str().unwrap(), &tested.device, Some(DType::F32)).unwrap();
            assert_eq!(format!("{}.gguf", model.name()), name);
            let other =
                Model::from_folder(folder.path(), &tested.device, Some(DType::F32)).unwrap();
            let vocabulary = model.config().vocab_size as u32;
            let tokens: Vec<u32> = (0..9).map(|token| token * 3 % vocabulary).collect();
            let own = logits(&model, &tokens);
            assert!(own.iter().any(|logit| *logit != own[0]), "{name} on {}", tested.name);
            assert_eq!(own, logits(&other, &tokens), "{name} on {}", tested.name);
            // Beside the name: the shape, and the last norm's sum.
            let [one, two] = [&model, &other].map(|model| {
                let fingerprint = model.fingerprint().unwrap();
                fingerprint.split_once(' ').unwrap().1.to_string()
            });
            assert_eq!(one, two);
            let text = "a b ab";
            assert_eq!(model.encode(text).unwrap(), other.encode(text).unwrap(), "{name}");
        }
    }
}

#[test]
fn damaged_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    let whole = std::fs::read(fixture("types.gguf")).unwrap();
    let device = devices().remove(0).device;
    for length in [0, 3, 24, 200, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = Model::load(path.to_str().unwrap(), &device, None).unwrap_err();
        assert!(matches!(error, ModelError::Gguf { .. }), "{length}: {error}");
        assert!(error.to_string().contains("cut.gguf"), "{error}");
    }
    // A whole file without a tokenizer.
    std::fs::write(&path, whole).unwrap();
    let error = Model::load(path.to_str().unwrap(), &device, None).unwrap_err();
    assert!(error.to_string().contains("tokenizer"), "{error}");
}
