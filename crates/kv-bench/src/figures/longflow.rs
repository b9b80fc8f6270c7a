//! LongFlow.

use super::preset::{self, Preset};
use super::{Figure, Measurement, ModelChoice, PRESET, PolicyChoice, TENSORS};
use crate::bench::Sizes;
use crate::studies::long_output_speed::{self, Size};
use crate::studies::op_time::{Heads, Limit, OpTime, Shapes, eviction_step};

/// The paper's GPU.
const A100_GIB: f64 = 40.0;

pub(super) const FIGURES: &[Figure] = &[
    Figure {
        name: "longflow-table1",
        about: "Accuracy on AIME, AMC, GPQA, GSM8K, MATH-500, Minerva and OlympiadBench: full, \
                H2O, R-KV, VATP, LongFlow",
        measures: "accuracy of reasoning models on their own long outputs",
        differs: "the paper states neither prompts nor sampling: questions are asked in a chat, \
                  with the request for a boxed answer, and tokens are drawn at temperature 0.6 and \
                  top-p 0.95, once a question, or --samples times; baselines evict every 128 \
                  steps, as in the paper's section 4.4, where table 1 states no interval",
        model: ModelChoice::AnyOr("deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/longflow-table1.toml"),
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "longflow-fig1",
        about: "Attention with an eviction: LongFlow, H2O, VATP, and attention alone",
        measures: "time of a decode step's attention with an eviction",
        stands_in: "made-up queries, keys and values",
        differs: "queries, keys and values are made up; all policies run in this project's \
                  kernels, on the device at hand",
        wants_gpu: true,
        measurement: Measurement::OpTime(OpTime {
            // Qwen3-8B's layers at the paper's batch.
            paper: Shapes {
                heads: &[Heads { name: "", query: 32, kv: 8, dim: 128 }],
                lengths: &[3_200],
                batches: &[128],
            },
            quick: Shapes {
                heads: &[Heads { name: "", query: 8, kv: 2, dim: 64 }],
                lengths: &[400],
                batches: &[4],
            },
            limit: Limit::None,
            shortest: 1,
            time: eviction_step::time,
            published_us: &[("A100, published: h2o", 47e3), ("A100, published: longflow", 8e3)],
        }),
        ..TENSORS
    },
    Figure {
        name: "longflow-fig4",
        about: "Throughput and memory of long outputs: full, H2O, VATP, R-KV, LongFlow",
        measures: "throughput and memory of long outputs",
        stands_in: "random weights, assumed prompts",
        differs: "weights are random; a short prompt is prefilled, the rest of the input is \
                  assumed, and a step's time at some lengths is integrated over the output; two \
                  batches a policy in place of a curve, and no memory fragments",
        published: "the paper, on an A100 of 40 GB: LongFlow generates 11.8 times as many tokens \
                    as the full cache, and about 4.0 times as many as H2O, VATP and R-KV",
        model: ModelChoice::Only("random:qwen3-1.7b"),
        policies: PolicyChoice::Names,
        memory_gib: Some(A100_GIB),
        wants_gpu: true,
        measurement: Measurement::Model(|bench, name, options| {
            let size = Sizes {
                paper: Size { input: 512, output: 16_000, budget: 3_200, interval: 128, batch: 16 },
                quick: Size { input: 64, output: 1_800, budget: 360, interval: 16, batch: 4 },
            };
            let gib = options.memory_cap.unwrap_or(A100_GIB);
            long_output_speed::run(bench, name, size.of(bench.common.quick), gib)
        }),
        ..TENSORS
    },
];

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::quick;

    #[test]
    fn steps_are_timed_beside_their_attention() {
        let (records, _) = quick("longflow-fig1");
        let timed = |policy: &str| {
            let own = records.iter().filter(|r| r.policy == policy);
            own.map(|r| (r.metric.as_str(), r.value.is_finite())).collect::<Vec<_>>()
        };
        for policy in ["full", "longflow", "h2o", "vatp"] {
            assert_eq!(timed(policy), [(metric::TIME_US, true)], "{policy} has one time");
        }
        // The paper's times are of other sizes.
        assert_eq!(records.len(), 4);
    }

    #[test]
    fn long_outputs_keep_their_budget() {
        let (records, _) = quick("longflow-fig4");
        let of = |policy: &str, name: &str| -> Vec<f64> {
            let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
            own.map(|record| record.value).collect()
        };
        for policy in ["full", "longflow", "h2o", "vatp", "r-kv"] {
            let [rate, step] = [metric::DECODE_TOKENS_PER_SECOND, metric::STEP_TIME]
                .map(|name| of(policy, name)[..].try_into().unwrap())
                .map(|[one]: [f64; 1]| one);
            // Caches are at their limit, and their steps equal, from the third of eight points on:
            // for 5 of 7 stretches, and at one end of a sixth stretch. The full cache's steps have
            // their last length at one end of one stretch alone. Whatever the other steps cost, no
            // mean rate of the four sequences can be further above the rate in the end. Points are
            // whole tokens, which moves the bound by less than 1 %.
            let last = 4.0 / (step * 1e-3);
            let most = if policy == "full" { 7.0 / 0.5 } else { 7.0 / 5.5 };
            let above = rate / last;
            assert!(above > 0.0 && above < 1.01 * most, "{policy}: {rate}, in the end {last}");
        }
        let [full, own] = ["full", "longflow"].map(|policy| of(policy, metric::BYTES_ALLOCATED)[0]);
        assert!(own < 0.25 * full, "{own} of {full} bytes are allocated");
    }
}
