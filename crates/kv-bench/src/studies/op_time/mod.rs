//! Times of one layer's attention in a decode step, on made-up queries, keys and values.

pub(crate) mod eviction_step;
pub(crate) mod sketch_attention;
pub(crate) mod subset_attention;

use anyhow::{bail, ensure};
use burn::tensor::{DType, Device, Distribution, Tensor};
use kv_policies::Reads;

use super::SUITE;
use crate::bench::Bench;
use crate::options::{Common, PaperOptions};
use crate::progress::Progress;
use crate::record::{Case, metric};
use crate::suites::kernels::Clock;

/// A figure of times: its shapes, and the measurement that runs on each of them.
#[derive(Debug)]
pub(crate) struct OpTime {
    /// The shapes of the paper's size; `--lengths` and `--batches` replace theirs.
    pub(crate) paper: Shapes,
    /// The shapes of the quick form.
    pub(crate) quick: Shapes,
    /// The largest cases that are measured.
    pub(crate) limit: Limit,
    /// The fewest tokens of which policies can read a share.
    pub(crate) shortest: usize,
    /// Times one case.
    pub(crate) time: fn(&OpBench<'_>, &Common, Sink<'_>) -> anyhow::Result<()>,
    /// The paper's times in µs, which are recorded beside the times at its sizes.
    pub(crate) published_us: &'static [(&'static str, f64)],
}

/// Takes times as they are measured.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Timed);

/// Heads, tokens, and sequences that decode together.
type Shape = (Heads, usize, usize);

/// All pairs of heads, lengths in tokens, and sequences that decode together.
#[derive(Debug)]
pub(crate) struct Shapes {
    pub(crate) heads: &'static [Heads],
    pub(crate) lengths: &'static [usize],
    pub(crate) batches: &'static [usize],
}

impl Shapes {
    /// One case for small machines.
    pub(crate) const SMALL: Self = Self {
        heads: &[Heads { name: "small", query: 4, kv: 2, dim: 64 }],
        lengths: &[512],
        batches: &[1],
    };
}

/// The heads of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// The name in records, behind the figure's name; empty where all cases have these heads.
    pub(crate) name: &'static str,
    /// Query heads.
    pub(crate) query: usize,
    /// Key-value heads.
    pub(crate) kv: usize,
    /// Numbers of a head's query, key or value.
    pub(crate) dim: usize,
}

/// The size beyond which a case is left out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// Every case is measured.
    None,
    /// Tokens of all sequences: more would take long.
    Tokens(usize),
    /// Tokens of all key-value heads and sequences: kernels do not count more, and a note says how
    /// many cases are left out.
    KvTokens(usize),
}

/// A time, as it appears in records.
pub(crate) struct Timed {
    /// The policy's label.
    pub(crate) policy: String,
    /// Its budget.
    pub(crate) budget: Option<f64>,
    /// The part of a step, behind the figure's name; it may be empty.
    pub(crate) part: &'static str,
    /// The time.
    pub(crate) seconds: f64,
    /// Bytes that must be read in this time, where they are known.
    pub(crate) bytes: Option<f64>,
    /// Counts of choices, for policies that read a part of the tokens they keep.
    pub(crate) reads: Reads,
}

/// A case, and the clock that times it.
pub(crate) struct OpBench<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
    pub(crate) clock: &'a Clock,
    pub(crate) heads: Heads,
    pub(crate) length: usize,
    pub(crate) batch: usize,
}

impl OpBench<'_> {
    /// Normal rows, `[rows, D]`.
    fn random(&self, rows: usize) -> Tensor<2> {
        self.random_of([rows, self.heads.dim])
    }

    /// A normal matrix of any shape.
    fn random_of(&self, shape: [usize; 2]) -> Tensor<2> {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<2>::random(shape, normal, (self.device, DType::F32)).cast(self.dtype)
    }

    /// Bytes of the keys and values of all tokens.
    fn cache_bytes(&self) -> usize {
        let Heads { kv, dim, .. } = self.heads;
        2 * self.batch * kv * self.length * dim * self.dtype.size()
    }
}

/// Times all cases of a figure.
///
/// # Errors
/// Where all cases are too large, and where a policy or the device refuses.
pub(crate) fn run(
    bench: &mut Bench,
    name: &str,
    ops: &OpTime,
    options: &PaperOptions,
) -> anyhow::Result<()> {
    let (quick, on_cpu) = (bench.common.quick, bench.is_cpu());
    let (cases, left_out) = ops.cases(name, quick, &options.lengths, &options.batches)?;
    let (device, dtype, common) = (&bench.device.clone(), bench.dtype(), bench.common.clone());
    let clock = &Clock::new(device.clone());
    // A processor's copy of so little comes from its caches.
    let copy = if on_cpu { None } else { Some(clock.copy_bandwidth()?) };
    let mut progress = Progress::new(cases.len(), name);
    for (heads, length, batch) in cases {
        let case = Case::default().length(length).batch(batch);
        let mut record = |timed: Timed| {
            let words = [name, timed.part].into_iter().filter(|word| !word.is_empty());
            let task = words.collect::<Vec<_>>().join(" ");
            let task = [task.as_str(), heads.name].into_iter().filter(|word| !word.is_empty());
            let task = Some(task.collect::<Vec<_>>().join(", "));
            let case = Case { task, ..case.clone() };
            let setup = (timed.policy.as_str(), timed.budget);
            let mut record =
                |metric: &str, value: f64| bench.record(SUITE, &case, setup, metric, value);
            record(metric::TIME_US, timed.seconds * 1e6);
            if let (Some(copy), Some(bytes)) = (copy, timed.bytes) {
                record(metric::BANDWIDTH_FRACTION, bytes / timed.seconds / copy);
            }
            if timed.reads.steps > 0 {
                record(metric::RETRIEVAL_RATIO, timed.reads.ratio());
                record(metric::TOKENS_READ, timed.reads.slots_each());
            }
        };
        let case = OpBench { device, dtype, clock, heads, length, batch };
        (ops.time)(&case, &common, &mut record)?;
        if !quick {
            for (label, us) in ops.published_us {
                record(Timed::of((*label).into(), None, us / 1e6));
            }
        }
        progress.step();
    }
    progress.finish();
    if let Limit::KvTokens(most) = ops.limit
        && left_out > 0
    {
        bench.note(format!(
            "{left_out} cases of more than {most} tokens of all key-value heads and sequences \
             together are left out"
        ));
    }
    Ok(())
}

impl Timed {
    /// A time of a whole step.
    fn of(policy: String, budget: Option<f64>, seconds: f64) -> Self {
        Self { policy, budget, part: "", seconds, bytes: None, reads: Reads::default() }
    }
}

impl OpTime {
    /// The cases of the lengths and batches that are asked for, or else of the figure's own, and
    /// how many more are too large.
    ///
    /// # Errors
    /// Where all cases are too large, and where a case is too short.
    fn cases(
        &self,
        name: &str,
        quick: bool,
        lengths: &[usize],
        batches: &[usize],
    ) -> anyhow::Result<(Vec<Shape>, usize)> {
        let own = if quick { &self.quick } else { &self.paper };
        let lengths = if lengths.is_empty() { own.lengths } else { lengths };
        let batches = if batches.is_empty() { own.batches } else { batches };
        if let Some(short) = lengths.iter().find(|length| **length < self.shortest) {
            bail!(
                "--lengths: {short} tokens, of which {name} reads an eighth; expected {}, at least",
                self.shortest
            );
        }
        let mut all: Vec<_> = own
            .heads
            .iter()
            .flat_map(|&heads| lengths.iter().map(move |&length| (heads, length)))
            .flat_map(|(heads, length)| batches.iter().map(move |&batch| (heads, length, batch)))
            .collect();
        let asked = all.len();
        let (most, of) = match self.limit {
            Limit::None => (usize::MAX, ""),
            Limit::Tokens(most) => (most, "all sequences together"),
            Limit::KvTokens(most) => (most, "all key-value heads and sequences together"),
        };
        all.retain(|(heads, length, batch)| match self.limit {
            Limit::KvTokens(_) => heads.kv * length * batch <= most,
            _ => length * batch <= most,
        });
        ensure!(!all.is_empty(), "--lengths, --batches: {name} times up to {most} tokens of {of}");
        let left_out = asked - all.len();
        Ok((all, left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ops(kv: &'static [Heads], limit: Limit) -> OpTime {
        OpTime {
            paper: Shapes { heads: kv, lengths: &[1_024], batches: &[8, 16] },
            quick: Shapes::SMALL,
            limit,
            shortest: 128,
            time: |_, _, _| Ok(()),
            published_us: &[],
        }
    }

    #[test]
    fn cases_have_the_sizes_asked_for() {
        const WIDE: Heads = Heads { name: "wide", query: 32, kv: 32, dim: 128 };
        const NARROW: Heads = Heads { name: "narrow", query: 32, kv: 8, dim: 128 };
        let sizes = |heads, limit, lengths: &[usize], batches: &[usize]| {
            let (all, left_out) = ops(heads, limit).cases("it", false, lengths, batches)?;
            let all = all.iter().map(|(heads, length, batch)| (heads.kv, *length, *batch));
            anyhow::Ok((all.collect::<Vec<_>>(), left_out))
        };
        let limit = Limit::KvTokens(16 << 20);
        let of = |lengths: &[usize], batches: &[usize]| sizes(&[WIDE], limit, lengths, batches);
        assert_eq!(of(&[128, 160], &[1]).unwrap(), (vec![(32, 128, 1), (32, 160, 1)], 0));
        assert_eq!(of(&[2_048], &[]).unwrap(), (vec![(32, 2_048, 8), (32, 2_048, 16)], 0));
        let error = of(&[160, 96], &[1]).unwrap_err().to_string();
        assert!(error.contains("96 tokens") && error.contains("expected 128"), "{error}");
        // Of 32 heads, a million tokens are too many.
        let million = 1 << 20;
        let found = sizes(&[WIDE, NARROW], limit, &[million], &[1, 2]).unwrap();
        assert_eq!(found, (vec![(8, million, 1), (8, million, 2)], 2));
        let error = of(&[million], &[1]).unwrap_err().to_string();
        assert!(error.contains("times up to 16777216 tokens of all key-value heads"), "{error}");
        let found = sizes(&[WIDE], Limit::Tokens(1_024), &[1_024], &[1, 2]).unwrap();
        assert_eq!(found, (vec![(32, 1_024, 1)], 1));
    }
}
