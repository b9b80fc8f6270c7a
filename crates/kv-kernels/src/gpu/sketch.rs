//! Count-sketches of tokens.

use burn::backend::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::extension::{Revised, Revision, SketchAttended, SketchOps, SketchTensors, SketchTokens};
use crate::{count_sketch, revise_sketch, sketch_attention};

impl SketchOps for CubeBackend {
    fn sketch_insert(
        sketch: SketchTensors<Self>,
        tokens: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        sign: f32,
    ) -> (CubeTensor, CubeTensor) {
        count_sketch::launch::insert(sketch, tokens, keys, values, sign)
    }

    fn sketch_query(
        sketch: SketchTensors<Self>,
        tokens: CubeTensor,
        dtype: DType,
    ) -> (CubeTensor, CubeTensor) {
        count_sketch::launch::query(sketch, tokens, dtype)
    }

    fn sketch_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        tokens: SketchTokens<Self>,
        scale: f32,
        longest: usize,
    ) -> SketchAttended<Self> {
        sketch_attention::launch::run(query, keys, values, offsets, lengths, tokens, scale, longest)
    }

    fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
        revise_sketch::launch::run(revision)
    }
}
