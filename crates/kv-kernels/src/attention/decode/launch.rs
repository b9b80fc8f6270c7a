//! Launches decode attention on CubeCL devices: the attention kernel, then `combine.rs` where parts
//! of heads are left, then `normalise.rs` where probabilities are wanted.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::{DecodeArgs, DecodeTensors};
use super::blueprint::{self, Blueprint, KvSplit, LogitsSink};
use super::combine::{self, combine_kernel};
use super::eviction::Evicts;
use super::kernel_args::{
    AttendedRangesLaunch, DecodeOutputsLaunch, HeadOutputsLaunch, QueriesLaunch, WeightedPoolLaunch,
};
use super::plan::{Kernel, Layout, portable, tensor_core};
use super::strategy::{DecodeShape, DecodeStrategy};
use super::subgroup_softmax::ThreadGroup;
use super::{DecodeConfig, ViewKind, normalise, plain, tensor_core, together};
use crate::backend::client::{elem_type, empty_like, grid, widest_cube, zeros_like};
use crate::backend::strategy::{DeviceTraits, Strategy};

/// The tensors that the attention kernel leaves for the kernels after it.
pub(crate) struct Attended {
    /// `[B, Hq, D]`; not written yet where the heads are in parts.
    pub(crate) output: CubeTensor,
    /// `[B, Hq]`; not written yet where the heads are in parts.
    pub(crate) log_sum_exp: CubeTensor,
    /// Logits of the attended slots, `[S, G]`.
    pub(crate) scores: CubeTensor,
    /// Weighted sums of values of each part, `[B, Hkv, splits, G, D]`.
    pub(crate) partial: CubeTensor,
    /// Largest logit and sum of weights of each part, `[B, Hkv, splits, G, 2]`.
    pub(crate) stats: CubeTensor,
    /// Parts of a head.
    pub(crate) splits: usize,
    /// `G`
    pub(crate) group: usize,
    /// Whether the parts are still to be combined.
    pub(crate) split: bool,
}

/// The layout of a call: how many parts each range is split into, the kernel that attends to them,
/// and the tensors that sums and logits are written to.
struct Plan {
    layout: Layout,
    logits: LogitsSink,
    parts: KvSplit,
}

/// A call whose tensors have no gaps between rows. What is absent has the query in its place.
struct Call {
    query: CubeTensor,
    keys: CubeTensor,
    values: CubeTensor,
    log_weights: CubeTensor,
    numerators: CubeTensor,
    offsets: CubeTensor,
    lengths: CubeTensor,
    view: CubeTensor,
    /// Numbers of a row of the view.
    width: usize,
    config: DecodeConfig,
}

impl DecodeArgs<CubeBackend> {
    /// Runs the call; returns output, log-sum-exp, and probabilities or logits.
    pub(crate) fn run(self) -> DecodeTensors<CubeBackend> {
        let call = Call::new(self);
        let features = call.config.features;
        let scores = match features.scores {
            // Zeros: kernels do not write slots that are not attended to.
            true => zeros_like(&call.query, call.scores_shape()),
            false => empty_like(&call.query, Shape::from([1, 1]), DType::F32),
        };
        let attended = call.attend(Some(scores), None);
        if attended.split {
            let from = [&attended.partial, &attended.stats];
            let to = [&attended.output, &attended.log_sum_exp];
            combine(from, to, call.total_kv_heads(), attended.splits, features.log_sum_exp);
        }
        if features.scores && !call.config.raw {
            call.normalise(&attended);
        }
        let Attended { output, log_sum_exp, scores, .. } = attended;
        DecodeTensors { output, log_sum_exp, scores }
    }

    /// Attends, and evicts in the same launch where `evicts` says so. Otherwise leaves the logits
    /// and the partial sums of all heads, even of heads in one part.
    pub(crate) fn run_evicting(self, evicts: &Evicts) -> Attended {
        Call::new(self).attend(None, Some(evicts))
    }
}

impl Call {
    fn new(args: DecodeArgs<CubeBackend>) -> Self {
        let query = into_contiguous(args.query);
        let total_kv_heads = args.offsets.shape().num_elements();
        let numbers = args.view.as_ref().map_or(0, |view| view.shape().num_elements());
        Self {
            keys: into_contiguous(args.keys),
            values: into_contiguous(args.values),
            log_weights: args.log_weights.or_stand_in(&query),
            numerators: args.numerators.or_stand_in(&query),
            offsets: into_contiguous(args.offsets),
            lengths: into_contiguous(args.lengths),
            view: args.view.or_stand_in(&query),
            width: numbers / total_kv_heads,
            config: args.config,
            query,
        }
    }

    fn total_kv_heads(&self) -> usize {
        self.offsets.shape().num_elements()
    }

    fn group(&self) -> usize {
        let [batch, query_heads, _] = self.query.shape().dims();
        batch * query_heads / self.total_kv_heads()
    }

    fn scores_shape(&self) -> [usize; 2] {
        let [slots, _] = self.keys.shape().dims();
        [slots, self.group()]
    }

    /// Launches the attention kernel. `scores` takes the logits; without it a fresh tensor does, in
    /// which only live slots are written.
    fn attend(&self, scores: Option<CubeTensor>, evicts: Option<&Evicts>) -> Attended {
        let query = &self.query;
        let client = query.client.clone();
        let [batch, query_heads, head_dim] = query.shape().dims();
        let [slots, _] = self.keys.shape().dims();
        let (total_kv_heads, group) = (self.total_kv_heads(), self.group());
        let DecodeConfig { scale, features, .. } = self.config;

        let Plan { layout, logits, parts } = self.plan(evicts);
        let Layout { splits, kernel: chosen, room } = layout;
        let deciding = evicts.filter(|evicts| evicts.in_launch);
        let split = parts == KvSplit::Global;
        let scores = scores.unwrap_or_else(|| {
            let shape = if deciding.is_some() { [1, 1] } else { self.scores_shape() };
            empty_like(query, Shape::from(shape), DType::F32)
        });
        let output = empty_like(query, query.shape(), query.dtype);
        let shape = if features.log_sum_exp { [batch, query_heads] } else { [1, 1] };
        let log_sum_exp = empty_like(query, Shape::from(shape), DType::F32);
        let sums = if split { total_kv_heads * splits * group } else { 1 };
        let partial = empty_like(query, Shape::from([sums * head_dim]), DType::F32);
        let stats = empty_like(query, Shape::from([sums * 2]), DType::F32);
        let importances = match logits.together() {
            0 => [1, 1],
            _ => {
                let longest = self.config.longest.max(1);
                [total_kv_heads, longest.next_multiple_of(together::LINE)]
            }
        };
        let eviction = || {
            deciding.map(|evicts| {
                evicts.launched(empty_like(query, Shape::from(importances), DType::F32))
            })
        };

        let count = grid(total_kv_heads * splits);
        let dtype = elem_type(query.dtype);
        // All attention kernels take these arguments.
        macro_rules! attend {
            ($kernel:path, $units:expr, $lanes:expr, $blueprint:expr $(, $eviction:expr)?) => {
                $kernel(
                    &client,
                    count,
                    CubeDim::new_1d($units as u32),
                    $lanes,
                    QueriesLaunch::new(query.clone().into_buffer_arg(), scale),
                    self.ranges(splits),
                    WeightedPoolLaunch::new(
                        self.keys.clone().into_buffer_arg(),
                        self.values.clone().into_buffer_arg(),
                        self.log_weights.clone().into_buffer_arg(),
                        self.numerators.clone().into_buffer_arg(),
                        slots,
                    ),
                    DecodeOutputsLaunch::new(
                        head_outputs([&output, &log_sum_exp], [&partial, &stats]),
                        scores.clone().into_buffer_arg(),
                    ),
                    $($eviction,)?
                    $blueprint,
                    dtype,
                )
            };
        }
        // SAFETY: shapes were checked; the kernels read and write within them, given ranges that
        // end within the pool.
        unsafe {
            match chosen {
                Kernel::TensorCore { words, planes } => {
                    let blueprint = Blueprint {
                        group,
                        head_dim,
                        words,
                        parts,
                        room,
                        planes,
                        staged: self.staged(splits, room),
                        logits,
                        features,
                    };
                    let units = 32 * planes;
                    match parts {
                        KvSplit::Cluster(_) => attend!(
                            tensor_core::joined_kernel::launch_unchecked,
                            units,
                            words,
                            blueprint,
                            eviction().into()
                        ),
                        KvSplit::None | KvSplit::Global => attend!(
                            tensor_core::tensor_core_kernel::launch_unchecked,
                            units,
                            words,
                            blueprint,
                            eviction().into()
                        ),
                    }
                }
                Kernel::Plain { lanes, team } => attend!(
                    plain::plain_kernel::launch_unchecked,
                    plain::UNITS,
                    lanes,
                    plain::Blueprint {
                        shape: ThreadGroup::new(&client, group, head_dim / lanes, team),
                        split,
                        features
                    }
                ),
            }
        }
        Attended { output, log_sum_exp, scores, partial, stats, splits, group, split }
    }

    /// The head ranges, each in `splits` parts, as a kernel's argument.
    fn ranges(&self, splits: usize) -> AttendedRangesLaunch {
        AttendedRangesLaunch::new(
            self.offsets.clone().into_buffer_arg(),
            self.lengths.clone().into_buffer_arg(),
            self.view.clone().into_buffer_arg(),
            self.total_kv_heads(),
            splits,
            self.width,
            self.config.sinks,
        )
    }

    /// How many parts each range has, and where the sums and logits of a part go.
    fn plan(&self, evicts: Option<&Evicts>) -> Plan {
        let query = &self.query;
        let [_, _, head_dim] = query.shape().dims();
        let device = DeviceTraits::of(&query.client, query.dtype);
        let DecodeConfig { longest, strategy, .. } = self.config;
        let total_kv_heads = self.total_kv_heads();
        let shape = DecodeShape {
            head_dim,
            total_kv_heads,
            longest,
            listed: self.listed(),
            weighted: self.config.features.weighted,
        };
        let strategy = strategy.or_chosen(&device, &shape);
        let kernel = match strategy {
            DecodeStrategy::Portable => portable(query, head_dim, self.group()),
            _ => tensor_core(head_dim),
        };
        let clustered = match strategy {
            DecodeStrategy::TensorCoreCluster => {
                Layout::clustered(&device, kernel, total_kv_heads, longest)
            }
            _ => None,
        };
        let [slots, _] = self.keys.shape().dims();
        let uneven = || {
            let may = clustered.is_none() && evicts.is_none() && !self.listed();
            may.then(|| Layout::uneven(&device, kernel, total_kv_heads, longest, slots)).flatten()
        };
        let layout = clustered
            .or_else(uneven)
            .unwrap_or_else(|| Layout::of(&device, kernel, total_kv_heads, longest));
        // The kernel that evicts behind the attention takes the sums of parts, of a single one too.
        let evicts_behind = evicts.is_some_and(|evicts| !evicts.in_launch);
        let parts = match clustered {
            Some(Layout { splits, .. }) => KvSplit::Cluster(splits),
            None if layout.splits > 1 || evicts_behind => KvSplit::Global,
            None => KvSplit::None,
        };
        Plan { layout, logits: self.logits(&layout, evicts), parts }
    }

    /// Whether the query attends to listed slots.
    fn listed(&self) -> bool {
        matches!(self.config.features.view, ViewKind::List | ViewKind::Sets)
    }

    /// Whether shared memory has room for the listed slots of a part.
    fn staged(&self, splits: usize, room: usize) -> bool {
        let longest = self.config.longest;
        self.listed() && longest.div_ceil(splits).next_multiple_of(blueprint::MMA_KEYS) <= room
    }

    /// Where the kernel leaves logits: in shared memory where it has room.
    fn logits(&self, layout: &Layout, evicts: Option<&Evicts>) -> LogitsSink {
        let DecodeConfig { features, longest, .. } = self.config;
        let [_, _, head_dim] = self.query.shape().dims();
        match evicts {
            Some(&Evicts { in_launch: true, spares_newest, together, ref records, .. }) => {
                let remembers = records.is_some();
                LogitsSink::ArgminInPlace { spares_newest, together, remembers }
            }
            _ if !features.scores => LogitsSink::None,
            _ if features.view == ViewKind::All
                && layout.holds_logits(self.group(), head_dim, longest) =>
            {
                LogitsSink::Shared
            }
            _ => LogitsSink::Global,
        }
    }

    /// Turns logits into probabilities.
    fn normalise(&self, attended: &Attended) {
        let [slots, _] = self.keys.shape().dims();
        // SAFETY: as in `attend`.
        unsafe {
            normalise::normalise_kernel::launch_unchecked(
                &self.query.client.clone(),
                grid(self.total_kv_heads() * attended.splits),
                CubeDim::new_1d(normalise::UNITS as u32),
                self.ranges(attended.splits),
                attended.log_sum_exp.clone().into_buffer_arg(),
                attended.scores.clone().into_buffer_arg(),
                slots,
                attended.group,
                self.config.features,
            );
        }
    }
}

/// Outputs, and sums and statistics of parts, as a kernel's argument.
pub(crate) fn head_outputs<O: CubePrimitive, P: CubePrimitive>(
    [output, log_sum_exp]: [&CubeTensor; 2],
    [partial, stats]: [&CubeTensor; 2],
) -> HeadOutputsLaunch<O, P> {
    HeadOutputsLaunch::new(
        output.clone().into_buffer_arg(),
        log_sum_exp.clone().into_buffer_arg(),
        partial.clone().into_buffer_arg(),
        stats.clone().into_buffer_arg(),
    )
}

/// Combines the parts of each head. Takes `partial` `[B * Hkv, splits, G, D]` and `stats` `[B *
/// Hkv, splits, G, 2]`; writes the output `[B, Hq, D]` and, where wanted, the log-sum-exp `[B,
/// Hq]`.
pub(crate) fn combine(
    parts: [&CubeTensor; 2],
    outputs: [&CubeTensor; 2],
    total_kv_heads: usize,
    splits: usize,
    log_sum_exp: bool,
) {
    let [output, _] = outputs;
    let [batch, query_heads, head_dim] = output.shape().dims();
    let heads = batch * query_heads;
    let lanes = if head_dim.is_multiple_of(4) { 4 } else { 1 };
    let columns = head_dim / lanes;
    let (widest, _) = widest_cube(&output.client);
    let rows = (widest.min(512) / columns).clamp(1, 16);
    // SAFETY: the kernel stays within the parts that an attention kernel wrote.
    unsafe {
        combine_kernel::launch_unchecked(
            &output.client.clone(),
            grid(heads),
            CubeDim::new_1d((rows * columns) as u32),
            lanes,
            head_outputs(outputs, parts),
            heads,
            splits,
            combine::Blueprint { group: heads / total_kv_heads, columns, rows, log_sum_exp },
            elem_type(output.dtype),
        );
    }
}
