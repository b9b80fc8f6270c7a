//! Tensor buffers on the CPU: read, created, and written in place.

use std::ops::Deref;

use burn::backend::{DType, Element, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A tensor's elements as f32.
pub(crate) enum Wide {
    /// A tensor of f32, without gaps. It shares its buffer.
    Shared(FlexTensor),
    /// Converted numbers.
    Converted(Vec<f32>),
}

impl Deref for Wide {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Shared(tensor) => slice(tensor),
            Self::Converted(numbers) => numbers,
        }
    }
}

impl Default for Wide {
    fn default() -> Self {
        Self::Converted(Vec::new())
    }
}

impl Wide {
    /// The numbers, to be changed.
    pub(crate) fn into_vec(self) -> Vec<f32> {
        match self {
            Self::Shared(tensor) => slice(&tensor).to_vec(),
            Self::Converted(numbers) => numbers,
        }
    }
}

/// A tensor's elements as f32.
pub(crate) fn wide(tensor: &FlexTensor) -> Wide {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::F16 => Wide::Converted(slice::<f16>(&tensor).to_f32_vec()),
        DType::BF16 => Wide::Converted(slice::<bf16>(&tensor).to_f32_vec()),
        _ => Wide::Shared(tensor),
    }
}

/// f32 numbers as a tensor of the given dtype.
pub(crate) fn rounded(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    let shape: Shape = shape.into();
    let data = match dtype {
        DType::F16 => {
            TensorData::new(values.into_iter().map(f16::from_f32).collect::<Vec<_>>(), shape)
        }
        DType::BF16 => {
            TensorData::new(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>(), shape)
        }
        _ => TensorData::new(values, shape),
    };
    FlexTensor::from_data(data)
}

/// The function that rounds an f32 to the given dtype.
pub(crate) fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::BF16 => |x| bf16::from_f32(x).to_f32(),
        _ => |x| x,
    }
}

/// The tensor without gaps, to be written. `to_contiguous` on a contiguous tensor would share the
/// buffer, and the write would then copy it.
pub(crate) fn owned(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The elements of a tensor from [`owned`], to be written. It may be a part of a larger buffer.
pub(crate) fn slice_mut<E: Element + Pod>(tensor: &mut FlexTensor) -> &mut [E] {
    let (start, end) = tensor.layout().contiguous_offsets().unwrap_or((0, 0));
    &mut tensor.storage_mut::<E>()[start..end]
}

/// A contiguous tensor's elements.
pub(crate) fn slice<E: Element + Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice::<E>().unwrap_or(&[])
}

/// The dimensions of a tensor.
pub(crate) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.layout().shape().dims()
}

/// Lists of slots and their lengths as tensors, one row a list.
pub(crate) fn listed((slots, counts): (Vec<i32>, Vec<i32>)) -> (FlexTensor, FlexTensor) {
    let rows = counts.len();
    let width = slots.len() / rows.max(1);
    let slots = FlexTensor::from_data(TensorData::new(slots, [rows, width]));
    (slots, FlexTensor::from_data(TensorData::new(counts, [rows])))
}

/// Runs an expression with `$element` as the type of the elements of a dtype that the ops take.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $run:expr) => {
        match $dtype {
            burn::backend::DType::I32 => {
                type $element = i32;
                $run
            }
            burn::backend::DType::F16 => {
                type $element = half::f16;
                $run
            }
            burn::backend::DType::BF16 => {
                type $element = half::bf16;
                $run
            }
            _ => {
                type $element = f32;
                $run
            }
        }
    };
}
pub(crate) use with_element;
