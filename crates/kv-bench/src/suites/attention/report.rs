//! The records and notes of the suite `attention`.

use super::sums::Sums;
use crate::bench::ModelBench;
use crate::certificates::{Means, conclude};
use crate::options::Attention;
use crate::policy_runs::PolicyRun;
use crate::record::{Case, metric};

const SUITE: &str = "attention";
/// Metrics that are means over the prompts that bounds are checked on, not over all prompts.
const CHECKED: [&str; 5] = [
    metric::WINDOW_DROPPED_MASS,
    metric::WINDOW_DROPPED_BOUND,
    metric::FROZEN_KEY_TV,
    metric::FROZEN_KEY_TV_BOUND,
    metric::RUN_FROZEN_KEY_TV,
];

/// The sums of all layers and policies, and the prompts that they are sums over.
pub(super) struct Measured<'a> {
    pub(super) policy_runs: &'a [PolicyRun],
    /// The number of prompts, the number of prompts on which bounds with constants are checked, and
    /// the file that the prompts are from.
    pub(super) prompts: usize,
    pub(super) checked: usize,
    pub(super) source: String,
    /// The sums, by layer and policy.
    pub(super) sums: &'a [Vec<Sums>],
}

impl Measured<'_> {
    /// Writes the layers `wanted`.
    pub(super) fn write(&self, bench: &mut ModelBench<'_>, options: &Attention, wanted: &[usize]) {
        let heads: Vec<Vec<Vec<Means>>> = (0..self.policy_runs.len())
            .map(|at| self.heads(at, bench.model.config().head_dim))
            .collect();
        if options.certificates {
            self.remark(bench, &heads);
        }
        for layer in wanted {
            for (at, policy_run) in self.policy_runs.iter().enumerate() {
                let case = Case::default().layer(*layer).samples_of(&self.source, self.prompts);
                let (sums, heads) = (&self.sums[*layer][at], &heads[at][*layer]);
                let mut all = Means::default();
                heads.iter().for_each(|means| all.add(means));
                write_sums(bench, &case, policy_run, sums, &all);
                self.write_means(bench, &case, policy_run, &all, options.certificates);
                for (head, means) in heads.iter().enumerate().filter(|_| options.by_head) {
                    let case = Case { head: Some(head), ..case.clone() };
                    self.write_means(bench, &case, policy_run, means, true);
                }
            }
        }
    }

    /// A policy's means of each layer's query heads, with the bounds on the attention that windows
    /// hide and frozen tokens move.
    fn heads(&self, at: usize, head_dim: usize) -> Vec<Vec<Means>> {
        let moved = self.sums.iter().map(|layer| &layer[at].frozen).collect::<Vec<_>>();
        let mut moved = conclude(&moved, head_dim);
        for (layer, heads) in self.sums.iter().zip(&mut moved) {
            let reading = &layer[at].reading;
            heads.resize(heads.len().max(reading.len()), Means::default());
            for (read, means) in reading.iter().zip(heads) {
                means.add(&read.means);
                read.hidden.conclude(means);
            }
        }
        moved
    }

    /// Writes the means of the reads, and their `certificates`.
    fn write_means(
        &self,
        bench: &mut ModelBench<'_>,
        case: &Case,
        policy_run: &PolicyRun,
        means: &Means,
        certificates: bool,
    ) {
        let setup = policy_run.setup();
        for (name, mean) in means.all() {
            let wanted = match name {
                metric::RETAINED_MASS => true,
                // The overlap is with the budget's best tokens.
                metric::OVERLAP => policy_run.budget.is_some(),
                _ => certificates,
            };
            let samples = if CHECKED.contains(&name) { self.checked } else { self.prompts };
            let case = Case { samples: Some(samples), ..case.clone() };
            if wanted {
                bench.record(SUITE, &case, setup, name, mean);
            }
        }
    }

    /// Notes that no bound applies, or that bounds are fitted and checked on a single prompt.
    fn remark(&self, bench: &mut ModelBench<'_>, heads: &[Vec<Vec<Means>>]) {
        let heads = || heads.iter().flatten().flatten();
        let measures = |sums: &Sums| !sums.measures.records().is_empty();
        if !heads().any(Means::bounds) && !self.sums.iter().flatten().any(measures) {
            let whose = "LongFlow's, of caches at their budget, and those of cis, psaw, etf and \
                         cpe where steps share sets, and layers hide or freeze a part of such \
                         prompts";
            bench.note(format!("no bounds: they are {whose}"));
        }
        let constants = [metric::WINDOW_DROPPED_BOUND, metric::FROZEN_KEY_TV_BOUND];
        let fitted = |means: &Means| constants.iter().any(|metric| means.of(metric).is_some());
        if self.prompts == 1 && heads().any(fitted) {
            let note = "constants of the bounds of psaw and etf are fitted to the one prompt that \
                        they are checked on, and hold there in any case: `--limit 2` or more fits \
                        and checks apart";
            bench.note(note.into());
        }
    }
}

/// Records the sums of one policy in a layer; the `means` of its heads are recorded apart.
fn write_sums(
    bench: &mut ModelBench<'_>,
    case: &Case,
    policy_run: &PolicyRun,
    sums: &Sums,
    means: &Means,
) {
    let setup = policy_run.setup();
    bench.record(SUITE, case, setup, metric::RELATIVE_ERROR, sums.relative_error());
    for (name, value) in sums.measures.records() {
        bench.record(SUITE, case, setup, name, value);
    }
    if let Some((cosine, alike)) = sums.similarity.means() {
        bench.record(SUITE, case, setup, metric::QUERY_COSINE, cosine);
        bench.record(SUITE, case, setup, metric::QUERIES_ALIKE, alike);
    }
    // The kept mass says nothing where steps read less than is kept.
    if means.of(metric::RETAINED_MASS).is_none()
        && let Some(mass) = sums.mass.value()
    {
        bench.record(SUITE, case, setup, metric::RETAINED_MASS, mass);
    }
    if sums.reads.steps > 0 {
        let (ratio, slots) = (sums.reads.ratio(), sums.reads.slots_each());
        bench.record(SUITE, case, setup, metric::RETRIEVAL_RATIO, ratio);
        bench.record(SUITE, case, setup, metric::TOKENS_READ, slots);
    }
}
