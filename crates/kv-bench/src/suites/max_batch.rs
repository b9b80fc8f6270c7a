//! The largest batch that a memory holds: an estimate from the bytes of one sequence, and the
//! search among batches near it.

use anyhow::ensure;
use kv_core::MemoryReport;

use crate::bench::ModelBench;

/// Bytes of a GiB.
pub(crate) const GIB: f64 = (1u64 << 30) as f64;
/// Share of the memory that caches and weights may take, beside activations and the rounding of
/// pools.
pub(crate) const FILLED: f64 = 0.94;

/// The bytes of a model with caches.
pub(crate) struct Footprint {
    /// The model's weights.
    pub(crate) weights: f64,
    /// Bytes that every sequence adds.
    pub(crate) sequence: f64,
    /// Bytes that all sequences share: prefill goes sequence by sequence where it must, so that its
    /// scratch counts once.
    pub(crate) shared: f64,
}

impl Footprint {
    /// Measured on the caches of `batch` sequences.
    pub(crate) fn of(bench: &ModelBench<'_>, memory: &MemoryReport, batch: usize) -> Self {
        let (rows, scratch) = (batch as f64, memory.scratch as f64);
        Self {
            weights: bench.weight_bytes(),
            sequence: (memory.total() as f64 - scratch) / rows,
            shared: scratch / rows,
        }
    }

    /// How many sequences fit in a memory of so many bytes, beside the weights.
    pub(crate) fn sequences(&self, bytes: f64) -> f64 {
        ((bytes - self.weights - self.shared) / self.sequence).floor().max(0.0)
    }

    /// How many sequences fit in the share of a memory that caches and weights may take; `None`
    /// where not one does.
    pub(crate) fn largest(&self, bytes: f64) -> Option<usize> {
        let most = self.sequences(FILLED * bytes);
        (most >= 1.0).then_some(most as usize)
    }
}

/// Batches up to the batch that should fit: powers of two below half of that batch, and then steps
/// of an eighth of it. Nothing may be measured behind a batch that does not fit, as the device's
/// pool keeps pages of the size that the batch needed.
pub(crate) fn growing(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |batch| Some(2 * batch));
    let mut batches: Vec<usize> = powers.take_while(|batch| 2 * batch < most).collect();
    let below = batches.last().copied().unwrap_or(0);
    batches.extend((4..=8).map(|eighths| most * eighths / 8).filter(|batch| *batch > below));
    batches.dedup();
    batches
}

/// Batches from the batch that should fit downwards, each a sixteenth smaller. Where a measurement
/// takes long, the first batch that fits is enough.
pub(crate) fn shrinking(most: usize) -> Vec<usize> {
    let next = |batch: &usize| (*batch > 1).then(|| (batch * 15 / 16).max(1));
    std::iter::successors(Some(most), next).collect()
}

/// The order of the batches of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Every batch is measured up to the first that does not fit.
    Growing,
    /// The first batch that fits ends the search.
    Shrinking,
}

/// The batches that fit, each with its measurement, in the order of the search.
pub(crate) struct Found<M> {
    pub(crate) fits: Vec<(usize, M)>,
    /// The last batch that could not be measured: most likely for want of memory.
    pub(crate) failed: Option<(usize, anyhow::Error)>,
}

/// Measures batch after batch; `measure` returns `None` for a batch that needs more than the
/// memory.
///
/// # Errors
/// Where the smallest batch cannot be measured, and where none fits.
pub(crate) fn search<M>(
    order: Order,
    batches: &[usize],
    mut measure: impl FnMut(usize) -> anyhow::Result<Option<M>>,
) -> anyhow::Result<Found<M>> {
    let smallest = match order {
        Order::Growing => batches.first(),
        Order::Shrinking => batches.last(),
    };
    let smallest = smallest.copied().unwrap_or_default();
    let mut found = Found { fits: Vec::new(), failed: None };
    for &batch in batches {
        let fits = match measure(batch) {
            Ok(Some(measured)) => {
                found.fits.push((batch, measured));
                true
            }
            Ok(None) => false,
            Err(error) if batch == smallest => return Err(error),
            Err(error) => {
                found.failed = Some((batch, error));
                false
            }
        };
        if fits == (order == Order::Shrinking) {
            break;
        }
    }
    ensure!(!found.fits.is_empty(), "batch {smallest} needs more memory than there is");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn batches_double_and_then_grow_by_eighths_of_the_largest() {
        assert_eq!(growing(1), [1]);
        assert_eq!(growing(2), [1, 2]);
        assert_eq!(growing(7), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(growing(24), [1, 2, 4, 8, 12, 15, 18, 21, 24]);
        assert_eq!(shrinking(17), [17, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn searches_end_at_the_largest_batch_that_fits() {
        let mut tried = Vec::new();
        let mut run = |order, batches: &[usize], fails: usize| {
            tried.clear();
            let found = search(order, batches, |batch| {
                tried.push(batch);
                match batch {
                    _ if batch == fails => bail!("out of memory"),
                    0..13 => Ok(Some(10 * batch)),
                    _ => Ok(None),
                }
            });
            (found.map(|found| (found.fits, found.failed.map(|(batch, _)| batch))), tried.clone())
        };
        let (found, tried) = run(Order::Growing, &[4, 8, 12, 16, 20], 0);
        assert_eq!(found.unwrap(), (vec![(4, 40), (8, 80), (12, 120)], None));
        assert_eq!(tried, [4, 8, 12, 16], "nothing is measured behind a batch that does not fit");
        let (found, tried) = run(Order::Growing, &[4, 8, 12], 8);
        assert_eq!((found.unwrap(), tried), ((vec![(4, 40)], Some(8)), vec![4, 8]));
        let (found, tried) = run(Order::Shrinking, &[20, 16, 12, 8], 16);
        assert_eq!((found.unwrap(), tried), ((vec![(12, 120)], Some(16)), vec![20, 16, 12]));
        // A smallest batch that fails or does not fit is an error.
        assert_eq!(run(Order::Growing, &[4, 8], 4).0.unwrap_err().to_string(), "out of memory");
        let (found, _) = run(Order::Shrinking, &[20, 16], 0);
        assert!(found.unwrap_err().to_string().contains("batch 16 needs more memory"));
    }

    #[test]
    fn sequences_fit_beside_weights_and_what_all_share() {
        let footprint = Footprint { weights: 100.0, sequence: 30.0, shared: 10.0 };
        assert_eq!(footprint.sequences(199.0), 2.0);
        assert_eq!(footprint.sequences(50.0), 0.0);
        assert_eq!(footprint.largest(150.0), Some(1));
        assert_eq!(footprint.largest(140.0), None, "a share of it is for activations");
    }
}
