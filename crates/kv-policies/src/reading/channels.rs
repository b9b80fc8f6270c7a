//! The channels by which Double Sparsity, HShare and CIS with labels approximate products of
//! queries and keys.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{counted, read_f32};
use serde::{Deserialize, Serialize};

use crate::policy::attention_scores::last_queries;
use crate::policy::check::Check;
use crate::policy::config::invalid;
use crate::policy::state_tensors::int_numbers;
use crate::{HeadPart, Observation, Result};

/// State of channels, integers `[B, H, r]`: of query heads, or of key-value heads.
pub(crate) const CHANNELS: &str = "channels";

/// Channels for every layer and query head, the most important first; or for every key-value head,
/// whose query heads then share them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Channels {
    /// A file that `kv-bench calibrate` has written. Policies read it when they are built.
    File(String),
    /// `[layers][heads][channels]`
    Lists(Vec<Vec<Vec<u32>>>),
}

/// The parts of a calibration file that are read.
#[derive(Deserialize)]
struct Calibrated {
    layers: Vec<Vec<Vec<u32>>>,
}

impl Channels {
    /// The option that gives them.
    pub(crate) const OPTION: &'static str = "channels";

    /// The channels, read from their file.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for files that cannot be read and empty lists.
    pub(crate) fn read(self, policy: &'static str) -> Result<Self> {
        let invalid = |reason| invalid(policy, reason);
        let lists = match self {
            Self::Lists(lists) => lists,
            Self::File(path) => {
                let told = |error: String| invalid(format!("`channels`: {path}: {error}"));
                let text = std::fs::read_to_string(&path).map_err(|e| told(e.to_string()))?;
                let file: Calibrated =
                    serde_json::from_str(&text).map_err(|e| told(e.to_string()))?;
                file.layers
            }
        };
        if lists.is_empty() || lists.iter().any(|heads| heads.is_empty()) {
            let reason = "`channels` has no layers, or a layer without heads";
            return Err(invalid(reason.into()));
        }
        Ok(Self::Lists(lists))
    }

    /// `count` channels of each of a layer's `heads` heads: of its `query_heads`, or of their
    /// groups.
    fn of_layer(
        &self,
        policy: &'static str,
        observation: &Observation<'_>,
        [query_heads, heads, count]: [usize; 3],
    ) -> Result<Vec<Vec<u32>>> {
        let [_, kv_heads, _, head_dim] = observation.dims();
        let HeadPart { first, all } = observation.heads;
        let (layer, all_queries) = (observation.layer, query_heads / kv_heads * all);
        let invalid = |reason| invalid(policy, reason);
        let Self::Lists(lists) = self else {
            return Err(invalid("`channels` is a file that was not read".into()));
        };
        if lists.len() != layer.count {
            let (actual, expected) = (counted(lists.len(), "layer"), layer.count);
            return Err(invalid(format!("`channels` has {actual}, expected {expected}")));
        }
        let whole = &lists[layer.index];
        if whole.len() != all_queries && whole.len() != all {
            let (index, actual) = (layer.index, counted(whole.len(), "head"));
            return Err(invalid(format!(
                "`channels` of layer {index} has {actual}, expected {all_queries} or {all}"
            )));
        }
        let group = whole.len() / all;
        let own = &whole[first * group..(first + kv_heads) * group];
        for (head, list) in own.iter().enumerate() {
            let unusable = list.len() < count
                || list.iter().any(|&channel| channel as usize >= head_dim)
                || (1..count).any(|at| list[..at].contains(&list[at]));
            if unusable {
                let index = layer.index;
                return Err(invalid(format!(
                    "`channels` of layer {index}, head {head}: expected {count} different ones \
                     below {head_dim}, found {list:?}"
                )));
            }
        }
        let lists = (0..heads).map(|head| {
            let of_head = head * own.len() / heads..((head + 1) * own.len()).div_ceil(heads);
            in_turns(&own[of_head], count)
        });
        Ok(lists.collect())
    }
}

/// The first `count` different channels of several lists, which take turns. Each list has as many.
fn in_turns(lists: &[Vec<u32>], count: usize) -> Vec<u32> {
    let mut chosen = Vec::with_capacity(count);
    for channel in (0..count).flat_map(|rank| lists.iter().map(move |list| list[rank])) {
        if chosen.len() < count && !chosen.contains(&channel) {
            chosen.push(channel);
        }
    }
    chosen
}

/// Which heads have channels of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelsOf {
    /// Every query head.
    QueryHeads,
    /// Every key-value head, for all query heads of its group.
    KvHeads,
}

/// `count` channels of every head, `[B, H, count]`, ascending: the calibrated channels, or else the
/// channels of the highest mean `|q_c k_c|` of a token's own query and key, over the prompt's last
/// `window` tokens. A group's channels are those of the highest sum of its heads' means. Where
/// channels of a group's query heads are calibrated, the heads take turns in choosing.
pub(crate) fn channels(
    policy: &'static str,
    calibrated: Option<&Channels>,
    observation: &Observation<'_>,
    of: ChannelsOf,
    count: usize,
    window: usize,
) -> Result<Tensor<3, Int>> {
    let queries = observation.last_queries(policy, window)?;
    let [batch, query_heads, _, head_dim] = queries.dims();
    let heads = match of {
        ChannelsOf::QueryHeads => query_heads,
        ChannelsOf::KvHeads => observation.keys.dims()[1],
    };
    let holds = (1..=head_dim).contains(&count);
    Check(policy).that("labels", count, holds, &format!("1 to {head_dim}"))?;
    let mut rows = match calibrated {
        Some(calibrated) => {
            let own = calibrated.of_layer(policy, observation, [query_heads, heads, count])?;
            vec![own; batch].concat()
        }
        None => {
            let mean = ChannelStatistic::Product.mean(&queries, observation.keys);
            let mean = mean.reshape([batch, heads, query_heads / heads, head_dim]).sum_dim(2);
            by_importance(&read_f32("channels", mean)?, head_dim, count)
        }
    };
    rows.iter_mut().for_each(|row| row.sort_unstable());
    let flat = rows.concat().into_iter().map(|channel| channel as usize);
    Ok(int_numbers(flat, [batch, heads, count], &observation.keys.device()))
}

/// The statistic that ranks channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChannelStatistic {
    /// `|q_c k_c|` of a token's own query and key.
    #[default]
    Product,
    /// `|q_c|`
    Query,
    /// `|k_c|`
    Key,
}

impl ChannelStatistic {
    /// The statistic's mean over tokens, after RoPE: a row for each query head, or for each
    /// key-value head under [`ChannelStatistic::Key`], `[B, H, D]`, f32.
    ///
    /// # Shapes
    /// `keys` `[B, Hkv, T, D]`; `queries` `[B, Hq, W, D]`, of the last `W` of these tokens.
    pub fn mean(self, queries: &Tensor<4>, keys: &Tensor<4>) -> Tensor<3> {
        let [batch, heads, window, head_dim] = queries.dims();
        let kv_heads = keys.dims()[1];
        let keys = last_queries(keys, window).cast(DType::F32);
        let queries = queries.clone().cast(DType::F32);
        match self {
            Self::Query => queries.abs().mean_dim(2).squeeze_dim(2),
            Self::Key => keys.abs().mean_dim(2).squeeze_dim(2),
            Self::Product => {
                let shape = [batch, kv_heads, heads / kv_heads, window, head_dim];
                let products = queries.reshape(shape) * keys.unsqueeze_dim::<5>(2);
                products.abs().mean_dim(3).reshape([batch, heads, head_dim])
            }
        }
    }
}

/// The `count` channels of the highest numbers in each row of `head_dim`, highest first; the lower
/// one among equals.
pub fn by_importance(numbers: &[f32], head_dim: usize, count: usize) -> Vec<Vec<u32>> {
    let rows = numbers.chunks_exact(head_dim).map(|row| {
        let mut order: Vec<u32> = (0..head_dim as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        order.truncate(count);
        order
    });
    rows.collect()
}
