//! How a wide product on Hopper is divided: into tiles of its result, and the sums of a tile into
//! parts.

/// Columns of the factors that are copied and multiplied at once.
const BLOCK: usize = 64;
/// Rows of a tile: of products of few rows, and of others.
const ROWS: [usize; 2] = [64, 128];
const COLUMNS: [usize; 2] = [128, 256];
/// The fewest blocks that a part sums: fewer would not fill its stages of copies.
const LEAST_BLOCKS: usize = 4;
/// Bytes of tiles that a processor copies while all of them write and read one byte of the parts.
/// On an H200, tiles come at 46 bytes a nanosecond and processor, and parts go through the L2 cache
/// at 3,000.
const SUMS_PER_COPY: usize = 65;

/// The tiles of a product, and the parts of their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Rows and columns of a tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Parts of a tile's sums, each by a cube of its own.
    pub(super) parts: usize,
    /// Blocks that a part sums; the last part may have fewer, but has some.
    pub(super) blocks: usize,
}

impl Tiling {
    /// The fastest tiling of a product of `rows` rows and `outputs` outputs, each a sum over
    /// `inputs`, where sums may have parts or may not.
    pub(super) fn of([rows, outputs, inputs]: [usize; 3], processors: usize, shares: bool) -> Self {
        let blocks = inputs.div_ceil(BLOCK).max(1);
        let high = if rows <= ROWS[0] { ROWS[0] } else { ROWS[1] };
        let tilings = COLUMNS.into_iter().flat_map(|columns| {
            let tiles = rows.div_ceil(high) * outputs.div_ceil(columns);
            let most = (processors / tiles.max(1)).min(blocks / LEAST_BLOCKS).max(1);
            (1..=if shares { most } else { 1 }).map(move |parts| {
                let each = blocks.div_ceil(parts);
                let parts = blocks.div_ceil(each);
                let tiling = Self { rows: high, columns, parts, blocks: each };
                let waves = (tiles * parts).div_ceil(processors);
                let copied = waves * each * (high + columns) * BLOCK * size_of::<u16>();
                let summed =
                    if parts > 1 { 2 * parts * rows * outputs * size_of::<f32>() } else { 0 };
                (copied + summed / SUMS_PER_COPY, tiling)
            })
        });
        let best = tilings.min_by_key(|(cost, _)| *cost);
        best.map_or(Self { rows: high, columns: COLUMNS[0], parts: 1, blocks }, |(_, tiling)| {
            tiling
        })
    }

    /// Tiles of a result of `rows` rows and `outputs` outputs.
    #[cfg(feature = "cuda")]
    pub(super) fn tiles(self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows) * outputs.div_ceil(self.columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_blocks_and_run_at_once() {
        for inputs in [64, 96, 320, 4_096, 14_336, 28_672] {
            for outputs in [2, 130, 4_096, 6_144, 28_672, 128_256] {
                for rows in [33, 64, 65, 128, 300, 4_096] {
                    let shape = [rows, outputs, inputs];
                    let Tiling { rows: high, columns, parts, blocks } =
                        Tiling::of(shape, 132, true);
                    let all = inputs.div_ceil(BLOCK);
                    // No part is empty.
                    assert!(parts * blocks >= all && (parts - 1) * blocks < all, "{shape:?}");
                    let tiles = rows.div_ceil(high) * outputs.div_ceil(columns);
                    assert!(parts == 1 || parts * tiles <= 132, "{shape:?}");
                    assert_eq!(Tiling::of(shape, 132, false).parts, 1, "{shape:?}");
                }
            }
        }
    }

    /// As the matrices of Llama 3.1 8B have them.
    #[test]
    fn few_tiles_share_their_sums() {
        let of = |shape| {
            let Tiling { rows, columns, parts, .. } = Tiling::of(shape, 132, true);
            [rows, columns, parts]
        };
        assert_eq!(of([64, 4_096, 4_096]), [64, 128, 4]);
        assert_eq!(of([64, 6_144, 4_096]), [64, 256, 5]);
        assert_eq!(of([64, 28_672, 4_096]), [64, 256, 1]);
        assert_eq!(of([8_192, 4_096, 4_096]), [128, 256, 1]);
    }
}
