//! Operands of matrix instructions: a plane loads a tile of 16 slots into the registers from which
//! `products.rs` multiplies, without shared memory or exchanges between lanes.
//!
//! Lane `4 r + j` of a plane holds every fourth 16-byte piece, from piece `j` on, of the keys of
//! slots `r` and `r + 8`. It holds every eighth piece, from piece `r` on, of the values of slots `2
//! j`, `2 j + 1`, `2 j + 8` and `2 j + 9`.

use cubecl::prelude::*;

use super::kernel_args::WeightedPool;
use super::slot_indexer::SlotIndexer;
use super::{Features, ViewKind};
use crate::components::ptx::read_fleeting;

/// How rows lie in a plane's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// `D`, a multiple of 32.
    pub(crate) dim: usize,
    /// 32-bit words of a vector of values: 8 lanes take `16 * words` columns.
    pub(crate) words: usize,
}

impl Rows {
    /// Pieces of a key, of 32 columns each, of which each of 4 lanes holds 8 columns.
    pub(crate) fn pieces(self) -> usize {
        self.dim / 32
    }

    /// Columns of a value that 8 lanes hold in one vector each.
    pub(crate) fn span(self) -> usize {
        16 * self.words
    }

    /// Vectors of a value that a lane holds.
    pub(crate) fn blocks(self) -> usize {
        self.dim / self.span()
    }
}

/// The position of a lane's `u`-th logit among the slots that the query attends to. `tile` is the
/// position of the tile's first slot; `u` counts through `2 j`, `2 j + 1`, `2 j + 8`, `2 j + 9`.
#[cube]
pub(crate) fn key_index(tile: usize, #[comptime] u: usize, j: usize) -> usize {
    tile + 2 * j + comptime!(u % 2 + (u / 2) * 8)
}

/// A lane's position in a tile of 16 slots.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileLane {
    /// The tile's first slot, counted among the slots that the query attends to.
    pub(crate) tile: usize,
    /// `r` of lane `4 r + j`.
    pub(crate) r: usize,
    /// `j` of lane `4 r + j`.
    pub(crate) j: usize,
}

/// A cube's part of the slots that a query attends to, and how they are read.
#[derive(CubeType)]
pub(crate) struct PartSlots {
    pub(crate) indexer: SlotIndexer,
    /// The part's first slot, counted among the slots that the query attends to.
    pub(crate) first: usize,
    /// The first slot after the part, counted among the slots that the query attends to.
    pub(crate) end: usize,
    /// Slots of the pool. This number stands for no slot.
    pub(crate) slots: usize,
    #[cube(comptime)]
    pub(crate) kind: ViewKind,
    /// Whether the cube has copied the part's slots to shared memory.
    #[cube(comptime)]
    pub(crate) staged: bool,
    /// Whether values are read as the first to leave the L2 cache.
    #[cube(comptime)]
    pub(crate) fleeting: bool,
}

#[cube]
impl PartSlots {
    /// The `i`-th slot that the query attends to. `totals` holds the part's slots where they are
    /// staged.
    fn slot(&self, view: &[i32], totals: &Shared<[f32]>, i: usize) -> usize {
        if self.staged.comptime() {
            // Slots lie in `totals` as bits of f32. The sums of planes take this shared memory
            // later, when all rows are read. With separate shared memory for slots, fewer cubes
            // would fit on a processor.
            u32::reinterpret(totals[i - self.first]) as usize
        } else {
            self.indexer.slot(view, i, self.slots, self.kind)
        }
    }
}

/// A lane's values and weights of four slots of a tile, `2 j`, `2 j + 1`, `2 j + 8` and `2 j + 9`.
/// The lane's logits belong to these slots.
#[derive(CubeType)]
pub(crate) struct TileSlots<N: Size> {
    /// Every eighth piece of each value from piece `r` on, `[4, blocks]`.
    pub(crate) values: Array<Vector<u32, N>>,
    /// The slots, `[4]`.
    pub(crate) at: Array<usize>,
    /// Logarithms of weights, `[4]`, where slots are weighted.
    pub(crate) log_weights: Array<f32>,
    /// Weights of the values alone, `[4]`, where they differ from the slots' weights.
    pub(crate) numerators: Array<f32>,
}

#[cube]
impl<N: Size> TileSlots<N> {
    /// Unset registers for a tile's slots.
    pub(crate) fn room(#[comptime] rows: Rows) -> TileSlots<N> {
        TileSlots::<N> {
            values: Array::new(comptime!(4 * rows.blocks())),
            at: Array::new(4usize),
            log_weights: Array::new(4usize),
            numerators: Array::new(4usize),
        }
    }

    /// Reads the weights that the features name. Where `at` is no slot, the weight of the pool's
    /// last slot is read.
    pub(super) fn read_weights<K: CubePrimitive>(
        &mut self,
        pool: &WeightedPool<K, Vector<u32, N>>,
        #[comptime] features: Features,
    ) {
        if features.weighted {
            #[unroll]
            for u in 0..4usize {
                self.log_weights[u] = pool.log_weights[min(self.at[u], pool.slots - 1)];
            }
        }
        if features.numerators {
            #[unroll]
            for u in 0..4usize {
                self.numerators[u] = pool.numerators[min(self.at[u], pool.slots - 1)];
            }
        }
    }
}

/// Reads a tile's keys: of slots `r` and `r + 8`, every fourth piece from piece `j` on. After the
/// part's end, its last slot is read again.
#[cube]
pub(crate) fn read_keys(
    keys: &[Vector<u32, Const<4>>],
    view: &[i32],
    part: &PartSlots,
    totals: &Shared<[f32]>,
    k: &mut Array<Vector<u32, Const<4>>>,
    lane: &TileLane,
    #[comptime] rows: Rows,
) {
    let pieces = comptime!(rows.pieces());
    #[unroll]
    for n in 0..2usize {
        let i = min(lane.tile + 8 * n + lane.r, part.end - 1);
        let slot = min(part.slot(view, totals, i), part.slots - 1);
        #[unroll]
        for piece in 0..pieces {
            k[n * pieces + piece] = keys[slot * comptime!(4 * pieces) + 4 * piece + lane.j];
        }
    }
}

/// Reads a tile's values and slots. A slot after the part's end becomes `part.slots`.
#[cube]
pub(crate) fn read_values<N: Size>(
    values: &[Vector<u32, N>],
    view: &[i32],
    part: &PartSlots,
    totals: &Shared<[f32]>,
    own: &mut TileSlots<N>,
    lane: &TileLane,
    #[comptime] rows: Rows,
) {
    let blocks = comptime!(rows.blocks());
    #[unroll]
    for u in 0..4usize {
        let i = key_index(lane.tile, u, lane.j);
        let slot = part.slot(view, totals, min(i, part.end - 1));
        let row = min(slot, part.slots - 1);
        own.at[u] = select(i < part.end, slot, part.slots);
        #[unroll]
        for block in 0..blocks {
            let from = row * comptime!(8 * blocks) + 8 * block + lane.r;
            let mut piece = if part.fleeting.comptime() {
                read_fleeting(values, from, rows.words)
            } else {
                values[from]
            };
            if comptime!(part.kind == ViewKind::List) {
                // A slot outside the pool must add nothing. The row read for it may hold NaN, and
                // `0 * NaN` is NaN.
                if slot == part.slots {
                    piece = Vector::new(0u32);
                }
            }
            own.values[u * blocks + block] = piece;
        }
    }
}
