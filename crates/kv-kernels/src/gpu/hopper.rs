//! What Hopper GPUs alone do.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::extension::{Epilogue, HopperOps};
use crate::{linear, prefill_attention};

impl HopperOps for CubeBackend {
    fn streamed_product(
        x: CubeTensor,
        weight: CubeTensor,
        gain: CubeTensor,
        epsilon: Option<f32>,
        epilogue: Epilogue<Self>,
    ) -> CubeTensor {
        linear::launch::streamed(x, weight, gain, epsilon, epilogue)
    }

    fn wide_product(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        linear::launch::wide(x, weight)
    }

    fn causal_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        config: prefill_attention::PrefillConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        prefill_attention::launch::causal(query, keys, values, config)
    }
}
