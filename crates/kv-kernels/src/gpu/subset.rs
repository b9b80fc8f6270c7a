//! What a step reads of a whole cache.

use burn::backend::DType;
use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::empty_like;
use crate::decode_attention::DecodeConfig;
use crate::extension::{LabelTensors, Retrieval, SubsetOps};
use crate::pages::PageOptions;
use crate::retrieve_slots::SteerOptions;
use crate::window_starts::kernel as window_starts;
use crate::{Share, labels, lists, pages, retrieve_slots};

impl SubsetOps for CubeBackend {
    fn retrieve_slots(retrieval: Retrieval<Self>) -> (CubeTensor, CubeTensor, CubeTensor) {
        retrieve_slots::launch::run(retrieval)
    }

    fn retrieving_attention(
        retrieval: Retrieval<Self>,
        values: CubeTensor,
        attention: DecodeConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        retrieve_slots::fused::run(retrieval, values, attention)
    }

    fn steer_sets(table: CubeTensor, dropped: CubeTensor, options: SteerOptions) -> CubeTensor {
        retrieve_slots::steer::steer(table, dropped, options)
    }

    fn page_bounds(
        keys: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        bounds: CubeTensor,
        page: usize,
        pages: usize,
        last: bool,
    ) -> CubeTensor {
        pages::launch::bounds(keys, offsets, lengths, bounds, page, pages, last)
    }

    fn page_scores(
        query: CubeTensor,
        bounds: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        budgets: CubeTensor,
        pages: usize,
        options: PageOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        pages::launch::scores(query, bounds, offsets, lengths, budgets, pages, options)
    }

    fn page_slots(
        pages: CubeTensor,
        found: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        page: usize,
        always_last: bool,
    ) -> (CubeTensor, CubeTensor) {
        pages::launch::slots(pages, found, offsets, lengths, page, always_last)
    }

    fn label_scores(
        query: CubeTensor,
        keys: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        labels: LabelTensors<Self>,
        columns: usize,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        labels::launch::run(query, keys, offsets, lengths, labels, columns)
    }

    fn keep_lists(
        lists: CubeTensor,
        indices: CubeTensor,
        found: CubeTensor,
        wanted: CubeTensor,
        budgets: CubeTensor,
        lengths: CubeTensor,
        board: CubeTensor,
        layer: Option<usize>,
    ) -> (CubeTensor, CubeTensor) {
        lists::launch::keep(lists, indices, found, wanted, budgets, lengths, board, layer)
    }

    fn list_slots(
        table: CubeTensor,
        sources: CubeTensor,
        budgets: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        width: usize,
    ) -> (CubeTensor, CubeTensor) {
        lists::launch::slots(table, sources, budgets, offsets, lengths, width)
    }

    fn window_starts(
        positions: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        newest: CubeTensor,
        share: Share,
    ) -> CubeTensor {
        let pairs = offsets.shape().num_elements();
        let kv_heads = pairs / newest.shape().num_elements();
        let client = positions.client.clone();
        let starts = empty_like(&positions, offsets.shape(), DType::I32);
        let cube_dim = CubeDim::new(&client, pairs);
        window_starts::window_starts_kernel::launch(
            &client,
            calculate_cube_count_elemwise(&client, pairs, cube_dim),
            cube_dim,
            into_contiguous(positions).into_buffer_arg(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            into_contiguous(newest).into_buffer_arg(),
            starts.clone().into_buffer_arg(),
            pairs,
            kv_heads,
            share.bits(),
        );
        starts
    }
}
