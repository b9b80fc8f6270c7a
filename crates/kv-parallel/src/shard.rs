use std::fmt;
use std::ops::Range;

use crate::{ParallelError, Result};

/// A rank's share of a model: one of `world` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    rank: usize,
    world: usize,
}

impl Shard {
    /// The whole model.
    pub const WHOLE: Self = Self { rank: 0, world: 1 };

    /// Part `rank` of `world` parts.
    ///
    /// # Errors
    /// [`ParallelError::Rank`] unless `rank < world`.
    pub fn new(rank: usize, world: usize) -> Result<Self> {
        if rank < world {
            Ok(Self { rank, world })
        } else {
            Err(ParallelError::Rank { rank, world })
        }
    }

    /// This rank, counted from 0.
    pub const fn rank(self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub const fn world(self) -> usize {
        self.world
    }

    /// Whether this is rank 0, which adds what is added once: residuals and biases of sums.
    pub const fn is_first(self) -> bool {
        self.rank == 0
    }

    /// Whether there are other ranks.
    pub const fn is_part(self) -> bool {
        self.world > 1
    }

    /// How many of `whole` things this rank has. `what` names them in errors.
    ///
    /// # Errors
    /// [`ParallelError::Indivisible`] where the ranks' parts would differ.
    pub fn part(self, what: &'static str, whole: usize) -> Result<usize> {
        let world = self.world;
        if whole.is_multiple_of(world) {
            Ok(whole / world)
        } else {
            Err(ParallelError::Indivisible { what, whole, world })
        }
    }

    /// Which of `whole` things this rank has.
    ///
    /// # Errors
    /// The errors of [`Self::part`].
    pub fn range(self, what: &'static str, whole: usize) -> Result<Range<usize>> {
        let part = self.part(what, whole)?;
        Ok(self.rank * part..(self.rank + 1) * part)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_all_ranks_cover_the_whole() {
        for world in [1, 2, 4, 8] {
            let ranges = (0..world).map(|rank| Shard::new(rank, world).unwrap().range("heads", 8));
            let all: Vec<usize> = ranges.flat_map(|range| range.unwrap()).collect();
            assert_eq!(all, (0..8).collect::<Vec<_>>());
        }
    }

    #[test]
    fn unequal_parts_and_ranks_beyond_the_world_are_refused() {
        let error = Shard::new(1, 4).unwrap().part("key-value heads", 6).unwrap_err();
        assert_eq!(error.to_string(), "6 key-value heads cannot be divided among 4 ranks equally");
        assert_eq!(Shard::new(2, 2), Err(ParallelError::Rank { rank: 2, world: 2 }));
    }
}
