use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// `y = x Wᵀ + b` with `W` kept `[out, in]`: matrix-vector products read it row by row.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    pub(crate) fn new(weight: Tensor<2>, bias: Option<Tensor<1>>) -> Self {
        Self { weight: Param::from_tensor(weight), bias: bias.map(Param::from_tensor) }
    }

    /// `[N, in]` to `[N, out]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let y = x.matmul(self.weight.val().transpose());
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze_dim(0),
            None => y,
        }
    }
}
