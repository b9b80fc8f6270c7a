//! Tensors that belong to a policy's state of a layer as a whole.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::expect_shape;
use crate::{Error, LayerCache, Result};

/// A state tensor: real numbers, or counts, indices and positions.
#[derive(Debug)]
pub(crate) enum StateTensor {
    /// f32
    Float(Tensor<3>),
    /// i32
    Int(Tensor<3, Int>),
}

impl StateTensor {
    /// A copy with a buffer of its own: kernels write states in place.
    pub(crate) fn copied(&self) -> Self {
        match self {
            Self::Float(tensor) => Self::Float(packed(tensor.clone().mul_scalar(1.0))),
            Self::Int(tensor) => Self::Int(packed_ints(tensor.clone().add_scalar(0))),
        }
    }

    /// Puts the one row of another state in the place of a row, in this state's own buffer.
    pub(crate) fn replace_row(&mut self, row: usize, from: &Self) -> Result<()> {
        match (self, from) {
            (Self::Float(own), Self::Float(other)) => {
                let [_, width, depth] = own.dims();
                expect_shape("state", &other.dims(), &[1, width, depth])?;
                Ok(kv_kernels::assign_rows(own, row, other.clone())?)
            }
            (Self::Int(own), Self::Int(other)) => {
                let [_, width, depth] = own.dims();
                expect_shape("state", &other.dims(), &[1, width, depth])?;
                Ok(kv_kernels::assign_int_rows(own, row, other.clone())?)
            }
            _ => Err(Error::InvalidPlan { what: "state", reason: "f32 and i32 differ".into() }),
        }
    }

    pub(crate) fn to_device(&self, device: &Device) -> Self {
        match self {
            Self::Float(tensor) => Self::Float(packed(tensor.clone().to_device(device))),
            Self::Int(tensor) => Self::Int(packed_ints(tensor.clone().to_device(device))),
        }
    }

    /// A copy in host memory.
    pub(crate) fn to_host(&self) -> Result<TensorData> {
        let _work = kv_kernels::device_work();
        let data = match self {
            Self::Float(tensor) => tensor.clone().try_into_data(),
            Self::Int(tensor) => tensor.clone().try_into_data(),
        };
        data.map_err(|error| Error::Read { what: "state", reason: error.to_string() })
    }

    /// A copy of `data` on a device. Integers that a file stores as f32 give [`Self::Float`];
    /// [`LayerCache::states_to_ints`] converts them.
    pub(crate) fn from_host(data: TensorData, device: &Device) -> Self {
        match data.dtype() {
            DType::I32 => Self::Int(packed_ints(Tensor::from_data(data, (device, DType::I32)))),
            dtype => Self::Float(packed(Tensor::from_data(data, (device, dtype)))),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let (dims, dtype) = match self {
            Self::Float(tensor) => (tensor.dims(), tensor.dtype()),
            Self::Int(tensor) => (tensor.dims(), tensor.dtype()),
        };
        dims.iter().product::<usize>() * dtype.size()
    }

    /// The states `name` of several caches, batched.
    pub(crate) fn joined(name: &str, parts: &[&Self]) -> Result<Self> {
        let (mut floats, mut ints) = (Vec::new(), Vec::new());
        for part in parts {
            match part {
                Self::Float(tensor) => floats.push(tensor.clone()),
                Self::Int(tensor) => ints.push(tensor.clone()),
            }
        }
        let alike = |all: Vec<[usize; 3]>| {
            let first = all.first().copied().unwrap_or_default();
            let each = all.into_iter();
            let mut each = each.map(|dims| (dims, [dims[0], first[1], first[2]]));
            each.try_for_each(|(dims, expected)| expect_shape("state", &dims, &expected))
        };
        match (floats.is_empty(), ints.is_empty()) {
            (_, true) => {
                alike(floats.iter().map(Tensor::dims).collect())?;
                Ok(Self::Float(packed(Tensor::cat(floats, 0))))
            }
            (true, _) => {
                alike(ints.iter().map(Tensor::dims).collect())?;
                Ok(Self::Int(packed_ints(Tensor::cat(ints, 0))))
            }
            _ => {
                let reason = format!(
                    "state `{name}` is f32 in {} and i32 in {} caches",
                    floats.len(),
                    ints.len()
                );
                Err(Error::InvalidPlan { what: "concat", reason })
            }
        }
    }
}

impl LayerCache {
    /// A tensor of real numbers that belongs to the policy's state of this layer.
    pub fn state(&self, name: &str) -> Option<&Tensor<3>> {
        match self.state.get(name)? {
            StateTensor::Float(tensor) => Some(tensor),
            StateTensor::Int(_) => None,
        }
    }

    /// A tensor of integers, i32, that belongs to the policy's state of this layer.
    pub fn int_state(&self, name: &str) -> Option<&Tensor<3, Int>> {
        match self.state.get(name)? {
            StateTensor::Int(tensor) => Some(tensor),
            StateTensor::Float(_) => None,
        }
    }

    /// Stores a state tensor.
    pub fn set_state(&mut self, name: &str, tensor: Tensor<3>) {
        self.state.insert(name.to_string(), StateTensor::Float(tensor));
    }

    /// Stores a state tensor of integers, i32.
    pub fn set_int_state(&mut self, name: &str, tensor: Tensor<3, Int>) {
        let tensor = tensor.cast(DType::I32);
        self.state.insert(name.to_string(), StateTensor::Int(tensor));
    }

    /// Overwrites a state tensor in its own buffer, as recorded steps must.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPlan`] where there is none, [`crate::Error::Kernel`] for one of
    /// another shape or dtype.
    pub fn assign_state(&mut self, name: &str, tensor: Tensor<3>) -> Result<()> {
        match self.state.get_mut(name) {
            Some(StateTensor::Float(state)) => Ok(kv_kernels::assign(state, tensor)?),
            _ => Err(Error::InvalidPlan {
                what: "state",
                reason: format!("the cache has no state `{name}` of real numbers"),
            }),
        }
    }

    /// Converts the state tensors `names` that the cache has from f32 to integers: files of earlier
    /// versions store integers as f32.
    pub fn states_to_ints(&mut self, names: &[&str]) {
        for name in names {
            if let Some(tensor) = self.state(name) {
                let ints = packed_ints(tensor.clone().int().cast(DType::I32));
                self.state.insert((*name).to_string(), StateTensor::Int(ints));
            }
        }
    }
}

/// A state without padding between rows, so that kernels write it in place.
fn packed(state: Tensor<3>) -> Tensor<3> {
    let shape = state.dims();
    state.reshape([shape.iter().product::<usize>()]).reshape(shape)
}

/// [`packed`] for integers.
fn packed_ints(state: Tensor<3, Int>) -> Tensor<3, Int> {
    let shape = state.dims();
    state.reshape([shape.iter().product::<usize>()]).reshape(shape)
}
