//! Launches decode attention on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::plan::{Kernel, kernel, room_of_half, splits};
use super::{DecodeConfig, combine, normalise, plain, tensor_core};
use crate::gpu::{elem_type, empty_like, grid, zeros_like};

/// A call's tensors, all contiguous.
pub(crate) struct Call {
    pub(crate) query: CubeTensor,
    pub(crate) keys: CubeTensor,
    pub(crate) values: CubeTensor,
    pub(crate) log_weights: CubeTensor,
    pub(crate) numerators: CubeTensor,
    pub(crate) offsets: CubeTensor,
    pub(crate) lengths: CubeTensor,
    pub(crate) view: CubeTensor,
    pub(crate) config: DecodeConfig,
}

impl Call {
    /// Returns output, log-sum-exp and probabilities.
    pub(crate) fn run(self) -> (CubeTensor, CubeTensor, CubeTensor) {
        let call = Self {
            query: into_contiguous(self.query),
            keys: into_contiguous(self.keys),
            values: into_contiguous(self.values),
            log_weights: into_contiguous(self.log_weights),
            numerators: into_contiguous(self.numerators),
            offsets: into_contiguous(self.offsets),
            lengths: into_contiguous(self.lengths),
            view: into_contiguous(self.view),
            config: self.config,
        };
        call.launch()
    }

    fn launch(self) -> (CubeTensor, CubeTensor, CubeTensor) {
        let query = self.query.clone();
        let client = query.client.clone();
        let [batch, query_heads, head_dim] = query.shape().dims();
        let [slots, _] = self.keys.shape().dims();
        let pairs = self.offsets.shape().num_elements();
        let group = batch * query_heads / pairs;
        let width = self.view.shape().num_elements() / pairs.max(1);
        let DecodeConfig { scale, features, longest, sinks } = self.config;

        let chosen = kernel(&query, head_dim, group);
        let splits = splits(&query, chosen, pairs, longest);
        let split = splits > 1;
        let output = empty_like(&query, query.shape(), query.dtype);
        let shape = if features.log_sum_exp { [batch, query_heads] } else { [1, 1] };
        let log_sum_exp = empty_like(&query, Shape::from(shape), DType::F32);
        // Zeros, since slots that are not attended to are not written.
        let shape = if features.probabilities { [slots, group] } else { [1, 1] };
        let scores = zeros_like(&query, shape);
        let parts = if split { pairs * splits * group } else { 1 };
        let partial = empty_like(&query, Shape::from([parts * head_dim]), DType::F32);
        let stats = empty_like(&query, Shape::from([parts * 2]), DType::F32);

        let count = grid(pairs * splits);
        let room = room_of_half(&self.query);
        let dtype = elem_type(query.dtype);
        // The kernels for attention take the same arguments.
        macro_rules! attend {
            ($kernel:path, $units:expr, $lanes:expr, $blueprint:expr) => {
                $kernel(
                    &client,
                    count,
                    CubeDim::new_1d($units as u32),
                    $lanes,
                    self.query.into_buffer_arg(),
                    self.keys.into_buffer_arg(),
                    self.values.into_buffer_arg(),
                    self.log_weights.into_buffer_arg(),
                    self.numerators.into_buffer_arg(),
                    self.offsets.clone().into_buffer_arg(),
                    self.lengths.clone().into_buffer_arg(),
                    self.view.clone().into_buffer_arg(),
                    output.clone().into_buffer_arg(),
                    log_sum_exp.clone().into_buffer_arg(),
                    scores.clone().into_buffer_arg(),
                    partial.clone().into_buffer_arg(),
                    stats.clone().into_buffer_arg(),
                    pairs,
                    splits,
                    slots,
                    width,
                    sinks,
                    scale,
                    $blueprint,
                    dtype,
                )
            };
        }
        // SAFETY: shapes were checked; the kernels read and write within them, given ranges that end
        // within the pool.
        unsafe {
            match chosen {
                Kernel::TensorCore { words } => attend!(
                    tensor_core::tensor_core_kernel::launch_unchecked,
                    32 * tensor_core::PLANES,
                    words,
                    tensor_core::Blueprint { group, head_dim, words, split, room, features }
                ),
                Kernel::Plain { lanes, team } => attend!(
                    plain::plain_kernel::launch_unchecked,
                    plain::UNITS,
                    lanes,
                    plain::Blueprint { group, columns: head_dim / lanes, team, split, features }
                ),
            }
            if split {
                let lanes = if head_dim.is_multiple_of(4) { 4 } else { 1 };
                let columns = head_dim / lanes;
                let rows = (256 / columns).clamp(1, 8);
                combine::combine_kernel::launch_unchecked(
                    &client,
                    grid(pairs * group),
                    CubeDim::new_1d((rows * columns) as u32),
                    lanes,
                    partial.into_buffer_arg(),
                    stats.into_buffer_arg(),
                    output.clone().into_buffer_arg(),
                    log_sum_exp.clone().into_buffer_arg(),
                    pairs * group,
                    splits,
                    group,
                    columns,
                    rows,
                    features.log_sum_exp,
                    dtype,
                );
            }
            if features.probabilities {
                normalise::normalise_kernel::launch_unchecked(
                    &client,
                    grid(pairs * splits),
                    CubeDim::new_1d(normalise::UNITS as u32),
                    self.offsets.into_buffer_arg(),
                    self.lengths.into_buffer_arg(),
                    self.view.into_buffer_arg(),
                    log_sum_exp.clone().into_buffer_arg(),
                    scores.clone().into_buffer_arg(),
                    pairs,
                    splits,
                    slots,
                    width,
                    sinks,
                    group,
                    features,
                );
            }
        }
        (output, log_sum_exp, scores)
    }
}
