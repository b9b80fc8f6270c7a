//! Slots: copied, dropped, chosen, written.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::{elem_type, empty_like, grid, vector_lanes, widest_cube};
use crate::argmin_slots::{Protection, kernel as argmin};
use crate::extension::{Drops, Lists, Scalars, SlotOps, SlotPools};
use crate::move_slots;
use crate::reading::Reading;
use crate::scatter_rows::kernel as scatter;
use crate::select::Search;
use crate::top_slots::kernel as top_slots;

impl SlotOps for CubeBackend {
    fn begin_read(tensor: CubeTensor) -> Reading {
        Reading::of(tensor)
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

    fn drop_slots(
        pools: SlotPools<Self>,
        scalars: Scalars<Self>,
        drops: Drops<Self>,
        whole: bool,
    ) -> (SlotPools<Self>, Scalars<Self>, CubeTensor) {
        move_slots::launch::drop(pools, scalars, drops, whole)
    }

    fn reset_last(
        pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: CubeTensor,
        lengths: CubeTensor,
    ) -> Scalars<Self> {
        move_slots::launch::reset_last(pools, initial, offsets, lengths)
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

    fn scatter_rows(pool: CubeTensor, slots: CubeTensor, rows: CubeTensor) -> CubeTensor {
        launch_scatter(pool, slots, rows)
    }

    fn scatter_ints(pool: CubeTensor, slots: CubeTensor, values: CubeTensor) -> CubeTensor {
        launch_scatter(pool, slots, values)
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
        let units = widest_cube(&scores.client).0.min(512);
        argmin::argmin_slots_kernel::launch(
            &scores.client.clone(),
            grid(pairs),
            CubeDim::new_1d(units as u32),
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
            units,
            protects,
        );
        output
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
