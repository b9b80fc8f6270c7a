//! Matrices that are stored in fewer bits than activations have.

use burn::module::Param;
use burn::tensor::{DType, Tensor};
use kv_core::{device_name, read_f32};
use kv_kernels::device_work;

use super::Llama;
use crate::{ModelError, Result};

impl Llama {
    /// The dtype in which matrices are stored, the embedding included.
    pub fn matrix_dtype(&self) -> DType {
        self.embedding.val().dtype()
    }

    /// Stores all matrices, the embedding included, in `dtype`: f16 or bf16. Norms, biases,
    /// activations and the cache stay in f32. A decode step reads every matrix once, and then reads
    /// half the bytes. A prompt gains nothing: each of its products casts its matrix to f32, which
    /// takes 4 bytes a number while the product runs.
    ///
    /// Numbers are rounded; f16 rounds those below 3e-8 to 0. `dtype` may be f32, which brings
    /// back no digits.
    ///
    /// # Errors
    /// [`ModelError::MatrixStorage`] outside the CPU, for a decoder that does not compute in f32,
    /// for other dtypes, and for matrices with numbers that f16 does not hold.
    pub fn with_matrices_in(mut self, dtype: DType) -> Result<Self> {
        let refuse = |reason: String| {
            let name = format!("{dtype:?}").to_lowercase();
            Err(ModelError::MatrixStorage { dtype: name, reason })
        };
        let device = device_name(&self.device());
        if device != "cpu" {
            return refuse(format!("the device is {device}, and kernels there take one dtype"));
        }
        if self.dtype != DType::F32 {
            let own = format!("{:?}", self.dtype).to_lowercase();
            return refuse(format!("the model computes in {own}, expected f32"));
        }
        if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32) {
            return refuse("expected f16, bf16 or f32".into());
        }
        let _work = device_work();
        let layers = self.layers.iter_mut().flat_map(|layer| {
            [&mut layer.qkv, &mut layer.output, &mut layer.gate_up, &mut layer.down]
        });
        let linears = layers.chain(&mut self.head).map(|linear| linear.weight_mut());
        for matrix in linears.chain([&mut self.embedding]) {
            let stored = matrix.val().cast(dtype);
            if dtype == DType::F16 {
                let largest = largest(&stored)?;
                if !largest.is_finite() {
                    let [rows, columns] = stored.dims();
                    return refuse(format!(
                        "a matrix of {rows} x {columns} has numbers beyond 65,504, the largest of \
                         f16; bf16 holds them"
                    ));
                }
            }
            *matrix = Param::from_tensor(stored);
        }
        Ok(self)
    }
}

/// The largest absolute number.
fn largest(matrix: &Tensor<2>) -> Result<f32> {
    let largest = matrix.clone().abs().max().cast(DType::F32);
    Ok(read_f32("matrix", largest)?.first().copied().unwrap_or(0.0))
}
