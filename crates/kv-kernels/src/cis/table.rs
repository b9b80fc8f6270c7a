//! How a range's index sets lie in their table, a row of 32-bit integers a range.
//!
//! Fields of the range, then fields of each entry, then the tokens of each set, ascending, and last
//! those of the step's own choice.
//!
//! A step of the block that is compared with later ones has an entry: the list that it read, and
//! vectors. A step that retrieves makes the list of its entry's number; the entry of a step that
//! shares names the list of another.
//!
//! Fields 11 to 13 of a range, and fields 1 and 2 of an entry, hold nothing: rows have the layout
//! of files that were saved when they held something.

#[cfg(doc)]
use crate::components::sentinels::{ALL_SLOTS, NEW_SET, NO_BLOCK};

// The fields that attention reads; the others are between them and behind.
pub(super) use crate::attention::decode::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// The block of steps that the sets are of; [`NO_BLOCK`] before the first.
pub(crate) const BLOCK: usize = 0;
/// Entries of the block so far.
pub(crate) const SETS: usize = 1;

/// Steps so far.
pub(crate) const STEPS: usize = 6;
/// Steps that retrieved.
pub(crate) const RETRIEVED: usize = 7;
/// Tokens attended to so far: below `1 << TOKEN_BITS`, and multiples of that.
pub(crate) const TOKENS: usize = 8;
pub(crate) const TOKENS_HIGH: usize = 9;
/// What the step does: the list that it shares, [`NEW_SET`] or [`ALL_SLOTS`].
pub(crate) const DECIDED: usize = 10;
/// What the range's steps retrieve, and when they share: [`crate::SetRule`], 0 for no wanted size.
///
/// Shares and thresholds are bits of f32 numbers. In a tensor of their own, every step of every
/// range would wait for one more line of memory before it compares or chooses, and saved files
/// would have another form.
pub(crate) const TOP: usize = 14;
pub(crate) const DILATED: usize = 15;
pub(crate) const THRESHOLD: usize = 16;
pub(crate) const WANTED: usize = 17;

pub(crate) const LOCALS: usize = 19;
/// Bits of an f32: what [`TOP`] is rounded from, where it is steered.
pub(crate) const EXACT_TOP: usize = 20;
/// First visible slot behind the sinks, counted from the range's first.
pub(crate) const SEEN: usize = 21;
/// Bits of an f32: the attention that the last measured step dropped, a mean over the group's
/// queries.
pub(crate) const MEASURED: usize = 22;
/// Fields of a range.
pub(crate) const FIELDS: usize = 24;

/// Tokens of a set.
pub(crate) const COUNT: usize = 0;
/// The list that the entry's step read: its own number where it retrieved.
pub(crate) const LIST: usize = 3;
/// Fields of an entry.
pub(crate) const SET_FIELDS: usize = 4;

/// What a share of a count is rounded down with: thirds in f32 are less than thirds.
pub(crate) const ROUNDING: f32 = 1e-3;

/// Low bits of [`TOKENS`].
pub(crate) const TOKEN_BITS: u32 = 24;

/// Integers of a row.
pub(crate) fn row(sets: usize, width: usize) -> usize {
    list(sets, width, sets) + width
}

/// Where a list begins in the row; behind those of all `sets` lies the step's own choice.
pub(crate) fn list(sets: usize, width: usize, at: usize) -> usize {
    FIELDS + sets * SET_FIELDS + at * width
}

/// The tokens that a list of a row of so many integers has room for.
pub(super) fn width(sets: usize, row: usize) -> usize {
    row.saturating_sub(FIELDS + sets * SET_FIELDS) / (sets + 1)
}

/// Whether a row's sets are of tokens below `tokens`, ascending.
pub(super) fn is_sound(own: &[i32], sets: usize, width: usize, tokens: usize) -> bool {
    let within = |value: i32, most: usize| usize::try_from(value).is_ok_and(|value| value <= most);
    let sound = |set: usize| {
        let fields = &own[FIELDS + set * SET_FIELDS..][..SET_FIELDS];
        let count = fields[COUNT];
        if !usize::try_from(fields[LIST]).is_ok_and(|list| list < sets) {
            return false;
        }
        let Some(count) = usize::try_from(count).ok().filter(|count| *count <= width) else {
            return false;
        };
        let listed = &own[list(sets, width, fields[LIST] as usize)..][..count];
        listed.windows(2).all(|two| two[0] < two[1])
            && listed.first().is_none_or(|first| *first >= 0)
            && listed.last().is_none_or(|last| (*last as usize) < tokens)
    };
    within(own[SETS], sets)
        && own[TOP] >= 1
        && own[WANTED] >= 0
        && own[SINKS] >= 0
        && own[LOCALS] >= 1
        && (0..own[SETS] as usize).all(sound)
}
