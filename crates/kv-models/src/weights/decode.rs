//! Bytes on disk to numbers in the type asked for.

use std::io::{self, Read};
use std::path::Path;

use burn::tensor::{DType, TensorData};
use half::{bf16, f16};
use safetensors::{Dtype, tensor::TensorInfo};

use super::PIECE;
use crate::error::{ModelError, Result, WeightsError};

const SUPPORTED: &str = "F32, F16, BF16";

/// Reads one tensor in pieces, so that no copy of the raw bytes is ever held.
pub(super) fn decode(
    reader: &mut dyn Read,
    name: &str,
    info: &TensorInfo,
    dtype: DType,
    path: &Path,
) -> Result<TensorData> {
    let wrong = |actual: String| WeightsError::WrongDtype {
        name: name.to_string(),
        actual,
        supported: SUPPORTED,
    };
    let shape = info.shape.clone();
    let n: usize = shape.iter().product();
    let io = |source| ModelError::io(path, source);
    Ok(match (info.dtype, dtype) {
        (Dtype::F32, DType::F32) => {
            TensorData::new(elements(reader, n, f32::from_le_bytes).map_err(io)?, shape)
        }
        (Dtype::F16, DType::F16) => {
            TensorData::new(elements(reader, n, f16::from_le_bytes).map_err(io)?, shape)
        }
        (Dtype::BF16, DType::BF16) => {
            TensorData::new(elements(reader, n, bf16::from_le_bytes).map_err(io)?, shape)
        }
        (from @ (Dtype::F32 | Dtype::F16 | Dtype::BF16), to) => {
            let wide = match from {
                Dtype::F16 => elements(reader, n, |b| f16::from_le_bytes(b).to_f32()),
                Dtype::BF16 => elements(reader, n, |b| bf16::from_le_bytes(b).to_f32()),
                _ => elements(reader, n, f32::from_le_bytes),
            }
            .map_err(io)?;
            match to {
                DType::F32 => TensorData::new(wide, shape),
                DType::F16 => {
                    let values: Vec<f16> = wide.into_iter().map(f16::from_f32).collect();
                    check_finite(name, dtype, values.iter().map(|v| v.to_f32()))?;
                    TensorData::new(values, shape)
                }
                DType::BF16 => {
                    let values: Vec<bf16> = wide.into_iter().map(bf16::from_f32).collect();
                    check_finite(name, dtype, values.iter().map(|v| v.to_f32()))?;
                    TensorData::new(values, shape)
                }
                other => return Err(wrong(other.name().to_string()).into()),
            }
        }
        (from, _) => return Err(wrong(from.to_string()).into()),
    })
}

/// Exactly `count` elements of `N` bytes, a divisor of [`PIECE`].
fn elements<const N: usize, T>(
    reader: &mut dyn Read,
    count: usize,
    element: impl Fn([u8; N]) -> T,
) -> io::Result<Vec<T>> {
    let mut values = Vec::with_capacity(count);
    let mut piece = vec![0; PIECE.min(count * N)];
    while values.len() < count {
        let bytes = &mut piece[..PIECE.min((count - values.len()) * N)];
        reader.read_exact(bytes)?;
        values.extend(bytes.as_chunks::<N>().0.iter().map(|chunk| element(*chunk)));
    }
    Ok(values)
}

/// Refuses a conversion that overflowed.
fn check_finite(name: &str, dtype: DType, values: impl Iterator<Item = f32>) -> Result<()> {
    match values.enumerate().find(|(_, value)| !value.is_finite()) {
        None => Ok(()),
        Some((index, value)) => {
            let name = name.to_string();
            Err(WeightsError::OutOfRange { name, dtype: dtype.name(), index, value }.into())
        }
    }
}
