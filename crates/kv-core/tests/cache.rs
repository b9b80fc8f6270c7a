use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, Error, LayerCache, Room, Selection, SlotLayout};
use kv_kernels::{DecodeAttentionOptions, HeadLayout};
use kv_testing::{Numbers, devices};

fn prompt_cache(device: &burn::tensor::Device, selection: &Selection, room: Room) -> LayerCache {
    let mut numbers = Numbers::new(5);
    let keys = numbers.tensor([2, 2, 10, 8], device);
    let values = numbers.tensor([2, 2, 10, 8], device);
    let positions = Tensor::<1, Int>::arange(0..10, (device, DType::I32));
    let positions = positions.unsqueeze::<2>().expand([2, 10]);
    let options = CacheOptions::new(device, DType::F32);
    LayerCache::from_prefill(&keys, &values, &positions, selection, room, options).unwrap()
}

fn ragged() -> Selection {
    Selection::new(vec![vec![0, 3, 9], vec![], vec![1], vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
        .unwrap()
}

#[test]
fn ragged_selections_take_only_their_own_slots() {
    for tested in devices() {
        let cache = prompt_cache(&tested.device, &ragged(), Room::Extra(2));
        assert_eq!(cache.layout().lengths(), [3, 0, 1, 10]);
        assert_eq!(cache.layout().capacities(), [5, 2, 3, 12]);
        let positions = cache.read_positions().unwrap();
        let live: Vec<i32> = (0..4)
            .flat_map(|range| cache.layout().live(range))
            .map(|slot| positions[slot])
            .collect();
        assert_eq!(live, [0, 3, 9, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}

#[test]
fn extending_attends_like_single_steps() {
    for tested in devices() {
        let device = &tested.device;
        let mut together = prompt_cache(device, &ragged(), Room::Extra(3));
        let mut single = together.clone();
        let mut numbers = Numbers::new(6);
        let keys = numbers.tensor([2, 2, 3, 8], device);
        let values = numbers.tensor([2, 2, 3, 8], device);
        let query = numbers.tensor([2, 4, 3, 8], device);
        let positions = Tensor::<1, Int>::arange(10..13, (device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([2, 3]);
        together.extend(keys.clone(), values.clone(), positions.clone()).unwrap();
        let all = together.attend_extended(query.clone()).unwrap();
        for step in 0..3 {
            let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, step, 1).squeeze_dim::<3>(2);
            let position = positions.clone().narrow(1, step, 1).squeeze_dim(1);
            single.append(pick(&keys), pick(&values), position).unwrap();
            let one = single.attend(pick(&query), DecodeAttentionOptions::default()).unwrap();
            let difference = (one.output - pick(&all)).abs().max().into_scalar::<f32>();
            assert!(difference < 1e-6, "{} step {step}: {difference}", tested.name);
        }
    }
}

#[test]
fn a_full_head_is_an_error_and_a_growable_one_grows() {
    for tested in devices() {
        let device = &tested.device;
        for growable in [false, true] {
            let options = CacheOptions { growable, ..CacheOptions::new(device, DType::F32) };
            let mut cache = LayerCache::new(SlotLayout::new(2, vec![1, 3]), 8, options);
            let rows = || Tensor::<3>::ones([1, 2, 8], (device, DType::F32));
            let position = || Tensor::<1, Int>::zeros([1], (device, DType::I32));
            cache.append(rows(), rows(), position()).unwrap();
            let second = cache.append(rows(), rows(), position());
            if growable {
                second.unwrap();
                assert_eq!(cache.layout().lengths(), [2, 2]);
            } else {
                let error = second.unwrap_err();
                let full =
                    Error::CapacityExhausted { sequence: 0, head: 0, capacity: 1, requested: 2 };
                assert_eq!(error.to_string(), full.to_string());
                assert_eq!(cache.layout().lengths(), [1, 1]);
            }
        }
    }
}

#[test]
fn concat_keeps_every_sequence() {
    for tested in devices() {
        let device = &tested.device;
        let parts = vec![
            prompt_cache(device, &ragged(), Room::Extra(1)),
            prompt_cache(device, &Selection::all(4, 10), Room::Total(3)),
        ];
        let query = Numbers::new(8).tensor([2, 4, 8], device);
        let attend = |cache: &LayerCache, query| {
            cache.attend(query, DecodeAttentionOptions::default()).unwrap().output
        };
        let alone = Tensor::cat(parts.iter().map(|part| attend(part, query.clone())).collect(), 0);
        let joined = LayerCache::concat(parts).unwrap();
        let together = attend(&joined, query.repeat_dim(0, 2));
        let difference = (alone - together).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-6, "{}: {difference}", tested.name);
    }
}

#[test]
fn selections_and_limits_that_do_not_fit_change_nothing() {
    for tested in devices() {
        let mut cache = prompt_cache(&tested.device, &ragged(), Room::Extra(0));
        let beyond = Selection::new(vec![vec![3], vec![], vec![], vec![]]).unwrap();
        assert!(cache.retain(&beyond).is_err());
        let victims = cache.ranges().offsets.clone();
        assert!(cache.evict_slots(victims, &[0; 4]).is_err());
        assert_eq!(cache.layout().lengths(), [3, 0, 1, 10]);
    }
}

/// What a device has chosen is what the host would have, whoever looks at it: by itself, by what is
/// left, and as rows.
#[test]
fn selections_of_a_device_are_those_of_the_host() {
    let mut numbers = Numbers::new(9);
    let scores = numbers.normal(4 * 10);
    let host = Selection::top(&scores, 10, 3);
    for tested in devices() {
        let device = &tested.device;
        let scores = Tensor::<1>::from_data(scores.as_slice(), (device, DType::F32));
        let chosen = Selection::highest(scores.reshape([2, 2, 10]), 3).unwrap();
        assert_eq!(chosen.lengths(), [3; 4], "{}", tested.name);
        let others = chosen.others(&[10; 4]).unwrap();
        assert_eq!(others.lengths(), [7; 4], "{}", tested.name);
        let left = host.others(&[10; 4]).unwrap();
        assert_eq!(others.kept().unwrap(), left.kept().unwrap(), "{}", tested.name);
        let firsts = [0, 10, 20, 30];
        for (own, of_host) in [(&chosen, &host), (&others, &left)] {
            let rows = [own, of_host].map(|of| {
                let lists = of.lists(&firsts, device).unwrap();
                (lists.slots.try_into_vec_as::<i32>(), lists.counts.try_into_vec_as::<i32>())
            });
            let [rows, expected] = rows.map(|(slots, counts)| (slots.unwrap(), counts.unwrap()));
            assert_eq!(rows, expected, "{}", tested.name);
        }
        assert_eq!(chosen.kept().unwrap(), host.kept().unwrap(), "{}", tested.name);

        let cache = prompt_cache(device, &chosen, Room::Extra(1));
        let positions = cache.read_positions().unwrap();
        for (range, kept) in host.kept().unwrap().iter().enumerate() {
            let own: Vec<u32> =
                cache.layout().live(range).map(|slot| positions[slot] as u32).collect();
            assert_eq!(own, *kept, "{}", tested.name);
        }
        // It is refused where it does not fit.
        let short = chosen.others(&[9; 4]).unwrap_err();
        assert!(matches!(short, Error::IndexOutOfRange { index: 9, limit: 9, .. }), "{short}");
        let error = chosen.lists(&firsts[1..], device).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
}

/// A projected token goes where a finished one would; another model's layout changes nothing.
#[test]
fn projected_tokens_append_as_finished_ones_do() {
    for tested in devices() {
        let device = &tested.device;
        let layout =
            HeadLayout { query_heads: 4, kv_heads: 2, head_dim: 8, rope: None, norms: None };
        let mut numbers = Numbers::new(11);
        let projected = numbers.tensor([2, layout.width()], device);
        let at = |position: i32| Tensor::<1, Int>::full([2], position, (device, DType::I32));
        let heads = |first: usize, count: usize| {
            projected.clone().narrow(1, first * 8, count * 8).reshape([2, count, 8])
        };
        let mut expected = prompt_cache(device, &ragged(), Room::Extra(2));
        let mut cache = expected.clone();
        expected.append(heads(4, 2), heads(6, 2), at(10)).unwrap();
        let query = cache.append_projected(projected.clone(), at(10), &layout).unwrap();
        let read = |tensor: Tensor<3>| tensor.try_into_vec_as::<f32>().unwrap();
        assert_eq!(read(query), read(heads(0, 4)));
        assert_eq!(cache.layout(), expected.layout());
        let pool = |cache: &LayerCache| {
            let rows = |pool: &Tensor<2>| pool.clone().try_into_vec_as::<f32>().unwrap();
            (rows(cache.keys()), rows(cache.values()), cache.read_positions().unwrap())
        };
        assert_eq!(pool(&cache), pool(&expected), "{}", tested.name);

        let other = HeadLayout { query_heads: 6, kv_heads: 1, ..layout };
        let before = pool(&cache);
        let error = cache.append_projected(projected, at(11), &other).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        assert_eq!(pool(&cache), before);
    }
}
