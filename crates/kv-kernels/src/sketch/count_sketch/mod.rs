//! Count-sketches of tokens: many tokens share few entries, and each token can be estimated from
//! them again (KVReviver, algorithms 1 and 2).
//!
//! A range's sketch has `r` buckets of `b` entries, and an entry is a key and a value. A token is
//! added to one entry of every bucket, with a sign; a hash of its index chooses both (`hash.rs`).
//! Its estimate is the elementwise median of these entries times their signs. `insert.rs` and
//! `query.rs` have the kernels.

pub(crate) mod args;
mod backend;
pub(crate) mod hash;
#[cfg(feature = "gpu")]
mod insert;
#[cfg(feature = "gpu")]
pub(crate) mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
pub(crate) mod query;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use args::{InsertArgs, SketchTensors};
use backend::CountSketchOps;

pub use hash::SketchHashes;

/// The most buckets of a sketch.
pub const MAX_BUCKETS: usize = 9;
/// Numbers of a range's row in [`SketchSource::heads`].
pub const HEAD_FIELDS: usize = 6;

/// The sketches of all ranges, to be read.
#[derive(Debug, Clone, Copy)]
pub struct SketchSource<'a> {
    /// Keys of entries, `[N, D]`, f32. A range's entries lie together, bucket after bucket.
    pub keys: &'a Tensor<2>,
    /// Values of entries, `[N, D]`, f32, in the order of the keys.
    pub values: &'a Tensor<2>,
    /// Six numbers of every range, `[P, 6]`, 32-bit: its first entry; its entries a bucket; its
    /// first token among the tokens of all ranges; the tokens that it has room for; and, for
    /// [`crate::update_sketch`], the slots that it keeps exactly, and how many of these are for the
    /// most recent tokens. A range without entries has no sketch.
    pub heads: &'a Tensor<2, Int>,
    /// The most entries of a range, over all its buckets. Kernels have room for no more.
    pub most_entries: usize,
    /// How tokens are hashed to entries.
    pub hashes: &'a SketchHashes,
    /// Whether keys have signs, as values have. Without signs, as in the paper, the keys of an
    /// entry add up, and their mean biases estimates of keys.
    pub signed_keys: bool,
}

/// The sketches of all ranges, to be written in place. As in [`crate::SlotPool`], the caller should
/// hold the only references.
#[derive(Debug)]
pub struct SketchPool<'a> {
    /// `[N, D]`
    pub keys: &'a mut Tensor<2>,
    /// `[N, D]`
    pub values: &'a mut Tensor<2>,
    /// `[P, 6]`
    pub heads: &'a Tensor<2, Int>,
    /// The most entries of a range, as in [`SketchSource`].
    pub most_entries: usize,
    /// How tokens are hashed, as in [`SketchSource`].
    pub hashes: &'a SketchHashes,
    /// Whether keys have signs, as in [`SketchSource`].
    pub signed_keys: bool,
}

/// Comptime configuration of all kernels that read or write sketches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SketchConfig {
    /// `r`
    pub(crate) buckets: usize,
    pub(crate) signed_keys: bool,
    /// Tokens of the table, where entries and signs are given and not hashed.
    pub(crate) tabled: Option<usize>,
}

/// Adds `sign` times each token to its range's sketch, in place: −1 takes out what +1 has put in.
/// The tokens of an entry are summed in their order, on every device, and the sum is added to the
/// entry at once.
///
/// # Shapes
/// `tokens` `[P, M]`, 32-bit: indices of the tokens, negative for none; `keys`, `values` `[P, M,
/// D]`, of one dtype (f32, f16 or bf16).
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed. The numbers in
/// `heads` are on the device and are not checked.
pub fn sketch_insert(
    pool: SketchPool<'_>,
    tokens: Tensor<2, Int>,
    keys: Tensor<3>,
    values: Tensor<3>,
    sign: f32,
) -> Result<(), KernelError> {
    let check = Check::new("sketch_insert", pool.keys);
    let config = pool.source().check(&check)?;
    let [_, head_dim] = pool.keys.dims();
    let [ranges, count] = tokens.dims();
    check.shape("tokens", &tokens, &[pool.heads.dims()[0], count])?;
    check.int("tokens", &tokens)?;
    check.float("keys", &keys)?;
    for (argument, tensor) in [("keys", &keys), ("values", &values)] {
        check.shape(argument, tensor, &[ranges, count, head_dim])?;
        check.same_dtype(argument, tensor, "the keys' dtype", keys.dtype())?;
    }
    if ranges * count == 0 {
        return Ok(());
    }
    let mut pool = pool;
    let (new_keys, new_values) = <Dispatch as CountSketchOps>::sketch_insert(InsertArgs {
        sketch: pool.take(&check, config),
        tokens: tokens.into_dispatch(),
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        sign,
    });
    pool.put_back([new_keys, new_values]);
    Ok(())
}

/// Estimates tokens by the elementwise median over the buckets; where `r` is even, the mean of the
/// middle two. Returns keys and values `[P, M, D]` of `dtype`, zeros for negative tokens.
///
/// # Shapes
/// `tokens` `[P, M]`, 32-bit.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn sketch_query(
    source: SketchSource<'_>,
    tokens: Tensor<2, Int>,
    dtype: DType,
) -> Result<[Tensor<3>; 2], KernelError> {
    let check = Check::new("sketch_query", source.keys);
    let config = source.check(&check)?;
    let [_, count] = tokens.dims();
    let [ranges, head_dim] = [source.heads.dims()[0], source.keys.dims()[1]];
    check.shape("tokens", &tokens, &[ranges, count])?;
    check.int("tokens", &tokens)?;
    if ranges * count == 0 {
        let none = || Tensor::zeros([ranges, count, head_dim], (&check.device(), dtype));
        return Ok([none(), none()]);
    }
    let tensors = source.tensors(config);
    let (keys, values) =
        <Dispatch as CountSketchOps>::sketch_query(tensors, tokens.into_dispatch(), dtype);
    Ok([Tensor::from_dispatch(keys), Tensor::from_dispatch(values)])
}

impl SketchPool<'_> {
    pub(crate) fn source(&self) -> SketchSource<'_> {
        let Self { heads, most_entries, hashes, signed_keys, .. } = *self;
        let (keys, values) = (&*self.keys, &*self.values);
        SketchSource { keys, values, heads, most_entries, hashes, signed_keys }
    }

    /// Takes the tensors, until [`Self::put_back`].
    pub(crate) fn take(&mut self, check: &Check, config: SketchConfig) -> SketchTensors<Dispatch> {
        SketchTensors {
            keys: check.take(self.keys).into_dispatch(),
            values: check.take(self.values).into_dispatch(),
            heads: self.heads.clone().into_dispatch(),
            hashes: self.hashes.flat().into_dispatch(),
            most_entries: self.most_entries,
            config,
        }
    }

    pub(crate) fn put_back(self, [keys, values]: [FloatTensor<Dispatch>; 2]) {
        *self.keys = Tensor::from_dispatch(keys);
        *self.values = Tensor::from_dispatch(values);
    }
}

impl SketchSource<'_> {
    /// Checks everything except what is on the device.
    pub(crate) fn check(&self, check: &Check) -> Result<SketchConfig, KernelError> {
        check.supported()?;
        let [entries, head_dim] = self.keys.dims();
        for (argument, tensor) in [("sketch keys", self.keys), ("sketch values", self.values)] {
            check.shape(argument, tensor, &[entries, head_dim])?;
            check.filled(argument, tensor)?;
            check.f32(argument, tensor)?;
        }
        if !head_dim.is_multiple_of(4) || head_dim > 256 {
            let supported = "multiples of 4 up to 256";
            return Err(check.unsupported("head dim", head_dim, supported));
        }
        let [ranges, _] = self.heads.dims();
        check.shape("heads", self.heads, &[ranges, HEAD_FIELDS])?;
        check.int("heads", self.heads)?;
        let config = SketchConfig {
            buckets: self.hashes.buckets(),
            signed_keys: self.signed_keys,
            tabled: match self.hashes {
                SketchHashes::Table(table) => Some(table.dims()[1]),
                SketchHashes::Seeded(_) => None,
            },
        };
        if !(1..=MAX_BUCKETS).contains(&config.buckets) {
            return Err(check.unsupported("buckets", config.buckets, "1 to 9"));
        }
        self.hashes.check(check, ranges)?;
        Ok(config)
    }

    pub(crate) fn tensors(&self, config: SketchConfig) -> SketchTensors<Dispatch> {
        SketchTensors {
            keys: self.keys.clone().into_dispatch(),
            values: self.values.clone().into_dispatch(),
            heads: self.heads.clone().into_dispatch(),
            hashes: self.hashes.flat().into_dispatch(),
            most_entries: self.most_entries,
            config,
        }
    }
}
