//! Sketches alone: against golden files, exactly reversible, and as the paper's statistics say.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_kernels::{
    HEAD_FIELDS, SketchHashes, SketchPool, SketchSource, sketch_insert, sketch_query,
};
use kv_testing::{Golden, Numbers, devices, golden_files, relative_error};

/// Sketches of a few ranges, of the same size each.
struct Sketches {
    keys: Tensor<2>,
    values: Tensor<2>,
    heads: Tensor<2, Int>,
    hashes: SketchHashes,
    signed_keys: bool,
    most_entries: usize,
}

impl Sketches {
    fn new(
        ranges: usize,
        entries: usize,
        head_dim: usize,
        hashes: SketchHashes,
        device: &Device,
    ) -> Self {
        let most_entries = hashes.buckets() * entries;
        let zeros = || Tensor::zeros([ranges * most_entries, head_dim], (device, DType::F32));
        let heads: Vec<i32> = (0..ranges)
            .flat_map(|range| [(range * most_entries) as i32, entries as i32, 0, 0, 0, 0])
            .collect();
        let heads = TensorData::new(heads, [ranges, HEAD_FIELDS]);
        let heads = Tensor::from_data(heads, (device, DType::I32));
        Self { keys: zeros(), values: zeros(), heads, hashes, signed_keys: false, most_entries }
    }

    fn add(&mut self, tokens: &[i32], keys: Tensor<3>, values: Tensor<3>, sign: f32) {
        let tokens = self.tokens(tokens);
        let pool = SketchPool {
            keys: &mut self.keys,
            values: &mut self.values,
            heads: &self.heads,
            most_entries: self.most_entries,
            hashes: &self.hashes,
            signed_keys: self.signed_keys,
        };
        sketch_insert(pool, tokens, keys, values, sign).unwrap();
    }

    fn query(&self, tokens: &[i32], dtype: DType) -> [Tensor<3>; 2] {
        let source = SketchSource {
            keys: &self.keys,
            values: &self.values,
            heads: &self.heads,
            most_entries: self.most_entries,
            hashes: &self.hashes,
            signed_keys: self.signed_keys,
        };
        sketch_query(source, self.tokens(tokens), dtype).unwrap()
    }

    /// The same tokens for every range.
    fn tokens(&self, tokens: &[i32]) -> Tensor<2, Int> {
        let ranges = self.heads.dims()[0];
        let data = TensorData::new(tokens.repeat(ranges), [ranges, tokens.len()]);
        Tensor::from_data(data, (&self.keys.device(), DType::I32))
    }

    fn entries(&self) -> [Vec<f32>; 2] {
        [&self.keys, &self.values].map(|entries| read(entries.clone()))
    }
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).try_into_vec_as::<f32>().unwrap()
}

fn seeds(count: usize, seed: u32) -> Vec<[u32; 2]> {
    (0..count as u32).map(|range| [seed, range]).collect()
}

#[test]
fn golden_sketches() {
    for file in golden_files("golden_sketches", "kvreviver_sketch_") {
        for tested in devices() {
            golden(&file, &tested.device, tested.name);
        }
    }
}

fn golden(file: &Golden, device: &Device, name: &str) {
    let [heads, tokens, head_dim] = file.tensor("k").dims();
    let hashed = file.tensor("h");
    let [buckets, _] = hashed.dims();
    let (entries, all) = (file.number("b") as usize, (0..tokens as i32).collect::<Vec<_>>());
    let hashes =
        SketchHashes::table(&hashed.indices(), &file.tensor("g").f32(), buckets, device).unwrap();
    let (keys, values) = (file.tensor("k").on::<3>(device), file.tensor("v").on::<3>(device));
    // `[r, b, H, D]` of the file to `[H, r, b, D]`.
    let expected = |name: &str| {
        let given = file.tensor(name).values;
        let at = move |head: usize, entry: usize, column: usize| {
            given[(entry * heads + head) * head_dim + column]
        };
        let rows = (0..heads * buckets * entries).flat_map(move |row| {
            let (head, entry) = (row / (buckets * entries), row % (buckets * entries));
            (0..head_dim).map(move |column| (head, entry, column))
        });
        rows.map(|(head, entry, column)| at(head, entry, column)).collect::<Vec<f64>>()
    };
    let compare = |what: &str, actual: Vec<f32>, expected: &[f64]| {
        let error = relative_error(&actual, expected);
        assert!(error < 1e-6, "{} {what} on {name}: off by {error}", file.name);
    };
    let mut sketch = Sketches::new(heads, entries, head_dim, hashes.clone(), device);
    let check = |sketch: &Sketches, behind: &str| {
        let [sketch_keys, sketch_values] = sketch.entries();
        compare("keys", sketch_keys, &expected(&format!("sketch_key{behind}")));
        compare("values", sketch_values, &expected(&format!("sketch_value{behind}")));
        let [keys, values] = sketch.query(&all, DType::F32);
        let query = |what: &str| file.tensor(&format!("query_{what}{behind}")).values;
        compare("queried keys", read(keys), &query("key"));
        compare("queried values", read(values), &query("value"));
    };
    sketch.add(&all, keys.clone(), values.clone(), 1.0);
    check(&sketch, "");
    let deleted: Vec<i32> = file.tensor("deleted").values.iter().map(|x| *x as i32).collect();
    let rows = |all: &Tensor<3>| {
        let at = Tensor::<1, Int>::from_data(deleted.as_slice(), (device, DType::I32));
        all.clone().select(1, at)
    };
    sketch.add(&deleted, rows(&keys), rows(&values), -1.0);
    check(&sketch, "_after_delete");
    let mut signed = Sketches::new(heads, entries, head_dim, hashes, device);
    signed.signed_keys = true;
    signed.add(&all, keys, values, 1.0);
    let [keys, _] = signed.query(&all, DType::F32);
    compare("signed keys", read(keys), &file.tensor("query_signedkey").values);
}

/// Any number of buckets, odd or even; ranges that differ; tokens that are none.
#[test]
fn devices_agree_with_the_references() {
    for (ranges, buckets, entries, head_dim) in
        [(1, 1, 1, 4), (3, 2, 5, 64), (2, 3, 7, 128), (1, 6, 3, 36), (2, 9, 2, 256)]
    {
        let tokens: Vec<i32> =
            (0..70).map(|token| if token % 7 == 3 { -1 } else { 5 * token }).collect();
        let shape = [ranges, tokens.len(), head_dim];
        let results = devices().into_iter().map(|tested| {
            let device = &tested.device;
            let mut numbers = Numbers::new(buckets as u64);
            let (keys, values) =
                (numbers.tensor::<3>(shape, device), numbers.tensor::<3>(shape, device));
            let hashes = SketchHashes::seeded(&seeds(ranges, 9), buckets, device);
            let mut sketch = Sketches::new(ranges, entries, head_dim, hashes, device);
            sketch.add(&tokens, keys, values, 1.0);
            let [sketch_keys, sketch_values] = sketch.entries();
            let [keys, values] = sketch.query(&tokens, DType::F32).map(read);
            (tested.name, [sketch_keys, sketch_values, keys, values])
        });
        let results: Vec<_> = results.collect();
        let (_, expected) = &results[0];
        let absent = &expected[2][3 * head_dim..4 * head_dim];
        assert!(absent.iter().all(|x| *x == 0.0), "a token that is none has an estimate");
        for (name, actual) in &results[1..] {
            for (part, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                let error = relative_error(actual, &expected);
                assert!(error < 1e-6, "{buckets} buckets, part {part} on {name}: off by {error}");
            }
        }
    }
}

/// Alone in its entries, a token comes back as it was; sharing all of them, everything adds up.
#[test]
fn estimates_are_exact_without_collisions() {
    for tested in devices() {
        let device = &tested.device;
        let (buckets, tokens, head_dim) = (3, 8usize, 32);
        let apart: Vec<u32> =
            (0..buckets * tokens).map(|i| ((i % tokens) as u32 * 5 + 3) % 8).collect();
        let signs: Vec<f32> =
            (0..buckets * tokens).map(|i| if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let mut numbers = Numbers::new(4);
        let shape = [2, tokens, head_dim];
        let (keys, values) =
            (numbers.tensor::<3>(shape, device), numbers.tensor::<3>(shape, device));
        let all: Vec<i32> = (0..tokens as i32).collect();
        let hashes = SketchHashes::table(&apart, &signs, buckets, device).unwrap();
        let mut sketch = Sketches::new(2, tokens, head_dim, hashes, device);
        sketch.add(&all, keys.clone(), values.clone(), 1.0);
        let [found_keys, found_values] = sketch.query(&all, DType::F32);
        assert_eq!(read(found_keys), read(keys.clone()), "{}", tested.name);
        assert_eq!(read(found_values), read(values.clone()), "{}", tested.name);

        // One entry for all.
        let hashes = SketchHashes::table(
            &vec![0; buckets * tokens],
            &vec![1.0; buckets * tokens],
            buckets,
            device,
        )
        .unwrap();
        let mut sketch = Sketches::new(2, 1, head_dim, hashes, device);
        sketch.add(&all, keys.clone(), values.clone(), 1.0);
        let [found, _] = sketch.query(&[5], DType::F32);
        let sums: Vec<f64> = read(keys.sum_dim(1)).iter().map(|x| f64::from(*x)).collect();
        let error = relative_error(&read(found), &sums);
        assert!(error < 1e-6, "{}: off by {error}", tested.name);
        let [_, found] = sketch.query(&[5], DType::F32);
        let sums: Vec<f64> = read(values.sum_dim(1)).iter().map(|x| f64::from(*x)).collect();
        let error = relative_error(&read(found), &sums);
        assert!(error < 1e-6, "{}: values off by {error}", tested.name);
    }
}

/// What was put in and taken out again leaves nothing, whatever happened in between.
#[test]
fn deletions_undo_insertions() {
    let operations = 100_000;
    let (buckets, entries, head_dim, block) = (3, 13, 16, 500);
    let device = &devices()[0].device;
    let hashes = SketchHashes::seeded(&seeds(1, 1), buckets, device);
    let mut sketch = Sketches::new(1, entries, head_dim, hashes, device);
    let mut numbers = Numbers::new(8);
    let own: Vec<i32> = (0..block).collect();
    let shape = [1, own.len(), head_dim];
    let (keys, values) = (numbers.tensor::<3>(shape, device), numbers.tensor::<3>(shape, device));
    sketch.add(&own, keys.clone(), values.clone(), 1.0);
    let before = sketch.entries();
    let passing: Vec<_> = (0..operations / 2 / block)
        .map(|round| {
            let tokens: Vec<i32> = (0..block).map(|token| block * (round + 1) + token).collect();
            let [keys, values] = [0, 1].map(|_| numbers.tensor::<3>(shape, device));
            (tokens, keys, values)
        })
        .collect();
    for (tokens, keys, values) in &passing {
        sketch.add(tokens, keys.clone(), values.clone(), 1.0);
    }
    // In another order than they came.
    for (tokens, keys, values) in passing.iter().rev() {
        sketch.add(tokens, keys.clone(), values.clone(), -1.0);
    }
    let compare = |what: &str, expected: &[Vec<f32>; 2]| {
        for (after, before) in sketch.entries().iter().zip(expected) {
            let largest = before.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let drift = after.iter().zip(before).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(drift <= 1e-5 * largest, "{what}: {drift} of {largest}");
        }
    };
    compare("drift", &before);
    // An empty sketch holds nothing of what was in it.
    sketch.add(&own, keys, values, -1.0);
    let largest = before.iter().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
    let left = sketch.entries().iter().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
    assert!(left <= 1e-5 * largest, "{left} is left of {largest}");
}

/// Tokens that come and go one by one, as decode steps move them, leave hardly more: as many at a
/// time as a tenth of 32,000 tokens' slots has in its sketch.
#[test]
fn tokens_that_come_and_go_leave_nothing() {
    let (operations, live) = (100_000, 29_000);
    let (buckets, entries, head_dim) = (3, 109, 4);
    let device = &devices()[0].device;
    let hashes = SketchHashes::seeded(&seeds(1, 5), buckets, device);
    let mut sketch = Sketches::new(1, entries, head_dim, hashes, device);
    let tokens = operations / 2;
    let numbers = Numbers::new(18).normal(2 * tokens * head_dim);
    // Unsigned keys around a mean add up.
    let row = |token: usize, which: usize| {
        let own = &numbers[(2 * token + which) * head_dim..][..head_dim];
        let own: Vec<f32> = own.iter().map(|x| x + 0.25).collect();
        Tensor::<1>::from_data(own.as_slice(), (device, DType::F32)).reshape([1, 1, head_dim])
    };
    let mut largest = 0.0f32;
    for token in 0..tokens + live {
        if token < tokens {
            sketch.add(&[token as i32], row(token, 0), row(token, 1), 1.0);
        }
        if let Some(old) = token.checked_sub(live) {
            sketch.add(&[old as i32], row(old, 0), row(old, 1), -1.0);
        }
        if token == live {
            let entries = sketch.entries();
            largest = entries.iter().flatten().fold(0.0, |max, x| max.max(x.abs()));
        }
    }
    let left = sketch.entries().iter().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
    assert!(left <= 1e-5 * largest, "{left} is left of {largest}");
}

/// Two tokens that change places a thousand times, each put in as it came out. Where they share no
/// entry, they come back as they did first; where they do, what one leaves behind is the other's,
/// as in plain arithmetic.
#[test]
fn tokens_that_change_places() {
    let (buckets, entries, head_dim, tokens) = (3usize, 3usize, 4usize, 3usize);
    for tested in devices() {
        let device = &tested.device;
        // Entries by bucket and token; the third token stays.
        for (places, apart) in
            [([0, 1, 2, 0, 1, 1, 2, 1, 0], true), ([0, 0, 2, 0, 1, 1, 2, 1, 0], false)]
        {
            let hashes = SketchHashes::table(&places, &[1.0; 9], buckets, device).unwrap();
            let mut sketch = Sketches::new(1, entries, head_dim, hashes, device);
            let rows = Numbers::new(4).tensor::<3>([1, tokens, head_dim], device);
            let all: Vec<i32> = (0..tokens as i32).collect();
            sketch.add(&all, rows.clone(), rows.clone(), 1.0);
            // The same in f64, of the first column.
            let column: Vec<f64> =
                read(rows.clone()).chunks(head_dim).map(|row| f64::from(row[0])).collect();
            let mut sums = vec![0.0f64; buckets * entries];
            let at = |bucket: usize, token: usize| {
                bucket * entries + places[bucket * tokens + token] as usize
            };
            let add = |sums: &mut Vec<f64>, token: usize, x: f64| {
                (0..buckets).for_each(|bucket| sums[at(bucket, token)] += x);
            };
            (0..tokens).for_each(|token| add(&mut sums, token, column[token]));
            let median = |sums: &[f64], token: usize| {
                let mut parts: Vec<f64> =
                    (0..buckets).map(|bucket| sums[at(bucket, token)]).collect();
                parts.sort_by(f64::total_cmp);
                parts[1]
            };
            // The first is in the sketch, the second comes from outside.
            let mut outside = rows.clone().narrow(1, 1, 1);
            let mut outside_reference = column[1];
            sketch.add(&[1], outside.clone(), outside.clone(), -1.0);
            add(&mut sums, 1, -outside_reference);
            let mut first: [Option<Vec<f32>>; 2] = [None, None];
            for swap in 0..1_000 {
                let (back, forth) = (swap % 2, 1 - swap % 2);
                let [revived, _] = sketch.query(&[back as i32], DType::F32);
                let reference = median(&sums, back);
                sketch.add(&[back as i32], revived.clone(), revived.clone(), -1.0);
                sketch.add(&[forth as i32], outside.clone(), outside.clone(), 1.0);
                add(&mut sums, back, -reference);
                add(&mut sums, forth, outside_reference);
                let own = read(revived.clone());
                let off = (f64::from(own[0]) - reference).abs();
                assert!(off < 1e-4, "{} swap {swap}: off by {off}", tested.name);
                let known = first[back].get_or_insert_with(|| own.clone());
                let moved = own.iter().zip(&*known).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(!apart || moved < 1e-5, "{} swap {swap}: {moved}", tested.name);
                (outside, outside_reference) = (revived, reference);
            }
        }
    }
}

/// Two tokens meet in a bucket with probability `1 / b`; entries and signs are even; ranges and
/// buckets differ.
#[test]
fn hashes_are_universal() {
    let (buckets, entries, tokens) = (3usize, 13usize, 2_000usize);
    let device = &devices()[0].device;
    let ranges = 40;
    let hashes = SketchHashes::seeded(&seeds(ranges, 77), buckets, device);
    // Where a token went shows in an otherwise empty sketch: 2 tokens' entries, found one by one.
    let mut counts = vec![0usize; entries];
    let (mut meetings, mut negatives, mut placed) = (0usize, 0usize, 0usize);
    let pairs = 250;
    for pair in 0..pairs {
        // Neighbours, and tokens far apart.
        let other = if pair % 2 == 0 { pair + 1 } else { tokens - pair };
        let places = [pair, other].map(|token| {
            let mut sketch = Sketches::new(ranges, entries, 4, hashes.clone(), device);
            let ones = || Tensor::<3>::ones([ranges, 1, 4], (device, DType::F32));
            sketch.add(&[token as i32], ones(), ones(), 1.0);
            let [keys, values] = sketch.entries();
            assert_eq!(keys.iter().filter(|x| **x == 1.0).count(), 4 * buckets * ranges);
            (0..ranges * buckets)
                .map(|at| {
                    let row = &values[at * entries * 4..][..entries * 4];
                    let found = row.iter().position(|x| *x != 0.0).unwrap();
                    (found / 4, row[found] < 0.0)
                })
                .collect::<Vec<_>>()
        });
        for (own, other) in places[0].iter().zip(&places[1]) {
            meetings += usize::from(own.0 == other.0);
            negatives += usize::from(own.1);
            counts[own.0] += 1;
            placed += 1;
        }
    }
    let near = |what: &str, count: usize, probability: f64| {
        let expected = placed as f64 * probability;
        let deviation = (expected * (1.0 - probability)).sqrt();
        let off = (count as f64 - expected) / deviation;
        assert!(off.abs() < 4.5, "{what}: {count} of {placed}, {off} deviations off");
    };
    near("meetings", meetings, 1.0 / entries as f64);
    near("negative signs", negatives, 0.5);
    counts
        .iter()
        .enumerate()
        .for_each(|(at, count)| near(&format!("entry {at}"), *count, 1.0 / entries as f64));
}

/// Estimates of values are unbiased, those of unsigned keys are off by what shares the entry.
#[test]
fn estimates_have_the_predicted_statistics() {
    let device = &devices()[0].device;
    let (buckets, entries, head_dim, tokens) = (3usize, 8usize, 64usize, 240usize);
    let load = (tokens - 1) as f64 / entries as f64;
    let mut numbers = Numbers::new(21);
    let shape = [1, tokens, head_dim];
    // Keys around a mean, as real ones are.
    let mean = 0.25;
    let keys = numbers.tensor::<3>(shape, device).add_scalar(mean);
    let values = numbers.tensor::<3>(shape, device).add_scalar(mean);
    let all: Vec<i32> = (0..tokens as i32).collect();
    let (own_keys, own_values) = (read(keys.clone()), read(values.clone()));
    let runs = 60;
    let mut errors = Vec::new();
    let mut key_errors = Vec::new();
    let mut signed_errors = Vec::new();
    for run in 0..runs {
        let hashes = SketchHashes::seeded(&seeds(1, 1_000 + run), buckets, device);
        for signed in [false, true] {
            let mut sketch = Sketches::new(1, entries, head_dim, hashes.clone(), device);
            sketch.signed_keys = signed;
            sketch.add(&all, keys.clone(), values.clone(), 1.0);
            let [found_keys, found_values] = sketch.query(&all, DType::F32).map(read);
            let of = |found: Vec<f32>, own: &[f32]| {
                found
                    .into_iter()
                    .zip(own.to_vec())
                    .map(|(a, b)| f64::from(a) - f64::from(b))
                    .sum::<f64>()
                    / (tokens * head_dim) as f64
            };
            if signed {
                signed_errors.push(of(found_keys, &own_keys));
            } else {
                key_errors.push(of(found_keys, &own_keys));
                errors.push(of(found_values, &own_values));
            }
        }
    }
    let moments = |errors: &[f64]| {
        let count = errors.len() as f64;
        let mean = errors.iter().sum::<f64>() / count;
        let variance = errors.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
        (mean, (variance / count).sqrt())
    };
    for (what, errors) in [("values", &errors), ("signed keys", &signed_errors)] {
        let (mean, deviation) = moments(errors);
        assert!(mean.abs() < 4.0 * deviation, "{what}: t = {}", mean / deviation);
    }
    // Unsigned keys: an entry holds `load` others of this mean.
    let (bias, deviation) = moments(&key_errors);
    let predicted = load * f64::from(read(keys.mean())[0]);
    assert!(
        (bias - predicted).abs() < 0.1 * predicted + 4.0 * deviation,
        "keys are off by {bias}, {predicted} was predicted"
    );
}

#[test]
fn the_median_of_three_normals() {
    for tested in devices() {
        let device = &tested.device;
        // Three entries of noise each.
        let (head_dim, ranges) = (256, 600);
        let hashes = SketchHashes::table(&[0, 0, 0], &[1.0, 1.0, 1.0], 3, device).unwrap();
        let mut sketch = Sketches::new(ranges, 1, head_dim, hashes, device);
        sketch.keys = Numbers::new(2).tensor([3 * ranges, head_dim], device);
        let [keys, _] = sketch.query(&[0], DType::F32);
        let keys = read(keys);
        let variance = keys.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / keys.len() as f64;
        assert!((variance / 0.4487 - 1.0).abs() < 0.02, "{}: {variance}", tested.name);
    }
}

#[test]
fn refuses_what_does_not_fit() {
    for tested in devices() {
        let device = &tested.device;
        let hashes = SketchHashes::seeded(&seeds(2, 0), 3, device);
        let mut sketch = Sketches::new(2, 5, 8, hashes, device);
        let zeros = |shape: [usize; 3]| Tensor::<3>::zeros(shape, (device, DType::F32));
        let tokens = sketch.tokens(&[1, 2]);
        let mut insert = |hashes: &SketchHashes, keys: Tensor<3>| {
            let pool = SketchPool {
                keys: &mut sketch.keys,
                values: &mut sketch.values,
                heads: &sketch.heads,
                most_entries: 15,
                hashes,
                signed_keys: false,
            };
            sketch_insert(pool, tokens.clone(), keys, zeros([2, 2, 8]), 1.0)
                .unwrap_err()
                .to_string()
        };
        let own = SketchHashes::seeded(&seeds(2, 0), 3, device);
        let error = insert(&own, zeros([2, 3, 8]));
        assert!(error.contains("keys") && error.contains("[2, 2, 8]"), "{error}");
        let error = insert(&SketchHashes::seeded(&seeds(2, 0), 10, device), zeros([2, 2, 8]));
        assert!(error.contains("`buckets` is 10"), "{error}");
        let error = insert(&SketchHashes::seeded(&seeds(1, 0), 3, device), zeros([2, 2, 8]));
        assert!(error.contains("hashes"), "{error}");
        for (entries, signs) in [(&[0, 1, 0, 1][..], &[1.0; 4][..]), (&[0, 1, 0], &[1.0])] {
            let error = SketchHashes::table(entries, signs, 3, device).unwrap_err().to_string();
            assert!(error.contains("entries"), "{error}");
        }
    }
}
