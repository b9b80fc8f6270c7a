//! Which slots of a whole cache are read: kernels against their references on the CPU, and these
//! against what is said of them.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    Choice, Chosen, KernelError, ListTable, NO_LIST, NO_SLOT, PageHeads, PageOptions, PageSpan,
    RefreshRows, ScoredRows, SlotRanges, copy_labels, keep_lists, label_scores, list_slots,
    page_bounds, page_rows, page_scores, page_slots, top_slots,
};
use kv_testing::{Numbers, devices, relative_error};

const BATCH: usize = 2;
const KV_HEADS: usize = 3;
/// Empty, one slot, below, at and above a page; of unequal capacity.
const LENGTHS: [usize; 6] = [0, 1, 7, 32, 33, 150];
const CAPACITIES: [usize; 6] = [1, 4, 7, 33, 48, 160];
const DIM: usize = 24;

fn ints<const D: usize>(values: &[i32], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape(shape)
}

fn floats<const D: usize>(values: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::<1>::from_data(values, (device, DType::F32)).reshape(shape)
}

fn read(tensor: Tensor<1, Int>) -> Vec<i32> {
    tensor.try_into_vec_as::<i32>().unwrap()
}

struct Pool {
    keys: Vec<f32>,
    offsets: Vec<usize>,
}

impl Pool {
    fn new() -> Self {
        let offsets = (0..6).map(|pair| CAPACITIES[..pair].iter().sum()).collect();
        let slots: usize = CAPACITIES.iter().sum();
        Self { keys: Numbers::new(5).normal(slots * DIM), offsets }
    }

    fn slots(&self) -> usize {
        self.keys.len() / DIM
    }

    fn keys(&self, dtype: DType, device: &Device) -> Tensor<2> {
        floats(&self.keys, [self.slots(), DIM], device).cast(dtype)
    }

    fn ranges(&self, device: &Device) -> SlotRanges {
        let numbers = |of: &[usize]| of.iter().map(|&x| x as i32).collect::<Vec<_>>();
        SlotRanges {
            offsets: ints(&numbers(&self.offsets), [BATCH, KV_HEADS], device),
            lengths: ints(&numbers(&LENGTHS), [BATCH, KV_HEADS], device),
        }
    }

    fn key(&self, pair: usize, slot: usize) -> &[f32] {
        &self.keys[(self.offsets[pair] + slot) * DIM..][..DIM]
    }

    /// What a page's products are at most, of a query in f64.
    fn bound(&self, pair: usize, page: std::ops::Range<usize>, query: &[f32]) -> f64 {
        (0..DIM)
            .map(|column| {
                let keys = page.clone().map(|slot| f64::from(self.key(pair, slot)[column]));
                let ends = keys.fold((f64::MAX, f64::MIN), |(l, h), k| (l.min(k), h.max(k)));
                let q = f64::from(query[column]);
                (q * ends.0).max(q * ends.1)
            })
            .sum()
    }
}

fn bounds(pool: &Pool, page: usize, device: &Device) -> Tensor<2> {
    let rows = page_rows(pool.slots(), 6, page);
    // Poisoned: what is not written must not count.
    let mut bounds = floats(&vec![f32::NAN; rows * DIM], [rows, DIM], device);
    let (keys, ranges) = (pool.keys(DType::F32, device), pool.ranges(device));
    page_bounds(&keys, &ranges, &mut bounds, page, PageSpan::All { longest: 160 }).unwrap();
    bounds
}

#[test]
fn pages_are_scored_by_their_bounds_and_chosen() {
    let pool = Pool::new();
    for tested in devices() {
        let device = &tested.device;
        for (group, heads) in [
            (1, PageHeads::Query),
            (4, PageHeads::Query),
            (4, PageHeads::Max),
            (2, PageHeads::Mean),
        ] {
            for (page, tokens, always_last) in [
                (16usize, 64usize, true),
                (16, 40, false),
                (5, 20, true),
                (1, 6, true),
                (16, 200, true),
            ] {
                let context = format!("{} {group} {heads:?} {page} {tokens}", tested.name);
                let bounds = bounds(&pool, page, device);
                let options = PageOptions { page, heads, always_last };
                let query_heads = KV_HEADS * group;
                let query = Numbers::new(9).normal(BATCH * query_heads * DIM);
                let own = if heads == PageHeads::Query { query_heads } else { KV_HEADS };
                let rows = BATCH * own;
                let budget = [tokens as i32, 0, 0].repeat(rows);
                let all = 160usize.div_ceil(page);
                let ScoredRows { scores, candidates, wanted } = page_scores(
                    floats(&query, [BATCH, query_heads, DIM], device),
                    &bounds,
                    &pool.ranges(device),
                    &ints(&budget, [BATCH, own, 3], device),
                    all,
                    options,
                )
                .unwrap();
                let scored = scores.clone().try_into_vec_as::<f32>().unwrap();
                let (found, counts) = (read(candidates.clone()), read(wanted.clone()));
                let choice = Choice::Top(wanted);
                let most = tokens.div_ceil(page).max(3).min(all);
                let chosen = top_slots(scores, Some(candidates), choice, most).unwrap();
                let indices = chosen.indices.clone().try_into_vec_as::<i32>().unwrap();
                let picked = read(chosen.counts.clone());
                let (slots, listed) = page_slots(
                    chosen.indices,
                    chosen.counts,
                    &pool.ranges(device),
                    page,
                    always_last,
                )
                .unwrap();
                let width = slots.dims()[1];
                let slots = slots.try_into_vec_as::<i32>().unwrap();
                let listed = read(listed);
                let each = query_heads / own;
                for row in 0..rows {
                    let pair = row / (own / KV_HEADS);
                    let length = LENGTHS[pair];
                    let pages = length.div_ceil(page);
                    let open = if always_last { pages.saturating_sub(1) } else { pages };
                    assert_eq!(found[row] as usize, open, "{context}");
                    let afford = tokens / page;
                    let expected = match always_last {
                        _ if tokens >= length => open,
                        true => (afford.max(1) - 1).min(open),
                        false => afford.max(3).min(open),
                    };
                    assert_eq!((counts[row], picked[row]), (expected as i32, expected as i32));
                    for at in 0..open {
                        let span = at * page..((at + 1) * page).min(length);
                        let heads: Vec<f64> = (row * each..(row + 1) * each)
                            .map(|head| pool.bound(pair, span.clone(), &query[head * DIM..]))
                            .collect();
                        let exact = match heads.len() {
                            _ if options.heads == PageHeads::Mean => {
                                heads.iter().sum::<f64>() / each as f64
                            }
                            _ => heads.into_iter().fold(f64::MIN, f64::max),
                        };
                        let score = f64::from(scored[row * all + at]);
                        assert!((score - exact).abs() < 1e-4, "{context}: {score} for {exact}");
                    }
                    let mut expected: Vec<usize> = indices[row * most..][..picked[row] as usize]
                        .iter()
                        .map(|&page| page as usize)
                        .collect();
                    if always_last && pages > 0 {
                        expected.push(pages - 1);
                    }
                    let expected: Vec<i32> = expected
                        .into_iter()
                        .flat_map(|own| own * page..((own + 1) * page).min(length))
                        .map(|slot| (pool.offsets[pair] + slot) as i32)
                        .collect();
                    let own = &slots[row * width..][..width];
                    let count = listed[row] as usize;
                    assert_eq!(own[..count], expected, "{context} row {row}");
                    assert!(
                        own[count..].iter().all(|&slot| slot == NO_SLOT),
                        "{context} row {row}"
                    );
                }
            }
        }
    }
}

/// Tokens that come one by one leave the bounds of tokens that came together.
#[test]
fn last_pages_follow_what_is_appended() {
    let pool = Pool::new();
    for tested in devices() {
        for dtype in [DType::F32, DType::F16] {
            let device = &tested.device;
            let (page, keys) = (4, pool.keys(dtype, device));
            let rows = page_rows(pool.slots(), 6, page);
            let zeros = || floats(&vec![0.0; rows * DIM], [rows, DIM], device).cast(dtype);
            let ranges = pool.ranges(device);
            let (mut grown, mut whole) = (zeros(), zeros());
            page_bounds(&keys, &ranges, &mut whole, page, PageSpan::All { longest: 160 }).unwrap();
            for length in 0..=150 {
                let lengths = LENGTHS.map(|most| length.min(most as i32));
                let lengths = ints(&lengths, [BATCH, KV_HEADS], device);
                let now = SlotRanges { offsets: ranges.offsets.clone(), lengths };
                page_bounds(&keys, &now, &mut grown, page, PageSpan::Last).unwrap();
            }
            let [grown, whole] =
                [grown, whole].map(|bounds| bounds.try_into_vec_as::<f32>().unwrap());
            assert_eq!(grown, whole, "{} {dtype:?}", tested.name);
        }
    }
}

#[test]
fn channels_score_what_is_between_the_ends() {
    let pool = Pool::new();
    for tested in devices() {
        let device = &tested.device;
        for group in [1, 2, 4] {
            let (heads, labels) = (KV_HEADS * group, 5);
            let rows = BATCH * heads;
            let mut numbers = Numbers::new(3);
            let query = numbers.normal(rows * DIM);
            let channels: Vec<i32> = (0..rows * labels).map(|at| ((at * 7) % DIM) as i32).collect();
            let budget = [6, 2, 3].repeat(rows);
            let scored = label_scores(
                floats(&query, [BATCH, heads, DIM], device),
                &pool.keys(DType::F32, device),
                &ints(&channels, [BATCH, heads, labels], device),
                &ints(&budget, [BATCH, heads, 3], device),
                &pool.ranges(device),
                160,
                None,
            )
            .unwrap();
            let scores = scored.scores.try_into_vec_as::<f32>().unwrap();
            let candidates = read(scored.candidates);
            assert_eq!(read(scored.wanted), vec![6; rows]);
            for row in 0..rows {
                let pair = row / group;
                let open = LENGTHS[pair].saturating_sub(5);
                assert_eq!(candidates[row] as usize, open, "{} row {row}", tested.name);
                let exact: Vec<f64> = (0..open)
                    .map(|at| {
                        let key = pool.key(pair, at + 2);
                        let channels = channels[row * labels..][..labels].iter();
                        let product = |&c: &i32| {
                            f64::from(query[row * DIM + c as usize]) * f64::from(key[c as usize])
                        };
                        channels.map(product).sum()
                    })
                    .collect();
                let error = relative_error(&scores[row * 160..][..open], &exact);
                assert!(open == 0 || error < 1e-5, "{} row {row}: {error}", tested.name);
            }
        }
    }
}

/// Keys that come one by one leave the labels of all of them; rows behind a range stay.
#[test]
fn labels_follow_what_is_appended() {
    let (pool, count) = (Pool::new(), 3);
    for tested in devices() {
        let device = &tested.device;
        for (dtype, group) in [(DType::F32, 1), (DType::F16, 4)] {
            let (keys, rows) = (pool.keys(dtype, device), BATCH * KV_HEADS * group);
            let query = Numbers::new(3).normal(rows * DIM);
            let query = floats(&query, [BATCH, KV_HEADS * group, DIM], device).cast(dtype);
            let channels: Vec<i32> = (0..6 * count).map(|at| ((at * 7) % DIM) as i32).collect();
            let of = ints(&channels, [BATCH, KV_HEADS, count], device);
            let poison = vec![9.0; pool.slots() * count];
            let mut labels = floats(&poison, [pool.slots(), count], device).cast(dtype);
            let mut chosen = None;
            for length in 0..=150 {
                let lengths = LENGTHS.map(|most| length.min(most as i32));
                let lengths = ints(&lengths, [BATCH, KV_HEADS], device);
                let now = SlotRanges { lengths, ..pool.ranges(device) };
                let own = copy_labels(query.clone(), &keys, &of, &now, &mut labels).unwrap();
                chosen = Some(own);
            }
            let flat = |rows: Tensor<2>| rows.try_into_vec_as::<f32>().unwrap();
            let (all, labels) = (flat(keys), flat(labels));
            let mut expected = poison;
            for (pair, &length) in LENGTHS.iter().enumerate() {
                for (slot, label) in (0..length).flat_map(|at| (0..count).map(move |c| (at, c))) {
                    let slot = pool.offsets[pair] + slot;
                    let channel = channels[pair * count + label] as usize;
                    expected[slot * count + label] = all[slot * DIM + channel];
                }
            }
            assert_eq!(labels, expected, "{} {dtype:?}", tested.name);
            let [query, chosen] = [query, chosen.unwrap()].map(|own| flat(own.flatten(0, 1)));
            for (row, own) in chosen.chunks(count).enumerate() {
                let channels = &channels[row / group * count..][..count];
                let row = &query[row * DIM..][..DIM];
                let expected: Vec<f32> = channels.iter().map(|&at| row[at as usize]).collect();
                assert_eq!(own, expected, "{} {dtype:?}", tested.name);
            }
        }
    }
}

/// A layer of 2 sequences with 2 query heads each on one key-value head, the second of which takes
/// the first one's list, over steps in which lists are chosen every third.
#[test]
fn lists_stay_and_are_shared() {
    for tested in devices() {
        let device = &tested.device;
        let (heads, width) = (2, 3 + 4);
        let mut lists = ints(&[NO_LIST, 0, 0, 0, 0, 0, 0].repeat(4), [2, 2, width], device);
        let sources = ints(&[0; 4], [2, 2, 1], device);
        let budget = ints(&[4, 2, 3].repeat(4), [2, 2, 3], device);
        let channels = ints(&[0; 4], [2, 2, 1], device);
        // One channel counts: its number is the score.
        let mut numbers = Numbers::new(1);
        let keys = floats(&numbers.normal(80 * 4), [80, 4], device);
        let values = keys.clone().try_into_vec_as::<f32>().unwrap();
        let query = floats(&[1.0; 16], [2, 2, 4], device);
        let mut kept: [Option<(Vec<i32>, i32)>; 2] = [None, None];
        let mut retrievals = [0; 2];
        for step in 0..9 {
            let lengths = [20 + step, 3 + step];
            let ranges = SlotRanges {
                offsets: ints(&[0, 40], [2, 1], device),
                lengths: ints(&lengths, [2, 1], device),
            };
            let due = RefreshRows { lists: &lists, sources: &sources, layer: 0, period: 3 };
            let scored =
                label_scores(query.clone(), &keys, &channels, &budget, &ranges, 40, Some(due))
                    .unwrap();
            let wanted = scored.wanted.clone();
            let choice = Choice::Top(scored.wanted);
            let chosen = top_slots(scored.scores, Some(scored.candidates), choice, 4).unwrap();
            keep_lists(&mut lists, &chosen, &wanted, &budget, &ranges, None).unwrap();
            let (slots, counts) =
                list_slots(ListTable::Own(&lists), &sources, &budget, &ranges, 12).unwrap();
            let slots = slots.try_into_vec_as::<i32>().unwrap();
            let counts = read(counts);
            for row in 0..2 {
                let (length, offset) = (lengths[row], [0, 40][row]);
                if length % 3 == 0 || kept[row].is_none() {
                    let mut open: Vec<i32> = (2..(length - 3).max(2)).collect();
                    let score = |slot: &i32| values[(offset + slot) as usize * 4];
                    open.sort_by(|a, b| score(b).total_cmp(&score(a)));
                    open.truncate(4);
                    open.sort_unstable();
                    kept[row] = Some((open, (length - 3).max(2)));
                    retrievals[row] += 1;
                }
                let (list, recent) = kept[row].clone().unwrap();
                let all = (0..2).chain(list).chain(recent..length).map(|slot| offset + slot);
                let all: Vec<i32> = all.collect();
                for head in 0..heads {
                    let at = row * heads + head;
                    let own = &slots[at * 12..][..12];
                    let context = format!("{} step {step} row {row} head {head}", tested.name);
                    assert_eq!(own[..counts[at] as usize], all, "{context}");
                    assert!(
                        own[counts[at] as usize..].iter().all(|&slot| slot == NO_SLOT),
                        "{context}"
                    );
                }
            }
        }
        let lists = lists.try_into_vec_as::<i32>().unwrap();
        let counted = [0, 2].map(|row| lists[row * width + 2]);
        assert_eq!(counted, retrievals, "{}", tested.name);
        assert_eq!([1, 3].map(|row| lists[row * width + 2]), [0; 2], "{}", tested.name);
    }
}

/// A second layer reads the first one's lists from the board.
#[test]
fn boards_carry_lists_to_later_layers() {
    for tested in devices() {
        let device = &tested.device;
        let ranges = SlotRanges {
            offsets: ints(&[0], [1, 1], device),
            lengths: ints(&[10], [1, 1], device),
        };
        let budget = ints(&[2, 1, 1].repeat(2), [1, 2, 3], device);
        let mut board = ints(&[i32::MIN; 2 * 2 * 5], [2, 1, 2, 5], device);
        let mut first = ints(&[NO_LIST, 0, 0, 0, 0].repeat(2), [1, 2, 5], device);
        let chosen = Chosen {
            indices: ints(&[1, 3, 2, 6], [2, 2], device),
            counts: ints(&[2, 2], [2], device),
        };
        let due = ints(&[2, 2], [2], device);
        keep_lists(&mut first, &chosen, &due, &budget, &ranges, Some((&mut board, 0))).unwrap();
        let mut second = ints(&[NO_LIST, 0, 0, 0, 0].repeat(2), [1, 2, 5], device);
        let none =
            Chosen { indices: ints(&[-1; 4], [2, 2], device), counts: ints(&[0, 0], [2], device) };
        let idle = ints(&[0, 0], [2], device);
        keep_lists(&mut second, &none, &idle, &budget, &ranges, Some((&mut board, 1))).unwrap();
        // The second layer's heads take the first layer's second and first.
        let sources = ints(&[1, 0, 0, 0], [1, 2, 2], device);
        let table = ListTable::Board(&board);
        let (slots, counts) = list_slots(table, &sources, &budget, &ranges, 5).unwrap();
        assert_eq!(read(counts), [4, 4], "{}", tested.name);
        let slots = slots.try_into_vec_as::<i32>().unwrap();
        assert_eq!(slots, [0, 3, 7, 9, NO_SLOT, 0, 2, 4, 9, NO_SLOT], "{}", tested.name);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = &devices()[0].device;
    let pool = Pool::new();
    let (keys, ranges) = (pool.keys(DType::F32, device), pool.ranges(device));
    let mut bounds = floats(&[0.0; 2 * DIM], [2, DIM], device);
    let error = page_bounds(&keys, &ranges, &mut bounds, 16, PageSpan::Last).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "bounds", .. }), "{error}");
    let error = page_bounds(&keys, &ranges, &mut bounds, 0, PageSpan::Last).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { argument: "page", .. }), "{error}");
    let query = || floats(&[0.0; 2 * 4 * DIM], [2, 4, DIM], device);
    let budget = ints(&[0; 24], [2, 4, 3], device);
    let channels = ints(&[0; 8], [2, 4, 1], device);
    let error = label_scores(query(), &keys, &channels, &budget, &ranges, 160, None).unwrap_err();
    assert!(
        matches!(error, KernelError::HeadGroups { query_heads: 4, kv_heads: 3, .. }),
        "{error}"
    );
    let mut labels = floats(&[0.0; 8], [8, 1], device);
    let error = copy_labels(query(), &keys, &channels, &ranges, &mut labels).unwrap_err();
    assert!(matches!(error, KernelError::HeadGroups { query_heads: 4, .. }), "{error}");
    let own = ints(&[0; 6], [2, 3, 1], device);
    let three = floats(&[0.0; 6 * DIM], [2, 3, DIM], device);
    let error = copy_labels(three, &keys, &own, &ranges, &mut labels).unwrap_err();
    assert!(matches!(error, KernelError::Shape { argument: "labels", .. }), "{error}");
    let options = PageOptions { page: 16, heads: PageHeads::Query, always_last: true };
    let error = page_scores(query(), &bounds, &ranges, &budget, 10, options).unwrap_err();
    assert!(matches!(error, KernelError::HeadGroups { .. }), "{error}");
    let lists = ints(&[0; 24], [2, 4, 3], device);
    let sources = ints(&[0; 8], [2, 4, 1], device);
    let four = SlotRanges {
        offsets: ints(&[0; 4], [2, 2], device),
        lengths: ints(&[0; 4], [2, 2], device),
    };
    let table = ListTable::Own(&lists);
    let error = list_slots(table, &sources, &budget, &four, 8).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
}
