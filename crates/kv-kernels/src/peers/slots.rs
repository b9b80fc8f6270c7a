//! Sums over several GPUs at the end of other kernels, which send each result as soon as they have
//! it. A slot of an inbox holds one number and the turn of the sum.

use burn::backend::{Backend, Dispatch, ExtensionType};
use cubecl::prelude::*;

use super::PeerSums;
use super::kernel::LINES;
use super::memory::{LINE, SLOT};
use crate::backend::optional::OptionalInt;
use crate::components::ptx::{read_slot, write_slot};

/// Slots of an inbox for each rank and each half.
pub(super) const SLOTS: usize = 1 << 18;
/// Counters of turns: at least as many as a grid has cubes.
pub(super) const TURNS: usize = 1 << 10;

/// The ranks whose kernels add their results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PeerGroup {
    rank: usize,
    ranks: usize,
}

impl PeerGroup {
    /// A kernel without peers.
    pub(crate) const ALONE: Self = Self { rank: 0, ranks: 1 };

    pub(crate) fn is_alone(self) -> bool {
        self.ranks == 1
    }

    /// The first slot of one half for a rank's numbers, counted from the beginning of an inbox.
    /// Lines of [`sum_kernel`](super::kernel::sum_kernel) come before all slots.
    fn first_slot(self, rank: usize, half: usize) -> u32 {
        let lines = 2 * self.ranks * LINES * LINE / SLOT;
        (lines + (half * self.ranks + rank) * SLOTS) as u32
    }
}

/// What a kernel needs for sums over peers, as backends take it.
#[derive(ExtensionType)]
pub(crate) struct PeerArgs<B: Backend> {
    /// As [`PeerSlots::addresses`].
    #[extension_type]
    pub(crate) addresses: OptionalInt<B>,
    /// As [`PeerSlots::turns`].
    #[extension_type]
    pub(crate) turns: OptionalInt<B>,
    pub(crate) group: PeerGroup,
}

impl PeerArgs<Dispatch> {
    /// Those of a kernel without peers.
    pub(crate) fn alone() -> Self {
        let (addresses, turns) = (OptionalInt::Absent, OptionalInt::Absent);
        Self { addresses, turns, group: PeerGroup::ALONE }
    }

    pub(super) fn of(sums: &PeerSums) -> Self {
        Self {
            addresses: Some(sums.addresses.clone()).into(),
            turns: Some(sums.slot_turns.clone()).into(),
            group: PeerGroup { rank: sums.rank, ranks: sums.ranks },
        }
    }
}

/// The inboxes of all ranks, and how many sums there were.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PeerSlots {
    /// Addresses of the inboxes, `[ranks, 2]`: lower and upper half.
    addresses: Box<[u32]>,
    /// The number of sums that this rank has made, in `[TURNS]` copies. A cube reads the copy of its
    /// own number, which no other cube writes.
    turns: Box<[u32]>,
}

/// A turn, and where its numbers are written.
#[derive(CubeType)]
pub(crate) struct PeerTurn {
    turn: u32,
    /// The lower halves of the addresses of the ranks' inboxes, and the upper halves.
    low: Array<u32>,
    high: Array<u32>,
}

/// Begins a turn of sums: the next one. A kernel begins it long before it sends, so that nothing
/// waits for these reads then. No cube has a number of [`TURNS`] or more.
#[cube]
pub(crate) fn begin_turn(slots: &PeerSlots, #[comptime] group: PeerGroup) -> PeerTurn {
    let mut low = Array::<u32>::new(group.ranks);
    let mut high = Array::<u32>::new(group.ranks);
    let mut turn = 0u32;
    if comptime!(!group.is_alone()) {
        turn = slots.turns[CUBE_POS] + 1u32;
        #[unroll]
        for rank in 0..comptime!(group.ranks) {
            low[rank] = slots.addresses[comptime!(2 * rank)];
            high[rank] = slots.addresses[comptime!(2 * rank + 1)];
        }
    }
    PeerTurn { turn, low, high }
}

/// Counts the turn, once all units of the cube have begun it. The `cubes` cubes count up all copies
/// of the number of turns, so that kernels of any grid go on with the next.
#[cube]
pub(crate) fn count_turn(slots: &mut PeerSlots, turn: &PeerTurn, cubes: usize) {
    let mut at = CUBE_POS + UNIT_POS as usize * cubes;
    while at < TURNS {
        slots.turns[at] = turn.turn;
        at += cubes * CUBE_DIM as usize;
    }
}

/// Sends this rank's number `at` to all other ranks.
#[cube]
pub(crate) fn send(turn: &PeerTurn, at: usize, number: f32, #[comptime] group: PeerGroup) {
    let rank = group.rank.comptime();
    let to = slot_of(at, turn.turn, rank, group);
    #[unroll]
    for other in 0..comptime!(group.ranks) {
        if comptime!(other != rank) {
            let (low, high) = (turn.low[other], turn.high[other]);
            write_slot(low, high, to, u32::reinterpret(number), turn.turn);
        }
    }
}

/// The sum of all ranks' numbers `at`, added in the order of ranks.
#[cube]
pub(crate) fn receive(turn: &PeerTurn, at: usize, own: f32, #[comptime] group: PeerGroup) -> f32 {
    let rank = group.rank.comptime();
    let (low, high) = (turn.low[rank], turn.high[rank]);
    let mut total = 0.0f32;
    #[unroll]
    for other in 0..comptime!(group.ranks) {
        if comptime!(other == rank) {
            total += own;
        } else {
            let from = slot_of(at, turn.turn, other, group);
            total += f32::reinterpret(read_slot(low, high, from, turn.turn));
        }
    }
    total
}

/// The slot of a rank's number `at`.
#[cube]
fn slot_of(at: usize, turn: u32, #[comptime] rank: usize, #[comptime] group: PeerGroup) -> u32 {
    let mut first = comptime!(group.first_slot(rank, 0)).runtime();
    if turn & 1u32 == 1u32 {
        first = comptime!(group.first_slot(rank, 1)).runtime();
    }
    first + at as u32
}
