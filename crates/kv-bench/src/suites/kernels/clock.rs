//! Device time: many calls in one captured graph, replayed.

use std::time::Instant;

use anyhow::anyhow;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, capture};

/// Inputs rotate among this many bytes, more than any cache holds.
const ROTATED: usize = 400 << 20;
/// The calls of a graph last about this long, launched one by one.
const GRAPH_SECONDS: f64 = 4e-3;
/// Replays that are waited for together last so long, where so many suffice.
const REPLAY_SECONDS: f64 = 8e-3;
const MOST_REPLAYS: usize = 64;
/// The number of times whose median is taken. Some times before them are thrown away.
const TIMES: usize = 11;
const WARM_UP: usize = 2;
/// Bytes of the copy that kernels are compared with.
pub(super) const COPIED: usize = 256 << 20;

/// The output of a timed call, which shows whether its kernels ran: a launch that failed says so
/// only when its output is read.
pub(crate) trait LaunchOutput {
    /// Reads a number of the output.
    ///
    /// # Errors
    /// Where it was never written.
    fn check(self) -> anyhow::Result<()>;
}

impl<const D: usize> LaunchOutput for Tensor<D> {
    fn check(self) -> anyhow::Result<()> {
        let first = self.flatten::<1>(0, D - 1).narrow(0, 0, 1);
        first.try_into_data().map(drop).map_err(|error| anyhow!("{error}"))
    }
}

impl<const D: usize> LaunchOutput for Tensor<D, Int> {
    fn check(self) -> anyhow::Result<()> {
        let first = self.flatten::<1>(0, D - 1).narrow(0, 0, 1);
        first.try_into_data().map(drop).map_err(|error| anyhow!("{error}"))
    }
}

impl<T: LaunchOutput> LaunchOutput for Option<T> {
    fn check(self) -> anyhow::Result<()> {
        self.map_or(Ok(()), LaunchOutput::check)
    }
}

impl<A: LaunchOutput, B: LaunchOutput> LaunchOutput for (A, B) {
    fn check(self) -> anyhow::Result<()> {
        self.0.check()?;
        self.1.check()
    }
}

/// Times calls on a device.
pub(crate) struct Clock {
    device: Device,
}

impl Clock {
    pub(crate) fn new(device: Device) -> Self {
        Self { device }
    }

    /// Sets of inputs of `bytes` to rotate among.
    pub(crate) fn sets(bytes: usize) -> usize {
        ROTATED.div_ceil(bytes.max(1)).clamp(2, 128)
    }

    /// Median seconds of `call(i)`, `i` rotating among `sets`.
    pub(crate) fn seconds<L: LaunchOutput>(
        &self,
        sets: usize,
        mut call: impl FnMut(usize) -> anyhow::Result<L>,
    ) -> anyhow::Result<f64> {
        self.cycles(sets.min(8), |i| call(i % sets))
    }

    /// Median seconds of `call(i)` over whole cycles of so many calls.
    pub(crate) fn cycles<L: LaunchOutput>(
        &self,
        cycle: usize,
        mut call: impl FnMut(usize) -> anyhow::Result<L>,
    ) -> anyhow::Result<f64> {
        // Once to compile, once to see how long it takes.
        call(0)?.check()?;
        self.wait()?;
        let clock = Instant::now();
        (0..4).try_for_each(|i| call(i).map(drop))?;
        self.wait()?;
        let estimate = clock.elapsed().as_secs_f64() / 4.0;
        let calls = ((GRAPH_SECONDS / estimate) as usize).clamp(2, 400).next_multiple_of(cycle);
        let mut failed = None;
        let mut graph = capture(&self.device, || {
            for i in 0..calls {
                if let Err(error) = call(i) {
                    failed.get_or_insert(error);
                }
            }
        });
        let mut time = |replays: usize| -> anyhow::Result<f64> {
            self.wait()?;
            let clock = Instant::now();
            for _ in 0..replays {
                // SAFETY: the inputs live as long as `call`, which the graph holds.
                unsafe { graph.replay() };
            }
            self.wait()?;
            Ok(clock.elapsed().as_secs_f64())
        };
        time(1)?;
        let mut more = 1;
        while more < MOST_REPLAYS && time(more)? < REPLAY_SECONDS {
            more *= 2;
        }
        // Both times include the wait itself, for which some devices need half a millisecond.
        let mut times = Vec::with_capacity(TIMES);
        for _ in 0..WARM_UP + TIMES {
            let (one, many) = (time(1)?, time(1 + more)?);
            // Where other work takes longer than that, all that was waited for counts.
            let spent =
                if many > one { (many - one) / more as f64 } else { many / (1 + more) as f64 };
            times.push(spent / calls as f64);
        }
        drop(graph);
        match failed {
            Some(error) => Err(error),
            None => Ok(median(times.split_off(WARM_UP))),
        }
    }

    /// Bytes a second of an elementwise copy, read and written.
    pub(crate) fn copy_bandwidth(&self) -> anyhow::Result<f64> {
        let count = COPIED / 4;
        let from: Vec<Tensor<1>> = (0..3)
            .map(|_| Tensor::random([count], Distribution::Default, (&self.device, DType::F32)))
            .collect();
        let seconds = self.seconds(3, |i| Ok(from[i].clone().mul_scalar(1.5)))?;
        Ok(2.0 * COPIED as f64 / seconds)
    }

    fn wait(&self) -> anyhow::Result<()> {
        self.device.sync().map_err(|error| anyhow!("{error}"))
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
