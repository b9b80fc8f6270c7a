//! Random numbers, which follow from a request's seed.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::Observation;

/// The generator of one (sequence, layer, head). `head` counts among the heads that are shown; the
/// numbers are those of the head among all of the layer, so that every rank draws what one rank
/// with the whole model draws.
pub(crate) fn generator(observation: &Observation<'_>, row: usize, head: usize) -> ChaCha8Rng {
    let request = observation.seeds.get(row).copied().unwrap_or_default();
    let mut generator = ChaCha8Rng::seed_from_u64(request);
    let head = observation.heads.first + head;
    generator.set_stream(((observation.layer.index as u64) << 32) | head as u64);
    generator
}
