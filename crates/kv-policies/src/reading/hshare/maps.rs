//! Who takes whose list, as the authors' code decides it.

/// The number of `count` heads or layers that take another's list, where the share `chooses` of
/// them choose for themselves.
pub fn copies(count: usize, chooses: f64) -> usize {
    (((1.0 - chooses) * count as f64).round() as usize).min(count.saturating_sub(1))
}

/// The source of the list that each of `count` heads or layers takes; `copies` of them take
/// another's list. Of all pairs, the pair of the largest `overlap(later, earlier)` goes first, and
/// the first pair among equals. The later one takes the earlier one's list, as do all that took the
/// later one's list, and is out of all further pairs.
pub fn share_map(count: usize, copies: usize, overlap: impl Fn(usize, usize) -> u64) -> Vec<usize> {
    let mut map: Vec<usize> = (0..count).collect();
    let mut left: Vec<Vec<u64>> =
        (0..count).map(|a| (0..a).map(|b| overlap(a, b)).collect()).collect();
    for _ in 0..copies {
        let pairs = left
            .iter()
            .enumerate()
            .flat_map(|(a, row)| row.iter().enumerate().map(move |(b, &shared)| (shared, a, b)));
        // `>` keeps the first among equals.
        let best = pairs.fold((0, 0, 0), |best, pair| if pair.0 > best.0 { pair } else { best });
        let (shared, later, earlier) = best;
        if shared == 0 {
            break;
        }
        for taken in &mut map {
            if *taken == later {
                *taken = earlier;
            }
        }
        left[later].fill(0);
        left.iter_mut().filter_map(|row| row.get_mut(later)).for_each(|shared| *shared = 0);
    }
    map
}
