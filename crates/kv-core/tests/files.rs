use burn::tensor::DType;
use kv_core::{CacheOptions, Error, KvCache, LayerCache, Origin, SlotLayout};
use kv_testing::devices;

fn saved(device: &burn::tensor::Device, path: &std::path::Path) -> KvCache {
    let options = CacheOptions::new(device, DType::F32);
    let layer = LayerCache::new(SlotLayout::new(1, vec![4]), 8, options);
    let origin = Origin { model: "m".into(), policy: serde_json::json!({"policy": "full"}) };
    let cache = KvCache { layers: vec![layer], seen: vec![0], origin };
    cache.save(path).unwrap();
    cache
}

#[test]
fn damaged_and_foreign_files_are_typed_errors() {
    for tested in devices() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache.safetensors");
        let load = || KvCache::load(&path, &tested.device);
        assert!(matches!(load().unwrap_err(), Error::Io { .. }));

        saved(&tested.device, &path);
        load().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for cut in [0, 5, bytes.len() / 2] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let error = load().unwrap_err();
            assert!(matches!(error, Error::InvalidFile { .. }), "{error}");
        }
    }
}

#[test]
fn another_model_or_policy_is_refused() {
    for tested in devices() {
        let folder = tempfile::tempdir().unwrap();
        let cache = saved(&tested.device, &folder.path().join("cache.safetensors"));
        cache.expect_origin(&cache.origin).unwrap();
        let other = Origin { model: "other".into(), ..cache.origin.clone() };
        let error = cache.expect_origin(&other).unwrap_err().to_string();
        assert!(error.contains("model m") && error.contains("model other"), "{error}");
    }
}
