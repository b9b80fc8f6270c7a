//! The two products of a plane over a tile of 16 slots, by matrix instructions: queries times keys,
//! and weights times values, with the online softmax between them.
//!
//! The first product is `Q Kᵀ`, with the group's query heads as rows (padded to 16) and 8 slots as
//! columns. The second is `Vᵀ Pᵀ`, with columns of values as rows and query heads as columns. The
//! weights `P` leave the first product in the registers in which the second takes them. Lanes
//! exchange nothing between the products, because the order of the summed dimension is free, and so
//! is the assignment of value columns to rows.
//!
//! In a plane, lane `4 r + j` holds row `r` (a query head) and columns `2 j`, `2 j + 1` of the
//! first result.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::mma_fragments::{Rows, TileSlots};
use crate::components::ptx::halves_of;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::softmax::{larger, weight_of};

/// A plane's softmax sums over the tiles so far.
#[derive(CubeType)]
pub(crate) struct Running {
    /// Weights times values, two registers for each word of a lane's values: rows `r` and `r + 8`
    /// of the second product.
    pub(crate) sums: Array<Vector<f32, Const<2>>>,
    /// The largest logit of query head `r` so far.
    pub(crate) max: f32,
    /// The sum of the weights that query head `r` gives to the lane's slots.
    pub(crate) weight: f32,
}

/// The sums before the first tile.
#[cube]
pub(crate) fn nothing_yet(#[comptime] rows: Rows) -> Running {
    let count = comptime!(rows.blocks() * rows.words * 2);
    let mut sums = Array::<Vector<f32, Const<2>>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0f32);
    }
    Running { sums, max: f32::new(LOWEST_LOGIT), weight: 0.0f32 }
}

/// Reads a range's queries as the first factor of `Q Kᵀ`.
///
/// # Shapes
/// `query` `[P, group, D / 4]`, in pairs of 32-bit words.
#[cube]
pub(crate) fn read_queries<E: Float>(
    query: &[Vector<u32, Const<2>>],
    kv_head: usize,
    r: usize,
    j: usize,
    #[comptime] group: usize,
    #[comptime] rows: Rows,
) -> Array<Vector<E, Const<2>>> {
    let pieces = comptime!(rows.pieces());
    let mut q = Array::<Vector<E, Const<2>>>::new(comptime!(4 * pieces));
    #[unroll]
    for piece in 0..pieces {
        #[unroll]
        for half in 0..2usize {
            let mut bits = Vector::<u32, Const<2>>::new(0u32);
            if r < group {
                bits = query
                    [(kv_head * group + r) * comptime!(rows.dim / 4) + 8 * piece + 2 * j + half];
            }
            let at = comptime!((piece * 2 + half) * 2);
            q[at] = Vector::reinterpret(bits.extract(0usize));
            q[at + 1] = Vector::reinterpret(bits.extract(1usize));
        }
    }
    q
}

/// The scaled products of query head `r` with the keys of the slots `2 j`, `2 j + 1`, `2 j + 8` and
/// `2 j + 9` of the tile.
#[cube]
pub(crate) fn dots_of<E: Float>(
    q: &Array<Vector<E, Const<2>>>,
    k: &Array<Vector<u32, Const<4>>>,
    scale: f32,
    #[comptime] rows: Rows,
) -> Array<f32> {
    let pieces = comptime!(rows.pieces());
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let none = Vector::<f32, Const<2>>::new(0.0f32);
    let blank = Vector::<E, Const<2>>::cast_from(none);
    let mut dots = Array::<f32>::new(4usize);
    #[unroll]
    for n in 0..2usize {
        let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
        acc[0] = none;
        acc[1] = none;
        #[unroll]
        for piece in 0..pieces {
            let bits = k[n * pieces + piece];
            #[unroll]
            for half in 0..2usize {
                let from = comptime!((piece * 2 + half) * 2);
                let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
                a[0] = q[from];
                a[1] = blank;
                a[2] = q[from + 1];
                a[3] = blank;
                let mut b = Array::<Vector<E, Const<2>>>::new(2usize);
                b[0] = Vector::reinterpret(bits.extract(comptime!(2 * half)));
                b[1] = Vector::reinterpret(bits.extract(comptime!(2 * half + 1)));
                acc = def.execute(&a, &b, &acc);
            }
        }
        let both = acc[0];
        dots[2 * n] = both.extract(0usize) * scale;
        dots[2 * n + 1] = both.extract(1usize) * scale;
    }
    dots
}

/// Adds a tile's values to the sums, each times the exponential of its slot's logit. Where
/// numerators are `separate`, logits weigh the denominator alone, and a value's weight is its
/// numerator times the exponential of its product `dots`.
#[cube]
pub(crate) fn take_values<E: Float, N: Size>(
    running: &mut Running,
    logits: &Array<f32>,
    dots: &Array<f32>,
    tile: &TileSlots<N>,
    j: usize,
    #[comptime] separate: bool,
    #[comptime] rows: Rows,
) {
    let blocks = comptime!(rows.blocks());
    let words = rows.words.comptime();
    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let mut top = running.max;
    #[unroll]
    for u in 0..4usize {
        // A separate numerator may weigh a slot whose weight in the denominator is 0.
        top = larger(top, select(separate, dots[u], logits[u]));
    }
    top = larger(top, plane_shuffle_xor(top, 1u32));
    top = larger(top, plane_shuffle_xor(top, 2u32));
    let rescale = (running.max - top).exp();
    running.max = top;
    let mut weight = running.weight * rescale;
    let mut p = Array::<Vector<E, Const<2>>>::new(2usize);
    #[unroll]
    for n in 0..2usize {
        let mut both = Vector::<f32, Const<2>>::empty();
        #[unroll]
        for e in 0..2usize {
            let u = comptime!(2 * n + e);
            let own = weight_of(logits[u], top);
            weight += own;
            let mut share = own;
            if separate {
                share = weight_of(dots[u], top) * tile.numerators[u];
            }
            both.insert(e, share);
        }
        p[n] = Vector::cast_from(both);
    }
    running.weight = weight;

    // The second product has query heads `2 j` and `2 j + 1` as the lane's columns.
    let mut rescales = Vector::<f32, Const<2>>::empty();
    rescales.insert(0usize, plane_shuffle(rescale, (8 * j) as u32));
    rescales.insert(1usize, plane_shuffle(rescale, (8 * j + 4) as u32));
    #[unroll]
    for block in 0..blocks {
        #[unroll]
        for word in 0..words {
            let t0 = tile.values[block].extract(word);
            let t1 = tile.values[blocks + block].extract(word);
            let t2 = tile.values[2 * blocks + block].extract(word);
            let t3 = tile.values[3 * blocks + block].extract(word);
            let mut a = Array::<Vector<E, Const<2>>>::new(4usize);
            a[0] = Vector::reinterpret(halves_of(t0, t1, false));
            a[1] = Vector::reinterpret(halves_of(t0, t1, true));
            a[2] = Vector::reinterpret(halves_of(t2, t3, false));
            a[3] = Vector::reinterpret(halves_of(t2, t3, true));
            let to = comptime!((block * words + word) * 2);
            let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
            acc[0] = running.sums[to] * rescales;
            acc[1] = running.sums[to + 1] * rescales;
            acc = def.execute(&a, &p, &acc);
            running.sums[to] = acc[0];
            running.sums[to + 1] = acc[1];
        }
    }
}
