//! The ops on labels in plain loops: the CPU path, and the oracle of the kernels' tests.

use crate::select::scored_rows::BUDGETS;

/// One call's arguments, in row-major order.
pub(crate) struct Labels<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) keys: &'a [f32],
    pub(crate) offsets: &'a [i32],
    pub(crate) lengths: &'a [i32],
    pub(crate) channels: &'a [i32],
    pub(crate) budgets: &'a [i32],
    /// Lists and sources, each with the width of its rows, where rows share lists.
    pub(crate) shared: Option<[(&'a [i32], usize); 2]>,
    pub(crate) layer: usize,
    pub(crate) period: usize,
    /// `Hq`
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    /// `T`
    pub(crate) columns: usize,
}

impl Labels<'_> {
    /// Approximate scores `[R, T]`, numbers of candidates `[R]`, and numbers of wanted tokens
    /// `[R]`.
    pub(crate) fn score(&self) -> (Vec<f32>, Vec<i32>, Vec<i32>) {
        let rows = self.query.len() / self.head_dim;
        let (group, labels) = (rows / self.offsets.len(), self.channels.len() / rows);
        let mut scores = vec![0.0; rows * self.columns];
        let (mut candidates, mut wanted) = (vec![0; rows], vec![0; rows]);
        for row in (0..rows).filter(|&row| self.due(row, self.lengths[row / group])) {
            let [count, sinks, recents] =
                [0, 1, 2].map(|at| self.budgets[row * BUDGETS + at] as usize);
            let (offset, length) = (self.offsets[row / group], self.lengths[row / group]);
            let own = (length as usize).saturating_sub(sinks + recents);
            let query = &self.query[row * self.head_dim..][..self.head_dim];
            for column in 0..own.min(self.columns) {
                let slot = offset as usize + sinks + column;
                let key = &self.keys[slot * self.head_dim..][..self.head_dim];
                let channels = &self.channels[row * labels..][..labels];
                scores[row * self.columns + column] =
                    channels.iter().map(|&at| query[at as usize] * key[at as usize]).sum();
            }
            (candidates[row], wanted[row]) = (own as i32, count as i32);
        }
        (scores, candidates, wanted)
    }

    fn due(&self, row: usize, length: i32) -> bool {
        let Some([(lists, width), (sources, columns)]) = self.shared else { return true };
        let source = &sources[row * columns..][..columns];
        let own = source[0] as usize == row % self.heads
            && source.get(1).is_none_or(|&layer| layer as usize == self.layer);
        own && ((length as usize).is_multiple_of(self.period) || lists[row * width] < 0)
    }
}

/// Writes the label channels of each range's newest key, and returns those of all queries.
pub(crate) fn copy_labels<E: Copy>(
    [query, keys]: [&[E]; 2],
    labels: &mut [E],
    [offsets, lengths, channels]: [&[i32]; 3],
    slots: usize,
    head_dim: usize,
) -> Vec<E> {
    let count = labels.len() / slots;
    let queries = query.len() / head_dim / offsets.len();
    let own = |kv_head: usize, row: &[E]| -> Vec<E> {
        let channels = channels[kv_head * count..][..count].iter();
        channels.map(|&channel| row[channel as usize]).collect()
    };
    let newest = offsets.iter().zip(lengths).map(|(offset, length)| offset + length - 1);
    for (kv_head, slot) in newest.enumerate().filter(|(kv_head, _)| lengths[*kv_head] > 0) {
        let slot = slot as usize;
        let row = own(kv_head, &keys[slot * head_dim..][..head_dim]);
        labels[slot * count..][..count].copy_from_slice(&row);
    }
    let rows = query.chunks_exact(head_dim).enumerate();
    rows.flat_map(|(row, query)| own(row / queries, query)).collect()
}
