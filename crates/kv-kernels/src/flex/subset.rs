//! Which slots of a whole cache are read: pages, channels, lists.

use burn::backend::{DType, Flex, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};

use super::buffers::{owned, rounded, slice, wide};
use crate::decode_attention::DecodeConfig;
use crate::extension::{AttentionOps, LabelTensors, Retrieval, SubsetOps};
use crate::labels::reference::Labels;
use crate::lists::reference::{NewLists, slots};
use crate::pages::{PageOptions, reference as pages};
use crate::retrieve_slots::SteerOptions;
use crate::window_starts::reference::starts;
use crate::{Share, retrieve_slots};

impl SubsetOps for Flex {
    fn retrieve_slots(retrieval: Retrieval<Self>) -> (FlexTensor, FlexTensor, FlexTensor) {
        let Retrieval { config, .. } = retrieval;
        let [pairs, parts, _] = retrieval.vectors.layout().shape().dims();
        let [_, head_dim] = retrieval.keys.layout().shape().dims();
        let [query, vectors, keys] =
            [&retrieval.query, &retrieval.vectors, &retrieval.keys].map(wide);
        let ints = [retrieval.offsets, retrieval.lengths, retrieval.newest]
            .map(|tensor| tensor.to_contiguous());
        let (mut table, mut set_vectors) = (owned(retrieval.table), owned(retrieval.set_vectors));
        let problem = retrieve_slots::reference::Problem {
            query: &query,
            vectors: &vectors,
            parts,
            keys: &keys,
            head_dim,
            offsets: slice(&ints[0]),
            lengths: slice(&ints[1]),
            newest: slice(&ints[2]),
            config,
        };
        let sums = problem.solve(table.storage_mut::<i32>(), set_vectors.storage_mut::<f32>());
        let group = sums.len() / pairs;
        (table, set_vectors, rounded(sums, [pairs, group], DType::F32))
    }

    fn retrieving_attention(
        retrieval: Retrieval<Self>,
        values: FlexTensor,
        attention: DecodeConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [query, keys] = [&retrieval.query, &retrieval.keys].map(Clone::clone);
        let [offsets, lengths] = [&retrieval.offsets, &retrieval.lengths].map(Clone::clone);
        let none = rounded(vec![0.0], [1], DType::F32);
        let (table, set_vectors, _) = Self::retrieve_slots(retrieval);
        let (output, ..) = Self::decode_attention(
            query,
            keys,
            values,
            none.clone(),
            none,
            offsets,
            lengths,
            table.clone(),
            attention,
        );
        (table, set_vectors, output)
    }

    fn steer_sets(table: FlexTensor, dropped: FlexTensor, options: SteerOptions) -> FlexTensor {
        let (mut table, dropped) = (owned(table), wide(&dropped));
        let [pairs, _] = table.layout().shape().dims();
        retrieve_slots::steer::reference(table.storage_mut::<i32>(), &dropped, pairs, options);
        table
    }

    fn page_bounds(
        keys: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        bounds: FlexTensor,
        page: usize,
        _pages: usize,
        last: bool,
    ) -> FlexTensor {
        let mut bounds = owned(bounds);
        let [_, head_dim] = keys.layout().shape().dims();
        let [keys, offsets, lengths] =
            [keys, offsets, lengths].map(|tensor| tensor.to_contiguous());
        let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
        macro_rules! bound {
            ($kind:ty, $load:expr) => {
                pages::bound(
                    slice::<$kind>(&keys),
                    bounds.storage_mut::<$kind>(),
                    ranges,
                    head_dim,
                    page,
                    last,
                    $load,
                )
            };
        }
        match keys.dtype() {
            DType::F16 => bound!(f16, f16::to_f32),
            DType::BF16 => bound!(bf16, bf16::to_f32),
            _ => bound!(f32, |x| x),
        }
        bounds
    }

    fn page_scores(
        query: FlexTensor,
        bounds: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        budgets: FlexTensor,
        pages: usize,
        options: PageOptions,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [_, _, head_dim] = query.layout().shape().dims();
        let [offsets, lengths] = [offsets, lengths].map(|tensor| tensor.to_contiguous());
        let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
        let [query, bounds, budgets] = [&query, &bounds, &budgets].map(wide);
        scored(pages::score(&query, &bounds, ranges, &budgets, [head_dim, pages], options), pages)
    }

    fn page_slots(
        pages: FlexTensor,
        found: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        page: usize,
        always_last: bool,
    ) -> (FlexTensor, FlexTensor) {
        let [pages, found, offsets, lengths] =
            [pages, found, offsets, lengths].map(|tensor| tensor.to_contiguous());
        let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
        listed(pages::slots(slice(&pages), slice(&found), ranges, page, always_last))
    }

    fn label_scores(
        query: FlexTensor,
        keys: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        labels: LabelTensors<Self>,
        columns: usize,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [_, heads, head_dim] = query.layout().shape().dims();
        let [[_, _, width], [_, _, source_width]] =
            [&labels.lists, &labels.sources].map(|tensor| tensor.layout().shape().dims());
        let [query, keys, channels, budgets, lists, sources] =
            [&query, &keys, &labels.channels, &labels.budgets, &labels.lists, &labels.sources]
                .map(wide);
        let [offsets, lengths] = [offsets, lengths].map(|tensor| tensor.to_contiguous());
        let found = Labels {
            query: &query,
            keys: &keys,
            offsets: slice(&offsets),
            lengths: slice(&lengths),
            channels: &channels,
            budgets: &budgets,
            shared: labels.shares.then_some([(&lists[..], width), (&sources[..], source_width)]),
            layer: labels.layer,
            period: labels.period,
            heads,
            head_dim,
            columns,
        };
        scored(found.score(), columns)
    }

    fn keep_lists(
        lists: FlexTensor,
        indices: FlexTensor,
        found: FlexTensor,
        wanted: FlexTensor,
        budgets: FlexTensor,
        lengths: FlexTensor,
        board: FlexTensor,
        layer: Option<usize>,
    ) -> (FlexTensor, FlexTensor) {
        let (mut lists, mut board) = (owned(lists), owned(board));
        let [indices, found, wanted, lengths] =
            [indices, found, wanted, lengths].map(|tensor| tensor.to_contiguous());
        let new = NewLists {
            indices: slice(&indices),
            found: slice(&found),
            wanted: slice(&wanted),
            budgets: &wide(&budgets),
            lengths: slice(&lengths),
        };
        let own = lists.storage_mut::<f32>();
        new.keep(own);
        if let Some(layer) = layer {
            let count = own.len();
            board.storage_mut::<f32>()[layer * count..][..count].copy_from_slice(own);
        }
        (lists, board)
    }

    fn list_slots(
        table: FlexTensor,
        sources: FlexTensor,
        budgets: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        width: usize,
    ) -> (FlexTensor, FlexTensor) {
        let [_, _, heads, list] = table.layout().shape().dims();
        let [_, _, columns] = sources.layout().shape().dims();
        let [table, sources, budgets] = [&table, &sources, &budgets].map(wide);
        let [offsets, lengths] = [offsets, lengths].map(|tensor| tensor.to_contiguous());
        let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
        listed(slots((&table, list), (&sources, columns), &budgets, ranges, heads, width))
    }

    fn window_starts(
        positions: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        newest: FlexTensor,
        share: Share,
    ) -> FlexTensor {
        let shape = offsets.layout().shape().clone();
        let [positions, offsets, lengths, newest] =
            [positions, offsets, lengths, newest].map(|tensor| tensor.to_contiguous());
        let [positions, offsets, lengths, newest] =
            [&positions, &offsets, &lengths, &newest].map(slice);
        let starts = starts(positions, offsets, lengths, newest, share);
        FlexTensor::from_data(TensorData::new(starts, shape))
    }
}

/// Scores in rows of `columns`, and two numbers a row.
fn scored(
    (scores, candidates, wanted): (Vec<f32>, Vec<i32>, Vec<i32>),
    columns: usize,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    let rows = candidates.len();
    let ints = |values: Vec<i32>| FlexTensor::from_data(TensorData::new(values, [rows]));
    let scores = FlexTensor::from_data(TensorData::new(scores, [rows, columns]));
    (scores, ints(candidates), ints(wanted))
}

/// Slots in rows, and how many each has.
fn listed((slots, counts): (Vec<i32>, Vec<i32>)) -> (FlexTensor, FlexTensor) {
    let rows = counts.len();
    let width = slots.len() / rows.max(1);
    let slots = FlexTensor::from_data(TensorData::new(slots, [rows, width]));
    (slots, FlexTensor::from_data(TensorData::new(counts, [rows])))
}
