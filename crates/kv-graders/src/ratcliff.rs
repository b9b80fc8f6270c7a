//! Ratcliff and Obershelp's similarity, as `difflib.SequenceMatcher.ratio` of Python defines it.
//!
//! `ratio = 2 M / (|a| + |b|)`. `M` is the length of the longest block that both contain, plus, by
//! the same rule, of the blocks to its left and to its right. Of equally long blocks the one that
//! begins first in `a`, then first in `b`, is taken.
//!
//! In a `b` of 200 elements or more, an element that occurs more than `|b| / 100 + 1` times is
//! popular. No block begins with popular elements alone: they only lengthen a block of others.
//!
//! The crate `difflib` 0.4.0 keeps the popular elements and drops the others, so it is not used.

use std::collections::HashMap;
use std::ops::Range;

/// The similarity of `a` and `b`, 1 if both are empty.
pub(crate) fn ratio(a: &str, b: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.is_empty() && b.is_empty() {
        return 1.0;
    }
    let matcher = Matcher::new(&a, &b);
    let mut matched = 0;
    let mut parts = vec![(0..a.len(), 0..b.len())];
    while let Some((in_a, in_b)) = parts.pop() {
        let (i, j, length) = matcher.longest(&in_a, &in_b);
        if length > 0 {
            matched += length;
            parts.push((in_a.start..i, in_b.start..j));
            parts.push((i + length..in_a.end, j + length..in_b.end));
        }
    }
    2.0 * matched as f64 / (a.len() + b.len()) as f64
}

struct Matcher<'a> {
    a: &'a [char],
    b: &'a [char],
    /// Where each element of `b` that is not popular occurs.
    places: HashMap<char, Vec<usize>>,
}

impl<'a> Matcher<'a> {
    fn new(a: &'a [char], b: &'a [char]) -> Self {
        let mut places: HashMap<char, Vec<usize>> = HashMap::new();
        for (j, element) in b.iter().enumerate() {
            places.entry(*element).or_default().push(j);
        }
        if b.len() >= 200 {
            places.retain(|_, places| places.len() <= b.len() / 100 + 1);
        }
        Self { a, b, places }
    }

    /// Start in `a`, start in `b`, and length of the longest common block of the two ranges.
    fn longest(&self, in_a: &Range<usize>, in_b: &Range<usize>) -> (usize, usize, usize) {
        let (mut i, mut j, mut length) = (in_a.start, in_b.start, 0);
        // `ending[y]` is the length of the longest block that ends before `y` in `b` and at the
        // current element of `a`.
        let mut ending: HashMap<usize, usize> = HashMap::new();
        for x in in_a.clone() {
            let mut next = HashMap::new();
            for &y in self.places.get(&self.a[x]).into_iter().flatten() {
                if !in_b.contains(&y) {
                    continue;
                }
                let here = ending.get(&y).copied().unwrap_or(0) + 1;
                next.insert(y + 1, here);
                if here > length {
                    (i, j, length) = (x + 1 - here, y + 1 - here, here);
                }
            }
            ending = next;
        }
        while i > in_a.start && j > in_b.start && self.a[i - 1] == self.b[j - 1] {
            (i, j, length) = (i - 1, j - 1, length + 1);
        }
        while i + length < in_a.end
            && j + length < in_b.end
            && self.a[i + length] == self.b[j + length]
        {
            length += 1;
        }
        (i, j, length)
    }
}
