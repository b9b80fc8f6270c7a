//! Launches: the extension's methods on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::prelude::*;

use crate::Share;
use crate::add_probabilities::GroupReduction;
use crate::argmin_slots::{Protection, kernel as argmin};
use crate::average_scores::{AverageWeights, kernel as average_scores};
use crate::balance::WalkConfig;
use crate::decode_attention::DecodeConfig;
use crate::decode_attention::launch::Call;
use crate::evicting_attention::EvictionConfig;
#[cfg(feature = "cuda")]
use crate::extension::HopperOps;
use crate::extension::{
    Classes, Drawn, Drops, Epilogue, Eviction, LabelTensors, Lists, MergedPools, Merges,
    MergingPools, Places, Projection, Retrieval, Revised, Revision, SampleTensors, Scalars,
    SketchAttended, SketchTensors, SketchTokens, SlotOps, SlotPools, Walk, Written,
};
use crate::merge_nearest::NearestConfig;
use crate::merge_slots::MergeConfig;
use crate::pages::PageOptions;
#[cfg(feature = "cuda")]
use crate::prefill_attention;
use crate::random::kernel as random;
use crate::reading::Reading;
use crate::retrieve_slots::SteerOptions;
use crate::rms_norm::kernel as rms_norm;
use crate::sample::DrawConfig;
use crate::scatter_rows::kernel as scatter;
use crate::select::Search;
use crate::swiglu::kernel as swiglu;
use crate::top_slots::kernel as top_slots;
use crate::window_starts::kernel as window_starts;
use crate::{
    add_probabilities, balance, count_sketch, evicting_attention, heads, labels, linear, lists,
    merge_nearest, merge_slots, move_slots, nearest_slots, pages, retrieve_slots, revise_sketch,
    sample, sketch_attention,
};

impl SlotOps for CubeBackend {
    fn decode_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        log_weights: CubeTensor,
        numerators: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        view: CubeTensor,
        config: DecodeConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let call =
            Call { query, keys, values, log_weights, numerators, offsets, lengths, view, config };
        call.run()
    }

    fn evicting_attention(
        query: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        log_weights: CubeTensor,
        eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let call = Call {
            query,
            keys,
            values,
            log_weights,
            numerators: eviction.log_norms.clone(),
            offsets: eviction.offsets.clone(),
            lengths: eviction.lengths.clone(),
            view: eviction.limits.clone(),
            config: config.attention,
        };
        evicting_attention::launch::run(call, eviction, config)
    }

    fn balance(
        keys: CubeTensor,
        values: CubeTensor,
        walk: Walk<Self>,
        config: WalkConfig,
    ) -> Classes<Self> {
        balance::launch::run(keys, values, walk, config)
    }

    fn nearest_slots(
        keys: CubeTensor,
        of: CubeTensor,
        of_counts: CubeTensor,
        among: CubeTensor,
        among_counts: CubeTensor,
        earlier: bool,
    ) -> (CubeTensor, CubeTensor) {
        nearest_slots::launch::run(keys, of, of_counts, among, among_counts, earlier)
    }

    fn merge_slots(
        keys: CubeTensor,
        values: CubeTensor,
        merges: Merges<Self>,
        config: MergeConfig,
    ) -> MergedPools<Self> {
        merge_slots::launch::run(keys, values, merges, config)
    }

    fn merge_nearest(
        pools: MergingPools<Self>,
        offsets: CubeTensor,
        lengths: CubeTensor,
        victims: CubeTensor,
        goes: CubeTensor,
        queries: CubeTensor,
        config: NearestConfig,
    ) -> MergingPools<Self> {
        merge_nearest::launch::run(pools, offsets, lengths, victims, goes, queries, config)
    }

    fn average_scores(
        log_scores: CubeTensor,
        log_samples: CubeTensor,
        logits: CubeTensor,
        log_weights: CubeTensor,
        weighted: bool,
        weights: AverageWeights,
    ) -> (CubeTensor, CubeTensor) {
        let [slots, group] = logits.shape().dims();
        let client = logits.client.clone();
        let cube_dim = CubeDim::new(&client, slots);
        average_scores::average_scores_kernel::launch(
            &client,
            calculate_cube_count_elemwise(&client, slots, cube_dim),
            cube_dim,
            log_scores.clone().into_buffer_arg(),
            log_samples.clone().into_buffer_arg(),
            into_contiguous(logits).into_buffer_arg(),
            into_contiguous(log_weights).into_buffer_arg(),
            slots,
            weights.new,
            weights.old,
            group,
            weighted,
        );
        (log_scores, log_samples)
    }

    fn add_probabilities(
        sums: CubeTensor,
        logits: CubeTensor,
        log_sum_exp: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        reduction: GroupReduction,
    ) -> CubeTensor {
        add_probabilities::launch::run(sums, logits, log_sum_exp, offsets, lengths, reduction)
    }

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

    fn begin_read(tensor: CubeTensor) -> Reading {
        Reading::of(tensor)
    }

    fn steer_sets(table: CubeTensor, dropped: CubeTensor, options: SteerOptions) -> CubeTensor {
        retrieve_slots::launch::steer(table, dropped, options)
    }

    fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
        revise_sketch::launch::run(revision)
    }

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

    fn copy_slots(
        from: SlotPools<Self>,
        rows: CubeTensor,
        to: SlotPools<Self>,
        slots: CubeTensor,
    ) -> SlotPools<Self> {
        move_slots::launch::copy(from, rows, to, slots)
    }

    fn compact_slots(
        pools: SlotPools<Self>,
        offsets: CubeTensor,
        lists: Lists<Self>,
    ) -> SlotPools<Self> {
        move_slots::launch::compact(pools, offsets, lists)
    }

    fn drop_slots(pools: SlotPools<Self>, drops: Drops<Self>) -> SlotPools<Self> {
        move_slots::launch::drop(pools, drops)
    }

    fn drop_scalars(
        pools: Scalars<Self>,
        drops: Drops<Self>,
        shrinks: bool,
    ) -> (Scalars<Self>, CubeTensor) {
        move_slots::launch::drop_scalars(pools, drops, shrinks)
    }

    fn reset_last(
        pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: CubeTensor,
        lengths: CubeTensor,
    ) -> Scalars<Self> {
        move_slots::launch::reset_last(pools, initial, offsets, lengths)
    }

    fn draw(logits: CubeTensor, state: SampleTensors<Self>, config: DrawConfig) -> Drawn<Self> {
        sample::launch::draw(logits, state, config)
    }

    fn top_slots(
        scores: CubeTensor,
        lengths: CubeTensor,
        counts: CubeTensor,
        bounds: CubeTensor,
        most: usize,
        by_bound: bool,
    ) -> (CubeTensor, CubeTensor) {
        let scores = into_contiguous(scores);
        let [rows, columns] = scores.shape().dims();
        let client = scores.client.clone();
        let indices = empty_like(&scores, Shape::from([rows, most]), DType::I32);
        let found = empty_like(&scores, Shape::from([rows]), DType::I32);
        let (units, planes) = widest_cube(&client);
        let lanes = vector_lanes(&scores, columns, columns);
        // SAFETY: shapes were checked, and the kernel guards its accesses.
        unsafe {
            top_slots::top_slots_kernel::launch_unchecked(
                &client,
                grid(rows),
                CubeDim::new_1d(units as u32),
                lanes,
                scores.into_buffer_arg(),
                into_contiguous(lengths).into_buffer_arg(),
                into_contiguous(counts).into_buffer_arg(),
                into_contiguous(bounds).into_buffer_arg(),
                indices.clone().into_buffer_arg(),
                found.clone().into_buffer_arg(),
                rows,
                columns / lanes,
                most,
                if by_bound { top_slots::Rule::Above } else { top_slots::Rule::Top },
                Search { units, planes, weighted: false },
            );
        }
        (indices, found)
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

    fn scatter_rows(pool: CubeTensor, slots: CubeTensor, rows: CubeTensor) -> CubeTensor {
        launch_scatter(pool, slots, rows)
    }

    fn scatter_ints(pool: CubeTensor, slots: CubeTensor, values: CubeTensor) -> CubeTensor {
        launch_scatter(pool, slots, values)
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

    fn assign(to: CubeTensor, from: CubeTensor) -> CubeTensor {
        launch_assign(to, from)
    }

    fn assign_ints(to: CubeTensor, from: CubeTensor) -> CubeTensor {
        launch_assign(to, from)
    }

    fn argmin_slots(
        scores: CubeTensor,
        offsets: CubeTensor,
        lengths: CubeTensor,
        positions: CubeTensor,
        newest: CubeTensor,
        protection: Option<Protection>,
    ) -> CubeTensor {
        let pairs = offsets.shape().num_elements();
        let rows = newest.shape().num_elements();
        let protects = protection.is_some();
        let Protection { sinks, recents } =
            protection.unwrap_or(Protection { sinks: 0, recents: 0 });
        let output = empty_like(&scores, offsets.shape(), DType::I32);
        argmin::argmin_slots_kernel::launch(
            &scores.client.clone(),
            grid(pairs),
            CubeDim::new_1d(argmin::UNITS as u32),
            into_contiguous(scores).into_buffer_arg(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            into_contiguous(positions).into_buffer_arg(),
            into_contiguous(newest).into_buffer_arg(),
            output.clone().into_buffer_arg(),
            pairs,
            pairs / rows.max(1),
            sinks,
            recents,
            protects,
        );
        output
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

#[cfg(feature = "cuda")]
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

/// Writes into `pool`'s own buffer: its clones see the rows too, so the cache never clones a pool.
/// CUDA pads the rows of some tensors, so that a pool has a row stride of its own.
fn launch_scatter(pool: CubeTensor, slots: CubeTensor, rows: CubeTensor) -> CubeTensor {
    let rows = into_contiguous(rows);
    let count = slots.shape().num_elements();
    let width = rows.shape().num_elements() / count.max(1);
    let stride = pool.meta.strides()[0];
    let lanes = vector_lanes(&rows, width, stride);
    let columns = width / lanes;
    let units = count * columns;
    let cube_dim = CubeDim::new(&pool.client, units);
    scatter::scatter_rows_kernel::launch(
        &pool.client.clone(),
        calculate_cube_count_elemwise(&pool.client, units, cube_dim),
        cube_dim,
        lanes,
        pool.clone().into_buffer_arg(),
        into_contiguous(slots).into_buffer_arg(),
        rows.into_buffer_arg(),
        count,
        columns,
        stride / lanes,
        elem_type(pool.dtype),
    );
    pool
}

/// Copies one tensor into the other's own buffer.
fn launch_assign(to: CubeTensor, from: CubeTensor) -> CubeTensor {
    let (to, from) = (into_contiguous(to), into_contiguous(from));
    let count = to.shape().num_elements();
    let lanes = vector_lanes(&to, count, count);
    let cube_dim = CubeDim::new(&to.client, count / lanes);
    scatter::assign_kernel::launch(
        &to.client.clone(),
        calculate_cube_count_elemwise(&to.client, count / lanes, cube_dim),
        cube_dim,
        lanes,
        to.clone().into_buffer_arg(),
        from.into_buffer_arg(),
        count / lanes,
        elem_type(to.dtype),
    );
    to
}

/// A cache's tensors without gaps: themselves, or copies that are to take their place.
pub(crate) fn packed(pools: SlotPools<CubeBackend>) -> SlotPools<CubeBackend> {
    SlotPools {
        keys: into_contiguous(pools.keys),
        values: into_contiguous(pools.values),
        positions: into_contiguous(pools.positions),
        log_weights: into_contiguous(pools.log_weights),
        weighted: pools.weighted,
    }
}

/// Planes of a cube of so many units, at most.
pub(crate) fn planes_of(client: &Client, units: usize) -> usize {
    units.div_ceil((client.properties().hardware.plane_size_min as usize).max(1))
}

/// Units of the widest cube, a power of two, and its planes, at most.
pub(crate) fn widest_cube(client: &Client) -> (usize, usize) {
    let hardware = &client.properties().hardware;
    let most = (hardware.max_units_per_cube as usize).min(1024);
    let units = 1 << most.ilog2();
    (units, units / (hardware.plane_size_min as usize).clamp(1, units))
}

/// At least `count` cubes, folded where a grid dimension has its limit; kernels end the surplus.
pub(crate) fn grid(count: usize) -> CubeCount {
    const LIMIT: usize = 65_535;
    let rows = count.div_ceil(LIMIT).max(1);
    CubeCount::Static(count.div_ceil(rows) as u32, rows as u32, 1)
}

/// The widest vector (16 bytes at most, on devices that have it) that divides a row and its stride.
pub(crate) fn vector_lanes(tensor: &CubeTensor, width: usize, stride: usize) -> usize {
    tensor
        .client
        .properties()
        .io_optimized_vector_sizes(tensor.dtype.size())
        .find(|lanes| width.is_multiple_of(*lanes) && stride.is_multiple_of(*lanes))
        .unwrap_or(1)
}

/// Whether the device has the matrix instructions that kernels use for a tensor's dtype, in planes
/// of 32: products of 16 by 16 and 16 by 8, summed in f32.
pub(crate) fn multiplies(tensor: &CubeTensor) -> bool {
    let properties = tensor.client.properties();
    let hardware = &properties.hardware;
    let elem = elem_type(tensor.dtype);
    let product = MmaConfig {
        a_type: elem,
        b_type: elem,
        cd_type: elem_type(DType::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let planes_of_32 = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    let halves = matches!(tensor.dtype, DType::F16 | DType::BF16);
    halves && planes_of_32 && properties.features.matmul.mma.contains(&product)
}

/// Whether kernels may hold PTX.
pub(crate) fn is_cuda(client: &Client) -> bool {
    client.properties().identity.fingerprint.starts_with("ptx_sm")
}

pub(crate) fn elem_type(dtype: DType) -> ElemType {
    burn::backend::cubecl::dtype_to_storage_type(dtype)
}

pub(crate) fn empty_like(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// Zeros without padding between rows: allocated flat, then viewed.
pub(crate) fn zeros_like(like: &CubeTensor, shape: [usize; 2]) -> CubeTensor {
    let flat = Shape::from([shape.iter().product::<usize>()]);
    let (client, device) = (like.client.clone(), CubeDevice::clone(&like.device));
    reshape(zeros_client(client, device, flat, DType::F32), Shape::from(shape))
}
