use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::merge_reference::{Member, MergedSlot, merge_group};
use kv_kernels::{KernelError, KeyRule, MergeLists, MergeOptions, Merged, SlotLists, merge_slots};
use kv_testing::{Numbers, TestDevice, devices};

mod golden;
mod many;

const RULES: [KeyRule; 4] = [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes, KeyRule::Mean];

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Attention of one query over slots `(weight's logarithm, key, value)`: output and log-sum-exp.
fn attention<'a>(
    query: &[f64],
    slots: impl Iterator<Item = (f64, &'a [f64], &'a [f64])> + Clone,
) -> (Vec<f64>, f64) {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let logit = |(weight, key, _): (f64, &[f64], &[f64])| weight + scale * dot(query, key);
    let max = slots.clone().map(logit).fold(f64::NEG_INFINITY, f64::max);
    let mut output = vec![0.0; query.len()];
    let mut sum = 0.0;
    for slot in slots {
        let weight = (logit(slot) - max).exp();
        sum += weight;
        output.iter_mut().zip(slot.2).for_each(|(out, x)| *out += weight * x);
    }
    output.iter_mut().for_each(|x| *x /= sum);
    (output, max + sum.ln())
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt()
}

/// A group of tokens, with the scores that a query gives them.
#[derive(Debug, Clone)]
struct Group {
    query: Vec<f64>,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    log_weights: Vec<f64>,
    log_scores: Vec<f64>,
}

impl Group {
    /// `size` tokens whose logits are about `spread`, or all `shifted` by a number.
    fn random(numbers: &mut Numbers, size: usize, dim: usize, spread: f64, shift: f64) -> Self {
        let mut row = |scale: f64| -> Vec<f64> {
            numbers.normal(dim).iter().map(|&x| f64::from(x) * scale).collect()
        };
        let query = row(1.0);
        let along = shift * (dim as f64).sqrt() / dot(&query, &query);
        let mut keys: Vec<_> = (0..size).map(|_| row(spread)).collect();
        for key in &mut keys {
            key.iter_mut().zip(&query).for_each(|(k, q)| *k += along * q);
        }
        let values = (0..size).map(|_| row(1.0)).collect();
        let log_weights = (0..size).map(|_| (1.0 + numbers.below(9) as f64).ln()).collect();
        let mut group = Self { query, keys, values, log_weights, log_scores: Vec::new() };
        group.score();
        group
    }

    fn score(&mut self) {
        let scale = 1.0 / (self.query.len() as f64).sqrt();
        self.log_scores = self.keys.iter().map(|key| scale * dot(key, &self.query)).collect();
    }

    fn merged(&self, rule: KeyRule, guard: f64) -> MergedSlot {
        let members: Vec<_> = (0..self.keys.len())
            .map(|i| Member {
                key: &self.keys[i],
                value: &self.values[i],
                log_weight: self.log_weights[i],
                log_score: self.log_scores[i],
            })
            .collect();
        let scale = 1.0 / (self.query.len() as f64).sqrt();
        merge_group(&members, Some(&self.query), rule, guard, scale)
    }

    /// Attention over the tokens and a slot that weighs as much as they do: the output, and the
    /// tokens' own log-sum-exp.
    fn before(&self) -> (Vec<f64>, f64) {
        let tokens = (0..self.keys.len())
            .map(|i| (self.log_weights[i], self.keys[i].as_slice(), self.values[i].as_slice()));
        self.beside(tokens)
    }

    /// The same over the slot that they became.
    fn after(&self, slot: &MergedSlot) -> (Vec<f64>, f64) {
        self.beside(std::iter::once((slot.log_weight, &slot.key[..], &slot.value[..])))
    }

    /// Without another slot the output would not depend on keys.
    fn beside<'a>(
        &self,
        slots: impl Iterator<Item = (f64, &'a [f64], &'a [f64])> + Clone,
    ) -> (Vec<f64>, f64) {
        let (_, lse) = attention(&self.query, slots.clone());
        let scores =
            self.log_weights.iter().zip(&self.log_scores).map(|(weight, score)| weight + score);
        let top = scores.clone().fold(f64::NEG_INFINITY, f64::max);
        let weight = top + scores.map(|score| (score - top).exp()).sum::<f64>().ln();
        let (key, value) = (vec![0.0; self.query.len()], vec![1.0; self.query.len()]);
        let mut all: Vec<(f64, &[f64], &[f64])> = slots.collect();
        all.push((weight, &key, &value));
        let (output, _) = attention(&self.query, all.into_iter());
        (output, lse)
    }

    /// The two logits that the paper's factor is made of.
    fn logits(&self) -> (f64, f64) {
        let slot = self.merged(KeyRule::Votes, 1.0);
        let own: f64 = slot.log_score;
        (self.merged(KeyRule::Mean, 1.0).log_score, own)
    }
}

/// Errors of a merged slot that rounding explains.
#[derive(Debug)]
struct Rounding {
    key: f64,
    value: f64,
    logarithm: f64,
}

impl Group {
    /// What rounding to f32 (unit roundoff `u = 2^-24`) may change. Logarithms are of the size of
    /// the largest logit or weight, `m`, and so are off by `ε = 16 u (1 + m)`, as are the shares
    /// that are made of them, relative to their size. Keys and values are means by these shares.
    /// The paper's key is the mean times `target / mean`, a quotient of two logarithms; the
    /// additive one is the mean and `(target - mean) / (scale ‖q‖²)` times the query.
    ///
    /// Pools of another `dtype` round each number that is written once more, to its nearest.
    fn rounding(&self, rule: KeyRule, exact: &MergedSlot, dtype: DType) -> Rounding {
        let largest =
            |rows: &[Vec<f64>]| rows.iter().map(|row| dot(row, row).sqrt()).fold(0.0, f64::max);
        let logarithms = self.log_scores.iter().chain(&self.log_weights);
        let most = logarithms.map(|value| value.abs()).fold(0.0, f64::max);
        let logarithm = 16.0 * 2f64.powi(-24) * (1.0 + most);
        let (target, mean) = self.logits();
        let key = logarithm * largest(&self.keys);
        let scale = 1.0 / (self.query.len() as f64).sqrt();
        let step = logarithm / (scale * dot(&self.query, &self.query).sqrt());
        let key = match rule {
            KeyRule::Paper if !exact.guarded => {
                (target / mean).abs() * key * (1.0 + 1.0 / mean.abs() + 1.0 / target.abs())
            }
            KeyRule::Paper | KeyRule::Additive => key + step,
            KeyRule::Votes | KeyRule::Mean => key,
        };
        let unit = match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 0.0,
        };
        let written = |row: &[f64]| unit * dot(row, row).sqrt();
        Rounding {
            key: key + written(&exact.key),
            value: logarithm * largest(&self.values) + written(&exact.value),
            logarithm,
        }
    }

    /// The group in a pool of `dtype`, with the scores that its keys then have.
    fn rounded(mut self, device: &Device, dtype: DType) -> Self {
        for row in self.keys.iter_mut().chain(&mut self.values) {
            let floats: Vec<f32> = row.iter().map(|&x| x as f32).collect();
            let floats = Tensor::<1>::from_data(floats.as_slice(), (device, DType::F32));
            let floats = floats.cast(dtype).cast(DType::F32).try_into_vec_as::<f32>().unwrap();
            *row = floats.into_iter().map(f64::from).collect();
        }
        self.score();
        self
    }
}

/// Theorem 3 for a million groups: attention to a group is that to its merged slot.
#[test]
fn the_step_that_a_merge_is_made_for_does_not_change() {
    let mut numbers = Numbers::new(1);
    for case in 0..1_000_000usize {
        let spread = [0.1, 1.0, 5.0, 40.0][case % 4];
        let shift = [0.0, -3.0, 3.0, 60.0, -60.0][case / 4 % 5];
        let group = Group::random(&mut numbers, 2 + case % 4, 4, spread, shift);
        let (output, lse) = group.before();
        for rule in [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes] {
            let slot = group.merged(rule, 4.0);
            let (after, after_lse) = group.after(&slot);
            let error = distance(&output, &after);
            assert!(error < 1e-12, "{rule:?} {case}: output off by {error} of {group:?}");
            let error = (lse - after_lse).abs() / (1.0 + lse.abs());
            assert!(error < 1e-12, "{rule:?} {case}: log-sum-exp off by {error} of {group:?}");
        }
        // What other merges lose: attention sags.
        let (_, sagged) = group.after(&group.merged(KeyRule::Mean, 4.0));
        let (target, mean) = group.logits();
        assert!(mean >= target - 1e-9 * (1.0 + mean.abs()), "{case}: {mean} below {target}");
        assert!((sagged - lse - (mean - target)).abs() < 1e-9 * (1.0 + lse.abs()), "{case}");
    }
}

/// Merges groups on a device, one a row, their first members kept.
fn on_device(tested: &TestDevice, groups: &[Group], options: MergeOptions) -> Vec<MergedSlot> {
    in_pools(tested, groups, options, DType::F32)
}

/// [`on_device`] in pools of `dtype`.
fn in_pools(
    tested: &TestDevice,
    groups: &[Group],
    options: MergeOptions,
    dtype: DType,
) -> Vec<MergedSlot> {
    let device = &tested.device;
    let dim = groups[0].query.len();
    let width = groups.iter().map(|group| group.keys.len()).max().unwrap() - 1;
    let rows = groups.len();
    let floats = |values: Vec<f64>| {
        let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
        Tensor::<1>::from_data(values.as_slice(), (device, DType::F32))
    };
    let ints =
        |values: Vec<i32>| Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
    let first = |rows: &dyn Fn(&Group) -> &Vec<Vec<f64>>| {
        floats(groups.iter().flat_map(|group| rows(group)[0].clone()).collect())
            .reshape([groups.len(), dim])
    };
    let rest = |rows: &dyn Fn(&Group) -> &Vec<Vec<f64>>| {
        let zeros = vec![0.0; dim];
        let rows = groups.iter().flat_map(|group| {
            let rest = rows(group)[1..].iter().chain(std::iter::repeat(&zeros));
            rest.take(width.max(1)).flatten().copied().collect::<Vec<_>>()
        });
        floats(rows.collect()).reshape([groups.len() * width.max(1), dim])
    };
    let weights = |group: &Group, i: usize| {
        let of = |values: &[f64]| values.get(i).copied().unwrap_or_default();
        [of(&group.log_weights), of(&group.log_scores)]
    };
    let width = width.max(1);
    let [mut keys, mut values] =
        [first(&|group| &group.keys), first(&|group| &group.values)].map(|rows| rows.cast(dtype));
    let all = |range: std::ops::Range<usize>| {
        let numbers =
            groups.iter().flat_map(|group| range.clone().flat_map(move |i| weights(group, i)));
        floats(numbers.collect()).reshape([rows, range.len(), 2])
    };
    let lists = MergeLists {
        victims: SlotLists {
            slots: ints((0..(rows * width) as i32).collect()).reshape([rows, width]),
            counts: ints(groups.iter().map(|group| group.keys.len() as i32 - 1).collect()),
        },
        targets: Tensor::zeros([rows, width], (device, DType::I32)),
        victim_weights: all(1..1 + width),
        kept: SlotLists {
            slots: ints((0..rows as i32).collect()).reshape([rows, 1]),
            counts: Tensor::ones([rows], (device, DType::I32)),
        },
        kept_weights: all(0..1),
    };
    let queries = groups.iter().flat_map(|group| group.query.clone());
    let queries = Some(floats(queries.collect()).reshape([rows, dim]));
    let from = [rest(&|group| &group.keys), rest(&|group| &group.values)];
    let from = from.map(|rows| rows.cast(dtype));
    let Merged { weights, guarded } = merge_slots(
        Some([&from[0], &from[1]]),
        [&mut keys, &mut values],
        &lists,
        &MergeOptions { queries, ..options },
    )
    .unwrap();
    let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
    let [keys, values] = [keys, values].map(|rows| read(rows.cast(DType::F32).reshape([-1])));
    let weights = read(weights.reshape([-1]));
    let guarded = guarded.try_into_vec_as::<i32>().unwrap();
    let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect();
    (0..rows)
        .map(|row| MergedSlot {
            key: wide(&keys[row * dim..][..dim]),
            value: wide(&values[row * dim..][..dim]),
            log_weight: weights[2 * row].into(),
            log_score: weights[2 * row + 1].into(),
            guarded: guarded[row] == 1,
        })
        .collect()
}

/// Merged slots of a device leave the step as it was, but for rounding.
fn check_on_device(tested: &TestDevice, name: &str, groups: &[Group], rule: KeyRule) {
    let slots = on_device(tested, groups, MergeOptions { rule, ..Default::default() });
    for (at, (group, slot)) in groups.iter().zip(&slots).enumerate() {
        let context = format!("{name} group {at} on {}, {rule:?}", tested.name);
        let exact = group.merged(rule, 4.0);
        let (target, mean) = group.logits();
        let factor = target / mean;
        let most = group.log_scores.iter().map(|logit| logit.abs()).fold(0.0, f64::max);
        // Where the guard trips depends on rounding near its bounds.
        let bound = |bound: f64| (factor / bound - 1.0).abs() < 1e-4;
        assert!(
            slot.guarded == exact.guarded || bound(0.25) || bound(4.0) || mean.abs() < 1e-4,
            "{context}: guarded {} at {factor}",
            slot.guarded
        );
        let stretch = if exact.guarded || rule != KeyRule::Paper { 1.0 } else { factor.abs() };
        let limit = 16.0 * 2f64.powi(-24) * (1.0 + most) * stretch.max(1.0);
        let (output, lse) = group.before();
        let (after, after_lse) = group.after(slot);
        let size = dot(&output, &output).sqrt().max(1.0);
        let error = distance(&output, &after) / size;
        assert!(error < limit, "{context}: output off by {error}, limit {limit}");
        let error = (lse - after_lse).abs();
        assert!(error < limit * (1.0 + most), "{context}: log-sum-exp off by {error} for {limit}");
    }
}

#[test]
fn kernels_agree_with_f64() {
    let mut numbers = Numbers::new(2);
    for tested in devices() {
        for (dim, spread, shift) in [(64, 1.0, 0.0), (20, 5.0, -40.0), (128, 20.0, 200.0)] {
            let groups: Vec<Group> = (0..600)
                .map(|case| Group::random(&mut numbers, 1 + case % 7, dim, spread, shift))
                .collect();
            let mut pools = vec![(DType::F32, groups.clone())];
            let half = tested.float_dtypes().into_iter().filter(|dtype| *dtype != DType::F32);
            pools.extend(half.map(|dtype| {
                // Rounded on the host, a few of them.
                let few = groups[..150].iter().cloned();
                (dtype, few.map(|group| group.rounded(&Device::flex(), dtype)).collect())
            }));
            for (rule, (dtype, groups)) in
                RULES.into_iter().flat_map(|rule| pools.iter().map(move |pool| (rule, pool)))
            {
                let (dtype, options) = (*dtype, MergeOptions { rule, ..Default::default() });
                let slots = in_pools(&tested, groups, options, dtype);
                for (group, slot) in groups.iter().zip(&slots) {
                    let context = || format!("{} {dtype:?} {rule:?} {dim} {group:?}", tested.name);
                    let exact = group.merged(rule, 4.0);
                    if group.keys.len() == 1 {
                        // Nothing goes into it: not a bit changes.
                        let same = |a: &[f64], b: &[f64]| {
                            a.iter().zip(b).all(|(a, b)| *a == f64::from(*b as f32))
                        };
                        assert!(same(&slot.key, &group.keys[0]), "{}", context());
                        assert!(same(&slot.value, &group.values[0]), "{}", context());
                        assert!(!slot.guarded, "{}", context());
                        continue;
                    }
                    let (target, mean) = group.logits();
                    if rule == KeyRule::Paper && slot.guarded != exact.guarded {
                        let factor = target / mean;
                        let near = (factor / 4.0 - 1.0).abs().min((factor * 4.0 - 1.0).abs());
                        assert!(near < 1e-3, "{}", context());
                        continue;
                    }
                    let limit = group.rounding(rule, &exact, dtype);
                    let error = distance(&slot.key, &exact.key);
                    assert!(error < limit.key, "{}: key off by {error}: {limit:?}", context());
                    let error = distance(&slot.value, &exact.value);
                    assert!(error < limit.value, "{}: value off by {error}: {limit:?}", context());
                    for (error, name) in [
                        (slot.log_weight - exact.log_weight, "weight"),
                        (slot.log_score - exact.log_score, "score"),
                    ] {
                        let (error, limit) = (error.abs(), limit.logarithm);
                        assert!(error < limit, "{}: {name} off by {error}: {limit}", context());
                    }
                }
                if rule != KeyRule::Mean && dtype == DType::F32 {
                    let name = format!("{dim}, {spread}, {shift}");
                    check_on_device(&tested, &name, groups, rule);
                }
            }
        }
    }
}

/// Identical tokens become one of as many votes: exact for every query.
#[test]
fn identical_tokens_merge_without_loss() {
    let mut numbers = Numbers::new(4);
    let mut group = Group::random(&mut numbers, 5, 32, 1.0, 2.0);
    group.keys = vec![group.keys[0].clone(); 5];
    group.values = vec![group.values[0].clone(); 5];
    group.score();
    for rule in RULES {
        let mut slots = vec![("f64".to_string(), group.merged(rule, 4.0), 1e-12)];
        for tested in devices() {
            let options = MergeOptions { rule, ..Default::default() };
            let slot = on_device(&tested, std::slice::from_ref(&group), options).remove(0);
            slots.push((tested.name.to_string(), slot, 1e-5));
        }
        for (name, slot, limit) in slots {
            assert!(distance(&slot.key, &group.keys[0]) < limit, "{name} {rule:?}");
            assert!(distance(&slot.value, &group.values[0]) < limit, "{name} {rule:?}");
            let votes: f64 = group.log_weights.iter().map(|weight| weight.exp()).sum();
            assert!((slot.log_weight.exp() / votes - 1.0).abs() < limit, "{name} {rule:?}");
        }
    }
}

/// Victims of score 0, groups without any mass, keys of zeros, dropped victims.
#[test]
fn edges() {
    let mut numbers = Numbers::new(5);
    let mut absent = Group::random(&mut numbers, 3, 16, 1.0, 1.0);
    absent.log_scores[1] = f64::NEG_INFINITY;
    let mut massless = Group::random(&mut numbers, 2, 16, 1.0, 1.0);
    massless.log_scores = vec![f64::NEG_INFINITY; 2];
    let mut zeros = Group::random(&mut numbers, 2, 16, 1.0, 0.0);
    zeros.keys = vec![vec![0.0; 16]; 2];
    zeros.score();
    let groups = [absent, massless, zeros];
    for tested in devices() {
        for rule in RULES {
            let options = MergeOptions { rule, ..Default::default() };
            for (group, slot) in groups.iter().zip(on_device(&tested, &groups, options)) {
                let context = format!("{} {rule:?}", tested.name);
                let exact = group.merged(rule, 4.0);
                assert!(distance(&slot.key, &exact.key) < 1e-4, "{context}: {slot:?} {exact:?}");
                assert!(distance(&slot.value, &exact.value) < 1e-4, "{context}: {slot:?}");
                let error = (slot.log_weight - exact.log_weight).abs();
                assert!(error < 1e-4, "{context}: {slot:?} {exact:?}");
                if exact.log_score == f64::NEG_INFINITY {
                    assert!(slot.log_score < -1e38, "{context}: {slot:?}");
                } else {
                    let error = (slot.log_score - exact.log_score).abs();
                    assert!(error < 1e-4, "{context}: {slot:?} {exact:?}");
                }
            }
        }
    }
}

/// Victims and kept slots of one pool; a target of none drops, and rows have lists of their own.
#[test]
fn pools_merge_within_themselves() {
    for tested in devices() {
        let device = &tested.device;
        let rows: Vec<f32> = (0..6).flat_map(|slot| [slot as f32 + 1.0; 4]).collect();
        let pool = || Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32)).reshape([6, 4]);
        let (mut keys, mut values) = (pool(), pool());
        let ints = |values: &[i32], shape: [usize; 2]| {
            Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape(shape)
        };
        let zeros = |width| Tensor::<3>::zeros([2, width, 2], (device, DType::F32));
        let counts = |values: &[i32]| ints(values, [1, 2]).reshape([2]);
        let lists = MergeLists {
            victims: SlotLists { slots: ints(&[1, 2, 4, -9], [2, 2]), counts: counts(&[2, 1]) },
            targets: ints(&[0, -1, 1, 0], [2, 2]),
            victim_weights: zeros(2),
            kept: SlotLists { slots: ints(&[0, -9, 3, 5], [2, 2]), counts: counts(&[1, 2]) },
            kept_weights: zeros(2),
        };
        let options = MergeOptions { rule: KeyRule::Mean, ..Default::default() };
        let merged = merge_slots(None, [&mut keys, &mut values], &lists, &options).unwrap();
        let expected = [1.5, 2.0, 3.0, 4.0, 5.0, 5.5];
        for pool in [keys, values] {
            let pool = pool.try_into_vec_as::<f32>().unwrap();
            for (row, expected) in pool.chunks(4).zip(expected) {
                let close = row.iter().all(|x| (x - expected).abs() < 1e-6);
                assert!(close, "{}: {row:?} for {expected}", tested.name);
            }
        }
        let weights = merged.weights.try_into_vec_as::<f32>().unwrap();
        assert!((weights[0].exp() - 2.0).abs() < 1e-6, "{}: {weights:?}", tested.name);
        assert_eq!(weights[4], 0.0, "{}", tested.name);
        assert!((weights[6].exp() - 2.0).abs() < 1e-6, "{}: {weights:?}", tested.name);
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    for tested in devices() {
        let device = &tested.device;
        let mut keys = Tensor::<2>::ones([4, 8], (device, DType::F32));
        let mut values = Tensor::<2>::ones([4, 8], (device, DType::F32));
        let list = |rows: usize| SlotLists {
            slots: Tensor::zeros([rows, 2], (device, DType::I32)),
            counts: Tensor::ones([rows], (device, DType::I32)),
        };
        let lists = MergeLists {
            victims: list(2),
            targets: Tensor::zeros([2, 2], (device, DType::I32)),
            victim_weights: Tensor::zeros([2, 2, 2], (device, DType::F32)),
            kept: list(2),
            kept_weights: Tensor::zeros([2, 2, 2], (device, DType::F32)),
        };
        let mut refused = |lists: &MergeLists, options: MergeOptions| {
            merge_slots(None, [&mut keys, &mut values], lists, &options).unwrap_err()
        };
        let other = MergeLists { kept: list(3), ..lists.clone() };
        let error = refused(&other, MergeOptions::default());
        assert!(matches!(error, KernelError::Shape { argument: "kept", .. }), "{error}");
        let targets = Tensor::zeros([2, 3], (device, DType::I32));
        let error = refused(&MergeLists { targets, ..lists.clone() }, MergeOptions::default());
        assert!(matches!(error, KernelError::Shape { argument: "targets", .. }), "{error}");
        let queries = Some(Tensor::ones([2, 4], (device, DType::F32)));
        let error = refused(&lists, MergeOptions { queries, ..Default::default() });
        assert!(matches!(error, KernelError::Shape { argument: "queries", .. }), "{error}");
        assert_eq!(keys.dims(), [4, 8], "{}", tested.name);
    }
}
