//! KVReviver.

use kv_core::Budget;
use kv_models::Fisher;
use serde_json::{Value, json};

use super::preset::{self, Preset};
use super::runners::{self, Quality};
use super::{BY_BATCH, Figure, Measurement, ModelChoice, PRESET, QUALITY, TENSORS};
use crate::bench::{ModelBench, Sizes};
use crate::prompts::Mode;
use crate::record::FULL;
use crate::studies::by_batch::{ByBatch, Size};
use crate::studies::op_time::{Heads, Limit, OpTime, Shapes, sketch_attention};
use crate::studies::sketch_variance;

/// The paper's share kept.
const BUDGET: f64 = 0.1;
/// Where a model has no file of Fisher information.
const UNIFORM: &str = "kvreviver's layers share the budget evenly, as the model's folder has no \
    fisher.json: the paper divides it by Fisher information, which `cargo xtask bench fisher` \
    measures";

/// The paper's model for short texts.
const CHAT_MODEL: &str = "meta-llama/Llama-2-7b-chat-hf";
/// What differs in its tables of summaries.
const SUMMARIES: &str = "the tables name neither the model nor the numbers of articles and of \
    solved examples: the paper's model for short texts, 100 articles, and 3 examples, which make \
    prompts of the 2k tokens that the paper states, are chosen; prompts are asked as they are, \
    without a chat template";

/// Layers share by Fisher information where it is known.
const BY_FISHER: Preset = Preset {
    adapt: |bench, config| {
        if config["policy"] == "kvreviver" && has_fisher(bench) {
            config["layers"] = json!("fisher");
        }
    },
    more: |bench, _, _| {
        if !has_fisher(bench) {
            bench.note(UNIFORM.into());
        }
        Ok(())
    },
    ..preset::PRESET
};

/// The context is compressed before the question is known; a note says where layers share evenly.
const AGNOSTIC: Quality = Quality {
    mode: Mode::QuestionAgnostic,
    budgets: &[Budget::Ratio(BUDGET)],
    more: |bench, _, _, _| {
        if !has_fisher(bench) {
            bench.note(UNIFORM.into());
        }
        Ok(())
    },
    ..runners::QUALITY
};

pub(super) const FIGURES: &[Figure] = &[
    Figure {
        name: "kvreviver-table1",
        about: "Throughput and memory by batch: full, and KVReviver that attends to its sketch or \
                rebuilds",
        measures: "throughput and memory by batch",
        differs: "weights are random where no model is named, and the prompts' tokens are made up; \
                  the rows without rebuild=true attend to the sketch without rebuilding the cache, \
                  which is ours",
        published: "rows named published are the paper's table 1, Llama-2-7B on an A100 of 80 GB, \
                    prompts of XSum at 10 %; its KVReviver rebuilds",
        measurement: Measurement::ByBatch(ByBatch {
            // Llama-2's positions.
            size: Sizes {
                paper: Size { context: 2_048, steps: 64 },
                quick: Size { context: 512, steps: 16 },
            },
            policies: || {
                vec![
                    json!({"policy": FULL}),
                    json!({"policy": "kvreviver", "vague": "sketch", "budget": BUDGET}),
                    json!({
                        "policy": "kvreviver", "vague": "sketch", "budget": BUDGET, "rebuild": true,
                    }),
                ]
            },
            published: &[
                ("published: full", 1, 12.67),
                ("published: full", 2, 21.48),
                ("published: kvreviver", 1, 6.48),
                ("published: kvreviver", 2, 10.16),
                ("published: kvreviver", 8, 19.10),
                ("published: kvreviver", 16, 22.46),
            ],
            more: |_, _, _, _| {},
        }),
        ..BY_BATCH
    },
    Figure {
        name: "kvreviver-table2",
        about: "ROUGE-1 of XSum at 10 % by the sketch's share",
        measures: "ROUGE-1 of XSum by the sketch's share",
        differs: SUMMARIES,
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/kvreviver-table2.toml"),
            ..BY_FISHER
        }),
        ..PRESET
    },
    Figure {
        name: "kvreviver-table3",
        about: "ROUGE-1 of XSum at 10 % by the shares of candidates and recents",
        measures: "ROUGE-1 of XSum by the shares of candidates and recents",
        differs: SUMMARIES,
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/kvreviver-table3.toml"),
            ..BY_FISHER
        }),
        ..PRESET
    },
    Figure {
        name: "kvreviver-fig4",
        about: "XSum and CNN/DailyMail by budget: full, H2O, StreamingLLM, CaM, KVReviver",
        measures: "ROUGE-1 and ROUGE-L of summaries by budget",
        differs: "the budgets, 100 articles of each task and 3 solved examples of XSum are chosen \
                  here, as the paper states none; prompts are asked as they are, without a chat \
                  template; no number stands beside ours, as the paper draws its own",
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/kvreviver-fig4.toml"),
            ..BY_FISHER
        }),
        ..PRESET
    },
    Figure {
        name: "kvreviver-fig6",
        about: "LongBench by budget: full, H2O, StreamingLLM, CaM, KVReviver",
        measures: "scores of LongBench's tasks by budget",
        differs: "all English tasks run, as the paper's text does not name its own; the budgets \
                  beside 25 % are chosen here; DuoAttention needs trained gates and runs where \
                  --policy names them, {\"policy\": \"duo-attention\", \"alpha\": \"GATES.tsv\"}; \
                  no number stands beside ours, as the paper draws its own",
        model: ModelChoice::AnyOr("togethercomputer/Llama-2-7B-32K-Instruct"),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/kvreviver-fig6.toml"),
            ..BY_FISHER
        }),
        ..PRESET
    },
    Figure {
        name: "kvreviver-table2-needles",
        about: "Retrieval and perplexity of KVReviver by the sketch's share",
        measures: "retrieval and perplexity of KVReviver by the sketch's share",
        differs: "exact match of short answers and one text's perplexity in place of ROUGE-1 on \
                  XSum",
        published: "the paper, ROUGE-1 on XSum at 10 %, by the sketch's share: 0.1 35.7, 0.15 \
                    35.2, 0.2 34.4, 0.3 34.1, 0.4 33.3",
        measurement: Measurement::Quality(Quality {
            policies: |bench, budgets| {
                let shares = [0.1, 0.15, 0.2, 0.3, 0.4f64].map(|sketch| {
                    // To four digits, as they are written.
                    let exact = ((1.0 - sketch) / 2.0 * 1e4).round() / 1e4;
                    [sketch, exact, exact]
                });
                by_shares(bench, budgets, &shares)
            },
            ..AGNOSTIC
        }),
        ..QUALITY
    },
    Figure {
        name: "kvreviver-table3-needles",
        about: "Retrieval and perplexity of KVReviver by the shares of candidates and recents",
        measures: "retrieval and perplexity of KVReviver by the shares of candidates and recents",
        differs: "exact match of short answers and one text's perplexity in place of ROUGE-1 on \
                  XSum",
        published: "the paper, ROUGE-1 on XSum at 10 %, by the shares of candidates and recents: \
                    0.7/0.2 32.9, 0.6/0.3 34.5, 0.5/0.4 35.6, 0.45/0.45 35.7, 0.4/0.5 35.0, \
                    0.3/0.6 35.5",
        measurement: Measurement::Quality(Quality {
            policies: |bench, budgets| {
                let exact =
                    [(0.7, 0.2), (0.6, 0.3), (0.5, 0.4), (0.45, 0.45), (0.4, 0.5), (0.3, 0.6)];
                by_shares(
                    bench,
                    budgets,
                    &exact.map(|(candidate, recent)| [0.1, candidate, recent]),
                )
            },
            ..AGNOSTIC
        }),
        ..QUALITY
    },
    Figure {
        name: "kvreviver-fig5",
        about: "Retrieval by length and depth at 25 %: KVReviver and others",
        measures: "retrieval by length and depth",
        differs: "exact match of short answers, in prompts as long as those at hand in place of \
                  32k tokens; DuoAttention needs trained gates and runs where --policy names them, \
                  {\"policy\": \"duo-attention\", \"alpha\": \"GATES.tsv\"}",
        text: false,
        measurement: Measurement::Quality(Quality {
            budgets: &[Budget::Ratio(0.25)],
            with_depth: true,
            policies: beside_others,
            ..AGNOSTIC
        }),
        ..QUALITY
    },
    Figure {
        name: "kvreviver-fig6-needles",
        about: "Retrieval and perplexity by budget: KVReviver and others",
        measures: "retrieval and perplexity by budget",
        differs: "exact match of short answers and one text's perplexity in place of LongBench",
        measurement: Measurement::Quality(Quality {
            budgets: runners::SHARES,
            quick_budgets: runners::QUICK_SHARES,
            policies: beside_others,
            ..AGNOSTIC
        }),
        ..QUALITY
    },
    Figure {
        name: "kvreviver-attention",
        about: "Time of a step's attention over the sketch, over the cache rebuilt, and over a \
                full cache",
        measures: "time of a step's attention over the sketch",
        stands_in: "made-up queries, keys and values; no figure of the paper",
        differs: "no figure of the paper; queries, keys and values are made up",
        sized: true,
        wants_gpu: true,
        measurement: Measurement::OpTime(OpTime {
            paper: Shapes {
                heads: &[
                    Heads { name: "Llama-2-7B", query: 32, kv: 32, dim: 128 },
                    Heads { name: "Llama-3.1-8B", query: 32, kv: 8, dim: 128 },
                ],
                lengths: &[2_048, 4_096, 32_768, 131_072],
                batches: &[1, 8],
            },
            quick: Shapes::SMALL,
            limit: Limit::Tokens(8 * 32_768),
            shortest: 1,
            time: |bench, _, found| sketch_attention::time(bench, BUDGET, found),
            published_us: &[],
        }),
        ..TENSORS
    },
    Figure {
        name: "kvreviver-bounds",
        about: "Variance of the sketch's estimates against the paper's bound",
        measures: "variance of the sketch's estimates against the paper's bound",
        stands_in: "drawn tokens; the paper proves the bound and measures nothing",
        differs: "the paper proves the bound and measures nothing: tokens are drawn from the \
                  normal distribution that it assumes",
        single_precision: true,
        measurement: Measurement::Tensors(|bench, name, _| {
            let loads: Sizes<&[f64]> =
                Sizes { paper: &[0.25, 0.5, 1.0, 2.0, 4.0, 16.0, 64.0], quick: &[0.5, 2.0, 16.0] };
            let sketches = Sizes { paper: 512, quick: 64 };
            let quick = bench.common.quick;
            sketch_variance::run(bench, name, loads.of(quick), *sketches.of(quick))
        }),
        ..TENSORS
    },
];

/// Whether the model's folder holds its Fisher information, by which the paper divides a budget
/// among layers.
fn has_fisher(bench: &ModelBench<'_>) -> bool {
    Fisher::beside(bench.common.model()).is_ok_and(|path| path.is_file())
}

/// The paper's form.
fn kvreviver(bench: &ModelBench<'_>, budget: Budget) -> Value {
    let mut config = json!({"policy": "kvreviver", "vague": "sketch", "budget": budget});
    if has_fisher(bench) {
        config["layers"] = json!("fisher");
    }
    config
}

/// KVReviver by the shares of the sketch, of candidates and of recents.
fn by_shares(bench: &ModelBench<'_>, budgets: &[Budget], shares: &[[f64; 3]]) -> Vec<Value> {
    let with = |budget: Budget, [sketch, candidate, recent]: [f64; 3]| {
        let mut config = kvreviver(bench, budget);
        config["sketch_share"] = json!(sketch);
        config["candidate"] = json!(candidate);
        config["recent"] = json!(recent);
        config
    };
    budgets.iter().flat_map(|&budget| shares.iter().map(move |own| with(budget, *own))).collect()
}

/// The policies that the paper compares with, and KVReviver as the paper has it and with signs for
/// keys too.
fn beside_others(bench: &ModelBench<'_>, budgets: &[Budget]) -> Vec<Value> {
    let mut configs = Vec::new();
    for name in ["streaming-llm", "h2o", "cam", "snapkv"] {
        configs.extend(budgets.iter().map(|budget| json!({"policy": name, "budget": budget})));
    }
    for &budget in budgets {
        for signed in [false, true] {
            let mut config = kvreviver(bench, budget);
            config["signed_keys"] = json!(signed);
            configs.push(config);
        }
    }
    configs
}

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::quick;

    #[test]
    fn variances_stay_below_the_bound() {
        let (records, _) = quick("kvreviver-bounds");
        let of = |metric: &str| -> Vec<f64> {
            records.iter().filter(|r| r.metric == metric).map(|r| r.value).collect()
        };
        let [variances, bounds, above, predicted] = [
            metric::VARIANCE,
            metric::VARIANCE_BOUND,
            metric::ABOVE_BOUND,
            metric::ABOVE_BOUND_PREDICTED,
        ]
        .map(of);
        assert_eq!(variances.len(), 6);
        for at in 0..variances.len() {
            let share = variances[at] / bounds[at];
            assert!(share > 0.0 && share < 0.5, "{share} of the bound");
            // Where entries hold many tokens, 0.448 of an entry's: pi a / N is 1.05 of that. The
            // mean of three would have a third, 0.32 of the bound.
            let many = bounds[at] > 10.0;
            assert!(!many || (share - 0.43).abs() < 0.06, "{share} of the bound");
            assert!(above[at] <= predicted[at], "{} above, {}", above[at], predicted[at]);
        }
    }

    #[test]
    fn sketches_attend_and_rebuild_at_growing_batches() {
        let (records, _) = quick("kvreviver-table1");
        for policy in ["full", "kvreviver vague=sketch", "kvreviver rebuild=true vague=sketch"] {
            let largest = records
                .iter()
                .filter(|r| r.policy == policy && r.metric == metric::DECODE_TOKENS_PER_SECOND);
            let largest = largest.filter_map(|r| r.case.batch).max().unwrap();
            assert!(policy == "full" || largest >= 4, "{policy}: batch {largest}");
        }
        let bytes = |policy: &str| {
            let own = records.iter().filter(|r| r.policy == policy && r.case.batch == Some(2));
            own.filter(|r| r.metric == metric::TOTAL_BYTES).map(|r| r.value).next().unwrap()
        };
        assert!(bytes("kvreviver vague=sketch") < bytes("full"), "a tenth of the cache is smaller");
    }

    #[test]
    fn every_share_is_asked_the_same_questions() {
        for (figure, policies) in [("kvreviver-table2-needles", 6), ("kvreviver-fig5", 7)] {
            let (records, _) = quick(figure);
            let mut names: Vec<&str> = records.iter().map(|r| r.policy.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), policies, "{figure}: {names:?}");
            let asked = |policy: &str| {
                records
                    .iter()
                    .filter(|r| r.policy == policy && r.metric == metric::EXACT_MATCH)
                    .count()
            };
            assert!(names.iter().all(|name| asked(name) == asked("full") && asked(name) > 0));
        }
    }
}
