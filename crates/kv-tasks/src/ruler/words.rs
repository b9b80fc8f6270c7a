//! Words, numbers and identifiers that are drawn.
//!
//! The word lists are those of the Python package wonderwords 3.0.1 (MIT), which RULER draws from.

use std::sync::LazyLock;

use rand::Rng;
use rand::seq::IndexedRandom;

static ADJECTIVES: LazyLock<Vec<&str>> =
    LazyLock::new(|| lines(include_str!("../../assets/words/adjectives.txt")));
static NOUNS: LazyLock<Vec<&str>> =
    LazyLock::new(|| lines(include_str!("../../assets/words/nouns.txt")));
static ALL: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let verbs = lines(include_str!("../../assets/words/verbs.txt"));
    let mut all: Vec<_> = ADJECTIVES.iter().chain(NOUNS.iter()).copied().chain(verbs).collect();
    all.sort_unstable();
    all.dedup();
    all
});

fn lines(text: &'static str) -> Vec<&'static str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// All nouns, adjectives and verbs, each once.
pub(super) fn all() -> &'static [&'static str] {
    &ALL
}

/// An adjective and a noun: `dusty-lamp`.
pub(super) fn word(random: &mut impl Rng) -> String {
    let adjective = ADJECTIVES.choose(random).copied().unwrap_or_default();
    let noun = NOUNS.choose(random).copied().unwrap_or_default();
    format!("{adjective}-{noun}")
}

/// A number of seven digits.
pub(super) fn number(random: &mut impl Rng) -> String {
    random.random_range(1_000_000..=9_999_999_u32).to_string()
}

/// A UUID of version 4.
pub(super) fn uuid(random: &mut impl Rng) -> String {
    let bits: u128 = random.random();
    let bits = bits & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-")
}

/// Random letters from `first` on in the alphabet.
pub(super) fn letters(random: &mut impl Rng, first: u8, count: usize) -> String {
    (0..count).map(|_| char::from(first + random.random_range(0..26_u8))).collect()
}
