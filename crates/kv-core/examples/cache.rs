//! The life of a cache: filled from a prompt, appended to, evicted from, and what it takes in
//! bytes.
//!
//! ```sh
//! cargo run --release -p kv-core --example cache
//! ```

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_core::{
    CacheOptions, DeviceChoice, LayerCache, MemoryReport, Result, Room, Selection, select_device,
};
use kv_kernels::DecodeAttentionOptions;

const KV_HEADS: usize = 2;
const QUERY_HEADS: usize = 4;
const TOKENS: usize = 100;
const DIM: usize = 64;
/// Slots that each head may hold after a step: heads may differ.
const LIMITS: [usize; KV_HEADS] = [24, 8];
const STEPS: usize = 5;

fn main() -> Result<()> {
    let device = select_device(DeviceChoice::Auto)?;
    let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, &device);

    // A prompt of one sequence: its keys and values, `[B, Hkv, T, D]`, and its positions, `[B, T]`.
    let keys = random([1, KV_HEADS, TOKENS, DIM]);
    let values = random([1, KV_HEADS, TOKENS, DIM]);
    let positions = Tensor::<1, Int>::arange(0..TOKENS as i64, (&device, DType::I32));

    // Keep the last tokens of each head, and make room for one slot more.
    let last = |limit: usize| (TOKENS - limit..TOKENS).map(|token| token as u32).collect();
    let selection = Selection::new(LIMITS.map(last).to_vec())?;
    let options = CacheOptions::new(&device, DType::F32);
    let room = Room::Extra(1);
    let positions = positions.unsqueeze();
    let mut cache =
        LayerCache::from_prefill(&keys, &values, &positions, &selection, room, options)?;
    let full = MemoryReport::full(TOKENS, 1, KV_HEADS, DIM, DType::F32);
    println!("a full cache: {full} bytes of keys and values");
    show("filled", &cache);

    for step in 0..STEPS {
        let token = |heads| random([1, heads, 1, DIM]).squeeze_dim::<3>(2);
        let position = Tensor::full([1], (TOKENS + step) as i32, (&device, DType::I32));
        cache.append(token(KV_HEADS), token(KV_HEADS), position)?;
        show("appended", &cache);

        let attended = cache.attend(token(QUERY_HEADS), DecodeAttentionOptions::default())?;
        assert_eq!(attended.output.dims(), [1, QUERY_HEADS, DIM]);

        // Evict each head's oldest token: its slot of lowest position.
        let ages = cache.positions().clone().float();
        let victims = cache.lowest_slots(ages)?;
        cache.evict_slots(victims, &LIMITS)?;
    }
    show("evicted", &cache);

    let positions = cache.read_positions()?;
    for (head, limit) in LIMITS.into_iter().enumerate() {
        let mut tokens: Vec<_> = cache.layout().live(head).map(|slot| positions[slot]).collect();
        tokens.sort_unstable();
        println!("head {head} holds the tokens {tokens:?}");
        assert_eq!(tokens.len(), limit);
        assert_eq!(tokens.last(), Some(&((TOKENS + STEPS - 1) as i32)));
    }
    Ok(())
}

fn show(what: &str, cache: &LayerCache) {
    let memory = cache.memory();
    println!(
        "{what}: slots {:?} of {:?}; {} bytes in use, {} allocated, {} of metadata",
        cache.layout().lengths(),
        cache.layout().capacities(),
        memory.in_use,
        memory.allocated,
        memory.metadata,
    );
}
