//! Kernels on bare tensors: time, bandwidth, rate, beside the device's own copy.

mod archive;
mod attention;
mod cases;
mod clock;
mod linear;
mod merging;
mod quantized;
mod slots;
mod strategies;

use anyhow::bail;
use burn::tensor::{DType, Device};
use kv_kernels::largest_tensor;

use crate::bench::Bench;
use crate::console::say;
use crate::options::{Kernels, Op};
use crate::progress::Progress;
use crate::record::{Case, metric};
use cases::{Attention, Problems};
pub(crate) use clock::Clock;
use clock::{COPIED, LaunchOutput};

const SUITE: &str = "kernels";
/// How this project appears beside its peers.
const OURS: &str = "burn-kv";

/// The device, dtype and clock of the cases.
pub(crate) struct KernelBench<'a> {
    bench: &'a mut Bench,
    device: Device,
    dtype: DType,
    clock: Clock,
    /// Bytes that a copy moves in a second, read and written.
    copy: f64,
}

impl<'a> KernelBench<'a> {
    fn new(bench: &'a mut Bench) -> anyhow::Result<Self> {
        if bench.is_cpu() {
            bail!(
                "the suite `kernels` measures GPUs; for the CPU there is `cargo bench -p kv-bench`"
            );
        }
        let (device, dtype) = (bench.device.clone(), bench.dtype());
        let clock = Clock::new(device.clone());
        let copy = clock.copy_bandwidth()?;
        let mut lab = Self { bench, device, dtype, clock, copy };
        let bytes = 2.0 * COPIED as f64;
        lab.record(&format!("copy {} MiB", COPIED >> 20), "", bytes / copy, [bytes, 0.0]);
        Ok(lab)
    }

    /// Whether the device holds a case's keys, which are made in f32.
    fn holds(&self, case: &Attention) -> bool {
        let bytes = case.pairs() * case.tokens * case.head_dim * DType::F32.size();
        largest_tensor(&self.device).is_none_or(|most| bytes <= most)
    }

    /// Times `call`, which rotates among `sets` inputs, and records it. The bytes of `work` must
    /// move in one call, and its operations be done.
    fn measure<L: LaunchOutput>(
        &mut self,
        task: &str,
        variant: &str,
        sets: usize,
        work: [f64; 2],
        call: impl FnMut(usize) -> anyhow::Result<L>,
    ) -> anyhow::Result<()> {
        let seconds = self.clock.seconds(sets, call)?;
        self.record(task, variant, seconds, work);
        Ok(())
    }

    fn record(&mut self, task: &str, variant: &str, seconds: f64, [bytes, operations]: [f64; 2]) {
        let policy = if variant.is_empty() { OURS.into() } else { format!("{OURS} {variant}") };
        let mut record = |metric: &str, value: f64| {
            let case = Case::of(task);
            self.bench.record(SUITE, &case, (&policy, None), metric, value);
        };
        record(metric::TIME_US, seconds * 1e6);
        record(metric::MOVED_BYTES, bytes);
        record(metric::BANDWIDTH, bytes / seconds / 1e9);
        record(metric::BANDWIDTH_FRACTION, bytes / seconds / self.copy);
        if operations > 0.0 {
            record(metric::TERAFLOPS, operations / seconds / 1e12);
        }
    }
}

/// Runs the suite.
///
/// # Errors
/// On CPUs, and where a kernel refuses a case.
pub(crate) fn run(bench: &mut Bench, options: &Kernels) -> anyhow::Result<()> {
    let Problems { suite, strategies } = Problems::read()?;
    let cases = if bench.common.quick { suite.shortened() } else { suite };
    let mut lab = KernelBench::new(bench)?;
    let wanted = |op: Op| options.ops.is_empty() || options.ops.contains(&op);
    if options.strategies {
        return strategies::run(&mut lab, &strategies, wanted);
    }
    let count = cases.count(wanted);
    if count == 0 {
        bail!("these ops are timed by every kernel alone: add --strategies");
    }
    let mut progress = Progress::new(count, SUITE);
    if wanted(Op::DecodeAttention) {
        for case in &cases.decode_attention {
            if lab.holds(case) {
                attention::decode(&mut lab, case)?;
            } else {
                say!("decode_attention {}: more than this device holds in a tensor", case.name());
            }
            progress.step();
        }
    }
    if wanted(Op::PrefillAttention) {
        for case in &cases.prefill_attention {
            attention::prefill(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::Linear) {
        for case in &cases.linear {
            linear::product(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::CompactSlots) {
        for case in &cases.compact_slots {
            slots::compact(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::TopSlots) {
        for case in &cases.top_slots {
            slots::top(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::Balance) {
        for case in &cases.balance {
            slots::halve(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::MergeNearest) {
        for case in &cases.merge_nearest {
            merging::nearest(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::QuantizedAttention) {
        for case in &cases.quantized_attention {
            quantized::attention(&mut lab, case)?;
            progress.step();
        }
    }
    if wanted(Op::ArchivedAttention) {
        for case in &cases.archived_attention {
            archive::attention(&mut lab, case)?;
            progress.step();
        }
    }
    progress.finish();
    Ok(())
}
