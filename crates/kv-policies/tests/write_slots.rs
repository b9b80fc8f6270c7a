//! Caches that are held at their limits: new tokens fill them, then take the place of others.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    CacheOptions, Error, KvCache, LayerCache, NUMERATORS, Origin, SlotLayout, read_f32, read_i32,
};
use kv_kernels::{EvictionScope, HeadLayout};
use kv_policies::{VictimChoice, WriteSlots};
use kv_testing::{Numbers, devices, quick_devices};

const BATCH: usize = 2;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

/// Each head overwrites the slot of the least importance so far, decayed.
const REMEMBERING: VictimChoice = VictimChoice {
    scope: EvictionScope::Head,
    protected: [0, 0],
    evict_newest: false,
    memory: Some(0.9),
    ties: None,
};

/// Heads of 3 live slots, held at `limit`.
fn at_limit(device: &Device, capacity: usize, limit: usize) -> LayerCache {
    let mut numbers = Numbers::new(3);
    let layout = SlotLayout::new(KV_HEADS, vec![capacity; BATCH * KV_HEADS]);
    let mut cache = LayerCache::new(layout, DIM, CacheOptions::new(device, DType::F32));
    let mut rows = || numbers.tensor([BATCH, KV_HEADS, 3, DIM], device);
    let (keys, values) = (rows(), rows());
    let positions = Tensor::<1, Int>::arange(0..3, (device, DType::I32));
    cache.extend(keys, values, positions.unsqueeze::<2>().expand([BATCH, 3])).unwrap();
    cache.set_limits(vec![limit; BATCH * KV_HEADS]).unwrap();
    WriteSlots::enable(&mut cache).unwrap();
    cache
}

fn token(numbers: &mut Numbers, device: &Device) -> (Tensor<2>, HeadLayout) {
    let layout = HeadLayout {
        query_heads: 2 * KV_HEADS,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        rope: None,
        norms: None,
    };
    (numbers.tensor([BATCH, layout.width()], device), layout)
}

fn at(position: i32, device: &Device) -> Tensor<1, Int> {
    Tensor::full([BATCH], position, (device, DType::I32))
}

/// Writes a token from its projection, attends with its queries.
fn step(cache: &mut LayerCache, projected: Tensor<2>, layout: &HeadLayout, position: i32) {
    let device = cache.options().device.clone();
    let position = at(position, &device);
    let query = WriteSlots::write_projected(cache, projected, position.clone(), layout).unwrap();
    WriteSlots::attend_and_choose_victim(cache, query, &position, REMEMBERING).unwrap();
}

/// All that a cache holds, of live slots.
#[derive(Debug, PartialEq)]
struct Contents {
    keys: Vec<f32>,
    norms: Vec<f32>,
    /// Of importances; none before the first step.
    records: Vec<f32>,
    positions: Vec<i32>,
    places: Vec<i32>,
    lengths: Vec<usize>,
}

fn contents(cache: &LayerCache) -> Contents {
    let live: Vec<usize> =
        (0..cache.layout().head_ranges()).flat_map(|p| cache.layout().live(p)).collect();
    let keys = read_f32("keys", cache.keys().clone()).unwrap();
    let norms = read_f32("norms", WriteSlots::value_log_norms(cache).unwrap().clone()).unwrap();
    let positions = cache.read_positions().unwrap();
    let records =
        cache.track("importance_record").map(|own| read_f32("records", own.clone()).unwrap());
    Contents {
        keys: live.iter().flat_map(|slot| keys[slot * DIM..][..DIM].to_vec()).collect(),
        norms: live.iter().map(|slot| norms[*slot]).collect(),
        records: records.iter().flat_map(|own| live.iter().map(|slot| own[*slot])).collect(),
        positions: live.iter().map(|slot| positions[*slot]).collect(),
        places: read_i32("places", WriteSlots::next(cache).unwrap().clone()).unwrap(),
        lengths: cache.layout().lengths().to_vec(),
    }
}

/// One launch for projections does what separate rows do.
#[test]
fn projected_tokens_are_written_like_others() {
    for tested in quick_devices("write_slots") {
        let device = &tested.device;
        let (mut fused, mut plain) = (at_limit(device, 5, 5), at_limit(device, 5, 5));
        for cache in [&mut fused, &mut plain] {
            let track = Tensor::full([4 * 5], 3.0, (device, DType::F32));
            cache.set_track("other", track, 1.0).unwrap();
        }
        let mut numbers = Numbers::new(4);
        for position in 3..12 {
            let (projected, layout) = token(&mut numbers, device);
            let heads = projected.clone().reshape([BATCH, 4 * KV_HEADS, DIM]);
            let part = |first, count| heads.clone().narrow(1, first, count);
            let (query, keys, values) = (part(0, 4), part(4, 2), part(6, 2));
            let now = at(position, device);
            WriteSlots::write(&mut plain, keys, values, now.clone()).unwrap();
            WriteSlots::attend_and_choose_victim(&mut plain, query, &now, REMEMBERING).unwrap();
            step(&mut fused, projected, &layout, position);
            let (a, b) = (contents(&fused), contents(&plain));
            for (a, b) in [(&a.norms, &b.norms), (&a.records, &b.records)] {
                let close = a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(close, "{}: {a:?} for {b:?}", tested.name);
            }
            let (norms, records) = (b.norms.clone(), b.records.clone());
            assert_eq!(Contents { norms, records, ..a }, b, "{}", tested.name);
            let track =
                |cache: &LayerCache| read_f32("t", cache.track("other").unwrap().clone()).unwrap();
            assert_eq!(track(&fused), track(&plain), "{}: a new slot starts anew", tested.name);
            assert!(track(&fused).contains(&1.0));
        }
        assert_eq!(fused.layout().lengths(), [5; 4]);
    }
}

/// Copies, other capacities, batches, files: places and norms go along.
#[test]
fn places_follow_the_slots() {
    for tested in quick_devices("write_slots") {
        let device = &tested.device;
        let mut cache = at_limit(device, 4, 4);
        let mut numbers = Numbers::new(5);
        for position in 3..6 {
            let (projected, layout) = token(&mut numbers, device);
            step(&mut cache, projected, &layout, position);
        }
        let mut copy = cache.clone();
        let mut roomy = cache.clone();
        roomy.resize(vec![9; 4]).unwrap();
        let mut moved = cache.clone().to_device(device);
        let file = tempfile::NamedTempFile::new().unwrap();
        let whole = KvCache {
            layers: vec![cache.clone()],
            seen: vec![6; BATCH],
            origin: Origin::default(),
        };
        whole.save(file.path()).unwrap();
        let mut loaded = KvCache::load(file.path(), device).unwrap().layers.remove(0);
        loaded.restore_state::<WriteSlots>().unwrap();
        let (projected, layout) = token(&mut numbers, device);
        step(&mut cache, projected.clone(), &layout, 6);
        let expected = contents(&cache);
        for other in [&mut copy, &mut roomy, &mut moved, &mut loaded] {
            step(other, projected.clone(), &layout, 6);
            assert_eq!(contents(other), expected, "{}", tested.name);
        }
        let both = LayerCache::concat(vec![cache.clone(), cache.clone()]).unwrap();
        let places = read_i32("places", WriteSlots::next(&both).unwrap().clone()).unwrap();
        assert_eq!(
            places,
            [&expected.places[..], &expected.places[..]].concat(),
            "{}",
            tested.name
        );
    }
}

#[test]
fn what_cannot_be_held_is_refused() {
    let tested = devices().remove(0);
    let device = &tested.device;
    let reason = |error: Error| error.to_string();
    let mut cache = at_limit(device, 5, 5);
    cache.set_limits(vec![5, 2, 5, 5]).unwrap();
    let error = reason(WriteSlots::enable(&mut cache).unwrap_err());
    assert!(error.contains("head 1 is 2 slots, expected at least 3"), "{error}");
    // Steps that overwrite look at one weight a slot.
    let mut apart = at_limit(device, 5, 5);
    apart.set_track(NUMERATORS, Tensor::ones([4 * 5], (device, DType::F32)), 1.0).unwrap();
    let error = reason(WriteSlots::enable(&mut apart).unwrap_err());
    assert!(error.contains("one weight a slot"), "{error}");
    // Below its limit a head needs room; at it, none.
    let mut small = at_limit(device, 4, 6);
    let mut numbers = Numbers::new(6);
    let (projected, layout) = token(&mut numbers, device);
    step(&mut small, projected.clone(), &layout, 3);
    let write = |cache: &mut LayerCache, projected: Tensor<2>, position: i32| {
        WriteSlots::write_projected(cache, projected, at(position, device), &layout).unwrap_err()
    };
    let before = contents(&small);
    let error = write(&mut small, projected.clone(), 4);
    assert!(matches!(error, Error::CapacityExhausted { capacity: 4, requested: 5, .. }), "{error}");
    assert_eq!(contents(&small), before);
    // Other limits, too, make the places void.
    let mut other = at_limit(device, 5, 4);
    other.set_limits(vec![5; 4]).unwrap();
    let error = write(&mut other, projected.clone(), 3);
    assert!(reason(error).contains("not held at its limits"));
    // Tokens that are appended make the places void.
    let mut cache = at_limit(device, 5, 5);
    cache.append_projected(projected.clone(), at(3, device), &layout).unwrap();
    let error = write(&mut cache, projected, 4);
    assert!(reason(error).contains("not held at its limits"));
}

/// A file whose places point elsewhere is refused: the device would write there.
#[test]
fn places_of_a_file_are_checked() {
    let tested = devices().remove(0);
    let cache = at_limit(&tested.device, 5, 4);
    let whole = KvCache { layers: vec![cache], seen: vec![3; BATCH], origin: Origin::default() };
    let file = tempfile::NamedTempFile::new().unwrap();
    whole.save(file.path()).unwrap();
    let mut bytes = std::fs::read(file.path()).unwrap();
    // The slots, four times `2`, are the last integers of the file.
    let places: Vec<u8> = [2i32; 4].iter().flat_map(|place| place.to_le_bytes()).collect();
    let start = bytes.windows(places.len()).rposition(|window| window == places).unwrap();
    bytes[start..start + 4].copy_from_slice(&9i32.to_le_bytes());
    std::fs::write(file.path(), bytes).unwrap();
    let mut loaded = KvCache::load(file.path(), &tested.device).unwrap().layers.remove(0);
    let reason = loaded.restore_state::<WriteSlots>().unwrap_err().to_string();
    assert!(reason.contains("slot 9 of head 0, which holds 3 of 4"), "{reason}");
}
