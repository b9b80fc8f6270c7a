//! Random numbers that depend on the seed, on their purpose and on the question, and on nothing
//! else: a question is the same whether or not others are made before it.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The numbers of one purpose for one question.
pub(crate) fn stream(seed: u64, purpose: &str, question: usize) -> ChaCha8Rng {
    // FNV-1a, which is the same on every machine and in every version.
    let hash = purpose.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ hash);
    random.set_stream(question as u64);
    random
}
