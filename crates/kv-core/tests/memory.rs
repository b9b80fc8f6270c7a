use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, MemoryReport, Room, Selection};
use kv_testing::{Numbers, devices};

/// At a budget of 25 % the bytes allocated are at most 26 % of the full cache, ragged or not.
#[test]
fn dropped_slots_are_not_allocated() {
    for tested in devices() {
        let device = &tested.device;
        let mut numbers = Numbers::new(1);
        let (batch, heads, tokens, dim) = (2, 2, 1000, 16);
        let keys = numbers.tensor([batch, heads, tokens, dim], device);
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([batch, tokens]);
        let scores = numbers.normal(batch * heads * tokens);
        let budget = tokens / 4;
        for selection in [
            Selection::top(&scores, tokens, budget),
            Selection::ada(&scores, tokens, heads, budget, budget / 5),
        ] {
            let options = CacheOptions::new(device, DType::F32);
            let mut cache = LayerCache::from_prefill(
                &keys,
                &keys,
                &positions,
                &selection,
                Room::Extra(10),
                options,
            )
            .unwrap();
            let full = MemoryReport::full(batch * tokens, 1, heads, dim, DType::F32);
            let report = cache.memory();
            assert_eq!(report.room(), 2 * 4 * 10 * dim * 4);
            assert!(report.in_use as f64 <= 0.26 * full as f64, "{report:?} of {full}");
            // The pools themselves, not only the report.
            let bytes = |rows: usize| 2 * rows * dim * 4;
            assert_eq!(bytes(cache.keys().dims()[0]), report.allocated);
            assert!(report.metadata > 0);
            cache.shrink(0).unwrap();
            assert_eq!(bytes(cache.keys().dims()[0]), report.in_use);
            assert!((cache.memory().allocated as f64) <= 0.26 * full as f64);
        }
    }
}
