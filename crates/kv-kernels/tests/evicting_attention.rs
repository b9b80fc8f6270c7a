use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    EvictingOutput, EvictionOptions, EvictionScope, EvictionStrategy, Guard, HeldSlots,
    KernelError, Memory, NO_RECORD, SlotRanges, Ties, evicting_attention, log_norms,
};
use kv_testing::{Golden, Numbers, TestDevice, devices, dot, golden_files, relative_error};

use super::problems::timed_steps;
use super::strategies::force;

/// One call's inputs; heads lie behind each other, `capacity` slots each.
#[derive(Clone)]
struct Case {
    kv_heads: usize,
    group: usize,
    dim: usize,
    capacity: usize,
    /// Of each (sequence, head).
    lengths: Vec<i32>,
    limits: Vec<i32>,
    /// Of the newest tokens.
    places: Vec<i32>,
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    log_weights: Option<Vec<f32>>,
}

/// Counters before a step.
fn arrivals(batch: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::zeros([batch, HeldSlots::ARRIVALS], (device, DType::I32))
}

impl Case {
    /// Random tensors; every head is full, its newest token in the middle.
    fn random(seed: u64, kv_heads: usize, group: usize, dim: usize, lengths: &[usize]) -> Self {
        let mut numbers = Numbers::new(seed);
        let capacity = lengths.iter().max().unwrap() + 3;
        let slots = lengths.len() * capacity;
        let ints = |of: fn(usize) -> usize| lengths.iter().map(|&l| of(l) as i32).collect();
        Self {
            kv_heads,
            group,
            dim,
            capacity,
            lengths: ints(|length| length),
            limits: ints(|length| length),
            places: ints(|length| length / 2),
            query: numbers.normal(lengths.len() * group * dim),
            keys: numbers.normal(slots * dim).iter().map(|x| 1.5 * x).collect(),
            values: numbers.normal(slots * dim),
            log_weights: None,
        }
    }

    fn run(
        &self,
        device: &Device,
        dtype: DType,
        options: EvictionOptions,
    ) -> (EvictingOutput, Vec<i32>) {
        self.try_run(device, dtype, options).unwrap()
    }

    fn try_run(
        &self,
        device: &Device,
        dtype: DType,
        options: EvictionOptions,
    ) -> Result<(EvictingOutput, Vec<i32>), KernelError> {
        self.try_run_remembering(device, dtype, options, None)
    }

    fn try_run_remembering(
        &self,
        device: &Device,
        dtype: DType,
        options: EvictionOptions,
        memory: Option<Memory<'_>>,
    ) -> Result<(EvictingOutput, Vec<i32>), KernelError> {
        let (pairs, batch) = (self.lengths.len(), self.lengths.len() / self.kv_heads);
        let slots = pairs * self.capacity;
        let float = |values: &[f32], dtype| {
            Tensor::<1>::from_data(values, (device, DType::F32)).cast(dtype)
        };
        let ints = |values: &[i32]| {
            Tensor::<1, Int>::from_data(values, (device, DType::I32))
                .reshape([batch, self.kv_heads])
        };
        let offsets: Vec<i32> = (0..pairs).map(|pair| (pair * self.capacity) as i32).collect();
        let ranges = SlotRanges { offsets: ints(&offsets), lengths: ints(&self.lengths) };
        let values = float(&self.values, dtype).reshape([slots, self.dim]);
        let keys = float(&self.keys, dtype).reshape([slots, self.dim]);
        let norms = log_norms(values.clone());
        let mut places = ints(&self.places);
        let mut arrivals = arrivals(batch, device);
        let heads = self.kv_heads * self.group;
        let output = evicting_attention(
            float(&self.query, dtype).reshape([batch, heads, self.dim]),
            [keys, values],
            self.log_weights.as_deref().map(|weights| float(weights, DType::F32)),
            &ranges,
            HeldSlots {
                log_norms: norms,
                limits: ints(&self.limits),
                places: &mut places,
                arrivals: &mut arrivals,
                memory,
            },
            options,
        );
        let counted = arrivals.try_into_vec_as::<i32>().unwrap();
        assert!(counted.iter().all(|count| *count == 0), "arrivals are left: {counted:?}");
        Ok((output?, places.try_into_vec_as::<i32>().unwrap()))
    }

    /// With tensors as they are in a dtype.
    fn rounded(&self, device: &Device, dtype: DType) -> Self {
        let rounded = |values: &[f32]| {
            let values = Tensor::<1>::from_data(values, (device, DType::F32));
            values.cast(dtype).try_into_vec_as::<f32>().unwrap()
        };
        let [query, keys, values] = [&self.query, &self.keys, &self.values].map(|x| rounded(x));
        Self { query, keys, values, ..self.clone() }
    }

    /// Output `[B, Hq, D]` and importances of every head's slots, in f64 straight from the formula:
    /// logarithms, since they may be too small for any float; `None` for slots of weight 0.
    fn exact(&self) -> (Vec<f64>, Vec<Vec<Option<f64>>>) {
        let mut output = Vec::new();
        let mut importances = Vec::new();
        for (pair, &length) in self.lengths.iter().enumerate() {
            let slots: Vec<usize> =
                (0..length as usize).map(|i| pair * self.capacity + i).collect();
            let (dim, scale) = (self.dim, (self.dim as f64).sqrt());
            let weight = |slot: usize| self.log_weights.as_ref().map_or(0.0, |w| w[slot].into());
            let mut shares: Vec<Vec<f64>> = vec![Vec::new(); slots.len()];
            for g in 0..self.group {
                let query = &self.query[(pair * self.group + g) * dim..][..dim];
                let logits: Vec<f64> = slots
                    .iter()
                    .map(|&slot| dot(query, &self.keys[slot * dim..][..dim]) / scale + weight(slot))
                    .collect();
                let sum = log_sum_exp(&logits);
                let mut total = vec![0.0; dim];
                for (i, &slot) in slots.iter().enumerate() {
                    shares[i].push(logits[i] - sum);
                    let (p, value) = ((logits[i] - sum).exp(), &self.values[slot * dim..][..dim]);
                    total.iter_mut().zip(value).for_each(|(o, v)| *o += p * f64::from(*v));
                }
                output.extend(total);
            }
            let own = slots.iter().zip(shares).map(|(&slot, shares)| {
                let value = &self.values[slot * dim..][..dim];
                let norm: f64 = value.iter().map(|v| f64::from(v.abs())).sum();
                (weight(slot) > -1e38).then(|| log_sum_exp(&shares) + norm.ln())
            });
            importances.push(own.collect());
        }
        (output, importances)
    }

    /// Asserts that a full head gives up a slot whose importance is the least of those that
    /// `may_go`, to within `tolerance`; the newest token where none may.
    fn assert_weakest(
        &self,
        importances: &[Option<f64>],
        place: i32,
        pair: usize,
        may_go: impl Fn(usize) -> bool,
        tolerance: f64,
        context: &str,
    ) {
        let (Some(least), _) = weakest(importances, &may_go) else {
            return assert_eq!(place, self.places[pair], "{context}: head {pair}, none may go");
        };
        let least = importances[least as usize].unwrap();
        let own = importances.get(place as usize).copied().flatten();
        assert!(
            own.is_some_and(|own| own <= least + tolerance) && may_go(place as usize),
            "{context}: head {pair} gives up {place}, of {own:?}, where the least is {least}"
        );
    }
}

fn log_sum_exp(values: &[f64]) -> f64 {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + values.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// Places of the least importance among those that `may_go`, with the margin to the second.
fn weakest(importances: &[Option<f64>], may_go: impl Fn(usize) -> bool) -> (Option<i32>, f64) {
    let mut best: (Option<i32>, f64) = (None, f64::INFINITY);
    let mut second = f64::INFINITY;
    for (place, importance) in importances.iter().enumerate().filter(|(place, _)| may_go(*place)) {
        let Some(importance) = *importance else { continue };
        if importance < best.1 {
            second = best.1;
            best = (Some(place as i32), importance);
        } else {
            second = second.min(importance);
        }
    }
    (best.0, second - best.1)
}

/// Every strategy that may be forced.
const FORCED: [EvictionStrategy; 4] = [
    EvictionStrategy::Portable,
    EvictionStrategy::TensorCore,
    EvictionStrategy::TensorCoreInPlace,
    EvictionStrategy::TensorCoreCluster,
];

fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::random(1, 1, 1, 32, &[1]),
        Case::random(2, 2, 2, 32, &[5, 130, 127, 128]),
        Case::random(3, 1, 3, 64, &[129, 300]),
        Case::random(4, 2, 4, 64, &[17, 256, 1, 511]),
        Case::random(5, 1, 5, 96, &[77]),
        Case::random(6, 2, 8, 128, &[640, 33]),
        Case::random(7, 1, 8, 256, &[257]),
        Case::random(8, 3, 1, 20, &[13, 131, 7]),
        // Long enough to be split.
        Case::random(9, 1, 4, 64, &[3000]),
        Case::random(11, 2, 8, 128, &[1900, 70, 0, 2048]),
        // Heads that fill any device, each a cube's.
        many_heads(),
    ];
    cases.extend([15, 18, 21, 25, 32, 50].map(some_long_heads));
    // Below the limits, weights.
    cases[1].limits = vec![5, 131, 200, 128];
    let mut numbers = Numbers::new(10);
    let slots = cases[3].lengths.len() * cases[3].capacity;
    let weights = (0..slots).map(|_| match numbers.below(8) {
        0 => f32::NEG_INFINITY,
        weight => (weight as f32).ln(),
    });
    cases[3].log_weights = Some(weights.collect());
    let timed = (100u64..).zip(timed_steps());
    cases.extend(timed.map(|(seed, (kv_heads, group, dim, lengths))| {
        Case::random(seed, kv_heads, group, dim, &lengths)
    }));
    cases
}

/// As many heads as clusters split into 7, 6, 5, 4, 3 and 2 parts on 132 processors, of any length
/// up to 1,030.
fn some_long_heads(heads: usize) -> Case {
    let mut numbers = Numbers::new(heads as u64);
    let mut lengths: Vec<usize> = (0..heads).map(|_| numbers.below(400)).collect();
    lengths[heads / 2] = 1_030;
    Case::random(heads as u64, 1, 3, 64, &lengths)
}

/// Many heads of any length, some below their limits, some slots without weight.
fn many_heads() -> Case {
    let mut numbers = Numbers::new(12);
    let lengths: Vec<usize> = (0..300).map(|_| 1 + numbers.below(90)).collect();
    let mut case = Case::random(13, 3, 2, 32, &lengths);
    case.limits.iter_mut().step_by(7).for_each(|limit| *limit += 2);
    let weights = (0..lengths.len() * case.capacity).map(|_| match numbers.below(5) {
        // As masks are written that must stay finite.
        0 => f32::MIN,
        weight => (weight as f32).ln(),
    });
    case.log_weights = Some(weights.collect());
    case
}

#[test]
fn agrees_with_f64_on_every_device_and_dtype() {
    for tested in devices() {
        let cases = cases();
        for dtype in tested.float_dtypes() {
            // Of the output, and of importances' logarithms, which stay in f32 whatever the dtype.
            let [limit, tolerance] = if dtype == DType::F32 { [1e-5, 1e-4] } else { [1e-2, 1e-3] };
            let every = if dtype == DType::F32 { 2 } else { 6 };
            for case in tested.some(&cases, every) {
                let case = case.rounded(&tested.device, dtype);
                let options = EvictionOptions { importance: true, ..Default::default() };
                let (result, places) = case.run(&tested.device, dtype, options);
                let (output, importances) = case.exact();
                let context = format!(
                    "{} {dtype:?} {:?} of {} by {}",
                    tested.name, case.lengths, case.group, case.dim
                );
                let actual = result.output.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &output);
                assert!(error < limit, "{context}: output off by {error}");
                // Without importances, and knowing how long heads are, the attention may decide by
                // itself.
                let longest = case.lengths.iter().max().map(|length| *length as usize);
                let options = EvictionOptions { longest, ..Default::default() };
                let (whole, alone) = case.run(&tested.device, dtype, options);
                let actual = whole.output.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &output);
                assert!(error < limit, "{context}: output off by {error} without importances");
                let actual = result.log_importance.unwrap().try_into_vec_as::<f32>().unwrap();
                for (pair, exact) in importances.iter().enumerate() {
                    for (place, exact) in exact.iter().enumerate() {
                        let actual = actual[pair * case.capacity + place];
                        match exact {
                            None => assert_eq!(actual, f32::MAX, "{context}"),
                            Some(exact) => {
                                let error = (f64::from(actual) - exact).abs();
                                assert!(error < tolerance, "{context}: {actual} for {exact}");
                            }
                        }
                    }
                    let newest = case.places[pair] as usize;
                    let full = case.lengths[pair] >= case.limits[pair];
                    for places in [&places, &alone] {
                        let place = places[pair];
                        match full {
                            true => case.assert_weakest(
                                exact,
                                place,
                                pair,
                                |place| place != newest,
                                tolerance,
                                &context,
                            ),
                            false => assert_eq!(place, case.lengths[pair], "{context}: {pair}"),
                        }
                    }
                }
                let options = EvictionOptions { longest, evict_newest: true, ..Default::default() };
                let (_, places) = case.run(&tested.device, dtype, options);
                for (pair, exact) in importances.iter().enumerate() {
                    match case.lengths[pair] >= case.limits[pair] {
                        true => case.assert_weakest(
                            exact,
                            places[pair],
                            pair,
                            |_| true,
                            tolerance,
                            &context,
                        ),
                        false => assert_eq!(places[pair], case.lengths[pair], "{context}: {pair}"),
                    }
                }
            }
        }
    }
}

#[test]
fn every_strategy_agrees_with_f64() {
    for tested in devices() {
        let device = &tested.device;
        for dtype in tested.float_dtypes() {
            let [limit, tolerance] = if dtype == DType::F32 { [1e-5, 1e-4] } else { [1e-2, 1e-3] };
            let cases: Vec<Case> = tested.some(cases(), 6).collect();
            let test = format!("evicting_attention in {dtype:?}");
            force(&test, &tested, &FORCED, &cases, |strategy, case| {
                let case = case.rounded(device, dtype);
                let longest = case.lengths.iter().max().map(|length| *length as usize);
                let options = EvictionOptions { longest, strategy, ..Default::default() };
                let (result, places) = case.try_run(device, dtype, options)?;
                let (output, importances) = case.exact();
                let context = format!("{} {dtype:?} {strategy:?} {:?}", tested.name, case.lengths);
                let actual = result.output.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&actual, &output);
                assert!(error < limit, "{context}: output off by {error}");
                for (pair, exact) in importances.iter().enumerate() {
                    let (place, newest) = (places[pair], case.places[pair] as usize);
                    if case.lengths[pair] < case.limits[pair] {
                        assert_eq!(place, case.lengths[pair], "{context}: {pair}");
                        continue;
                    }
                    let goes = |place| place != newest;
                    case.assert_weakest(exact, place, pair, goes, tolerance, &context);
                }
                Ok(())
            });
        }
    }
}

/// All heads of a sequence give up the same place, whatever kernel decides: of cubes that have a
/// whole head, of clusters that share one, and of launches behind the attention.
#[test]
fn heads_decide_together_on_every_device_and_dtype() {
    for tested in devices() {
        let longs = |heads: usize, sequences: &[usize]| -> Vec<usize> {
            sequences.iter().flat_map(|length| vec![*length; heads]).collect()
        };
        let mut many: Vec<usize> = (0..150).map(|at| 1 + at * 7 % 90).collect();
        many[3] = 400;
        let cases = [
            (2, 2, 64, longs(2, &[70, 300, 1])),
            (8, 4, 128, longs(8, &[2_100])),
            (8, 4, 64, longs(8, &[1_300, 900])),
            (3, 1, 32, longs(3, &[640, 64, 65])),
            (2, 3, 64, longs(2, &many)),
            (12, 1, 64, longs(12, &[130, 131])),
        ];
        for dtype in tested.float_dtypes() {
            let every = if dtype == DType::F32 { 2 } else { 6 };
            let cases: Vec<_> = tested.some((50u64..).zip(&cases), every).collect();
            let strategies = [&[EvictionStrategy::Auto][..], &FORCED].concat();
            let test = format!("evicting_attention of heads together in {dtype:?}");
            force(&test, &tested, &strategies, &cases, |strategy, case| {
                let (seed, (heads, group, dim, lengths)) = *case;
                let case = Case::random(seed, *heads, *group, *dim, lengths);
                let mut case = case.rounded(&tested.device, dtype);
                // One sequence is below its limit.
                let last = lengths.len() - heads..lengths.len();
                if lengths.len() > *heads {
                    case.limits[last.clone()].iter_mut().for_each(|limit| *limit += 2);
                }
                let (_, importances) = case.exact();
                let longest = lengths.iter().max().copied();
                let name = &tested.name;
                let context =
                    format!("{name} {dtype:?} {strategy:?}, {heads} heads of {group} by {dim}");
                for evict_newest in [false, true] {
                    let alone = EvictionOptions { longest, strategy, ..Default::default() };
                    let options = EvictionOptions {
                        scope: EvictionScope::Layer,
                        evict_newest,
                        ..alone.clone()
                    };
                    let (result, places) = case.try_run(&tested.device, dtype, options)?;
                    let (expected, _) = case.try_run(&tested.device, dtype, alone)?;
                    let [actual, expected] = [result, expected]
                        .map(|result| result.output.try_into_vec_as::<f32>().unwrap());
                    assert_eq!(actual, expected, "{context}: outputs");
                    for (first, own) in importances.chunks(*heads).enumerate() {
                        let first = first * heads;
                        let same = places[first..first + heads].iter();
                        assert!(same.clone().all(|place| *place == places[first]), "{context}");
                        if case.limits[first] > case.lengths[first] {
                            assert_eq!(places[first], case.lengths[first], "{context}");
                            continue;
                        }
                        let sums = (0..own[0].len()).map(|place| {
                            let own: Vec<f64> = own.iter().filter_map(|head| head[place]).collect();
                            (!own.is_empty()).then(|| log_sum_exp(&own))
                        });
                        let sums: Vec<Option<f64>> = sums.collect();
                        let newest = case.places[first] as usize;
                        let may_go = |place: usize| evict_newest || place != newest;
                        case.assert_weakest(&sums, places[first], first, may_go, 1e-3, &context);
                    }
                }
                Ok(())
            });
        }
    }
}

/// Slots that are compared by the largest importance of several steps, decayed: records are as in
/// f64, and the least of them goes, whatever kernel decides. A head below its limit records, too.
#[test]
fn records_are_raised_and_compared() {
    const DECAY: f64 = 0.8;
    for tested in devices() {
        let device = &tested.device;
        let lengths = |heads: usize, sequences: &[usize]| -> Vec<usize> {
            sequences.iter().flat_map(|length| vec![*length; heads]).collect()
        };
        let cases = [
            (2, 2, 64, lengths(2, &[70, 300, 9])),
            (8, 4, 128, lengths(8, &[2_100])),
            (3, 1, 32, lengths(3, &[640, 64, 65])),
            (2, 3, 64, lengths(2, &(0..150).map(|at| 2 + at * 7 % 90).collect::<Vec<_>>())),
        ];
        for dtype in tested.float_dtypes() {
            let every = if dtype == DType::F32 { 2 } else { 4 };
            let scopes = [EvictionScope::Head, EvictionScope::Layer];
            let cases = tested.some((70u64..).zip(&cases), every);
            let cases = cases.flat_map(|case| scopes.map(|scope| (case, scope)));
            let cases: Vec<_> = cases.collect();
            let strategies = [&[EvictionStrategy::Auto][..], &FORCED].concat();
            let test = format!("evicting_attention that remembers in {dtype:?}");
            force(&test, &tested, &strategies, &cases, |strategy, case| {
                let ((seed, (heads, group, dim, lengths)), scope) = *case;
                let mut case = Case::random(seed, *heads, *group, *dim, lengths);
                if lengths.len() > *heads {
                    let last = lengths.len() - heads;
                    case.limits[last..].iter_mut().for_each(|limit| *limit += 2);
                }
                let batch = lengths.len() / heads;
                let slots = lengths.len() * case.capacity;
                let stale = Tensor::<1>::full([slots], NO_RECORD, (device, DType::F32));
                let mut records = stale;
                let mut expected = vec![vec![f64::NEG_INFINITY; case.capacity]; lengths.len()];
                for step in 0..4u64 {
                    // Other queries, and another newest token, at positions of its sequence's own.
                    case.query = Numbers::new(seed * 10 + step).normal(case.query.len());
                    case.places = lengths
                        .iter()
                        .map(|l| (l / 2 + step as usize) as i32 % *l as i32)
                        .collect();
                    let case = case.rounded(device, dtype);
                    let now: Vec<i32> =
                        (0..batch).map(|at| (at as i32 + 1) * 40 + step as i32).collect();
                    let memory = Memory {
                        records: &mut records,
                        now: Tensor::from_data(&now[..], (device, DType::I32)),
                        decay: DECAY as f32,
                    };
                    let longest = lengths.iter().max().copied();
                    let options =
                        EvictionOptions { longest, scope, strategy, ..Default::default() };
                    let (_, places) =
                        case.try_run_remembering(device, dtype, options, Some(memory))?;
                    let context = format!(
                        "{} {dtype:?} {strategy:?} {scope:?}, {heads} heads of {group} by {dim}",
                        tested.name
                    );
                    let (_, importances) = case.exact();
                    let actual = records.clone().try_into_vec_as::<f32>().unwrap();
                    for (pair, own) in importances.iter().enumerate() {
                        let first = pair / heads * heads;
                        let growth = -f64::from(now[pair / heads]) * DECAY.ln();
                        let newest = case.places[pair] as usize;
                        let sums: Vec<Option<f64>> = (0..own.len())
                            .map(|place| match scope {
                                EvictionScope::Head => own[place],
                                EvictionScope::Layer => {
                                    let all = &importances[first..first + heads];
                                    let all = all.iter().filter_map(|head| head[place]);
                                    Some(log_sum_exp(&all.collect::<Vec<_>>()))
                                }
                            })
                            .collect();
                        let compared: Vec<Option<f64>> = (0..own.len())
                            .map(|place| {
                                let before = &mut expected[pair][place];
                                if place == newest {
                                    *before = f64::NEG_INFINITY;
                                }
                                *before = before.max(sums[place].unwrap() + growth);
                                Some(*before)
                            })
                            .collect();
                        if scope == EvictionScope::Head || pair == first {
                            for (place, expected) in compared.iter().enumerate() {
                                let actual = f64::from(actual[pair * case.capacity + place]);
                                let error = (actual - expected.unwrap()).abs();
                                let at = format!("{context}: step {step}, head {pair}, {place}");
                                assert!(error < 2e-3, "{at}: {actual} for {expected:?}");
                            }
                        }
                        if case.lengths[pair] < case.limits[pair] {
                            assert_eq!(places[pair], case.lengths[pair], "{context}: {pair}");
                            continue;
                        }
                        let goes = |place| place != newest;
                        case.assert_weakest(&compared, places[pair], pair, goes, 4e-3, &context);
                    }
                }
                Ok(())
            });
        }
    }
}

/// Of slots whose importances are within a factor, the oldest goes, on any number of cubes.
#[test]
fn the_oldest_of_equal_slots_goes() {
    for tested in devices() {
        let (device, name) = (&tested.device, tested.name);
        for (scope, lengths) in [(EvictionScope::Head, [3_000; 2]), (EvictionScope::Layer, [70; 2])]
        {
            let case = Case::random(90, 2, 2, 32, &lengths);
            let slots = case.lengths.len() * case.capacity;
            let mut numbers = Numbers::new(91);
            let positions: Vec<i32> = (0..slots).map(|_| numbers.below(1 << 20) as i32).collect();
            let ties = Ties {
                positions: Tensor::from_data(&positions[..], (device, DType::I32)),
                factor: 100.0,
            };
            let longest = Some(lengths[0]);
            let options =
                EvictionOptions { ties: Some(ties), scope, longest, ..Default::default() };
            let (_, places) = case.run(device, DType::F32, options);
            let (_, importances) = case.exact();
            let plain = EvictionOptions { scope, longest, ..Default::default() };
            let (_, plain) = case.run(device, DType::F32, plain);
            assert_ne!(plain, places, "{name} {scope:?}: ties change nothing");
            for (pair, own) in importances.iter().enumerate() {
                let levels: Vec<f64> = (0..own.len())
                    .map(|place| {
                        let all = |heads: &[Vec<Option<f64>>]| {
                            let all: Vec<f64> = heads.iter().map(|h| h[place].unwrap()).collect();
                            log_sum_exp(&all) / 100f64.ln()
                        };
                        match scope {
                            EvictionScope::Head => all(&importances[pair..=pair]),
                            EvictionScope::Layer => all(&importances),
                        }
                    })
                    .collect();
                let least = |place: &usize| {
                    let first = if scope == EvictionScope::Layer { 0 } else { pair };
                    (levels[*place].floor() as i64, positions[first * case.capacity + place])
                };
                let newest = case.places[pair] as usize;
                let expected =
                    (0..own.len()).filter(|place| *place != newest).min_by_key(least).unwrap();
                // The test says nothing where rounding moves a slot to another level.
                let margin = |place: usize| (levels[place] - levels[place].round()).abs();
                assert!(margin(expected) > 1e-4, "{name}");
                assert_eq!(places[pair] as usize, expected, "{name} {scope:?}: head {pair}");
            }
        }
    }
}

#[test]
fn memories_and_ties_that_do_not_fit_are_refused() {
    let TestDevice { device, .. } = devices().remove(0);
    let case = Case::random(95, 1, 1, 8, &[4]);
    let slots = case.capacity;
    let ties = |factor: f32| EvictionOptions {
        ties: Some(Ties { positions: Tensor::zeros([slots], (&device, DType::I32)), factor }),
        ..Default::default()
    };
    assert!(case.try_run(&device, DType::F32, ties(2.0)).is_ok());
    for factor in [1.0, f32::NAN, f32::INFINITY] {
        let error = case.try_run(&device, DType::F32, ties(factor)).unwrap_err();
        assert!(error.to_string().contains("factor"), "{error}");
    }
    let remembering = |slots: usize, decay: f32| {
        let mut records = Tensor::full([slots], NO_RECORD, (&device, DType::F32));
        let now = Tensor::zeros([1], (&device, DType::I32));
        let memory = Memory { records: &mut records, now, decay };
        case.try_run_remembering(&device, DType::F32, Default::default(), Some(memory))
    };
    assert!(remembering(slots, 1.0).is_ok());
    for (slots, decay, named) in
        [(slots + 1, 0.9, "records"), (slots, 0.0, "decay"), (slots, f32::NAN, "decay")]
    {
        let error = remembering(slots, decay).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}

/// A slot whose importance is no number in one head stays, however little it adds in the others,
/// and hides no other slot.
#[test]
fn heads_that_decide_together_pass_over_what_is_no_number() {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            let case = Case::random(60, 2, 2, 64, &[300, 300]);
            let mut case = case.rounded(&tested.device, dtype);
            let (first, second) = (5 * case.dim, (case.capacity + 5) * case.dim);
            case.values[first] = f32::NAN;
            case.values[second..][..case.dim].fill(1e-4);
            let (_, importances) = case.exact();
            let sums = (0..300).map(|place| {
                let own: Vec<f64> = importances.iter().filter_map(|head| head[place]).collect();
                Some(log_sum_exp(&own))
            });
            let sums: Vec<Option<f64>> = sums.collect();
            let options = EvictionOptions {
                scope: EvictionScope::Layer,
                longest: Some(300),
                ..Default::default()
            };
            let (_, places) = case.run(&tested.device, dtype, options);
            let context = format!("{} {dtype:?}", tested.name);
            assert_eq!(places[0], places[1], "{context}");
            let newest = case.places[0] as usize;
            let may_go = |place: usize| place != newest && place != 5;
            case.assert_weakest(&sums, places[0], 0, may_go, 1e-3, &context);
        }
    }
}

/// All heads give up the same place: that of the least sum.
#[test]
fn heads_may_decide_together() {
    for tested in devices() {
        let case = Case::random(20, 3, 2, 32, &[70, 70, 70, 9, 9, 9]);
        let options = || EvictionOptions { scope: EvictionScope::Layer, ..Default::default() };
        let (_, places) = case.run(&tested.device, DType::F32, options());
        let (_, importances) = case.exact();
        for (sequence, heads) in importances.chunks(3).enumerate() {
            let sums = (0..heads[0].len()).map(|place| {
                let own: Vec<f64> = heads.iter().filter_map(|head| head[place]).collect();
                Some(log_sum_exp(&own))
            });
            let newest = case.places[sequence * 3] as usize;
            let (place, margin) = weakest(&sums.collect::<Vec<_>>(), |place| place != newest);
            assert!(margin > 1e-4);
            assert_eq!(places[sequence * 3..][..3], [place.unwrap(); 3], "{}", tested.name);
        }
        // Sinks and recents stay; positions are in reverse.
        let length = |pair: usize| if pair < 3 { 70 } else { 9 };
        let slots = case.lengths.len() * case.capacity;
        let position =
            |slot: usize| length(slot / case.capacity) - 1 - (slot % case.capacity) as i32;
        let positions: Vec<i32> = (0..slots).map(position).collect();
        let guard = Guard {
            positions: Tensor::from_data(&positions[..], (&tested.device, DType::I32)),
            now: Tensor::from_data([69, 8], (&tested.device, DType::I32)),
            sinks: 3,
            recents: 4,
        };
        let options = EvictionOptions { guard: Some(guard), ..options() };
        let (_, places) = case.run(&tested.device, DType::F32, options);
        for (sequence, heads) in importances.chunks(3).enumerate() {
            let sums = (0..heads[0].len()).map(|place| {
                let own: Vec<f64> = heads.iter().filter_map(|head| head[place]).collect();
                Some(log_sum_exp(&own))
            });
            let newest = case.places[sequence * 3] as usize;
            let last = heads[0].len() - 1;
            // Place `p` has position `last - p`.
            let may_go = |place: usize| place != newest && (4..=last - 3).contains(&place);
            let (place, _) = weakest(&sums.collect::<Vec<_>>(), may_go);
            assert_eq!(places[sequence * 3..][..3], [place.unwrap(); 3], "{}", tested.name);
        }
    }
}

/// Logits of hundreds: `exp` of their differences is 0 in any float, their order is not lost.
#[test]
fn huge_logits_are_told_apart() {
    for tested in devices() {
        let forms =
            tested.float_dtypes().into_iter().flat_map(|dtype| [1, 2].map(|group| (dtype, group)));
        for (dtype, group) in forms {
            let dim = if dtype == DType::F32 { 4 } else { 64 };
            let mut case = Case::random(30, 1, group, dim, &[6]);
            case.query = vec![1.0; group * dim];
            case.values = vec![1.0; case.values.len()];
            // A logit is the root of the head dim times a key's element.
            for (slot, logit) in [200.0, -200.0, -199.0, -201.0, 0.0, 199.0].iter().enumerate() {
                case.keys[slot * dim..][..dim].fill(logit / (dim as f32).sqrt());
            }
            let (result, places) = case.run(&tested.device, dtype, Default::default());
            // The newest token, at place 3, is the least important.
            assert_eq!(places, [1], "{} {dtype:?}", tested.name);
            let options =
                EvictionOptions { evict_newest: true, longest: Some(6), ..Default::default() };
            let (_, places) = case.run(&tested.device, dtype, options);
            assert_eq!(places, [3], "{} {dtype:?}", tested.name);
            let output = result.output.try_into_vec_as::<f32>().unwrap();
            assert!(output.iter().all(|x| (x - 1.0).abs() < 1e-5), "{}: {output:?}", tested.name);
        }
    }
}

#[test]
fn ties_zeros_masks_and_guards() {
    let tested = devices();
    let forms = tested
        .iter()
        .flat_map(|tested| tested.float_dtypes().into_iter().map(move |dtype| (tested, dtype)));
    for (tested, dtype) in forms {
        let (device, name) = (&tested.device, format!("{} {dtype:?}", tested.name));
        let mut case = Case::random(40, 1, 2, 32, &[300]);
        case.keys.fill(0.5);
        case.places = vec![0];
        let places = |case: &Case, options: EvictionOptions| {
            case.run(device, dtype, EvictionOptions { longest: Some(301), ..options }).1
        };
        // Equally important slots: the lowest goes.
        case.values.fill(1.0);
        assert_eq!(places(&case, Default::default()), [1], "{name}");
        // Values of nothing are worth nothing, each as little as the other.
        case.values.fill(0.0);
        assert_eq!(places(&case, Default::default()), [1], "{name}");
        // A slot of weight 0 stays while another is left, and the newest goes if none is.
        let mut weights = vec![0.0; case.capacity];
        weights[..290].fill(f32::NEG_INFINITY);
        case.log_weights = Some(weights.clone());
        assert_eq!(places(&case, Default::default()), [290], "{name}");
        weights[290..300].fill(f32::NEG_INFINITY);
        weights[7] = 0.0;
        case.places = vec![7];
        case.log_weights = Some(weights);
        assert_eq!(places(&case, Default::default()), [7], "{name}");
        case.log_weights = None;
        // Positions in reverse: the first tokens are the last slots.
        let positions: Vec<i32> = (0..case.capacity as i32).map(|slot| 299 - slot).collect();
        let guard = |sinks, recents| Guard {
            positions: Tensor::from_data(&positions[..], (device, DType::I32)),
            now: Tensor::from_data([299], (device, DType::I32)),
            sinks,
            recents,
        };
        let guarded = |sinks, recents| EvictionOptions {
            guard: Some(guard(sinks, recents)),
            ..Default::default()
        };
        assert_eq!(places(&case, guarded(10, 5)), [5], "{name}");
        assert_eq!(places(&case, guarded(294, 5)), [5], "{name}");
        // All are kept but the newest, which is kept only while another may go.
        assert_eq!(places(&case, guarded(295, 5)), [7], "{name}");
        // Room left: behind the live slots. No room at all: the only slot.
        case.limits = vec![301];
        assert_eq!(places(&case, Default::default()), [300], "{name}");
        case.lengths = vec![0];
        assert_eq!(places(&case, Default::default()), [0], "{name}");
        (case.lengths, case.limits, case.places) = (vec![1], vec![1], vec![0]);
        assert_eq!(places(&case, Default::default()), [0], "{name}");
    }
}

/// What the authors' code computes: one slot a sequence, the newest among the candidates.
#[test]
fn golden_longflow() {
    for golden in golden_files("golden_longflow", "longflow_") {
        if golden.find("q").is_none() {
            continue;
        }
        for tested in devices() {
            let (case, mask) = of_golden(&golden);
            let options = EvictionOptions {
                scope: EvictionScope::Layer,
                evict_newest: true,
                importance: true,
                ..Default::default()
            };
            let (result, places) = case.run(&tested.device, DType::F32, options);
            let context = format!("{} on {}", golden.name, tested.name);
            let output = result.output.try_into_vec_as::<f32>().unwrap();
            let error = relative_error(&output, &golden.tensor("out").values);
            assert!(error < 1e-5, "{context}: output off by {error}");
            // The mean over all query heads and columns.
            let importance = result.log_importance.unwrap().try_into_vec_as::<f32>().unwrap();
            let parts = (case.kv_heads * case.group * case.dim) as f64;
            let loss = golden.tensor("loss");
            let [batch, tokens] = loss.dims();
            let own: Vec<f32> = (0..batch * tokens)
                .map(|at| {
                    let (sequence, place) = (at / tokens, at % tokens);
                    let heads = (0..case.kv_heads).map(|head| {
                        let pair = sequence * case.kv_heads + head;
                        f64::from(importance[pair * case.capacity + place]).exp() / parts
                    });
                    if mask[at] { heads.sum::<f64>() as f32 } else { 0.0 }
                })
                .collect();
            let error = relative_error(&own, &loss.values);
            assert!(error < 1e-5, "{context}: importances off by {error}");
            let gaps = golden.tensor("rel_gap_best_two").values;
            let expected = golden.tensor("evict_idx_valid_only").values;
            for (sequence, (expected, gap)) in expected.iter().zip(gaps).enumerate() {
                let place = f64::from(places[sequence * case.kv_heads]);
                assert!(place == *expected || gap < 1e-4, "{context}: {place} for {expected}");
            }
        }
    }
}

/// A golden file's case, masked slots as slots of weight 0, and its mask.
fn of_golden(golden: &Golden) -> (Case, Vec<bool>) {
    let [batch, heads, _, dim] = golden.tensor("q").dims();
    let [_, kv_heads, tokens, _] = golden.tensor("k").dims();
    let mask: Vec<bool> = golden.tensor("mask").values.iter().map(|x| *x != 0.0).collect();
    let pairs = batch * kv_heads;
    let weights = (0..pairs * tokens).map(|slot| {
        let seen = mask[slot / tokens / kv_heads * tokens + slot % tokens];
        if seen { 0.0 } else { f32::NEG_INFINITY }
    });
    let case = Case {
        kv_heads,
        group: heads / kv_heads,
        dim,
        capacity: tokens,
        lengths: vec![tokens as i32; pairs],
        limits: vec![tokens as i32; pairs],
        places: vec![0; pairs],
        query: golden.tensor("q").f32(),
        keys: golden.tensor("k").f32(),
        values: golden.tensor("v").f32(),
        log_weights: Some(weights.collect()),
    };
    (case, mask)
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let TestDevice { device, .. } = devices().remove(0);
    let ints = |batch: usize| Tensor::<2, Int>::ones([batch, 1], (&device, DType::I32));
    let floats = |count: usize| Tensor::<1>::zeros([count], (&device, DType::F32));
    let call = |norms: usize, limits: usize, places: usize| {
        let query = Tensor::<3>::zeros([1, 1, 8], (&device, DType::F32));
        let pool = Tensor::<2>::zeros([4, 8], (&device, DType::F32));
        let ranges = SlotRanges { offsets: ints(1), lengths: ints(1) };
        let options = EvictionOptions::default();
        let (mut places, mut arrivals) = (ints(places), arrivals(1, &device));
        let (log_norms, limits) = (floats(norms), ints(limits));
        let (places, arrivals) = (&mut places, &mut arrivals);
        let held = HeldSlots { log_norms, limits, places, arrivals, memory: None };
        evicting_attention(query, [pool.clone(), pool], None, &ranges, held, options).map(|_| ())
    };
    assert!(call(4, 1, 1).is_ok());
    for (argument, result) in
        [("log_norms", call(5, 1, 1)), ("limits", call(4, 2, 1)), ("places", call(4, 1, 2))]
    {
        let error = result.unwrap_err();
        let named =
            matches!(error, KernelError::Shape { argument: actual, .. } if actual == argument);
        assert!(named, "{error}");
    }
}
