//! A run's device, options, records and notes, which every measurement works with.

use std::ops::{Deref, DerefMut};

use anyhow::Context;
use burn::tensor::{DType, Device};
use kv_core::{device_name, select_device};
use kv_models::{Calibration, Model, PrefillPass};
use kv_parallel::Ranks;
use kv_policies::{Observation, crowded_sketch};

use crate::allocator::keep_freed_memory;
use crate::console::say;
use crate::format;
use crate::options::Common;
use crate::policy_runs::PolicyRun;
use crate::prompts::EMBEDDED_FOR;
use crate::record::{Case, Record, metric};
use crate::record_log::RecordLog;
use crate::report::ShownQuestion;

/// The CPU's name as a device.
pub(crate) const CPU: &str = "cpu";

/// The size of a measurement: the paper's, and one for small machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes<T> {
    /// The size in the paper.
    pub(crate) paper: T,
    /// The size of the quick form.
    pub(crate) quick: T,
}

impl<T> Sizes<T> {
    /// The size of a run, in the quick form or not.
    pub(crate) fn of(&self, quick: bool) -> &T {
        if quick { &self.quick } else { &self.paper }
    }
}

/// A device with nothing loaded, for measurements on bare tensors.
pub(crate) struct Bench {
    /// The options that all suites have.
    pub(crate) common: Common,
    /// The device that is measured.
    pub(crate) device: Device,
    /// Its name in records.
    pub(crate) device_name: String,
    /// The processes that measure one model together.
    ranks: Ranks,
    /// The model's name in records; empty until a model is loaded.
    model_name: String,
    records: RecordLog,
    notes: Vec<String>,
    questions: Vec<ShownQuestion>,
}

/// What a run has measured.
pub(crate) struct Finished {
    /// Its records.
    pub(crate) records: Vec<Record>,
    /// Whether their file was written.
    pub(crate) saved: anyhow::Result<()>,
    /// Notes for readers of the numbers.
    pub(crate) notes: Vec<String>,
    /// Questions with the answers of policies.
    pub(crate) questions: Vec<ShownQuestion>,
}

/// A bench with a model on its device.
pub(crate) struct ModelBench<'a> {
    /// The model.
    pub(crate) model: Model,
    bench: &'a mut Bench,
}

impl Bench {
    /// The device that the options ask for; nothing is measured yet.
    ///
    /// # Errors
    /// Where there is no such device.
    pub(crate) fn new(common: &Common, ranks: Ranks, records: RecordLog) -> anyhow::Result<Self> {
        let device = match ranks.shard().is_part() {
            true => select_device(common.device.of_process(ranks.local()))?,
            false => select_device(common.device)?,
        };
        let device_name = device_name(&device);
        Ok(Self {
            common: common.clone(),
            device,
            device_name,
            ranks,
            model_name: String::new(),
            records,
            notes: Vec::new(),
            questions: Vec::new(),
        })
    }

    /// Whether the device is the CPU.
    pub(crate) fn is_cpu(&self) -> bool {
        self.device_name == CPU
    }

    /// The type of bare tensors: the one that is asked for, or else half precision where the device
    /// computes in it.
    pub(crate) fn dtype(&self) -> DType {
        let halves = [DType::BF16, DType::F16].into_iter();
        let half =
            halves.filter(|_| !self.is_cpu()).find(|&dtype| self.device.supports_dtype(dtype));
        self.common.dtype.map(Into::into).or(half).unwrap_or(DType::F32)
    }

    /// Adds a measured number, in its metric's unit.
    pub(crate) fn record(
        &mut self,
        suite: &str,
        case: &Case,
        (policy, budget): (&str, Option<f64>),
        metric: &str,
        value: f64,
    ) {
        self.records.push(Record {
            suite: suite.into(),
            case: case.clone(),
            model: self.model_name.clone(),
            device: self.device_name.clone(),
            policy: policy.into(),
            budget,
            metric: metric.into(),
            value,
            unit: metric::info(metric).unit.into(),
        });
    }

    /// Adds a note for readers of the numbers, once.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            say!("note: {note}");
            self.notes.push(note);
        }
    }

    /// Adds questions for the report to show.
    pub(crate) fn show(&mut self, questions: Vec<ShownQuestion>) {
        self.questions.extend(questions);
    }

    /// Ends the run.
    pub(crate) fn finish(self) -> Finished {
        let (records, saved) = self.records.finish();
        Finished { records, saved, notes: self.notes, questions: self.questions }
    }
}

impl<'a> ModelBench<'a> {
    /// Loads a model by its name.
    ///
    /// # Errors
    /// Where there is no such model, or the device does not hold it.
    pub(crate) fn load(bench: &'a mut Bench, name: &str) -> anyhow::Result<Self> {
        say!("loading {name} on {}", bench.device_name);
        let dtype = bench.common.dtype.map(Into::into);
        let collective = bench.ranks.collective(&bench.device)?;
        let mut model = Model::load_part(name, &bench.device, dtype, collective)
            .with_context(|| format!("model {name}"))?;
        if let Some(matrices) = bench.common.matrices {
            model = model.with_matrices_in(matrices.into()).context("--matrices")?;
        }
        if bench.is_cpu() {
            // Behind the load, whose buffers are not needed again.
            keep_freed_memory();
        }
        bench.model_name = match bench.ranks.shard().world() {
            1 => model.name().into(),
            world => format!("{} on {world} ranks", model.name()),
        };
        let shard = bench.ranks.shard();
        if shard.is_part() {
            let world = shard.world();
            bench.note(format!("{world} ranks compute the model together: bytes are those of one"));
        }
        Ok(Self { model, bench })
    }

    /// Prefills a prompt and shows its layers to `see`, one by one, up to the first that it
    /// refuses.
    ///
    /// # Errors
    /// Errors of the model and of `see`.
    pub(crate) fn observe(
        &self,
        tokens: &[u32],
        pass: PrefillPass<'_>,
        see: &mut dyn FnMut(&Observation<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut failed = None;
        self.model.llama().prefill(&[tokens], pass, &mut |observation| {
            if failed.is_none() {
                failed = see(observation).err();
            }
            Ok(None)
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Bytes of the model's weights.
    pub(crate) fn weight_bytes(&self) -> f64 {
        let dtype = self.model.llama().matrix_dtype();
        self.model.config().parameter_count() as f64 * dtype.size() as f64
    }

    /// Notes remarks on policies in this model, behind prompts of up to so many tokens, for readers
    /// of their numbers.
    pub(crate) fn remark(
        &mut self,
        policy_runs: &[PolicyRun],
        tokens: usize,
    ) -> anyhow::Result<()> {
        let layers = self.model.config().num_layers;
        for policy_run in policy_runs {
            for remark in policy_run.policy.warnings(layers) {
                self.note(remark);
            }
            if self.model.name() == EMBEDDED_FOR
                && let Some(reason) = why_it_fails(&policy_run.label)
            {
                self.note(reason.into());
            }
            if let Some(remark) = crowded_sketch(&*policy_run.policy, tokens) {
                let (label, budget) = (&policy_run.label, format::budget(policy_run.budget));
                self.note(format!("{label} at {budget}: {remark}"));
            }
            let Some(path) = &policy_run.channels else { continue };
            // Files of channels alone, which policies take too, do not say whose they are.
            let Ok(calibration) = Calibration::load(path) else { continue };
            if !calibration.is_of(&self.model)? {
                let (found, own) = (&calibration.model, self.model.name().to_string());
                self.note(format!("{path} has the channels of {found}, not those of {own}"));
            }
        }
        Ok(())
    }
}

impl Deref for ModelBench<'_> {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        self.bench
    }
}

impl DerefMut for ModelBench<'_> {
    fn deref_mut(&mut self) -> &mut Bench {
        self.bench
    }
}

/// Why a policy, as it is without options, finds hardly an answer in the embedded model.
fn why_it_fails(label: &str) -> Option<&'static str> {
    Some(match label {
        "knorm" => {
            "knorm keeps the keys of smallest norm, but needle-1m attends to keys of large norm: \
             of the attention, knorm keeps a smaller share than of the tokens"
        }
        "double-sparsity" => {
            "double-sparsity chooses tokens by a sixteenth of a head's channels, in needle-1m by 2 \
             of 32, which is too few to find a token: with `\"labels\": 8` it finds most answers"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use crate::record::{Record, mean, metric};
    use crate::testing::ran;

    fn mean_of(records: &[Record], policy: &str, metric: &str) -> f64 {
        let own = records.iter().filter(|r| r.policy == policy && r.metric == metric);
        mean(&own.collect::<Vec<_>>()).unwrap()
    }

    /// Measurements confirm the reasons that the notes give.
    #[test]
    fn reasons_of_policies_that_fail_in_the_embedded_model_are_true() {
        let policies =
            r#"["knorm", "double-sparsity", {"policy": "double-sparsity", "labels": 8}]"#;
        let run = |line: &str| {
            let words: Vec<&str> = line.split(' ').chain(["--policy", policies]).collect();
            ran(&words).unwrap()
        };
        let line = "quality --budget 0.25 --limit 4 --no-perplexity --mode question-aware";
        let (records, report) = run(line);
        let right = |policy: &str| mean_of(&records, policy, metric::EXACT_MATCH);
        assert_eq!(right("full"), 1.0);
        assert!(right("knorm") <= 0.25 && right("double-sparsity") <= 0.25);
        assert!(right("double-sparsity labels=8") >= 0.75);
        for reason in ["needle-1m attends to keys of large norm", "in needle-1m by 2 of 32"] {
            assert_eq!(report.matches(reason).count(), 1, "{reason}");
        }
        let (records, _) = run("attention --budget 0.25 --limit 2 --steps 8");
        let kept = |policy: &str| mean_of(&records, policy, metric::RETAINED_MASS);
        assert!(kept("knorm") < 0.25, "{}", kept("knorm"));
        assert!(kept("double-sparsity labels=8") > kept("double-sparsity") + 0.1);
    }
}
