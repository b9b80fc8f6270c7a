//! The layout of index sets in their table, one row of 32-bit integers for each head range.
//!
//! A row has the fields of the range, then the fields of each entry, then one list of tokens for
//! each entry, ascending, and last the list of the step's own choice.
//!
//! An entry is a step of the block that later steps are compared with. It has a list and vectors. A
//! step that retrieves writes the list that has the entry's number. The entry of a step that shares
//! names the list of the entry that it shared.
//!
//! Fields 11 to 13 of a range and field 2 of an entry are unused. They keep the layout of saved
//! files, in which they had a use.

#[cfg(doc)]
use crate::components::sentinels::{ALL_SLOTS, NEW_SET, NO_BLOCK};

// Attention reads these fields too.
pub(super) use crate::attention::decode::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// The block of steps to which the sets belong; [`NO_BLOCK`] before the first step.
pub(crate) const BLOCK: usize = 0;
/// Entries of the block so far.
pub(crate) const SETS: usize = 1;

/// Steps so far.
pub(crate) const STEPS: usize = 6;
/// Steps that retrieved.
pub(crate) const RETRIEVED: usize = 7;
/// Tokens attended to so far: the count modulo `1 << TOKEN_BITS`, and the count in multiples of it.
pub(crate) const TOKENS: usize = 8;
pub(crate) const TOKENS_HIGH: usize = 9;
/// The decision of the last step: the number of the list that it shared, [`NEW_SET`] or
/// [`ALL_SLOTS`].
pub(crate) const DECIDED: usize = 10;
/// The parameters of the range's steps ([`crate::SetRule`]). `WANTED` is 0 where no size is wanted.
///
/// Shares and thresholds are stored as the bits of f32 numbers. In a tensor of their own, every
/// step would wait for one more line of memory before it compares or chooses, and saved files would
/// have another form.
pub(crate) const TOP: usize = 14;
pub(crate) const DILATED: usize = 15;
pub(crate) const THRESHOLD: usize = 16;
pub(crate) const WANTED: usize = 17;

pub(crate) const LOCALS: usize = 19;
/// Bits of an f32: the size before it is rounded to [`TOP`], where sizes are steered.
pub(crate) const EXACT_TOP: usize = 20;
/// The first visible slot after the sinks, counted from the range's first slot.
pub(crate) const SEEN: usize = 21;
/// Bits of an f32: the share of attention that the last measured step dropped, a mean over the
/// group's queries.
pub(crate) const MEASURED: usize = 22;
/// Fields of a range.
pub(crate) const FIELDS: usize = 24;

/// Tokens of a set.
pub(crate) const COUNT: usize = 0;
/// The index of the first local token of the step that retrieved the entry's list. Steps that keep
/// what has left the locals since read from this token on.
pub(crate) const LOCAL_TOKEN: usize = 1;
/// The list that the entry's step read: the entry's own number where the step retrieved.
pub(crate) const LIST: usize = 3;
/// Fields of an entry.
pub(crate) const SET_FIELDS: usize = 4;

/// Added to a share of a count before it is rounded down: in f32 the product may be just below a
/// whole number.
pub(crate) const ROUNDING: f32 = 1e-3;

/// Bits of [`TOKENS`].
pub(crate) const TOKEN_BITS: u32 = 24;

/// Integers of a row.
pub(crate) fn row(sets: usize, width: usize) -> usize {
    list(sets, width, sets) + width
}

/// Where list number `at` begins in a row. List number `sets` is the step's own choice.
pub(crate) fn list(sets: usize, width: usize, at: usize) -> usize {
    FIELDS + sets * SET_FIELDS + at * width
}

/// The tokens that a list has room for, in a row of `row` integers.
pub(super) fn width(sets: usize, row: usize) -> usize {
    row.saturating_sub(FIELDS + sets * SET_FIELDS) / (sets + 1)
}

/// Whether the lists of a row hold ascending tokens below `tokens`.
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
