//! Means over records, and their 95 % confidence intervals.
//!
//! The samples are the records that name their prompt. Modes, and several questions of one prompt,
//! are not independent: the mean of a prompt's records is one sample. The samples of a text are the
//! records of its buckets of positions.

use std::collections::BTreeMap;

use statrs::distribution::{Beta, ContinuousCDF, Normal, StudentsT};
use statrs::statistics::Statistics;

use crate::record::{Record, metric, summary};

/// The probabilities below an interval's lower end and below its upper end.
const LOWER: f64 = 0.025;
const UPPER: f64 = 0.975;

/// A mean, and its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    /// The mean.
    pub(crate) mean: f64,
    /// Its 95 % confidence interval, where the records are samples.
    pub(crate) interval: Option<Interval>,
}

/// A confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Interval {
    /// The mean less and plus a number.
    Around(f64),
    /// From one number to another.
    Between(f64, f64),
}

/// What tells a sample from others: the source, the prompt and its length, and the position in a
/// text.
type Key<'a> = (Option<&'a str>, Option<&'a str>, Option<usize>, Option<usize>);

impl Estimate {
    /// The mean of one metric over whole runs, and its interval.
    pub(crate) fn of(records: &[&Record], metric: &str) -> Option<Self> {
        let whole = summary(records, metric)?;
        let samples = samples(records, metric);
        let of_prompts = samples.keys().all(|(_, prompt, ..)| prompt.is_some());
        let samples: Vec<f64> = samples.into_values().collect();
        // Prompts with more questions than others count once.
        let mean = match of_prompts && !samples.is_empty() {
            true => samples.iter().mean(),
            false => whole,
        };
        let binary = || metric == metric::EXACT_MATCH && samples.iter().all(|s| s.fract() == 0.0);
        let interval = if binary() {
            binomial(samples.iter().filter(|sample| **sample == 1.0).count(), samples.len())
        } else {
            half_width(&samples).map(|half| around(mean, half, metric))
        };
        Some(Self { mean, interval: interval.filter(|_| mean.is_finite()) })
    }

    /// The mean of the means of groups, such as tasks, in which every group counts once. Its
    /// interval is by Student's t distribution with the degrees of freedom of Welch and
    /// Satterthwaite; there is none where a group has fewer than two samples.
    pub(crate) fn of_groups(groups: &[Vec<&Record>], metric: &str) -> Option<Self> {
        let means = groups.iter().map(|own| Self::of(own, metric).map(|own| own.mean));
        let means: Vec<f64> = means.collect::<Option<_>>()?;
        // The variance of each group's mean, and its degrees of freedom.
        let parts: Vec<[f64; 2]> = groups
            .iter()
            .map(|own| {
                let samples: Vec<f64> = samples(own, metric).into_values().collect();
                let count = samples.len() as f64;
                [samples.iter().variance() / count, count - 1.0]
            })
            .collect();
        let variance: f64 = parts.iter().map(|[variance, _]| variance).sum();
        let freedom = variance.powi(2)
            / parts.iter().map(|[variance, freedom]| variance.powi(2) / freedom).sum::<f64>();
        let half = quantile(freedom).map(|t| t * variance.sqrt() / groups.len() as f64);
        let half = half.filter(|half| half.is_finite() && *half > 0.0);
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        (!means.is_empty())
            .then_some(Self { mean, interval: half.map(|half| around(mean, half, metric)) })
    }

    /// A policy's number less the full cache's, or the ratio of their perplexities, over the
    /// samples that both have. A sample is compared with itself, so that the interval is that of
    /// the differences. `None` without such samples.
    pub(crate) fn of_difference(own: &[&Record], full: &[&Record], metric: &str) -> Option<Self> {
        let (own, full) = (samples(own, metric), samples(full, metric));
        let differences: Vec<f64> =
            own.iter().filter_map(|(key, own)| Some(own - full.get(key)?)).collect();
        let mean = differences.iter().sum::<f64>() / differences.len() as f64;
        let mean = if metric == metric::PERPLEXITY { mean.exp() } else { mean };
        let interval = half_width(&differences).map(|half| around(mean, half, metric));
        (!differences.is_empty()).then_some(Self { mean, interval })
    }

    /// The lower and the upper end of the interval.
    pub(crate) fn ends(&self) -> Option<[f64; 2]> {
        self.interval.map(|interval| match interval {
            Interval::Around(half) => [self.mean - half, self.mean + half],
            Interval::Between(low, high) => [low, high],
        })
    }
}

impl From<f64> for Estimate {
    fn from(mean: f64) -> Self {
        Self { mean, interval: None }
    }
}

/// The samples of a metric; logarithms of perplexities. None where the records are no samples.
fn samples<'a>(records: &[&'a Record], metric: &str) -> BTreeMap<Key<'a>, f64> {
    let own = || records.iter().copied().filter(|r| r.metric == metric);
    let by_prompt = own().all(|r| r.case.prompt.is_some());
    let mut sums: BTreeMap<Key<'a>, (f64, f64)> = BTreeMap::new();
    let mut contexts: Vec<(Option<&str>, Option<usize>)> = Vec::new();
    for record in own().filter(|r| by_prompt || r.case.position.is_some()) {
        let case = &record.case;
        contexts.push((case.source.as_deref(), case.length));
        let value = record.number();
        let value = if metric == metric::PERPLEXITY { value.ln() } else { value };
        let source = case.source.as_deref();
        let key = (source, case.prompt.as_deref(), case.length, case.position);
        let (sum, count) = sums.entry(key).or_default();
        (*sum, *count) = (*sum + value, *count + 1.0);
    }
    contexts.dedup();
    // Contexts of several lengths overlap, so that what follows them is no independent text.
    if !by_prompt && contexts.len() > 1 {
        return BTreeMap::new();
    }
    sums.into_iter().map(|(key, (sum, count))| (key, sum / count)).collect()
}

/// Half the width of the interval of a mean, by Student's t distribution. `None` for fewer than two
/// samples, and for samples that are all alike, which say nothing of their spread.
fn half_width(samples: &[f64]) -> Option<f64> {
    let count = samples.len() as f64;
    let half = quantile(count - 1.0)? * samples.std_dev() / count.sqrt();
    (half.is_finite() && half > 0.0).then_some(half)
}

/// Student's quantile at an interval's upper end. `None` for no positive number of degrees of
/// freedom.
fn quantile(freedom: f64) -> Option<f64> {
    Some(StudentsT::new(0.0, 1.0, freedom).ok()?.inverse_cdf(UPPER))
}

/// Student's quantiles at equal steps of the inverse of the degrees of freedom: from 0, which is
/// the normal distribution, to 1.
pub(crate) fn quantiles(steps: usize) -> Vec<f64> {
    let inverse = |step: usize| quantile(steps as f64 / step as f64);
    let normal = Normal::standard().inverse_cdf(UPPER);
    [normal].into_iter().chain((1..=steps).filter_map(inverse)).collect()
}

/// The interval around a mean; of a perplexity, whose logarithm has the half width.
fn around(mean: f64, half: f64, metric: &str) -> Interval {
    match metric {
        metric::PERPLEXITY => Interval::Between(mean * (-half).exp(), mean * half.exp()),
        _ => Interval::Around(half),
    }
}

/// Clopper and Pearson's exact interval of the share of right answers.
fn binomial(right: usize, count: usize) -> Option<Interval> {
    let (hits, misses) = (right as f64, (count - right) as f64);
    // No distribution is where all or none are right: the interval then ends at 1 or at 0.
    let low = Beta::new(hits, misses + 1.0).map_or(0.0, |beta| beta.inverse_cdf(LOWER));
    let high = Beta::new(hits + 1.0, misses).map_or(1.0, |beta| beta.inverse_cdf(UPPER));
    (count > 1).then_some(Interval::Between(low, high))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::Distribution;

    use super::*;
    use crate::record::mode;
    use crate::report::test_records::{of_prompt, record};

    /// A record a value, each of a prompt of its own.
    fn of_prompts(metric: &str, values: &[f64]) -> Vec<Record> {
        let record = |(index, value): (usize, &f64)| {
            of_prompt(record("a", Some(0.5), metric, *value), &index.to_string())
        };
        values.iter().enumerate().map(record).collect()
    }

    fn estimate(records: &[Record]) -> Estimate {
        Estimate::of(&records.iter().collect::<Vec<_>>(), &records[0].metric).unwrap()
    }

    fn assert_near(found: Option<[f64; 2]>, expected: [f64; 2], within: f64) {
        let found = found.unwrap();
        let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < within);
        assert!(near, "{found:?}, expected {expected:?}");
    }

    /// Of R's `binom.test(8, 10)` and others, and of Newcombe (1998), table I.
    #[test]
    fn shares_have_exact_binomial_intervals() {
        let ends = |right: usize, count: usize| {
            let values: Vec<f64> = (0..count).map(|i| f64::from(u8::from(i < right))).collect();
            estimate(&of_prompts(metric::EXACT_MATCH, &values)).ends()
        };
        assert_near(ends(8, 10), [0.4439045, 0.9747893], 1e-6);
        assert_near(ends(0, 10), [0.0, 0.3084971], 1e-6);
        assert_near(ends(10, 10), [0.6915029, 1.0], 1e-6);
        assert_near(ends(81, 263), [0.2527, 0.3676], 1e-4);
        assert_eq!(ends(1, 1), None);
    }

    /// Student's own data, the additional hours of sleep of ten patients: `t.test` of R's `sleep`.
    #[test]
    fn means_have_students_intervals() {
        let hours = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4];
        let found = estimate(&of_prompts(metric::ANSWER_LOGPROB, &hours));
        assert!((found.mean - 2.33).abs() < 1e-12);
        assert_near(found.ends(), [0.8976775, 3.7623225], 1e-6);
        let placebo = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0];
        let full = of_prompts(metric::ANSWER_LOGPROB, &placebo);
        let own = of_prompts(metric::ANSWER_LOGPROB, &hours);
        let [own, full] = [&own, &full].map(|records| records.iter().collect::<Vec<_>>());
        let paired = Estimate::of_difference(&own, &full, metric::ANSWER_LOGPROB).unwrap();
        assert!((paired.mean - 1.58).abs() < 1e-12);
        assert_near(paired.ends(), [0.7001142, 2.4598858], 1e-6);
    }

    /// The same data as two groups: R's `t.test(extra ~ group, sleep)` gives 17.776 degrees of
    /// freedom, and a half width of 1.7854832 for the difference, twice that of the mean.
    #[test]
    fn groups_count_once_each() {
        let hours = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4];
        let placebo = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0];
        let groups = [hours, placebo].map(|values| of_prompts(metric::SCORE, &values));
        let groups: Vec<Vec<&Record>> = groups.iter().map(|own| own.iter().collect()).collect();
        let both = Estimate::of_groups(&groups, metric::SCORE).unwrap();
        assert!((both.mean - (2.33 + 0.75) / 2.0).abs() < 1e-12);
        let half = 1.7854832 / 2.0;
        assert_near(both.ends(), [both.mean - half, both.mean + half], 1e-6);
        let one = Estimate::of_groups(&groups[..1], metric::SCORE).unwrap();
        assert_near(one.ends(), [0.8976775, 3.7623225], 1e-6);
        // A group of one sample says nothing of its spread.
        let short = [groups[0].clone(), groups[1][..1].to_vec()];
        let short = Estimate::of_groups(&short, metric::SCORE).unwrap();
        assert!((short.mean - (2.33 + 0.7) / 2.0).abs() < 1e-12 && short.interval.is_none());
        assert_eq!(Estimate::of_groups(&[Vec::new()], metric::SCORE), None);
        assert_eq!(Estimate::of_groups(&[], metric::SCORE), None);
    }

    /// Of tables: of infinitely many, 4, 2 and 1 degrees of freedom.
    #[test]
    fn quantiles_go_from_the_normal_one_to_that_of_one_degree() {
        let found = quantiles(4);
        for (step, expected) in [(0, 1.959964), (1, 2.776445), (2, 4.302653), (4, 12.706205)] {
            assert!((found[step] - expected).abs() < 1e-5, "{}, {expected}", found[step]);
        }
        assert!(found.len() == 5 && found.is_sorted());
    }

    #[test]
    fn what_is_no_sample_has_no_interval() {
        let none = |records: &[Record]| assert_eq!(estimate(records).interval, None);
        none(&of_prompts(metric::KL_DIVERGENCE, &[0.25]));
        // All alike.
        none(&of_prompts(metric::AGREEMENT, &[1.0; 4]));
        none(&of_prompts(metric::KL_DIVERGENCE, &[1.0, f64::NAN, 2.0]));
        none(&[1.0, 2.0].map(|bytes| record("a", None, metric::LIVE_BYTES, bytes)));
        // Layers are no samples.
        let mut layers = [0.1, 0.2].map(|error| record("a", None, metric::RELATIVE_ERROR, error));
        layers.iter_mut().enumerate().for_each(|(i, record)| record.case.layer = Some(i));
        none(&layers);
        // Records of files from before prompts were named.
        none(&[1.0, 0.0].map(|right| record("a", None, metric::EXACT_MATCH, right)));
    }

    /// A prompt's modes or questions add nothing to what the prompt says.
    #[test]
    fn records_of_one_prompt_are_one_sample() {
        let once = of_prompts(metric::KL_DIVERGENCE, &[0.1, 0.2, 0.4]);
        let mut twice = once.clone();
        twice.extend(once.iter().cloned().map(|mut record| {
            record.case.mode = Some(mode::AGNOSTIC.into());
            record
        }));
        let (one, two) = (estimate(&once).ends().unwrap(), estimate(&twice).ends());
        assert_near(two, one, 1e-12);
        // Prompts of another file are others, whatever their names.
        let mut other = once.clone();
        other.iter_mut().for_each(|record| record.case.source = Some("b.jsonl".into()));
        let [low, high] = estimate(&[once, other].concat()).ends().unwrap();
        assert!(high - low < 0.75 * (one[1] - one[0]));
        // Half of the first prompt's questions are answered: no share of prompts.
        let mut answers = of_prompts(metric::EXACT_MATCH, &[1.0, 1.0, 0.0]);
        answers.push(of_prompt(record("a", Some(0.5), metric::EXACT_MATCH, 0.0), "0"));
        assert!(matches!(estimate(&answers).interval, Some(Interval::Around(_))));
    }

    fn buckets(logs: &[f64]) -> Vec<Record> {
        let bucket = |(index, log): (usize, &f64)| {
            let mut record = record("a", Some(0.5), metric::PERPLEXITY, log.exp());
            (record.case.position, record.case.length) = (Some(512 + 64 * index), Some(512));
            record
        };
        let mut whole = record("a", Some(0.5), metric::PERPLEXITY, logs.mean().exp());
        whole.case.length = Some(512);
        logs.iter().enumerate().map(bucket).chain([whole]).collect()
    }

    #[test]
    fn buckets_of_overlapping_contexts_have_no_interval() {
        let mut records = buckets(&[2.9, 3.0, 3.2]);
        assert!(estimate(&records).interval.is_some());
        let mut longer = records.clone();
        longer.iter_mut().for_each(|record| record.case.length = Some(1024));
        records.extend(longer);
        assert_eq!(estimate(&records).interval, None);
    }

    /// Of 2,000 texts, 95 in 100 have the true perplexity in their interval.
    #[test]
    fn perplexities_intervals_cover() {
        let mut draws = ChaCha8Rng::seed_from_u64(17);
        let log = rand_distr::Normal::new(3.0, 0.25).unwrap();
        let covered = (0..2000).filter(|_| {
            let logs: Vec<f64> = (0..8).map(|_| log.sample(&mut draws)).collect();
            let [low, high] = estimate(&buckets(&logs)).ends().unwrap();
            (low..high).contains(&3f64.exp())
        });
        let covered = covered.count();
        // Within 3 deviations of 1,900.
        assert!((1870..=1930).contains(&covered), "{covered}");
    }
}
