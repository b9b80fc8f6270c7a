//! Made-up records for tests: every suite, all policies, four budgets.

use crate::record::{Case, FULL, Record, metric, mode};

const POLICIES: [&str; 17] = [
    "streaming-llm",
    "snapkv",
    "pyramidkv",
    "adakv",
    "h2o",
    "vatp",
    "tova",
    "r-kv",
    "knorm",
    "keydiff",
    "expected-attention",
    "lagkv",
    "pyramidinfer",
    "uniform",
    "random",
    "keepkv",
    "top-k-oracle",
];

const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const TASKS: [&str; 4] = ["passkey", "key-value", "multi-needle", "variable-tracking"];

/// One record of the quality suite.
pub(crate) fn record(policy: &str, budget: Option<f64>, metric: &str, value: f64) -> Record {
    Record {
        suite: "quality".into(),
        case: Case::default(),
        model: "needle-1m".into(),
        device: "cpu".into(),
        policy: policy.into(),
        budget,
        metric: metric.into(),
        value,
        unit: String::new(),
    }
}

/// The record as one of a prompt of that name.
pub(crate) fn of_prompt(record: Record, name: &str) -> Record {
    let case = record.case.clone().prompt_of("embedded", name);
    Record { case, ..record }
}

/// Records of `evaluate`: the full cache and two policies at two budgets, four questions of one
/// task and two of another.
pub(crate) fn evaluation() -> Vec<Record> {
    let setups = [
        (FULL, None, [1.0; 4], [1.0, 1.0]),
        ("snapkv", Some(0.5), [1.0, 0.0, 1.0, 1.0], [1.0, 0.0]),
        ("snapkv", Some(0.25), [1.0, 0.0, 1.0, 1.0], [1.0, 0.0]),
        ("h2o", Some(0.5), [0.0, 0.0, 1.0, 1.0], [1.0, 1.0]),
        ("h2o", Some(0.25), [0.0, 0.0, 0.0, 1.0], [1.0, 0.0]),
    ];
    let mut records = Vec::new();
    for (policy, budget, needles, sums) in setups {
        let scores = [("needles", &needles[..]), ("sums", &sums)];
        for (task, scores) in scores {
            for (index, score) in scores.iter().enumerate() {
                let case = Case {
                    length: Some(100 << index),
                    mode: Some(mode::AWARE.into()),
                    ..Case::of(task)
                };
                let case = case.prompt_of(task, &index.to_string());
                let numbers = [
                    (metric::SCORE, *score),
                    (metric::NEW_TOKENS, 4.0),
                    (metric::LIVE_BYTES, 1000.0 * budget.unwrap_or(1.0)),
                    (metric::ANSWER_SECONDS, 0.5),
                ];
                records.extend(numbers.map(|(metric, value)| {
                    let record = record(policy, budget, metric, value);
                    Record { suite: "evaluate".into(), case: case.clone(), ..record }
                }));
            }
        }
    }
    records
}

/// Records of all suites.
pub(crate) fn records() -> Vec<Record> {
    let mut records = Vec::new();
    let setups = POLICIES.iter().enumerate().flat_map(|(i, policy)| {
        BUDGETS.iter().map(move |budget| (*policy, Some(*budget), 0.25 + 0.045 * i as f64))
    });
    for (policy, budget, skill) in [(FULL, None, 1.0)].into_iter().chain(setups) {
        let share = budget.unwrap_or(1.0);
        // The loss against the full cache: 0 with everything kept, and less for a better policy.
        let loss = (1.0 - share).powi(4) * (1.0 - 0.92 * skill);
        let mut push = |suite: &str, case: &Case, metric: &str, value: f64| {
            let record = record(policy, budget, metric, value);
            records.push(Record { suite: suite.into(), case: case.clone(), ..record });
        };
        quality(&mut push, loss, share);
        for layer in 0..6 {
            let case = Case { layer: Some(layer), ..Case::default() };
            let error = (loss + 2e-4) * (0.5 + 0.2 * layer as f64);
            push("attention", &case, metric::RELATIVE_ERROR, if share < 1.0 { error } else { 0.0 });
            push("attention", &case, metric::RETAINED_MASS, 1.0 - 0.6 * loss);
        }
        for batch in [1, 4, 16] {
            let (case, size) = (Case { batch: Some(batch), ..Case::default() }, batch as f64);
            let time = 1e-3 * (2.0 + size * (0.1 + 0.9 * share) * (1.2 - 0.2 * skill));
            push("throughput", &case, metric::DECODE_TOKENS_PER_SECOND, size / time);
            push("throughput", &case, metric::PREFILL_TOKENS_PER_SECOND, 9e3 + 1e3 * skill + size);
            push("throughput", &case, metric::TIME_TO_FIRST_TOKEN, 120.0 * size - 20.0 * skill);
            push("throughput", &case, metric::PEAK_BYTES, size * 3e7 * (1.0 + share));
            push("throughput", &case, metric::LIVE_BYTES, size * 3.2e7 * share);
            push("throughput", &case, metric::BYTES_ALLOCATED, size * 3.4e7 * share + 1e6);
        }
    }
    records
}

fn quality(push: &mut impl FnMut(&str, &Case, &str, f64), loss: f64, share: f64) {
    for (m, mode) in [mode::AWARE, mode::AGNOSTIC].into_iter().enumerate() {
        for (t, task) in TASKS.into_iter().enumerate() {
            for (l, length) in [512, 1024, 2048, 4096].into_iter().enumerate() {
                for depth in [0.0, 0.25, 0.5, 0.75, 1.0] {
                    let hard = 0.5 + 0.2 * l as f64 + 0.3 * m as f64 + 0.1 * t as f64;
                    let middle = 1.0 - (depth * 2.0 - 1.0f64).abs() * 0.5;
                    let right = (1.0 - loss * hard * (0.5 + middle)).clamp(0.0, 1.0);
                    let case = Case {
                        task: Some(task.into()),
                        length: Some(length),
                        depth: Some(depth),
                        mode: Some(mode.into()),
                        ..Case::default()
                    };
                    let case = case.prompt_of("embedded", &format!("{task} {length} {depth}"));
                    push("quality", &case, metric::EXACT_MATCH, (right * 20.0).round() / 20.0);
                    push("quality", &case, metric::ANSWER_LOGPROB, -0.05 - 5.0 * loss * hard);
                    push("quality", &case, metric::KL_DIVERGENCE, 3.0 * loss * hard);
                    push("quality", &case, metric::AGREEMENT, 1.0 - 0.4 * loss * hard);
                }
            }
        }
    }
    for position in [0, 512, 1024, 1536, 2048, 2560, 3072, 3584] {
        let case = Case { position: Some(position), ..Case::default() };
        let start = 4.0 + 6.0 * (-(position as f64) / 700.0).exp();
        let drift = if position < 1024 { 0.0 } else { 8.0 * loss };
        push("quality", &case, metric::PERPLEXITY, start + drift);
        push("quality", &case, metric::TEXT_KL_DIVERGENCE, 0.02 * drift);
    }
    push("quality", &Case::default(), metric::TEXT_AGREEMENT, 1.0 - 0.8 * loss);
    push("quality", &Case::default(), metric::LIVE_BYTES, 1.2e7 * share);
}
