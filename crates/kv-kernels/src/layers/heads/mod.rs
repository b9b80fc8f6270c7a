//! The heads of new tokens: from a layer's joint projection of queries, keys and values to
//! normalised and rotated heads (RoPE, half-split), which go to attention or into the slots of a
//! cache. One kernel does all of it, in place of a launch for each step.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, SlotPool, SlotRanges};
use args::{PlacementArgs, Projection};
use backend::HeadsOps;

/// Cosines and sines of the rotation at every position, `[P, D / 2]` each, f32.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// Cosines.
    pub cos: Tensor<2>,
    /// Sines.
    pub sin: Tensor<2>,
}

/// Root-mean-square norms of each query and key head before RoPE (Qwen3).
#[derive(Debug, Clone)]
pub struct HeadNorms {
    /// Weights for queries, `[D]`, of the projections' dtype.
    pub query: Tensor<1>,
    /// Weights for keys, `[D]`.
    pub key: Tensor<1>,
    /// The number that is added to the mean square.
    pub epsilon: f32,
}

/// How a row of `(Hq + 2 Hkv) D` projected numbers is split into heads: queries, then keys, then
/// values.
#[derive(Debug, Clone)]
pub struct HeadLayout {
    /// `Hq`.
    pub query_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`, even.
    pub head_dim: usize,
    /// The rotation; `None` for heads that are not rotated.
    pub rope: Option<RotaryTable>,
    /// The norms of queries and keys, if any.
    pub norms: Option<HeadNorms>,
}

/// The slot of a new token.
#[derive(Debug)]
pub enum Placement<'a> {
    /// After each range's live slots. The lengths grow by one, in place. Ranges must have room.
    Append(&'a mut SlotRanges),
    /// At places that [`crate::evicting_attention`] has chosen. A range whose place is the one
    /// after its live slots grows by one, in place.
    Next {
        /// The ranges in which places are counted.
        ranges: &'a mut SlotRanges,
        /// Places within the ranges, `[B, Hkv]`, 32-bit.
        places: &'a Tensor<2, Int>,
        /// `ln ‖v‖₁` of every slot, `[S]`, f32. The new tokens' norms are written into it.
        log_norms: &'a mut Tensor<1>,
    },
}

/// [`Placement`] without its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PlacementKind {
    Append,
    Next,
}

/// Splits projections into queries `[B, Hq, T, D]`, keys and values `[B, Hkv, T, D]`.
///
/// # Shapes
/// `projected` `[B * T, (Hq + 2 Hkv) D]`, `positions` `[B, T]` below the table's `P` (on the
/// device, not checked), 32-bit.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn split_heads(
    projected: Tensor<2>,
    positions: Tensor<2, Int>,
    layout: &HeadLayout,
) -> Result<[Tensor<4>; 3], KernelError> {
    const OP: &str = "split_heads";
    let (query_heads, kv_heads) = (layout.query_heads, layout.kv_heads);
    if query_heads == 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads, kv_heads });
    }
    split(OP, projected, positions, layout)
}

/// [`split_heads`] for rows of keys and values alone; returns keys and values, `[B, Hkv, T, D]`.
///
/// # Shapes
/// `projected` `[B * T, 2 Hkv D]`, the rest as in [`split_heads`].
///
/// # Errors
/// The errors of [`split_heads`].
pub fn split_keys_values(
    projected: Tensor<2>,
    positions: Tensor<2, Int>,
    layout: &HeadLayout,
) -> Result<[Tensor<4>; 2], KernelError> {
    let layout = HeadLayout { query_heads: 0, ..layout.clone() };
    let [_, key, value] = split("split_keys_values", projected, positions, &layout)?;
    Ok([key, value])
}

/// Splits projections. Without query heads, the queries may be any tensor.
fn split(
    op: &'static str,
    projected: Tensor<2>,
    positions: Tensor<2, Int>,
    layout: &HeadLayout,
) -> Result<[Tensor<4>; 3], KernelError> {
    let [batch, tokens] = positions.dims();
    let check = Check::new(op, &projected);
    layout.check(op, &check, &projected, batch * tokens)?;
    check.shape("positions", &positions, &[batch, tokens])?;
    check.int("positions", &positions)?;
    let projection = layout.projection(projected, positions.reshape([batch * tokens]));
    let (query, key, value) = <Dispatch as HeadsOps>::split_heads(projection, tokens);
    Ok([query, key, value].map(Tensor::from_dispatch))
}

/// Writes one new token of each sequence into the slots of its heads, in place and in one launch.
/// Returns the tokens' queries, `[B, Hq, D]`.
///
/// On a CubeCL device every clone of the pool's tensors sees the writes. On the CPU shared tensors
/// are copied first, so the caller should hold the only references.
///
/// # Shapes
/// `projected` `[B, (Hq + 2 Hkv) D]`, `positions` `[B]` below the table's `P` (on the device, not
/// checked), 32-bit.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn write_heads(
    projected: Tensor<2>,
    positions: Tensor<1, Int>,
    layout: &HeadLayout,
    mut pool: SlotPool<'_>,
    placement: Placement<'_>,
) -> Result<Tensor<3>, KernelError> {
    const OP: &str = "write_heads";
    let (query_heads, kv_heads) = (layout.query_heads, layout.kv_heads);
    if query_heads == 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads, kv_heads });
    }
    let [batch] = positions.dims();
    let check = Check::new(OP, &projected);
    layout.check(OP, &check, &projected, batch)?;
    check.shape("positions", &positions, &[batch])?;
    check.int("positions", &positions)?;
    pool.check(&check, layout.head_dim)?;
    check.counted("keys", pool.keys)?;
    match &placement {
        Placement::Append(ranges) => check.ranges(ranges, batch, layout.kv_heads)?,
        Placement::Next { ranges, places, log_norms } => {
            check.ranges(ranges, batch, layout.kv_heads)?;
            check.shape("places", *places, &[batch, layout.kv_heads])?;
            check.int("places", *places)?;
            check.shape("log_norms", *log_norms, &[pool.keys.dims()[0]])?;
            check.f32("log_norms", *log_norms)?;
        }
    }

    let projection = layout.projection(projected, positions);
    let (place, ranges, next, mut log_norms) = match placement {
        Placement::Append(ranges) => (PlacementKind::Append, ranges, None, None),
        Placement::Next { ranges, places, log_norms } => {
            (PlacementKind::Next, ranges, Some(places.clone()), Some(log_norms))
        }
    };
    let SlotRanges { offsets, lengths } = ranges;
    let places = PlacementArgs {
        offsets: offsets.clone().into_dispatch(),
        lengths: check.take_ints(lengths).into_dispatch(),
        next: next.into(),
        log_norms: log_norms.as_deref_mut().map(|norms| check.take(norms)).into(),
        place,
    };
    let written = <Dispatch as HeadsOps>::write_heads(projection, pool.take(&check), places);
    pool.put_back(written.pools);
    *lengths = Tensor::from_dispatch(written.lengths);
    if let Some((own, written)) = log_norms.zip(written.log_norms.into_option()) {
        *own = Tensor::from_dispatch(written);
    }
    Ok(Tensor::from_dispatch(written.query))
}

/// A [`HeadLayout`] without its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadConfig {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) epsilon: f32,
}

impl HeadLayout {
    /// `(Hq + 2 Hkv) D`.
    pub fn width(&self) -> usize {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    fn check(
        &self,
        op: &'static str,
        check: &Check,
        projected: &Tensor<2>,
        tokens: usize,
    ) -> Result<(), KernelError> {
        check.supported()?;
        check.float("projected", projected)?;
        let (query_heads, kv_heads) = (self.query_heads, self.kv_heads);
        if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return Err(KernelError::HeadGroups { op, query_heads, kv_heads });
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) || self.head_dim > 256 {
            return Err(KernelError::Unsupported {
                op,
                argument: "head dim",
                actual: self.head_dim.to_string(),
                supported: "even numbers up to 256",
            });
        }
        if tokens == 0 {
            return Err(KernelError::Unsupported {
                op,
                argument: "tokens",
                actual: "0".into(),
                supported: "at least 1",
            });
        }
        check.shape("projected", projected, &[tokens, self.width()])?;
        check.counted("projected", projected)?;
        if let Some(RotaryTable { cos, sin }) = &self.rope {
            let shape = [cos.dims()[0], self.head_dim / 2];
            for (argument, table) in [("cosines", cos), ("sines", sin)] {
                check.shape(argument, table, &shape)?;
                check.f32(argument, table)?;
            }
        }
        if let Some(norms) = &self.norms {
            for (argument, norm) in [("query norm", &norms.query), ("key norm", &norms.key)] {
                check.shape(argument, norm, &[self.head_dim])?;
                check.same_dtype(argument, norm, "the projections' dtype", projected.dtype())?;
            }
        }
        Ok(())
    }

    /// The backends' arguments.
    fn projection(&self, projected: Tensor<2>, positions: Tensor<1, Int>) -> Projection<Dispatch> {
        let (rope, norms) = (self.rope.as_ref(), self.norms.as_ref());
        let config = HeadConfig {
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            epsilon: norms.map_or(0.0, |norms| norms.epsilon),
        };
        Projection {
            projected: projected.into_dispatch(),
            positions: positions.into_dispatch(),
            cos: rope.map(|rope| rope.cos.clone()).into(),
            sin: rope.map(|rope| rope.sin.clone()).into(),
            query_norm: norms.map(|norms| norms.query.clone()).into(),
            key_norm: norms.map(|norms| norms.key.clone()).into(),
            config,
        }
    }
}
