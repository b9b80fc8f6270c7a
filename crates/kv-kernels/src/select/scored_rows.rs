//! Rows of scored candidates, and the budgets that say how many of them are chosen.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Int, Tensor};

/// Numbers of a row of budgets: tokens to choose, sinks, recents.
pub(crate) const BUDGETS: usize = 3;

/// Scores of every row's candidates, and how many of these are wanted, as [`crate::top_slots`]
/// takes them.
#[derive(Debug, Clone)]
pub struct ScoredRows {
    /// `[R, T]`, f32; what is behind a row's candidates means nothing.
    pub scores: Tensor<2>,
    /// Candidates, from the first column on, `[R]`, 32-bit.
    pub candidates: Tensor<1, Int>,
    /// How many are to be chosen, `[R]`, 32-bit.
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

#[cfg(feature = "flex")]
impl ScoredRowTensors<burn::backend::Flex> {
    /// From scores in rows of `columns`, and two numbers a row.
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
