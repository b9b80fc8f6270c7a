//! The walk's kernel `K_ij = exp(<k_i, k_j> / sqrt(D)) (<v_i, v_j> + offset)` as matrices of groups
//! of tokens. The walk itself never has them whole.

use std::ops::Range;

use burn::tensor::Tensor;

/// Elements of the matrices that are made at once, which bounds the memory that they take.
const AT_ONCE: usize = 1 << 24;
/// Subtracted from logits of places without a token.
const NEVER: f32 = 1e30;

/// Groups of equally many tokens.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// Keys divided by the fourth root of `D`, so that their products are logits: `[Q, N, D]`, f32.
    pub(super) keys: Tensor<3>,
    /// `[Q, N, D]`, f32
    pub(super) values: Tensor<3>,
    /// 1 for a token, 0 for a place without one: `[Q, N]`.
    pub(super) live: Tensor<2>,
}

impl Groups {
    pub(super) fn len(&self) -> usize {
        self.keys.dims()[0]
    }

    /// Some of the groups.
    pub(super) fn part(&self, range: &Range<usize>) -> Self {
        let (first, count) = (range.start, range.len());
        Self {
            keys: self.keys.clone().narrow(0, first, count),
            values: self.values.clone().narrow(0, first, count),
            live: self.live.clone().narrow(0, first, count),
        }
    }

    /// Logits `<k_i, k_j> / sqrt(D)` with the tokens of the same group of `others`, `[Q, N, M]`;
    /// far below all others where there is no token.
    pub(super) fn logits(&self, others: &Self) -> Tensor<3> {
        let logits = self.keys.clone().matmul(others.keys.clone().swap_dims(1, 2));
        logits + others.live.clone().sub_scalar(1.0).mul_scalar(NEVER).unsqueeze_dim::<3>(1)
    }

    /// `<v_i, v_j> + offset`, `[Q, N, M]`.
    pub(super) fn likeness(&self, others: &Self, offset: f32) -> Tensor<3> {
        self.values.clone().matmul(others.values.clone().swap_dims(1, 2)).add_scalar(offset)
    }

    /// The diagonals of [`Self::logits`] and [`Self::likeness`] with the tokens themselves,
    /// `[Q, N, 1]`.
    pub(super) fn own(&self, offset: f32) -> [Tensor<3>; 2] {
        let square = |rows: &Tensor<3>| rows.clone().square().sum_dim(2);
        [square(&self.keys), square(&self.values).add_scalar(offset)]
    }
}

/// Ranges of `groups` groups whose matrices of `elements` elements are made at once.
pub(super) fn turns(groups: usize, elements: usize) -> impl Iterator<Item = Range<usize>> {
    let each = (AT_ONCE / elements.max(1)).max(1);
    (0..groups).step_by(each).map(move |first| first..groups.min(first + each))
}
