//! Tensors' buffers: read, made, written in place.

use burn::backend::{DType, Element, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use crate::move_slots::reference::{compact, copy, drop_rows};
use crate::scatter_rows::reference::scatter;

/// A tensor's elements as f32.
pub(super) fn wide(tensor: &FlexTensor) -> Vec<f32> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::F16 => slice::<f16>(&tensor).iter().map(|x| x.to_f32()).collect(),
        DType::BF16 => slice::<bf16>(&tensor).iter().map(|x| x.to_f32()).collect(),
        _ => slice::<f32>(&tensor).to_vec(),
    }
}

/// f32 numbers as a tensor of a dtype.
pub(super) fn rounded(values: Vec<f32>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
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

/// Rounding to a dtype.
pub(super) fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::BF16 => |x| bf16::from_f32(x).to_f32(),
        _ => |x| x,
    }
}

/// Rows of one pool copied into another, converted where their dtypes differ.
pub(super) fn moved(from: FlexTensor, rows: &[i32], to: FlexTensor, slots: &[i32]) -> FlexTensor {
    let mut to = owned(to);
    let width = to.layout().shape().iter().skip(1).product();
    if from.dtype() != to.dtype() {
        let (wide, dtype) = (wide(&from), to.dtype());
        let shape: Vec<usize> = from.layout().shape().to_vec();
        return moved(rounded(wide, shape, dtype), rows, to, slots);
    }
    let from = from.to_contiguous();
    match to.dtype() {
        DType::I32 => copy(slice::<i32>(&from), rows, to.storage_mut::<i32>(), slots, width),
        DType::F16 => copy(slice::<f16>(&from), rows, to.storage_mut::<f16>(), slots, width),
        DType::BF16 => copy(slice::<bf16>(&from), rows, to.storage_mut::<bf16>(), slots, width),
        _ => copy(slice::<f32>(&from), rows, to.storage_mut::<f32>(), slots, width),
    }
    to
}

/// A pool whose ranges hold their kept rows alone.
pub(super) fn compacted(pool: FlexTensor, lists: [&[i32]; 4]) -> FlexTensor {
    let mut pool = owned(pool);
    let width = pool.layout().shape().iter().skip(1).product();
    match pool.dtype() {
        DType::I32 => compact(pool.storage_mut::<i32>(), lists, width),
        DType::F16 => compact(pool.storage_mut::<f16>(), lists, width),
        DType::BF16 => compact(pool.storage_mut::<bf16>(), lists, width),
        _ => compact(pool.storage_mut::<f32>(), lists, width),
    }
    pool
}

/// A pool whose ranges' last rows are in their victims' places.
pub(super) fn dropped(pool: FlexTensor, drops: [&[i32]; 4]) -> FlexTensor {
    let mut pool = owned(pool);
    let width = pool.layout().shape().iter().skip(1).product();
    match pool.dtype() {
        DType::I32 => drop_rows(pool.storage_mut::<i32>(), drops, width),
        DType::F16 => drop_rows(pool.storage_mut::<f16>(), drops, width),
        DType::BF16 => drop_rows(pool.storage_mut::<bf16>(), drops, width),
        _ => drop_rows(pool.storage_mut::<f32>(), drops, width),
    }
    pool
}

pub(super) fn scatter_into<E: Element + Pod>(
    pool: FlexTensor,
    slots: FlexTensor,
    rows: FlexTensor,
) -> FlexTensor {
    let mut pool = owned(pool);
    let (slots, rows) = (slots.to_contiguous(), rows.to_contiguous());
    let rows = slice::<E>(&rows);
    let slots = slice::<i32>(&slots);
    let (start, _) = pool.layout().contiguous_offsets().unwrap_or((0, 0));
    let width = (rows.len() / slots.len().max(1)).max(1);
    scatter(&mut pool.storage_mut::<E>()[start..], slots, rows, width);
    pool
}

/// The tensor without gaps, to be written: `to_contiguous` would share the buffer with the
/// original, which then is copied on write.
pub(super) fn owned(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// A contiguous tensor's elements.
pub(super) fn slice<E: Element + Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice::<E>().unwrap_or(&[])
}
