use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::merge_reference::{Member, merge_group};
use kv_kernels::{
    AverageWeights, KernelError, KeyRule, MergeOptions, MergingSlots, NearestOptions, SlotRanges,
    StepScores, TAKES_ANY, TAKES_NONE, TAKES_SIMILAR, average_scores, merge_nearest,
};
use kv_testing::{Numbers, STEP, TestDevice, devices, relative_error};

/// Query heads of a key-value head.
const GROUP: usize = 3;

/// Slots of heads of given lengths, with gaps of two between ranges.
#[derive(Clone)]
struct Case {
    dim: usize,
    lengths: Vec<usize>,
    keys: Vec<f32>,
    values: Vec<f32>,
    log_weights: Vec<f32>,
    log_scores: Vec<f32>,
    log_samples: Vec<f32>,
    votes: Vec<f32>,
    queries: Vec<f32>,
    /// `[S, GROUP]`
    logits: Vec<f32>,
    /// Victims as places.
    victims: Vec<usize>,
    goes: Vec<bool>,
    /// Which merges slots take, and a number that merges add up; empty without them.
    takes: Vec<f32>,
    inherited: Vec<f32>,
}

impl Case {
    fn random(seed: u64, dim: usize, lengths: &[usize]) -> Self {
        let mut numbers = Numbers::new(seed);
        let slots = lengths.iter().sum::<usize>() + 2 * lengths.len();
        let victims = lengths.iter().map(|&length| numbers.below(length.max(1))).collect();
        let votes: Vec<f32> = (0..slots).map(|_| 1.0 + numbers.below(4095) as f32).collect();
        Self {
            dim,
            lengths: lengths.to_vec(),
            keys: numbers.normal(slots * dim),
            values: numbers.normal(slots * dim),
            log_weights: votes.iter().map(|votes| votes.ln()).collect(),
            log_scores: numbers.normal(slots).iter().map(|x| 3.0 * x).collect(),
            log_samples: numbers.normal(slots),
            votes,
            queries: numbers.normal(GROUP * lengths.len() * dim),
            logits: numbers.normal(slots * GROUP).iter().map(|x| 20.0 * x).collect(),
            victims,
            goes: (0..lengths.len()).map(|pair| pair % 4 != 3).collect(),
            takes: Vec::new(),
            inherited: Vec::new(),
        }
    }

    /// With slots that take no victims, and, in every second head, one that takes any.
    fn choosy(mut self, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let kinds = [TAKES_SIMILAR, TAKES_NONE];
        self.takes = (0..self.votes.len()).map(|_| kinds[numbers.below(2)]).collect();
        self.inherited = numbers.normal(self.votes.len());
        for (pair, &length) in self.lengths.clone().iter().enumerate().step_by(2) {
            let any = self.offset(pair) + numbers.below(length.max(1));
            self.takes[any] = TAKES_ANY;
        }
        self
    }

    fn takes(&self, slot: usize) -> f32 {
        self.takes.get(slot).copied().unwrap_or(TAKES_SIMILAR)
    }

    /// With keys, values and queries as they are in a dtype.
    fn rounded(&self, tested: &TestDevice, dtype: DType) -> Self {
        let rounded = |values: &[f32]| {
            let values = Tensor::<1>::from_data(values, (&tested.device, DType::F32));
            values.cast(dtype).try_into_vec_as::<f32>().unwrap()
        };
        let [keys, values, queries] = [&self.keys, &self.values, &self.queries].map(|x| rounded(x));
        Self { keys, values, queries, ..self.clone() }
    }

    fn offset(&self, pair: usize) -> usize {
        self.lengths[..pair].iter().map(|length| length + 2).sum()
    }

    fn key(&self, slot: usize) -> Vec<f64> {
        self.keys[slot * self.dim..][..self.dim].iter().map(|&x| x.into()).collect()
    }

    fn value(&self, slot: usize) -> Vec<f64> {
        self.values[slot * self.dim..][..self.dim].iter().map(|&x| x.into()).collect()
    }

    /// Scores and samples of live slots behind a step's, and of the others as they are.
    fn averaged(&self, weights: AverageWeights) -> [Vec<f32>; 2] {
        let (mut scores, mut samples) = (self.log_scores.clone(), self.log_samples.clone());
        let (new, old) = (f64::from(weights.new), f64::from(weights.old));
        for (pair, &length) in self.lengths.iter().enumerate() {
            for slot in self.offset(pair)..self.offset(pair) + length {
                let logits = self.logits[slot * GROUP..][..GROUP].iter();
                let mean = logits.map(|&x| f64::from(x).exp()).sum::<f64>() / GROUP as f64;
                let score = mean.ln() - f64::from(self.log_weights[slot]);
                let sum = (f64::from(scores[slot]) + old).exp() + (score + new).exp();
                scores[slot] = sum.ln() as f32;
                samples[slot] = ((f64::from(samples[slot]) + old).exp() + new.exp()).ln() as f32;
            }
        }
        [scores, samples]
    }

    /// The slot that takes a head's victim.
    fn target(&self, pair: usize, threshold: f64) -> Option<usize> {
        let victim = self.offset(pair) + self.victims[pair];
        let slots = self.offset(pair)..self.offset(pair) + self.lengths[pair];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let own = self.key(victim);
        let others = slots.filter(|&slot| slot != victim);
        let any = others.clone().find(|&slot| self.takes(slot) == TAKES_ANY);
        let similar = others.filter(|&slot| self.takes(slot) == TAKES_SIMILAR);
        let cosines = similar.map(|slot| {
            let key = self.key(slot);
            (slot, dot(&own, &key) / (dot(&own, &own) * dot(&key, &key)).sqrt())
        });
        let best = cosines.max_by(|a, b| a.1.total_cmp(&b.1));
        best.filter(|(_, cosine)| *cosine > threshold).map(|(slot, _)| slot).or(any)
    }
}

#[test]
fn victims_go_into_the_most_similar_slot() {
    // More heads than any device has processors.
    let many: Vec<usize> = (0..400).map(|head| 1 + head * 37 % 300).collect();
    let cases = [
        (Case::random(1, 64, &[200, 1, 33, 40, 2, 512]), KeyRule::Paper),
        (Case::random(2, 20, &[17, 90, 8, 9]), KeyRule::Votes),
        (Case::random(3, 128, &[1030, 64]), KeyRule::Additive),
        (Case::random(4, 32, &many), KeyRule::Votes),
        (Case::random(6, 64, &[200, 1, 33, 40, 2, 512]).choosy(7), KeyRule::Paper),
        (Case::random(8, 20, &[17, 90, 8, 9]).choosy(9), KeyRule::Mean),
        (Case::random(10, 128, &many).choosy(11), KeyRule::Additive),
        // As it is timed.
        (Case::random(5, STEP.head_dim, &[STEP.slots; STEP.pairs()]), KeyRule::Paper),
    ];
    for tested in devices() {
        let device = &tested.device;
        let dtypes = tested.float_dtypes();
        for ((case, rule), dtype) in
            cases.iter().flat_map(|case| dtypes.iter().map(move |d| (case, *d)))
        {
            let (case, rule) = (&case.rounded(&tested, dtype), *rule);
            let (pairs, slots) = (case.lengths.len(), case.votes.len());
            let floats = |values: &[f32]| Tensor::<1>::from_data(values, (device, DType::F32));
            let ints = |values: Vec<i32>| {
                Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32))
                    .reshape([1, pairs])
            };
            let rows = |values: &[f32]| floats(values).reshape([slots, case.dim]).cast(dtype);
            let (mut keys, mut values) = (rows(&case.keys), rows(&case.values));
            let mut log_weights = floats(&case.log_weights);
            let (mut log_scores, mut log_samples) =
                (floats(&case.log_scores), floats(&case.log_samples));
            let mut votes = floats(&case.votes);
            let mut votes_high = votes.zeros_like();
            let mut inherited = (!case.inherited.is_empty()).then(|| floats(&case.inherited));
            let takes = (!case.takes.is_empty()).then(|| floats(&case.takes));
            // Above the cosine of most nearest slots of choosy cases, so that some go elsewhere.
            let threshold = if takes.is_some() { 0.25f32 } else { 0.1 };
            let ranges = SlotRanges {
                offsets: ints((0..pairs).map(|pair| case.offset(pair) as i32).collect()),
                lengths: ints(case.lengths.iter().map(|&length| length as i32).collect()),
            };
            // Where nothing goes, the victim may be none, or no slot at all.
            let victims = (0..pairs).map(|pair| match case.goes[pair] {
                true => (case.offset(pair) + case.victims[pair]) as i32,
                false => [-1, i32::MAX][pair / 4 % 2],
            });
            let victims = ints(victims.collect());
            let goes = ints(case.goes.iter().map(|&goes| i32::from(goes)).collect());
            let queries = floats(&case.queries).reshape([1, GROUP * pairs, case.dim]).cast(dtype);
            let merge = MergeOptions { rule, ..Default::default() };
            let queries = Some(queries);
            // Alone, and behind a step's scores.
            let weights = (rule != KeyRule::Additive)
                .then_some(AverageWeights { new: 0.2f32.ln(), old: 0.8f32.ln() });
            let average = weights.map(|weights| {
                let logits = floats(&case.logits).reshape([slots, GROUP]);
                StepScores { logits, weights }
            });
            let options =
                NearestOptions { threshold, epsilon: 0.0, queries, average, takes, merge };
            merge_nearest(
                MergingSlots {
                    keys: &mut keys,
                    values: &mut values,
                    log_weights: &mut log_weights,
                    log_scores: &mut log_scores,
                    log_samples: &mut log_samples,
                    votes: &mut votes,
                    votes_high: &mut votes_high,
                    inherited: inherited.as_mut(),
                },
                &ranges,
                &victims,
                &goes,
                &options,
            )
            .unwrap();

            let (mut exact_keys, mut exact_values) = (case.keys.clone(), case.values.clone());
            let so_far = || [case.log_scores.clone(), case.log_samples.clone()];
            let [log_scores_now, samples_now] = weights.map_or_else(so_far, |w| case.averaged(w));
            let mut exact = [case.log_weights.clone(), log_scores_now.clone()];
            let mut exact_votes: Vec<f64> = case.votes.iter().map(|&x| x.into()).collect();
            let mut exact_sums = case.inherited.clone();
            for pair in (0..pairs).filter(|&pair| case.goes[pair]) {
                let Some(target) = case.target(pair, threshold.into()) else { continue };
                let victim = case.offset(pair) + case.victims[pair];
                let parts = [target, victim].map(|slot| (case.key(slot), case.value(slot)));
                let member = |slot: usize, at: usize| Member {
                    key: &parts[at].0,
                    value: &parts[at].1,
                    log_weight: case.log_weights[slot].into(),
                    log_score: f64::from(log_scores_now[slot]) - f64::from(samples_now[slot]),
                };
                let mut query = vec![0.0; case.dim];
                for own in case.queries[GROUP * pair * case.dim..].chunks(case.dim).take(GROUP) {
                    let mean = query.iter_mut().zip(own);
                    mean.for_each(|(mean, x)| *mean += f64::from(*x) / GROUP as f64);
                }
                let members = [member(target, 0), member(victim, 1)];
                let scale = 1.0 / (case.dim as f64).sqrt();
                let merged = merge_group(&members, Some(&query), rule, 4.0, scale);
                let write = |to: &mut [f32], from: &[f64]| {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
                };
                write(&mut exact_keys[target * case.dim..][..case.dim], &merged.key);
                write(&mut exact_values[target * case.dim..][..case.dim], &merged.value);
                exact[0][target] = merged.log_weight as f32;
                exact[1][target] = merged.log_score as f32 + samples_now[target];
                exact_votes[target] += exact_votes[victim];
                if !exact_sums.is_empty() {
                    exact_sums[target] += exact_sums[victim];
                }
            }
            let context = format!("{} {dtype:?} {rule:?}", tested.name);
            let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
            let [weights, scores] = exact;
            for (name, actual, expected) in [
                ("keys", read(keys.reshape([-1])), exact_keys),
                ("values", read(values.reshape([-1])), exact_values),
                ("weights", read(log_weights), weights),
                ("scores", read(log_scores), scores),
                ("samples", read(log_samples), samples_now.clone()),
            ] {
                let expected: Vec<f64> = expected.iter().map(|&x| x.into()).collect();
                let error = relative_error(&actual, &expected);
                // Keys and values are rounded once.
                let exact = dtype == DType::F32 || !["keys", "values"].contains(&name);
                let limit = if exact { 1e-4 } else { 1e-2 };
                assert!(error < limit, "{context}: {name} off by {error}");
            }
            assert_eq!(inherited.map(read).unwrap_or_default(), exact_sums, "{context}: sums");
            let (low, high) = (read(votes), read(votes_high));
            for (slot, expected) in exact_votes.iter().enumerate() {
                let actual = f64::from(low[slot]) + 4096.0 * f64::from(high[slot]);
                assert_eq!(actual, *expected, "{context}: slot {slot}");
            }
        }
    }
}

/// Slots of heads of equally many, keys and values alike, one vote each.
struct Slots {
    rows: [Tensor<2>; 2],
    scalars: [Tensor<1>; 5],
    ranges: SlotRanges,
}

impl Slots {
    /// `rows` `[heads * length, dim]`; `log_scores` of all slots.
    fn new(rows: &[f32], dim: usize, heads: usize, log_scores: &[f32], device: &Device) -> Self {
        let floats = |values: &[f32]| Tensor::<1>::from_data(values, (device, DType::F32));
        let count = rows.len() / dim;
        let length = (count / heads) as i32;
        let ints = |values: Vec<i32>| {
            Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32)).reshape([1, heads])
        };
        let zeros = || floats(&vec![0.0; count]);
        Self {
            rows: [0, 1].map(|_| floats(rows).reshape([count, dim])),
            scalars: [zeros(), floats(log_scores), zeros(), zeros().add_scalar(1.0), zeros()],
            ranges: SlotRanges {
                offsets: ints((0..heads as i32).map(|head| head * length).collect()),
                lengths: ints(vec![length; heads]),
            },
        }
    }

    /// Merges a victim of each head.
    fn merge(&mut self, victims: &[i32], options: &NearestOptions) {
        let device = self.rows[0].device();
        let ints = |values: &[i32]| {
            Tensor::<1, Int>::from_data(values, (&device, DType::I32)).reshape([1, values.len()])
        };
        let [keys, values] = &mut self.rows;
        let [log_weights, log_scores, log_samples, votes, votes_high] = &mut self.scalars;
        let slots = MergingSlots {
            keys,
            values,
            log_weights,
            log_scores,
            log_samples,
            votes,
            votes_high,
            inherited: None,
        };
        let goes = ints(&vec![1; victims.len()]);
        merge_nearest(slots, &self.ranges, &ints(victims), &goes, options).unwrap();
    }

    /// Weights, scores and votes.
    fn scalars(&self) -> [Vec<f32>; 3] {
        [0, 1, 3].map(|at| self.scalars[at].clone().try_into_vec_as::<f32>().unwrap())
    }
}

#[test]
fn the_first_of_equals_is_merged_into_wherever_it_is() {
    // Few long heads and many short ones; in rows that one unit has, and several; keys that are all
    // the same but for odd ones, and a head of zeros.
    for (tested, (heads, length, dim)) in devices().iter().flat_map(|tested| {
        [(3, 1500, 8), (3, 700, 20), (3, 700, 128), (400, 90, 64)].map(|shape| (tested, shape))
    }) {
        for (odd, victim, target) in [
            (0..2, length / 2, Some(2)),
            (0..0, 0, Some(1)),
            (0..0, length - 1, Some(0)),
            (0..length - 1, length - 1, None),
            (3..5, 2, Some(0)),
        ] {
            let mut rows = vec![0.0f32; heads * length * dim];
            let mut expected = vec![1.0f32; heads * length];
            for head in 1..heads {
                for slot in 0..length {
                    let at = (head * length + slot) * dim + head % (dim - 1);
                    rows[at + usize::from(odd.contains(&slot))] = 1.0;
                }
                if let Some(target) = target {
                    expected[head * length + target] = 2.0;
                }
            }
            let scores = vec![1.0; heads * length];
            let mut slots = Slots::new(&rows, dim, heads, &scores, &tested.device);
            let victims: Vec<i32> =
                (0..heads).map(|head| (head * length + victim) as i32).collect();
            slots.merge(&victims, &NearestOptions { threshold: 0.5, ..Default::default() });
            let [.., votes] = slots.scalars();
            assert!(votes == expected, "{}: {heads} {dim} {odd:?} {victim}", tested.name);
        }
    }
}

/// A victim that nobody attends to adds its vote and nothing else; where neither has a score, votes
/// alone weigh.
#[test]
fn tokens_without_score_merge_as_nothing() {
    const NOTHING: f32 = -1.0e30;
    const DIM: usize = 128;
    for tested in devices() {
        for rule in [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes, KeyRule::Mean] {
            for (scores, share) in [([2.0, NOTHING], 0.0), ([NOTHING, NOTHING], 0.5)] {
                let mut rows = vec![0.0; 2 * DIM];
                rows[..2].copy_from_slice(&[1.0, 0.5]);
                rows[DIM..DIM + 2].copy_from_slice(&[1.0, 0.7]);
                let mut slots = Slots::new(&rows, DIM, 1, &scores, &tested.device);
                let query = Tensor::<3>::ones([1, 1, DIM], (&tested.device, DType::F32));
                let merge = MergeOptions { rule, ..Default::default() };
                slots.merge(
                    &[1],
                    &NearestOptions { queries: Some(query), merge, ..Default::default() },
                );
                let context = format!("{} {rule:?} {scores:?}", tested.name);
                let [weights, log_scores, votes] = slots.scalars();
                assert_eq!(votes, [2.0, 1.0], "{context}");
                let [keys, values] =
                    slots.rows.clone().map(|rows| rows.try_into_vec_as::<f32>().unwrap());
                assert!(keys.iter().all(|key| key.is_finite()), "{context}: {keys:?}");
                let expected = 0.5 + 0.2 * share;
                assert!((values[1] - expected).abs() < 1e-6, "{context}: {values:?}");
                if share == 0.0 {
                    // All the mass is the one's that has any.
                    let mass = weights[0] + log_scores[0];
                    assert!((mass - scores[0]).abs() < 1e-5, "{context}: {mass}");
                }
            }
        }
    }
}

#[test]
fn averages_are_those_of_the_scores() {
    for (tested, group) in devices().iter().flat_map(|tested| [(tested, 1), (tested, 3)]) {
        let device = &tested.device;
        let (slots, steps) = (300, 5);
        let mut numbers = Numbers::new(4);
        let start = || Tensor::<1>::full([slots], -1e30, (device, DType::F32));
        let (mut scores, mut samples) = (start(), start());
        let log_weights = numbers.normal(slots);
        let alpha = 0.8f64;
        let mut exact = vec![(0.0f64, 0.0f64); slots];
        for _ in 0..steps {
            let logits: Vec<f32> = numbers.normal(slots * group).iter().map(|x| 20.0 * x).collect();
            for (slot, (sum, weight)) in exact.iter_mut().enumerate() {
                let own = logits[slot * group..][..group].iter();
                let mean = own
                    .map(|&logit| (f64::from(logit) - f64::from(log_weights[slot])).exp())
                    .sum::<f64>()
                    / group as f64;
                *sum = alpha * *sum + (1.0 - alpha) * mean;
                *weight = alpha * *weight + (1.0 - alpha);
            }
            let logits = Tensor::<1>::from_data(logits.as_slice(), (device, DType::F32));
            let weights = AverageWeights { new: (1.0 - alpha).ln() as f32, old: alpha.ln() as f32 };
            let log_weights = Tensor::from_data(log_weights.as_slice(), (device, DType::F32));
            let logits = logits.reshape([slots, group]);
            average_scores(&mut scores, &mut samples, logits, Some(log_weights), weights).unwrap();
        }
        let read = |tensor: Tensor<1>| tensor.try_into_vec_as::<f32>().unwrap();
        let (scores, samples) = (read(scores), read(samples));
        for (slot, (sum, weight)) in exact.iter().enumerate() {
            let error = (f64::from(scores[slot]) - sum.ln()).abs();
            assert!(error < 1e-4, "{}: slot {slot} off by {error}", tested.name);
            let error = (f64::from(samples[slot]) - weight.ln()).abs();
            assert!(error < 1e-5, "{}: samples of {slot} off by {error}", tested.name);
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    for tested in devices() {
        let device = &tested.device;
        let scalars = |slots: usize| Tensor::<1>::zeros([slots], (device, DType::F32));
        let (mut scores, mut samples) = (scalars(4), scalars(4));
        let logits = Tensor::<2>::zeros([5, 2], (device, DType::F32));
        let weights = AverageWeights { new: 0.0, old: 0.0 };
        let error = average_scores(&mut scores, &mut samples, logits, None, weights).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "logits", .. }), "{error}");
        assert_eq!(scores.dims(), [4], "{}", tested.name);

        let rows = || Tensor::<2>::ones([4, 8], (device, DType::F32));
        let pairs = |width: usize| Tensor::<2, Int>::ones([1, width], (device, DType::I32));
        let ranges = SlotRanges { offsets: pairs(2), lengths: pairs(2) };
        for (voters, rows_of_logits, expected) in [(3, 4, "votes"), (4, 5, "logits")] {
            let (mut keys, mut values) = (rows(), rows());
            let (mut weights, mut votes, mut votes_high) =
                (scalars(4), scalars(voters), scalars(4));
            let slots = MergingSlots {
                keys: &mut keys,
                values: &mut values,
                log_weights: &mut weights,
                log_scores: &mut scores,
                log_samples: &mut samples,
                votes: &mut votes,
                votes_high: &mut votes_high,
                inherited: None,
            };
            let logits = Tensor::zeros([rows_of_logits, 2], (device, DType::F32));
            let weights = AverageWeights { new: 0.0, old: 0.0 };
            let average = Some(StepScores { logits, weights });
            let options = NearestOptions { average, ..Default::default() };
            let error = merge_nearest(slots, &ranges, &pairs(2), &pairs(2), &options).unwrap_err();
            let argument = match &error {
                KernelError::Shape { argument, .. } => *argument,
                other => panic!("{other}"),
            };
            assert_eq!(argument, expected, "{}", tested.name);
            assert_eq!(keys.dims(), [4, 8], "{}", tested.name);
        }
    }
}
