//! Index sets in host memory, and in files.

use burn::tensor::{Device, TensorData};
use kv_kernels::IndexSets;

use crate::{Error, Result};

/// A layer's index sets in host memory.
#[derive(Debug, Clone)]
pub(crate) struct HostSets {
    /// Of the vectors: `[B * H, sets, parts, length]`.
    pub(crate) shape: [usize; 4],
    /// `[B * H, row]`, 32-bit.
    pub(crate) table: TensorData,
    /// f32.
    pub(crate) vectors: TensorData,
}

impl HostSets {
    pub(crate) fn read(sets: &IndexSets) -> Result<Self> {
        let _work = kv_kernels::device_work();
        let failed = |error: String| Error::Read { what: "index sets", reason: error };
        let (table, vectors) = sets.tensors();
        Ok(Self {
            shape: vectors.dims(),
            table: table.clone().try_into_data().map_err(|error| failed(error.to_string()))?,
            vectors: vectors.clone().try_into_data().map_err(|error| failed(error.to_string()))?,
        })
    }

    /// `tokens` are those of each range.
    pub(crate) fn upload(self, tokens: &[usize], device: &Device) -> Result<IndexSets> {
        let failed = |what: String| Error::Read { what: "index sets", reason: what };
        let table = self.table.try_to_vec::<i32>().map_err(|error| failed(format!("{error:?}")))?;
        let vectors =
            self.vectors.try_to_vec::<f32>().map_err(|error| failed(format!("{error:?}")))?;
        Ok(IndexSets::from_saved(&table, &vectors, self.shape, tokens, device)?)
    }
}
