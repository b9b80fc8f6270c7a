//! Files with random bytes changed. They may still be right, but nothing panics.

use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::allocation::largest;
use crate::build::File;
use crate::{fixture, open, read_all};

/// A file in which half of the changed bytes are in its first part, where the claims are.
fn changed(bytes: &[u8], changes: &[(Index, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (i, (at, value)) in changes.iter().enumerate() {
        let range = if i % 2 == 0 { bytes.len().min(2048) } else { bytes.len() };
        bytes[at.index(range)] = *value;
    }
    bytes
}

fn survives(bytes: &[u8]) {
    let (largest, _) = largest(|| open(bytes).and_then(|file| read_all(&file)));
    assert!(largest < 64 * bytes.len() + (1 << 20), "an allocation of {largest} bytes");
}

static FIXTURES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let names = ["bpe-llama-bpe.gguf", "spm.gguf", "llama3.gguf"];
    names.iter().map(|name| std::fs::read(fixture(name)).unwrap()).collect()
});

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_small_file(changes in vec(any::<(Index, u8)>(), 1..6)) {
        survives(&changed(&File::small().bytes(), &changes));
    }

    #[test]
    fn one_of_the_fixtures(which in 0..3_usize, changes in vec(any::<(Index, u8)>(), 1..6)) {
        survives(&changed(&FIXTURES[which], &changes));
    }

    #[test]
    fn random_bytes_after_the_magic(bytes in vec(any::<u8>(), 0..512)) {
        survives(&[b"GGUF\x03\0\0\0".as_slice(), &bytes].concat());
    }
}

#[test]
fn every_bit_of_the_header() {
    let file = File::small().bytes();
    // The descriptions of the tensors end here.
    let end = file.len() - File::small().data.len();
    for bit in 0..8 * end {
        let mut bytes = file.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        survives(&bytes);
    }
}
