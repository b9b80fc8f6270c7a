//! Lists that heads, layers and steps share.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{
    Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState, StateBytes, states_of,
};
use kv_kernels::{
    Choice, LIST_HEADER as HEADER, ListTable, RefreshRows, keep_lists, label_scores, list_slots,
    top_slots,
};

use crate::policy::board::SharedListBoard;
use crate::policy::lists::{SlotList, missing};

/// Lists that are kept for several steps, integers `[B, Hq, 3 + M]`, as [`keep_lists`] has them.
#[derive(Debug)]
pub(super) struct SharedLists(pub(super) Tensor<3, Int>);

/// How lists are shared and kept; see [`RefreshRows`].
#[derive(Debug)]
pub(super) struct Sharing<'a> {
    /// The layer.
    pub(super) layer: usize,
    /// Layers of the model.
    pub(super) layers: usize,
    /// Steps between choices.
    pub(super) period: usize,
    /// Where layers read each other's lists, if they do.
    pub(super) board: Option<&'a mut SharedListBoard>,
}

impl SharedLists {
    /// The slots of the highest products of queries and keys over a few channels ([`label_scores`])
    /// between sinks and recents, in lists that heads and layers share and that stay for several
    /// steps; tokens that have left the recents since stay readable. `ends` is the most that any
    /// budget has of sinks and recents together.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `states` are integers: channels `[B, Hq, r]`, budgets `[B, Hq, 3]`,
    /// and sources `[B, Hq, 1]`, or `[B, Hq, 2]` with a board.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without lists, and where layers before this one have not
    /// put theirs on the board; [`Error::Kernel`].
    pub(super) fn choose(
        cache: &mut LayerCache,
        query: Tensor<3>,
        states: [&Tensor<3, Int>; 3],
        ends: usize,
        sharing: Sharing<'_>,
    ) -> Result<SlotList> {
        let chosen = cache.with_policy_state(|own: &mut Self, cache| {
            own.refresh(cache, query, states, ends, sharing)
        });
        chosen.ok_or_else(|| missing("lists"))?
    }

    fn refresh(
        &mut self,
        cache: &LayerCache,
        query: Tensor<3>,
        [channels, budgets, sources]: [&Tensor<3, Int>; 3],
        ends: usize,
        sharing: Sharing<'_>,
    ) -> Result<SlotList> {
        let lists = &mut self.0;
        let Sharing { layer, layers, period, board } = sharing;
        let ([batch, heads, _], [_, _, width]) = (query.dims(), lists.dims());
        let (ranges, longest) = (cache.ranges(), cache.layout().most_capacity());
        let due = RefreshRows { lists, sources, layer, period };
        let scored =
            label_scores(query, cache.keys(), channels, budgets, ranges, longest, Some(due))?;
        let most = width.saturating_sub(HEADER);
        let choice = Choice::Top(scored.wanted.clone());
        let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
        // Tokens that came after the lists were chosen are behind the first recent token.
        let all = (most + ends + period - 1).min(longest);
        let wanted = &scored.wanted;
        let (slots, counts) = match board {
            None => {
                keep_lists(lists, &chosen, wanted, budgets, ranges, None)?;
                list_slots(ListTable::Own(lists), sources, budgets, ranges, all)?
            }
            Some(board) => {
                let device = &cache.options().device;
                let to = board.of_layer(layer, [layers, batch, heads, width], device)?;
                keep_lists(lists, &chosen, wanted, budgets, ranges, Some((to, layer)))?;
                list_slots(ListTable::Board(to), sources, budgets, ranges, all)?
            }
        };
        Ok(SlotList { slots, counts })
    }
}

impl PolicyState for SharedLists {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(without_padding(self.0.clone().add_scalar(0)))))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(without_padding(self.0.clone().to_device(device)))))
    }

    /// Shorter lists are filled up: what is behind a list's own number of tokens means nothing.
    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let parts = states_of::<Self>(self, others)?;
        let most = parts.iter().map(|part| part.0.dims()[2]).max().unwrap_or_default();
        let widened = parts.into_iter().map(|Self(lists)| {
            let [rows, heads, width] = lists.dims();
            if width == most {
                return lists.clone();
            }
            let more = Tensor::zeros([rows, heads, most - width], (&lists.device(), lists.dtype()));
            Tensor::cat(vec![lists.clone(), more], 2)
        });
        Ok(Box::new(Self(without_padding(Tensor::cat(widened.collect(), 0)))))
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        let read = || [("table", self.0.clone().try_into_data())];
        HostState::saved(self, "lists", true, read).map(Some)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let device = self.0.dims().iter().product::<usize>() * self.0.dtype().size();
        StateBytes { device, ..StateBytes::default() }
    }
}

impl LoadState for SharedLists {
    const NAME: &'static str = "lists";

    fn load(mut saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let table = integers(saved.take_any("table", &[DType::I32, DType::F32])?);
        let shape: Vec<usize> = table.shape().iter().copied().collect();
        let invalid = |reason: String| Error::InvalidPlan { what: "lists", reason };
        let layout = cache.layout();
        let fits = matches!(shape[..], [batch, heads, width]
            if batch == layout.batch() && heads.is_multiple_of(layout.kv_heads()) && width > HEADER);
        if !fits {
            return Err(invalid(format!("lists are {shape:?}, which is not of this cache")));
        }
        let lists = Tensor::from_data(table, (&cache.options().device, DType::I32));
        Ok(Self(without_padding(lists)))
    }
}

/// Lists of a file, which earlier versions store as f32.
fn integers(table: TensorData) -> TensorData {
    table.convert::<i32>()
}

/// Lists without padding between rows, as kernels that write in place must have them.
fn without_padding(lists: Tensor<3, Int>) -> Tensor<3, Int> {
    let shape = lists.dims();
    lists.reshape([shape.iter().product::<usize>()]).reshape(shape)
}
