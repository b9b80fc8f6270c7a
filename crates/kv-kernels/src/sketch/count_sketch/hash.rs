//! Hashes a token to its entry in a bucket, and to its sign.
//!
//! A token `J` has the hash `a J + c` in a bucket, in 64 bits, of which the upper half is used; `a`
//! and `c` are drawn once from the seed. The hash is strongly universal (Dietzfelbinger, 1996): two
//! tokens meet in a bucket of `b` entries with probability `1 / b`. But it spreads consecutive
//! tokens evenly, not at random. So a bijection that mixes all bits follows it, which keeps the
//! guarantee. The upper bits choose the entry, and the lowest bit the sign.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use crate::layers::random::mix;

/// 32-bit words of a hash function: `a` and `c`, the lower half first.
const WORDS: usize = 4;

/// How tokens are hashed.
#[derive(Debug, Clone)]
pub enum SketchHashes {
    /// Hash functions for each range and bucket, `[P, r, 4]`, 32-bit ([`SketchHashes::seeded`]).
    Seeded(Tensor<3, Int>),
    /// One table of hashes for all ranges, `[r, T]`, 32-bit: twice a token's entry in the bucket,
    /// plus 1 where its sign is negative ([`SketchHashes::table`]).
    Table(Tensor<2, Int>),
}

impl SketchHashes {
    /// Hash functions of `buckets` buckets for every range, from a seed for each range.
    pub fn seeded(seeds: &[[u32; 2]], buckets: usize, device: &Device) -> Self {
        let words = seeds.iter().flat_map(|seed| {
            let count = (buckets * WORDS) as u32;
            (0..count).map(move |word| coefficient(*seed, word) as i32)
        });
        let words: Vec<i32> = words.collect();
        // The data is made flat: some devices pad the rows of a matrix.
        let words = Tensor::<1, Int>::from_data(words.as_slice(), (device, DType::I32));
        Self::Seeded(words.reshape([seeds.len(), buckets, WORDS]))
    }

    /// A table of given entries (counted within their bucket) and signs (negative ones count as
    /// −1), `[r, T]`, row-major. Entries must lie within their buckets, and tokens within the
    /// table; kernels do not check this.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the lists differ in length, or their length is not a
    /// multiple of `buckets`.
    pub fn table(
        entries: &[u32],
        signs: &[f32],
        buckets: usize,
        device: &Device,
    ) -> Result<Self, KernelError> {
        if entries.len() != signs.len() || buckets == 0 || !entries.len().is_multiple_of(buckets) {
            return Err(KernelError::Unsupported {
                op: "sketch_hashes",
                argument: "table",
                actual: format!("{} entries, {} signs", entries.len(), signs.len()),
                supported: "as many signs as entries, and as many for each bucket",
            });
        }
        let signed_entries = entries.iter().zip(signs);
        let signed_entries: Vec<i32> = signed_entries
            .map(|(entry, sign)| 2 * *entry as i32 + i32::from(*sign < 0.0))
            .collect();
        let tokens = signed_entries.len() / buckets;
        let signed_entries =
            Tensor::<1, Int>::from_data(signed_entries.as_slice(), (device, DType::I32));
        Ok(Self::Table(signed_entries.reshape([buckets, tokens])))
    }

    /// `r`
    pub fn buckets(&self) -> usize {
        match self {
            Self::Seeded(functions) => functions.dims()[1],
            Self::Table(table) => table.dims()[0],
        }
    }

    pub(super) fn check(&self, check: &Check, ranges: usize) -> Result<(), KernelError> {
        match self {
            Self::Seeded(functions) => {
                check.shape("hashes", functions, &[ranges, self.buckets(), WORDS])?;
                check.int("hashes", functions)
            }
            Self::Table(table) => {
                check.filled("hashes", table)?;
                check.int("hashes", table)
            }
        }
    }

    /// All hash functions or tables, `[ranges or 1, r * width]`.
    pub(crate) fn flat(&self) -> Tensor<2, Int> {
        match self {
            Self::Seeded(functions) => {
                let [ranges, buckets, words] = functions.dims();
                functions.clone().reshape([ranges, buckets * words])
            }
            Self::Table(table) => {
                let [buckets, tokens] = table.dims();
                table.clone().reshape([1, buckets * tokens])
            }
        }
    }
}

/// Word number `word` of a seed's hash functions.
fn coefficient([low, high]: [u32; 2], word: u32) -> u32 {
    mix(mix(mix(low) ^ high) ^ word)
}

/// A token's entry, out of `entries` entries, and whether its sign is negative. `words` holds `a`
/// and `c`.
pub(crate) fn hashed(words: &[i32], token: u32, entries: u32) -> (u32, bool) {
    let wide = |low: i32, high: i32| u64::from(low as u32) | (u64::from(high as u32) << 32);
    let (a, c) = (wide(words[0], words[1]), wide(words[2], words[3]));
    let upper = (a.wrapping_mul(u64::from(token)).wrapping_add(c) >> 32) as u32;
    let hash = mix(upper);
    (((u64::from(hash) * u64::from(entries)) >> 32) as u32, hash & 1 == 1)
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    use cubecl::prelude::*;

    use super::WORDS;
    use crate::layers::random::kernel::mix;
    use crate::sketch::count_sketch::SketchConfig;

    /// Twice a token's entry in `bucket` of a range, plus 1 where its sign is negative.
    ///
    /// # Shapes
    /// `hashes` `[P, r, 4]`, or a table `[r, tokens]`.
    #[cube]
    pub(crate) fn hash_of(
        hashes: &[i32],
        range: usize,
        bucket: usize,
        token: u32,
        entries: u32,
        #[comptime] config: SketchConfig,
    ) -> u32 {
        if comptime!(config.tabled.is_some()) {
            let tokens = comptime!(config.tabled.unwrap_or_default());
            u32::cast_from(hashes[bucket * tokens + token as usize])
        } else {
            let at = (range * config.buckets + bucket) * WORDS;
            let a_low = u32::cast_from(hashes[at]);
            let a_high = u32::cast_from(hashes[at + 1]);
            let c_low = u32::cast_from(hashes[at + 2]);
            let c_high = u32::cast_from(hashes[at + 3]);
            let low = a_low * token + c_low;
            let carry = select(low < c_low, 1u32, 0u32);
            let upper = a_low.mul_hi(token) + a_high * token + c_high + carry;
            let hash = mix(upper);
            2u32 * hash.mul_hi(entries) + (hash & 1u32)
        }
    }

    /// The sign of a hash.
    #[cube]
    pub(crate) fn sign_of(hash: u32) -> f32 {
        select(hash % 2u32 == 1u32, -1.0f32, 1.0f32)
    }

    /// The factor of a key in an entry: its sign, or 1 where keys have no signs.
    #[cube]
    pub(crate) fn key_sign(hash: u32, #[comptime] config: SketchConfig) -> f32 {
        let mut sign = 1.0f32;
        if comptime!(config.signed_keys) {
            sign = sign_of(hash);
        }
        sign
    }
}
