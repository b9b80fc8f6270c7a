use std::path::PathBuf;

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// A file of golden vectors.
#[derive(Debug)]
pub struct Golden {
    /// The file's name without ending.
    pub name: String,
    bytes: Vec<u8>,
}

/// One tensor of a golden file, as f64.
#[derive(Debug, Clone)]
pub struct GoldenTensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, row-major.
    pub values: Vec<f64>,
}

/// All files whose names begin with `prefix`, from the workspace's `fixtures/golden`, or from the
/// folder that `KV_GOLDEN_DIR` names instead. Reports each; prints a skip for `test` where there
/// are none.
pub fn golden_files(test: &str, prefix: &str) -> Vec<Golden> {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    // A relative folder counts from the workspace, whatever folder cargo runs the test in.
    let named = std::env::var("KV_GOLDEN_DIR").unwrap_or_else(|_| "fixtures/golden".into());
    let mut paths: Vec<PathBuf> = std::fs::read_dir(workspace.join(named))
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .filter(|path| {
            path.file_stem().is_some_and(|stem| stem.to_string_lossy().starts_with(prefix))
        })
        .collect();
    paths.sort();
    if paths.is_empty() {
        crate::skip(test, &format!("no golden file `{prefix}*`; set KV_GOLDEN_DIR"));
    }
    paths
        .into_iter()
        .map(|path| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            crate::report(&format!("golden {name}"));
            let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            Golden { name, bytes }
        })
        .collect()
}

impl Golden {
    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.file().names().into_iter().map(str::to_string).collect()
    }

    /// One tensor; panics where it is missing.
    pub fn tensor(&self, name: &str) -> GoldenTensor {
        self.find(name).unwrap_or_else(|| panic!("{}: no tensor `{name}`", self.name))
    }

    /// One tensor, if it is there.
    pub fn find(&self, name: &str) -> Option<GoldenTensor> {
        let file = self.file();
        let view = file.tensor(name).ok()?;
        let bytes = view.data();
        macro_rules! read {
            ($kind:ty) => {
                bytes
                    .chunks_exact(size_of::<$kind>())
                    .map(|chunk| <$kind>::from_le_bytes(chunk.try_into().unwrap()) as f64)
                    .collect()
            };
        }
        let values = match view.dtype() {
            Dtype::F64 => read!(f64),
            Dtype::F32 => read!(f32),
            Dtype::I64 => read!(i64),
            Dtype::I32 => read!(i32),
            Dtype::I16 => read!(i16),
            Dtype::U8 | Dtype::BOOL => bytes.iter().map(|byte| f64::from(*byte)).collect(),
            other => panic!("{}: `{name}` is {other:?}", self.name),
        };
        Some(GoldenTensor { shape: view.shape().to_vec(), values })
    }

    /// A hyper-parameter from the metadata, where non-strings are JSON.
    pub fn parameter(&self, name: &str) -> Option<serde_json::Value> {
        let (_, metadata) = SafeTensors::read_metadata(&self.bytes).unwrap();
        let text = metadata.metadata().as_ref()?.get(name)?.clone();
        Some(serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text)))
    }

    /// A numeric hyper-parameter; panics where it is missing.
    pub fn number(&self, name: &str) -> f64 {
        let value = self.parameter(name);
        value
            .as_ref()
            .and_then(serde_json::Value::as_f64)
            .unwrap_or_else(|| panic!("{}: parameter `{name}` is {value:?}", self.name))
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes)
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

impl GoldenTensor {
    /// The elements as f32.
    pub fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|x| *x as f32).collect()
    }

    /// The elements as indices.
    pub fn indices(&self) -> Vec<u32> {
        self.values.iter().map(|x| *x as u32).collect()
    }

    /// The shape with a fixed number of dimensions; panics for another one.
    pub fn dims<const D: usize>(&self) -> [usize; D] {
        self.shape.clone().try_into().unwrap_or_else(|shape| panic!("shape {shape:?}"))
    }

    /// An f32 tensor on a device.
    pub fn on<const D: usize>(&self, device: &Device) -> Tensor<D> {
        let data = TensorData::new(self.f32(), self.dims::<D>());
        Tensor::from_data(data, (device, DType::F32))
    }
}
