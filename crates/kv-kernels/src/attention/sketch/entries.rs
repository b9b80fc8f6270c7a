//! Estimates tokens from a count-sketch, for the kernel for matrix instructions. A token's key or
//! value is the median, column by column, of its entries in all buckets, each times its sign. The
//! medians land in the registers from which the products take a tile's rows.
//!
//! Each lane hashes one token, and shuffles the entries' places to the lanes that need them. Lanes
//! read the pieces of a row from shared memory in different orders, so that no banks conflict, and
//! swap registers after the median. A token's first sign is left out of its entries: it would only
//! change the median's sign, and so becomes a factor of the weight. Arithmetic takes two halves at
//! a time. Its instructions set these kernels' time.

use cubecl::prelude::*;

use super::blueprint::{Blueprint, WORDS};
use super::staging::{Columns, ENTRY, KEY_PIECE, key_piece, orders, piece_ahead, value_piece};
use crate::components::ptx::{Halves, larger_halves, read_shared, scaled_halves, smaller_halves};
use crate::sketch::count_sketch::hash::kernel;

/// Bits of a packed entry. `NEGATIVE`: the sign is negative in the first bucket, or differs from
/// the first bucket's sign in another. `MISSING`: the token is not in the sketch. The higher bits
/// are the place where the entry begins, in pieces of a key.
const NEGATIVE: u32 = 1;
const MISSING: u32 = 2;
const FIELDS: u32 = 4;
/// Bytes of a piece of a key.
const PIECE_BYTES: u32 = 16;

/// The packed entries of a lane's own token, one a bucket. A token that is not in the sketch gets
/// the row of zeros after staged entries, or else the first entry.
#[cube]
pub(super) fn hashes_of(
    hashes: &[i32],
    kv_head: usize,
    token: usize,
    entries: usize,
    is_one: bool,
    #[comptime] blueprint: Blueprint,
) -> Array<u32> {
    let buckets = blueprint.sketch.buckets.comptime();
    let pieces = comptime!((blueprint.head_dim / KEY_PIECE) as u32);
    let staged = blueprint.staged.comptime();
    let mut packed_entries = Array::<u32>::new(buckets);
    let mut first_sign = 0u32;
    #[unroll]
    for bucket in 0..buckets {
        let mut packed_entry =
            comptime!(MISSING + (staged.max(1) as u32 - 1) * pieces * FIELDS).runtime();
        if is_one {
            let hash = kernel::hash_of(
                hashes,
                kv_head,
                bucket.runtime(),
                token as u32,
                entries as u32,
                blueprint.sketch,
            );
            let row = (bucket * entries) as u32 + hash / 2;
            let sign = hash % 2;
            packed_entry = row * (pieces * FIELDS) + (sign ^ first_sign);
            if comptime!(bucket == 0) {
                first_sign = sign;
            }
        }
        packed_entries[bucket] = packed_entry;
    }
    packed_entries
}

/// The entries of the token of lane `asked`: where each begins, in bytes where entries are staged,
/// else in pieces of a key; and their signs relative to the first sign.
#[derive(CubeType)]
struct Found {
    at: Array<u32>,
    /// The factor of each entry, for two halves.
    signs: Array<u32>,
    /// The packed entry of the first bucket.
    packed_entry: u32,
}

#[cube]
fn found(packed_entries: &Array<u32>, asked: usize, #[comptime] blueprint: Blueprint) -> Found {
    let buckets = blueprint.sketch.buckets.comptime();
    let ones = comptime!(blueprint.halves.ones());
    let mut at = Array::<u32>::new(buckets);
    let mut signs = Array::<u32>::new(buckets);
    let mut first = 0u32;
    #[unroll]
    for bucket in 0..buckets {
        let packed_entry = plane_shuffle(packed_entries[bucket], asked as u32);
        if comptime!(bucket == 0) {
            first = packed_entry;
        }
        if comptime!(blueprint.staged > 0) {
            at[bucket] =
                (packed_entry & comptime!(!(FIELDS - 1))) * comptime!(PIECE_BYTES / FIELDS);
        } else {
            at[bucket] = packed_entry / FIELDS;
        }
        signs[bucket] = (packed_entry & NEGATIVE) * 0x8000_8000u32 + ones;
    }
    Found { at, signs, packed_entry: first }
}

/// The keys of a tile's rows `r` and `r + 8`, every fourth piece from piece `j` on, without their
/// first signs. Lane `asked` has the packed entries of the tile's first token.
#[cube]
pub(super) fn token_keys<E: Float>(
    columns: &Columns,
    all: &[Vector<f32, Const<ENTRY>>],
    packed_entries: &Array<u32>,
    asked: usize,
    #[comptime] blueprint: Blueprint,
) -> Array<Vector<u32, Const<4>>> {
    let buckets = blueprint.sketch.buckets.comptime();
    let pieces = comptime!(blueprint.rows().pieces());
    let halves = blueprint.halves.comptime();
    let (r, j) = (columns.r, columns.j);
    let ahead = piece_ahead(r, blueprint);
    let mut k = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pieces));
    #[unroll]
    for n in 0..2usize {
        let found = found(packed_entries, asked + 8 * n + r, blueprint);
        #[unroll]
        for piece in 0..pieces {
            let odd = comptime!(piece % 2);
            let mut parts = Array::<Vector<u32, Const<4>>>::new(buckets);
            #[unroll]
            for bucket in 0..buckets {
                let at = found.at[bucket];
                if comptime!(blueprint.staged > 0) {
                    let at = columns.keys[odd] + at;
                    parts[bucket] = read_shared::<Const<4>>(at, comptime!(64 * piece), 4usize);
                } else {
                    let mut from = at as usize + 4 * piece + j + ahead;
                    if comptime!(odd == 1) {
                        from -= 2 * ahead;
                    }
                    let first = columns.first * comptime!(blueprint.head_dim / ENTRY);
                    parts[bucket] = key_piece::<E>(all, first + 2 * from);
                }
            }
            let mut key = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for word in 0..4usize {
                let mut words = Array::<u32>::new(buckets);
                #[unroll]
                for bucket in 0..buckets {
                    words[bucket] = parts[bucket].extract(word);
                    if comptime!(blueprint.sketch.signed_keys && bucket > 0) {
                        words[bucket] = scaled_halves(words[bucket], found.signs[bucket], halves);
                    }
                }
                key.insert(word, median::<E>(&mut words, buckets, halves));
            }
            k[n * pieces + piece] = key;
        }
        if comptime!(pieces.is_multiple_of(2)) {
            #[unroll]
            for two in 0..comptime!(pieces / 2) {
                let i = comptime!(n * pieces + 2 * two);
                swap_where::<Const<4>>(&mut k, i, comptime!(i + 1), r % 2 == 1, 4usize);
            }
        }
    }
    k
}

/// Writes the value of this lane's `u`-th row of a tile to registers `[u, blocks]` of `v`, without
/// its first sign. Returns that sign, and whether the token is in the sketch. Lane `asked` has the
/// token's packed entries.
#[cube]
pub(super) fn token_value<E: Float>(
    columns: &Columns,
    all: &[Vector<f32, Const<ENTRY>>],
    packed_entries: &Array<u32>,
    v: &mut Array<Vector<u32, Const<WORDS>>>,
    asked: usize,
    #[comptime] u: usize,
    #[comptime] blueprint: Blueprint,
) -> (f32, bool) {
    let buckets = blueprint.sketch.buckets.comptime();
    let blocks = comptime!(blueprint.rows().blocks());
    let halves = blueprint.halves.comptime();
    let orders = comptime!(orders(blocks));
    let (r, j) = (columns.r, columns.j);
    let turned = j % orders;
    let found = found(packed_entries, asked, blueprint);
    #[unroll]
    for step in 0..blocks {
        let (round, order) = comptime!((step / orders, step % orders));
        let mut parts = Array::<Vector<u32, Const<WORDS>>>::new(buckets);
        #[unroll]
        for bucket in 0..buckets {
            let at = found.at[bucket];
            if comptime!(blueprint.staged > 0) {
                let at = columns.values[order] + at;
                let offset = comptime!(32 * orders * round);
                parts[bucket] = read_shared::<Const<WORDS>>(at, offset, WORDS);
            } else {
                let block = comptime!(round * orders) + (comptime!(order) ^ turned);
                let first = columns.first * comptime!(blueprint.head_dim / ENTRY);
                let from = first + 2 * at as usize + 8 * block + r;
                parts[bucket] = value_piece::<E>(all, from);
                if found.packed_entry & MISSING != 0u32 {
                    parts[bucket] = Vector::new(0u32);
                }
            }
        }
        let mut value = Vector::<u32, Const<WORDS>>::empty();
        #[unroll]
        for word in 0..WORDS {
            let mut words = Array::<u32>::new(buckets);
            #[unroll]
            for bucket in 0..buckets {
                words[bucket] = parts[bucket].extract(word);
                if comptime!(bucket > 0) {
                    words[bucket] = scaled_halves(words[bucket], found.signs[bucket], halves);
                }
            }
            value.insert(word, median::<E>(&mut words, buckets, halves));
        }
        v[u * blocks + step] = value;
    }
    #[unroll]
    for level in 0..comptime!(orders.ilog2() as usize) {
        let swapped = (turned >> level) % 2 == 1;
        #[unroll]
        for step in 0..blocks {
            let other = comptime!(step ^ (1 << level));
            if comptime!(step < other) {
                let (a, b) = comptime!((u * blocks + step, u * blocks + other));
                swap_where::<Const<WORDS>>(v, a, b, swapped, WORDS);
            }
        }
    }
    (
        select(found.packed_entry & NEGATIVE != 0u32, f32::new(-1.0), f32::new(1.0)),
        found.packed_entry & MISSING == 0u32,
    )
}

/// The median of `count` pairs of halves, each half by itself. The pairs are reordered.
#[cube]
fn median<E: Float>(
    parts: &mut Array<u32>,
    #[comptime] count: usize,
    #[comptime] halves: Halves,
) -> u32 {
    if comptime!(count == 3) {
        let low = smaller_halves(parts[0], parts[1], halves);
        let high = larger_halves(parts[0], parts[1], halves);
        larger_halves(low, smaller_halves(high, parts[2], halves), halves)
    } else {
        // A bubble sort: there are few pairs, and all halves are sorted at once.
        #[unroll]
        for round in 1..count {
            #[unroll]
            for i in 0..comptime!(count - round) {
                let (one, other) = (parts[i], parts[i + 1]);
                parts[i] = smaller_halves(one, other, halves);
                parts[i + 1] = larger_halves(one, other, halves);
            }
        }
        let middle = parts[comptime!(count / 2)];
        if comptime!(count.is_multiple_of(2)) {
            let upper = Vector::<E, Const<2>>::reinterpret(middle);
            let lower = Vector::<E, Const<2>>::reinterpret(parts[comptime!(count / 2 - 1)]);
            u32::reinterpret((upper + lower) * Vector::new(E::new(0.5)))
        } else {
            middle
        }
    }
}

/// Swaps two registers where `wanted`.
#[cube]
fn swap_where<N: Size>(
    registers: &mut Array<Vector<u32, N>>,
    #[comptime] a: usize,
    #[comptime] b: usize,
    wanted: bool,
    #[comptime] words: usize,
) {
    let (one, other) = (registers[a], registers[b]);
    let mut first = Vector::<u32, N>::empty();
    let mut second = Vector::<u32, N>::empty();
    #[unroll]
    for word in 0..words {
        first.insert(word, select(wanted, other.extract(word), one.extract(word)));
        second.insert(word, select(wanted, one.extract(word), other.extract(word)));
    }
    registers[a] = first;
    registers[b] = second;
}
