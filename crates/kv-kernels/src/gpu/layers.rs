//! A layer's own work: products, norms, heads, and the tokens that are drawn.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::{elem_type, empty_like, grid, vector_lanes};
use crate::extension::{
    Drawn, Epilogue, LayerOps, Places, Projection, SampleTensors, SlotPools, Written,
};
use crate::random::kernel as random;
use crate::rms_norm::kernel as rms_norm;
use crate::sample::DrawConfig;
use crate::swiglu::kernel as swiglu;
use crate::{heads, linear, sample};

impl LayerOps for CubeBackend {
    fn skinny_product(x: CubeTensor, weight: CubeTensor, epilogue: Epilogue<Self>) -> CubeTensor {
        linear::launch::skinny(x, weight, epilogue)
    }

    fn swiglu(x: CubeTensor) -> CubeTensor {
        let x = into_contiguous(x);
        let [rows, width] = x.shape().dims();
        let y = empty_like(&x, Shape::from([rows, width / 2]), x.dtype);
        let lanes = vector_lanes(&x, width / 2, width / 2);
        let columns = width / 2 / lanes;
        let units = rows * columns;
        let cube_dim = CubeDim::new(&x.client, units);
        // SAFETY: the kernel guards its accesses.
        unsafe {
            swiglu::swiglu_kernel::launch_unchecked(
                &x.client.clone(),
                calculate_cube_count_elemwise(&x.client, units, cube_dim),
                cube_dim,
                lanes,
                x.clone().into_buffer_arg(),
                y.clone().into_buffer_arg(),
                units,
                columns,
                elem_type(x.dtype),
            );
        }
        y
    }

    fn rms_norm(
        x: CubeTensor,
        delta: CubeTensor,
        weight: CubeTensor,
        epsilon: f32,
        adds: bool,
    ) -> (CubeTensor, CubeTensor) {
        let (x, delta) = (into_contiguous(x), into_contiguous(delta));
        let [rows, width] = x.shape().dims();
        let normed = empty_like(&x, x.shape(), x.dtype);
        let sum = if adds { empty_like(&x, x.shape(), x.dtype) } else { x.clone() };
        let lanes = vector_lanes(&x, width, width);
        // SAFETY: shapes were checked, and the kernel guards its accesses.
        unsafe {
            rms_norm::rms_norm_kernel::launch_unchecked(
                &x.client.clone(),
                grid(rows),
                CubeDim::new_1d(rms_norm::UNITS as u32),
                lanes,
                x.clone().into_buffer_arg(),
                delta.into_buffer_arg(),
                into_contiguous(weight).into_buffer_arg(),
                normed.clone().into_buffer_arg(),
                sum.clone().into_buffer_arg(),
                rows,
                width / lanes,
                epsilon,
                adds,
                elem_type(x.dtype),
            );
        }
        (normed, sum)
    }

    fn split_heads(
        projection: Projection<Self>,
        tokens: usize,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        heads::launch::split(projection, tokens)
    }

    fn write_heads(
        projection: Projection<Self>,
        pools: SlotPools<Self>,
        places: Places<Self>,
    ) -> Written<Self> {
        heads::launch::write(projection, pools, places)
    }

    fn draw(logits: CubeTensor, state: SampleTensors<Self>, config: DrawConfig) -> Drawn<Self> {
        sample::launch::draw(logits, state, config)
    }

    fn uniforms(seeds: CubeTensor, draws: CubeTensor) -> CubeTensor {
        let count = draws.shape().num_elements();
        let output = empty_like(&draws, draws.shape(), DType::F32);
        let client = draws.client.clone();
        let cube_dim = CubeDim::new(&client, count);
        random::uniforms_kernel::launch(
            &client,
            calculate_cube_count_elemwise(&client, count, cube_dim),
            cube_dim,
            into_contiguous(seeds).into_buffer_arg(),
            into_contiguous(draws).into_buffer_arg(),
            output.clone().into_buffer_arg(),
            count,
        );
        output
    }
}
