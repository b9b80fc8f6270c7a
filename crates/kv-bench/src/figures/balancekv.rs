//! BalanceKV.

use kv_core::Budget;
use serde_json::{Value, json};

use super::preset::{self, Preset};
use super::runners::{self, Quality, Throughput};
use super::{Figure, LAYERS, Measurement, ModelChoice, PRESET, TENSORS};
use crate::bench::Sizes;
use crate::record::FULL;
use crate::studies::{attention_error, block_size, norms, stream_precision};

pub(super) const FIGURES: &[Figure] = &[
    Figure {
        name: "balancekv-fig1",
        about: "Attention error by layer and rate: BalanceKV and uniform sampling",
        measures: "attention error of single layers by rate",
        differs: "prompts are the retrieval prompts at hand in place of TriviaQA's, layers are all \
                  of the model's in place of 1, 2 and 5 of Llama 3.1 8B and Ministral 8B; the \
                  error is one ratio over all heads and last queries; rows named clustered are of \
                  made-up keys and values",
        measurement: Measurement::Model(|bench, name, options| {
            let size = Sizes {
                paper: attention_error::Size { seeds: 10, window: 256, prompts: 4 },
                quick: attention_error::Size { seeds: 3, window: 64, prompts: 2 },
            };
            attention_error::run(bench, name, options, size.of(bench.common.quick))
        }),
        ..LAYERS
    },
    Figure {
        name: "balancekv-fig3",
        about: "Error and run time of BalanceKV by block and rate",
        measures: "attention error and compression time of one layer by block and rate",
        stands_in: "made-up clusters, or the prompts at hand with --model or --prompts, not the \
                    paper's workload",
        differs: "without --model and --prompts, queries, keys and values are made-up clusters of \
                  the size of Llama 3.1 8B's layers, on which the error hardly depends on the \
                  block; with either, they are those of the prompts at hand in place of TriviaQA's",
        measurement: Measurement::Tensors(|bench, name, options| {
            block_size::run(bench, name, options, Sizes { paper: 4, quick: 1 })
        }),
        ..LAYERS
    },
    Figure {
        name: "balancekv-stream",
        about: "Precision of streams against slots (theorem 3.1)",
        measures: "precision of a stream's attention against the slots it holds",
        stands_in: "a made-up stream; the paper proves the theorem and measures nothing",
        differs: "the paper states theorem 3.1 and measures nothing: the stream is made up, with \
                  keys and queries of the norm that the theorem assumes",
        single_precision: true,
        measurement: Measurement::Tensors(|bench, name, _| {
            let prefixes: Sizes<&[usize]> =
                Sizes { paper: &[1_000, 3_000, 10_000, 30_000, 100_000], quick: &[1_000, 4_000] };
            stream_precision::run(bench, name, prefixes.of(bench.common.quick))
        }),
        ..TENSORS
    },
    Figure {
        name: "balancekv-table1",
        about: "LongBench-E at a quarter: full, StreamingLLM, PyramidKV, SnapKV, uniform, \
                BalanceKV",
        measures: "scores of LongBench-E's tasks at a quarter of the prompt",
        differs: "the baselines are this project's in place of MInference's; BalanceKV and uniform \
                  sampling keep 32 tokens exactly at either end, as the authors' code does, where \
                  the paper states no number; prompts lose their middle beyond the model's \
                  positions, where the paper states no length; the paper's first model comes last \
                  here, and the default is its smallest",
        model: ModelChoice::AnyOr("meta-llama/Llama-3.1-8B-Instruct"),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/balancekv-table1.toml"),
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "balancekv-table2",
        about: "Prefill and decode speed: full, SnapKV, PyramidKV, StreamingLLM, BalanceKV",
        measures: "prefill and decode speed at a quarter of the cache",
        stands_in: "random weights, made-up prompts",
        differs: "weights are random, the prompt's tokens are made up; StreamingLLM evicts while \
                  decoding, where the paper keeps all decoded tokens",
        published: "the paper, 16,384 + 1,024 tokens: prefill 3.03 s exact, 3.76 SnapKV, 3.75 \
                    PyramidKV, 3.68 StreamingLLM, 3.66 BalanceKV; decoding 37.8, 40.4, 37.2, 40.3 \
                    and 38.1 s",
        model: ModelChoice::Only("random:llama-3.1-8b"),
        wants_gpu: true,
        measurement: Measurement::Throughput(Throughput {
            policies: |_| {
                let names = ["snapkv", "pyramidkv", "streaming-llm", "balancekv"];
                let quarters = names.map(|name| json!({"policy": name, "budget": 0.25}));
                [&[json!({"policy": FULL})], &quarters[..]].concat()
            },
            lengths: Sizes { paper: &[16_384], quick: &[512] },
            batches: Sizes { paper: &[1], quick: &[1] },
            steps: Sizes { paper: 1_024, quick: 64 },
        }),
        ..TENSORS
    },
    Figure {
        name: "balancekv-table3",
        about: "Norms of queries, shifted keys and values, prompt by prompt",
        measures: "norms of queries, shifted keys and values",
        differs: "prompts are those at hand in place of TriviaQA's; keys are shifted by the mean \
                  of their head",
        measurement: Measurement::Model(|bench, name, options| {
            let prompts = Sizes { paper: 8, quick: 2 };
            norms::run(bench, name, options, *prompts.of(bench.common.quick))
        }),
        ..LAYERS
    },
    Figure {
        name: "balancekv-needle",
        about: "Retrieval by share dropped: full, SnapKV, PyramidKV, StreamingLLM, BalanceKV and \
                its augmented form, uniform sampling",
        measures: "retrieval by share kept",
        differs: "exact match of short answers that are fed token by token, in place of the recall \
                  of an answer's words in 30 generated tokens; lengths are those of the prompts at \
                  hand in place of 4k to 100k tokens; StreamingLLM evicts while decoding, where \
                  the paper keeps all decoded tokens",
        text: false,
        measurement: Measurement::Quality(Quality {
            budgets: &[
                Budget::Ratio(0.95),
                Budget::Ratio(0.8),
                Budget::Ratio(0.5),
                Budget::Ratio(0.25),
            ],
            policies: |_, _| needle_policies(),
            ..runners::QUALITY
        }),
        ..super::QUALITY
    },
];

/// The methods that the paper compares; each runs at every budget.
fn needle_policies() -> Vec<Value> {
    let names =
        ["balancekv", "balancekv-augmented", "uniform", "snapkv", "pyramidkv", "streaming-llm"];
    names.map(|name| json!({"policy": name})).into()
}
