use kv_core::{KvCache, Origin};
use kv_testing::devices;
use proptest::prelude::*;

use super::model::Pair;

#[derive(Debug, Clone, Copy)]
enum Op {
    Append,
    Rewrite,
    Retain,
    RetainHighest(usize),
    Evict(usize),
    Merge,
    SaveAndLoad,
    ToHostAndBack,
    Resize(usize),
    Clone,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => Just(Op::Append),
        2 => Just(Op::Rewrite),
        1 => Just(Op::Retain),
        2 => (0usize..6).prop_map(Op::RetainHighest),
        2 => (1usize..6).prop_map(Op::Evict),
        1 => Just(Op::Merge),
        1 => Just(Op::SaveAndLoad),
        1 => Just(Op::ToHostAndBack),
        1 => (0usize..5).prop_map(Op::Resize),
        1 => Just(Op::Clone),
    ]
}

fn whole(pair: &Pair) -> KvCache {
    let seen = vec![pair.next as usize; pair.cache.layout().batch()];
    KvCache { layers: vec![pair.cache.clone()], seen, origin: Origin::default() }
}

fn run(ops: &[Op], capacities: &[usize], device: &burn::tensor::Device) {
    let mut pair = Pair::new(capacities.to_vec(), 2, device);
    for op in ops {
        match *op {
            Op::Append => pair.append(),
            Op::Rewrite => pair.rewrite(),
            Op::Retain => pair.retain(),
            Op::RetainHighest(count) => pair.retain_highest(count),
            Op::Evict(limit) => pair.evict(limit),
            Op::Merge => pair.merge(),
            Op::SaveAndLoad => {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("cache.safetensors");
                whole(&pair).save(&path).unwrap();
                pair.cache = KvCache::load(&path, device).unwrap().layers.remove(0);
            }
            Op::ToHostAndBack => {
                let host = whole(&pair).into_host().unwrap();
                pair.cache = host.into_device(device).unwrap().layers.remove(0);
            }
            Op::Resize(extra) => pair.cache.shrink(extra).unwrap(),
            Op::Clone => {
                // The original goes on changing; the copy must not see it.
                let copy = pair.cache.clone();
                let before = pair.heads.clone();
                let next = pair.next;
                pair.rewrite();
                pair.evict(2);
                pair.cache = copy;
                pair.heads = before;
                pair.next = next;
            }
        }
        pair.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_agree_with_the_model(
        ops in prop::collection::vec(op(), 1..24),
        capacities in prop_oneof![
            prop::collection::vec(1usize..12, 4),
            (1usize..12).prop_map(|capacity| vec![capacity; 4]),
        ],
    ) {
        for tested in devices() {
            run(&ops, &capacities, &tested.device);
        }
    }
}

/// A pool of no slots is a row that no head owns.
#[test]
fn a_pool_without_slots_takes_every_operation() {
    let ops = [
        Op::Resize(0),
        Op::RetainHighest(2),
        Op::Retain,
        Op::Evict(1),
        Op::Rewrite,
        Op::Merge,
        Op::Clone,
        Op::SaveAndLoad,
        Op::ToHostAndBack,
        Op::RetainHighest(2),
        Op::Resize(3),
        Op::Append,
        Op::RetainHighest(2),
    ];
    for tested in devices() {
        run(&ops, &[3; 4], &tested.device);
    }
}
