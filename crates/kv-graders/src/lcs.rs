//! Longest common subsequences.

/// The indices in `x`, ascending, of one longest common subsequence of `x` and `y`.
///
/// Where several are equally long, the walk back through the table of lengths chooses one.
/// `shorten_x(a, b)` says, where the last elements differ, whether it goes on without that of `x`:
/// `a` is the length of the longest subsequence then, `b` that without the last element of `y`.
pub(crate) fn common<T: PartialEq>(
    x: &[T],
    y: &[T],
    shorten_x: impl Fn(u32, u32) -> bool,
) -> Vec<usize> {
    let width = y.len() + 1;
    let mut lengths = vec![0_u32; (x.len() + 1) * width];
    for i in 1..=x.len() {
        for j in 1..=y.len() {
            lengths[i * width + j] = if x[i - 1] == y[j - 1] {
                lengths[(i - 1) * width + j - 1] + 1
            } else {
                lengths[(i - 1) * width + j].max(lengths[i * width + j - 1])
            };
        }
    }
    let (mut i, mut j) = (x.len(), y.len());
    let mut indices = Vec::new();
    while i > 0 && j > 0 {
        if x[i - 1] == y[j - 1] {
            indices.push(i - 1);
            (i, j) = (i - 1, j - 1);
        } else if shorten_x(lengths[(i - 1) * width + j], lengths[i * width + j - 1]) {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    indices.reverse();
    indices
}
