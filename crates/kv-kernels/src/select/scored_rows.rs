//! Rows of scored candidates, and the numbers of candidates to choose from each row.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Int, Tensor};
#[cfg(feature = "gpu")]
use cubecl::prelude::*;

/// Numbers of a row of budgets: tokens to choose, sinks, and recents.
pub(crate) const BUDGETS: usize = 3;

/// The scores of every row's candidates, and how many candidates are wanted: arguments of
/// [`crate::top_slots`].
#[derive(Debug, Clone)]
pub struct ScoredRows {
    /// Scores, `[R, T]`, f32. Columns after a row's candidates hold garbage.
    pub scores: Tensor<2>,
    /// Candidates of each row, from the first column on, `[R]`, 32-bit.
    pub candidates: Tensor<1, Int>,
    /// How many candidates of each row are wanted, `[R]`, 32-bit.
    pub wanted: Tensor<1, Int>,
}

/// [`ScoredRows`] as backends return them.
#[derive(ExtensionType)]
pub(crate) struct ScoredRowTensors<B: Backend> {
    /// `[R, T]`
    pub(crate) scores: FloatTensor<B>,
    /// `[R]`
    pub(crate) candidates: IntTensor<B>,
    /// `[R]`
    pub(crate) wanted: IntTensor<B>,
}

impl From<ScoredRowTensors<Dispatch>> for ScoredRows {
    fn from(rows: ScoredRowTensors<Dispatch>) -> Self {
        Self {
            scores: Tensor::from_dispatch(rows.scores),
            candidates: Tensor::from_dispatch(rows.candidates),
            wanted: Tensor::from_dispatch(rows.wanted),
        }
    }
}

/// [`ScoredRows`] as kernels write them.
#[cfg(feature = "gpu")]
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScoredRowBuffers {
    /// `[rows, columns]`
    pub(crate) scores: Box<[f32]>,
    /// `[rows]`
    pub(crate) candidates: Box<[i32]>,
    /// `[rows]`
    pub(crate) wanted: Box<[i32]>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

#[cfg(feature = "gpu")]
impl ScoredRowTensors<burn_cubecl::CubeBackend> {
    /// Buffers for `rows` rows of `columns` scores, on the device of `of`.
    pub(crate) fn empty(of: &burn_cubecl::tensor::CubeTensor, [rows, columns]: [usize; 2]) -> Self {
        use burn::backend::{DType, Shape};

        use crate::backend::client::empty_like;

        let ints = || empty_like(of, Shape::from([rows]), DType::I32);
        Self {
            scores: empty_like(of, Shape::from([rows, columns]), DType::F32),
            candidates: ints(),
            wanted: ints(),
        }
    }

    /// The buffers as a kernel's argument.
    pub(crate) fn launched(&self, [rows, columns]: [usize; 2]) -> ScoredRowBuffersLaunch {
        ScoredRowBuffersLaunch::new(
            self.scores.clone().into_buffer_arg(),
            self.candidates.clone().into_buffer_arg(),
            self.wanted.clone().into_buffer_arg(),
            rows,
            columns,
        )
    }
}

#[cfg(feature = "flex")]
impl ScoredRowTensors<burn::backend::Flex> {
    /// Makes the tensors of scores in rows of `columns`, and of two numbers a row.
    pub(crate) fn new(
        (scores, candidates, wanted): (Vec<f32>, Vec<i32>, Vec<i32>),
        columns: usize,
    ) -> Self {
        use burn::backend::TensorData;
        use burn_flex::FlexTensor;

        let rows = candidates.len();
        let ints = |values: Vec<i32>| FlexTensor::from_data(TensorData::new(values, [rows]));
        Self {
            scores: FlexTensor::from_data(TensorData::new(scores, [rows, columns])),
            candidates: ints(candidates),
            wanted: ints(wanted),
        }
    }
}
