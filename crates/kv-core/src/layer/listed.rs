//! Reading a part of a whole cache: lists of slots for key-value or query heads, found by a few
//! channels and shared, without the host.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    AttentionOutput, Choice, DecodeAttentionOptions, DueRows, LIST_HEADER as HEADER, ListTable,
    SlotRanges, SlotView, decode_attention, keep_lists, label_scores, list_slots, top_slots,
};

use super::{NUMERATORS, expect_shape};
use crate::tensors::read_i32;
use crate::{Error, LayerCache, Result};

/// The state of lists that are kept for several steps, `[B, Hq, 3 + M]`, as [`keep_lists`] has
/// them. Where caches with lists of unequal room are batched, shorter ones are filled up.
pub const LISTS: &str = "lists";

/// Slots that each query or key-value head attends to.
#[derive(Debug, Clone)]
pub struct SlotList {
    /// Slots of the pool, `[B * H, W]`, 32-bit.
    pub slots: Tensor<2, Int>,
    /// How many of them, from the first on, `[B * H]`, 32-bit.
    pub counts: Tensor<1, Int>,
}

/// Lists of all layers in one decode step, `[layers, B, Hq, 3 + M]`.
#[derive(Debug, Default)]
pub struct ListBoard {
    lists: Option<Tensor<4>>,
    /// Layers that have put theirs here.
    posted: usize,
}

/// How lists are shared and kept; see [`DueRows`].
#[derive(Debug)]
pub struct Sharing<'a> {
    /// The layer.
    pub layer: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Steps between choices.
    pub period: usize,
    /// Where layers read each other's lists, if they do.
    pub board: Option<&'a mut ListBoard>,
}

impl LayerCache {
    /// Attention of one query per sequence over lists of slots, one for each key-value head or one
    /// for each query head.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; lists of `H = Hkv` or `H = Hq` heads.
    ///
    /// # Errors
    /// [`Error::Shape`], and those of [`decode_attention`].
    pub fn attend_listed(&mut self, query: Tensor<3>, list: SlotList) -> Result<AttentionOutput> {
        let ([batch, query_heads, _], kv_heads) = (query.dims(), self.layout.kv_heads());
        let [rows, width] = list.slots.dims();
        let heads = if rows == batch * query_heads { query_heads } else { kv_heads };
        expect_shape("lists", &[rows], &[batch * heads])?;
        expect_shape("counts", &list.counts.dims(), &[rows])?;
        self.listed = Some(list.clone());
        let counts = list.counts.reshape([batch, heads]);
        // A list names slots of the pool: ranges are not looked at.
        let ranges = SlotRanges { offsets: counts.clone(), lengths: counts.clone() };
        let options = DecodeAttentionOptions {
            view: SlotView::List { slots: list.slots.reshape([batch, heads, width]), counts },
            longest: Some(width),
            numerator_weights: self.track(NUMERATORS).cloned(),
            ..Default::default()
        };
        let (keys, values) = (self.keys.clone(), self.values.clone());
        let weights = self.log_weights.clone();
        Ok(decode_attention(query, keys, values, weights, &ranges, options)?)
    }

    /// What the last step attended to, where that was a list: slots of each key-value or query head
    /// of each sequence, counted from the first of its range. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_listed(&self) -> Result<Option<Vec<Vec<usize>>>> {
        let Some(list) = &self.listed else { return Ok(None) };
        let [rows, width] = list.slots.dims();
        let slots = read_i32("slots", list.slots.clone().reshape([rows * width]))?;
        let counts = read_i32("counts", list.counts.clone())?;
        let each = (rows / self.layout.pairs().max(1)).max(1);
        let rows =
            slots.chunks_exact(width).zip(counts).enumerate().map(|(row, (slots, count))| {
                let live = self.layout.live(row / each);
                let listed = &slots[..usize::try_from(count).unwrap_or(0).min(width)];
                let own = listed.iter().filter_map(|slot| usize::try_from(*slot).ok());
                own.filter(|slot| live.contains(slot)).map(|slot| slot - live.start).collect()
            });
        Ok(Some(rows.collect()))
    }

    /// The `tokens` slots at most of the highest products of queries and keys over a few channels,
    /// as [`label_scores`] says.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `channels` `[B, Hq, r]` and `budgets` `[B, Hq, 3]`, f32, without sinks
    /// and recents.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn choose_by_channels(
        &self,
        query: Tensor<3>,
        channels: &Tensor<3>,
        budgets: &Tensor<3>,
        tokens: usize,
    ) -> Result<SlotList> {
        let ([batch, heads, _], longest) = (query.dims(), self.longest_capacity());
        let ranges = &self.ranges;
        let scored = label_scores(query, &self.keys, channels, budgets, ranges, longest, None)?;
        let most = tokens.clamp(1, longest);
        let choice = Choice::Top(scored.wanted);
        let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
        let kv_heads = self.layout.kv_heads();
        let indices = chosen.indices.reshape([batch, kv_heads, heads / kv_heads * most]);
        let slots = indices + self.ranges.offsets.clone().unsqueeze_dim::<3>(2);
        Ok(SlotList { slots: slots.reshape([batch * heads, most]), counts: chosen.counts })
    }

    /// [`Self::choose_by_channels`] between sinks and recents, in lists that heads and layers share
    /// and that stay for several steps, in the state [`LISTS`]; tokens that have left the recents
    /// since stay readable. `ends` is the most that any budget has of sinks and recents together.
    ///
    /// # Shapes
    /// As [`Self::choose_by_channels`]'s; `sources` `[B, Hq, 1]`, f32, and `[B, Hq, 2]` with a
    /// board.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without lists, and where layers before this one have not
    /// put theirs on the board; [`Error::Kernel`].
    pub fn choose_shared(
        &mut self,
        query: Tensor<3>,
        [channels, budgets, sources]: [&Tensor<3>; 3],
        ends: usize,
        sharing: Sharing<'_>,
    ) -> Result<SlotList> {
        let Sharing { layer, layers, period, board } = sharing;
        let mut lists = self.state.remove(LISTS).ok_or_else(|| missing("lists"))?;
        let result = self.refresh_lists(
            &mut lists,
            query,
            [channels, budgets, sources],
            ends,
            Sharing { layer, layers, period, board },
        );
        self.state.insert(LISTS.into(), lists);
        result
    }

    fn refresh_lists(
        &self,
        lists: &mut Tensor<3>,
        query: Tensor<3>,
        [channels, budgets, sources]: [&Tensor<3>; 3],
        ends: usize,
        sharing: Sharing<'_>,
    ) -> Result<SlotList> {
        let Sharing { layer, layers, period, board } = sharing;
        let ([batch, heads, _], [_, _, width]) = (query.dims(), lists.dims());
        let (ranges, longest) = (&self.ranges, self.longest_capacity());
        let due = DueRows { lists, sources, layer, period };
        let scored =
            label_scores(query, &self.keys, channels, budgets, ranges, longest, Some(due))?;
        let most = width.saturating_sub(HEADER);
        let choice = Choice::Top(scored.wanted.clone());
        let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
        // All that has come since the lists were chosen is behind the first recent token.
        let all = (most + ends + period - 1).min(longest);
        let wanted = &scored.wanted;
        let (slots, counts) = match board {
            None => {
                keep_lists(lists, &chosen, wanted, budgets, ranges, None)?;
                list_slots(ListTable::Own(lists), sources, budgets, ranges, all)?
            }
            Some(board) => {
                let device = &self.options.device;
                let to = board.of_layer(layer, [layers, batch, heads, width], device)?;
                keep_lists(lists, &chosen, wanted, budgets, ranges, Some((to, layer)))?;
                list_slots(ListTable::Board(to), sources, budgets, ranges, all)?
            }
        };
        Ok(SlotList { slots, counts })
    }
}

impl ListBoard {
    /// Refuses a layer before whose step others have not put their lists here.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`].
    pub fn check_turn(&self, layer: usize) -> Result<()> {
        if self.posted >= layer {
            return Ok(());
        }
        let reason = format!(
            "layer {layer} may read lists of all layers before it, {} are there in this step",
            self.posted
        );
        Err(Error::InvalidPlan { what: "lists", reason })
    }

    /// The board, where it is this layer's turn.
    fn of_layer(
        &mut self,
        layer: usize,
        shape: [usize; 4],
        device: &Device,
    ) -> Result<&mut Tensor<4>> {
        self.check_turn(layer)?;
        self.posted = layer + 1;
        let count = shape.iter().product::<usize>();
        // Allocated flat, since rows must follow each other.
        let empty = || Tensor::<1>::empty([count], (device, DType::F32)).reshape(shape);
        let lists = self.lists.get_or_insert_with(empty);
        expect_shape("board", &lists.dims(), &shape)?;
        Ok(lists)
    }
}

pub(super) fn missing(what: &str) -> Error {
    let reason = format!("the cache keeps no {what}");
    Error::InvalidPlan { what: "choice of slots", reason }
}
