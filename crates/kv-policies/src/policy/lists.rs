//! Reading a part of a whole cache: lists of slots for key-value or query heads.

use burn::tensor::{Device, Int, Tensor};
use kv_core::{
    Error, HostState, LayerCache, NUMERATORS, PolicyState, Result, StateBytes, expect_shape,
    read_i32,
};
use kv_kernels::{AttentionOutput, DecodeAttentionOptions, SlotRanges, SlotView, decode_attention};

/// Slots that each query or key-value head attends to.
#[derive(Debug, Clone)]
pub struct SlotList {
    /// Slots of the pool, `[B * H, W]`, 32-bit.
    pub slots: Tensor<2, Int>,
    /// How many of them, from the first on, `[B * H]`, 32-bit.
    pub counts: Tensor<1, Int>,
}

impl SlotList {
    /// Attention of one query per sequence over lists of slots, one for each key-value head or one
    /// for each query head.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; lists of `H = Hkv` or `H = Hq` heads.
    ///
    /// # Errors
    /// [`Error::Shape`], and the errors of [`decode_attention`].
    pub fn attend(self, cache: &mut LayerCache, query: Tensor<3>) -> Result<AttentionOutput> {
        let list = self;
        let ([batch, query_heads, _], kv_heads) = (query.dims(), cache.layout().kv_heads());
        let [rows, width] = list.slots.dims();
        let heads = if rows == batch * query_heads { query_heads } else { kv_heads };
        expect_shape("lists", &[rows], &[batch * heads])?;
        expect_shape("counts", &list.counts.dims(), &[rows])?;
        cache.insert_policy_state(LastList(list.clone()));
        let counts = list.counts.reshape([batch, heads]);
        // A list names slots of the pool: ranges are not looked at.
        let ranges = SlotRanges { offsets: counts.clone(), lengths: counts.clone() };
        let options = DecodeAttentionOptions {
            view: SlotView::List { slots: list.slots.reshape([batch, heads, width]), counts },
            longest: Some(width),
            numerator_weights: cache.track(NUMERATORS).cloned(),
            ..Default::default()
        };
        let (keys, values) = (cache.keys().clone(), cache.values().clone());
        let weights = cache.log_weights().cloned();
        Ok(decode_attention(query, keys, values, weights, &ranges, options)?)
    }

    /// The slots that a cache's last step attended to, if it had a list: of each key-value or query
    /// head of each sequence, counted from the first slot of the head range. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub(crate) fn read_last(cache: &LayerCache) -> Result<Option<Vec<Vec<usize>>>> {
        let Some(LastList(list)) = cache.policy_state() else { return Ok(None) };
        let [rows, width] = list.slots.dims();
        let slots = read_i32("slots", list.slots.clone().reshape([rows * width]))?;
        let counts = read_i32("counts", list.counts.clone())?;
        let each = (rows / cache.layout().head_ranges().max(1)).max(1);
        let rows =
            slots.chunks_exact(width).zip(counts).enumerate().map(|(row, (slots, count))| {
                let live = cache.layout().live(row / each);
                let listed = &slots[..usize::try_from(count).unwrap_or(0).min(width)];
                let own = listed.iter().filter_map(|slot| usize::try_from(*slot).ok());
                own.filter(|slot| live.contains(slot)).map(|slot| slot - live.start).collect()
            });
        Ok(Some(rows.collect()))
    }
}

/// The list that the last step attended to, for reports. Copies of the cache go without it.
#[derive(Debug)]
struct LastList(SlotList);

impl PolicyState for LastList {
    fn name(&self) -> &'static str {
        "last list"
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        None
    }

    fn to_device(&self, _device: &Device) -> Option<Box<dyn PolicyState>> {
        None
    }

    fn joined(&self, _others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let reason = "lists of single steps are not joined".into();
        Err(Error::InvalidPlan { what: "concat", reason })
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        Ok(None)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        StateBytes::default()
    }
}

pub(crate) fn missing(what: &str) -> Error {
    let reason = format!("the cache keeps no {what}");
    Error::InvalidPlan { what: "choice of slots", reason }
}
