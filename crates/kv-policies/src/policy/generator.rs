//! Random numbers, which follow from a request's seed.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::Observation;

/// The generator of one (sequence, layer, head).
pub(crate) fn generator(observation: &Observation<'_>, row: usize, head: usize) -> ChaCha8Rng {
    let request = observation.seeds.get(row).copied().unwrap_or_default();
    let mut generator = ChaCha8Rng::seed_from_u64(request);
    generator.set_stream(((observation.layer.index as u64) << 32) | head as u64);
    generator
}
