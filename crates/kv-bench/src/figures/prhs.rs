//! PrHS.

use kv_core::Budget;
use serde_json::{Value, json};

use super::preset::{self, Preset};
use super::runners::{self, Quality, ReadAttention, Throughput};
use super::{Figure, LAYERS, Measurement, ModelChoice, PRESET, PolicyChoice, QUALITY, TENSORS};
use crate::bench::Sizes;
use crate::options::Common;
use crate::prompts::Mode;
use crate::record::FULL;
use crate::studies::op_time::{Heads, Limit, OpBench, OpTime, Shapes, Sink, subset_attention};
use crate::suites::perplexity::Text;
use crate::suites::prefill_perplexity;

const LLAMA_2: Heads = Heads { name: "Llama-2-7B", query: 32, kv: 32, dim: 128 };
/// With 128 numbers a token, kernels could not count more in 32 bits.
const LIMIT: Limit = Limit::KvTokens(16 << 20);
/// Share of the tokens that timed steps read.
const SHARE: f64 = 0.125;
/// HShare's ratios of layers, heads and queries.
const HSHARE: [[f64; 3]; 2] = [[0.75, 0.75, 0.5], [0.5, 0.5, 0.5]];

/// A figure of the time of a step's attention.
const STEPS: Figure = Figure {
    stands_in: "made-up queries, keys and values",
    policies: PolicyChoice::Names,
    sized: true,
    wants_gpu: true,
    ..TENSORS
};

/// A figure of the attention that is read of real prompts.
const READ: Figure = Figure { policies: PolicyChoice::Names, ..LAYERS };

/// The paper's first model.
const CHAT_MODEL: &str = "meta-llama/Llama-2-7b-chat-hf";
/// What differs in its tables of GSM8K and CoQA.
const ZERO_SHOT: &str = "prompts are asked as they are, without a chat template; retrieval ratios, \
    which the paper has beside its scores, are those of `prhs-table2-needles` and `prhs-fig7`";

pub(super) const FIGURES: &[Figure] = &[
    Figure {
        name: "prhs-table2",
        about: "GSM8K and CoQA at 128 tokens: full, H2O, Quest, Double Sparsity, HShare, CIS, CIS*",
        measures: "GSM8K and CoQA at 128 tokens",
        differs: "prompts are asked as they are, without a chat template; Double Sparsity takes \
                  the channels of the prompt's own keys unless --policy names a calibrated one, \
                  {\"policy\": \"double-sparsity\", \"channels\": \"FILE.json\"}; Quest and Double \
                  Sparsity read all tokens in their first two layers; retrieval ratios, which the \
                  paper has beside its scores, are those of `prhs-table2-needles` and `prhs-fig7`",
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/prhs-table2.toml"),
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "prhs-table3",
        about: "LongBench at 512 tokens: full, H2O, Quest, Double Sparsity, HShare, CIS, CIS*, CPE",
        measures: "scores of LongBench's tasks at 512 tokens",
        differs: "the table names no model: the paper's first is chosen; Double Sparsity takes the \
                  channels of the prompt's own keys, and reads all tokens in its first two layers, \
                  as Quest does; prompts lose their middle beyond the model's positions; of CIS* \
                  at s = 16 and of CPE the averages alone are known",
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/prhs-table3.toml"),
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "prhs-table6",
        about: "GSM8K, CoQA and prefill perplexity of CIS*, PSAW, ETF and CPE with other \
                parameters",
        measures: "GSM8K and CoQA of CIS*, PSAW, ETF and CPE",
        differs: "prompts are asked as they are, without a chat template; prefill perplexity is \
                  measured of the text that --text names, such as WikiText's, over windows of \
                  --contexts tokens and what follows; CPE's sets are of CIS with a k of 88",
        published: "the paper, prefill perplexity of WikiText: PSAW 6.120 at phi 0.5 and alpha 1, \
                    6.113 at 0.7 and 1.5; ETF 6.162 at psi 0.5 and gamma 1.5, 6.156 at 0.4 and 1; \
                    CPE 6.148 at s = 8, 6.136 at s = 32",
        model: ModelChoice::AnyOr(CHAT_MODEL),
        text: true,
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/prhs-table6.toml"),
            more: |bench, options, policy_runs| {
                if options.text.is_none() {
                    return Ok(());
                }
                let texts = Text::read(bench, options.text.as_deref(), &options.contexts)?;
                prefill_perplexity::run(bench, policy_runs, &texts)
            },
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "prhs-table7",
        about: "GSM8K and CoQA of CIS* by the vectors that it compares",
        measures: "GSM8K and CoQA of CIS* by the vectors that it compares",
        differs: ZERO_SHOT,
        model: ModelChoice::AnyOr(CHAT_MODEL),
        measurement: Measurement::Preset(Preset {
            toml: include_str!("../../assets/papers/prhs-table7.toml"),
            ..preset::PRESET
        }),
        ..PRESET
    },
    Figure {
        name: "prhs-table2-needles",
        about: "Retrieval and perplexity, and how often heads retrieve: CIS, HShare, Quest, Double \
                Sparsity, H2O",
        measures: "retrieval and perplexity, and how often heads retrieve",
        differs: "exact match of short answers and one text's perplexity in place of GSM8K and \
                  CoQA; retrieval ratio and tokens read are of the answers' steps, which end \
                  before a block of 8 steps is full, not of the text's; Double Sparsity takes the \
                  channels of the prompt's own keys unless --policy names a calibrated one, \
                  {\"policy\": \"double-sparsity\", \"channels\": \"FILE.json\"}; Quest and Double \
                  Sparsity read all tokens in their first two layers",
        measurement: Measurement::Quality(Quality {
            mode: Mode::QuestionAware,
            // The paper's for short prompts, and an eighth.
            budgets: &[Budget::Tokens(128), Budget::Ratio(0.125)],
            quick_budgets: &[Budget::Tokens(128)],
            policies: |_, budgets| table2_policies(budgets),
            ..runners::QUALITY
        }),
        ..QUALITY
    },
    Figure {
        name: "prhs-table4",
        about: "Time of a step's attention, choices included: CIS, CPE, HShare, Quest, Double \
                Sparsity, H2O, the oracle",
        measures: "time of a step's attention, choices included",
        differs: "one layer of made-up queries, keys and values, in which a fixed share of the \
                  heads retrieves; the layer is the last of 32, where CPE's window is narrowest; \
                  HShare's layers choose for themselves, in place of taking other layers' lists; \
                  H2O neither accumulates scores nor evicts",
        measurement: Measurement::OpTime(OpTime {
            paper: Shapes { heads: &[LLAMA_2], lengths: &[1_024, 2_048, 4_096], batches: &[8, 16] },
            quick: Shapes::SMALL,
            limit: LIMIT,
            // An eighth of them is a page of Quest's.
            shortest: 128,
            time: time_steps,
            published_us: &[],
        }),
        ..STEPS
    },
    Figure {
        name: "prhs-long",
        about: "Time of a step's attention at lengths beyond the paper's: 8k to 128k tokens, \
                groups of 4 and 8",
        measures: "time of a step's attention, choices included, at long lengths",
        stands_in: "made-up queries, keys and values; no table of the paper",
        differs: "no table of the paper, which ends at 4k tokens; one layer of made-up queries, \
                  keys and values, in which a fixed share of the heads retrieves; the layer is the \
                  last of 32, where CPE's window is narrowest; HShare's layers choose for \
                  themselves, in place of taking other layers' lists; H2O neither accumulates \
                  scores nor evicts",
        measurement: Measurement::OpTime(OpTime {
            paper: Shapes {
                heads: &[
                    LLAMA_2,
                    Heads { name: "groups of 4", query: 32, kv: 8, dim: 128 },
                    Heads { name: "groups of 8", query: 64, kv: 8, dim: 128 },
                ],
                lengths: &[8_192, 32_768, 131_072],
                batches: &[1, 8, 16],
            },
            quick: Shapes::SMALL,
            limit: LIMIT,
            // An eighth of them is a page of Quest's.
            shortest: 128,
            time: time_steps,
            published_us: &[],
        }),
        ..STEPS
    },
    Figure {
        name: "prhs-table5",
        about: "Decode throughput at 1/8: CIS, CPE, HShare, Quest, Double Sparsity, H2O, the full \
                cache",
        measures: "decode throughput at an eighth of the tokens",
        stands_in: "random weights unless --model names a model, made-up prompts",
        differs: "weights are random where no model is named, so that queries before RoPE are \
                  alike, and heads share at nearly every step of a block, more often than in a \
                  trained model; with threshold=-1.0 they share at every step; 3,968 tokens in \
                  place of 4k",
        published: "the paper, Llama-2-7B on an A100 of 80 GB, tokens/s at batch 16 and 4k: \
                    GPT-Fast 136, H2O 396, Quest 175, Double Sparsity 286, HShare 350 and 365, CIS \
                    352 and 364, CPE 362 and 384",
        model: ModelChoice::AnyOr("random:llama-2-7b"),
        measurement: Measurement::Throughput(Throughput {
            policies: throughput_policies,
            // Within Llama-2's positions with the steps behind them.
            lengths: Sizes { paper: &[1_024, 2_048, 4_096 - 128], quick: &[256] },
            batches: Sizes { paper: &[8, 16], quick: &[2] },
            steps: Sizes { paper: 64, quick: 64 },
        }),
        ..STEPS
    },
    Figure {
        name: "prhs-table6-needles",
        about: "Retrieval and perplexity of CIS*, PSAW, ETF and CPE with other parameters",
        measures: "retrieval, perplexity and prefill perplexity of CIS*, PSAW, ETF and CPE",
        differs: "exact match of short answers in place of GSM8K; prefill perplexity is of the one \
                  text at hand in place of WikiText, counts all of its tokens, frozen ones \
                  included, and is the full cache's for CIS*, which leaves prefill as it is; \
                  perplexity is of tokens decoded behind the text's context; CPE's sets are of CIS \
                  with a k of 88 in place of CIS*'s, and blocks are of 8 tokens alone, where table \
                  VII has 8 and 16",
        measurement: Measurement::Quality(Quality {
            mode: Mode::QuestionAware,
            budgets: &[Budget::Tokens(128)],
            policies: |bench, budgets| {
                table6_policies(budgets, bench.model.config().num_layers, bench.common.quick)
            },
            more: |bench, _, policy_runs, texts| prefill_perplexity::run(bench, policy_runs, texts),
            ..runners::QUALITY
        }),
        ..QUALITY
    },
    Figure {
        name: "prhs-fig7",
        about: "Attention that is read of real prompts, by how often heads retrieve; bounds on \
                what is dropped",
        measures: "attention that is read by how often heads retrieve",
        differs: "the right panel alone, without the left panel's accuracies, over the decode \
                  steps of the prompts at hand in place of GSM8K's",
        measurement: Measurement::ReadAttention(ReadAttention {
            policies: |quick| beside_oracle(quick, fig7_policies),
            ..EIGHT_PROMPTS
        }),
        ..READ
    },
    Figure {
        name: "prhs-fig8",
        about: "Attention that is read of real prompts, by how many tokens bring their neighbours \
                along",
        measures: "attention that is read by how many tokens bring their neighbours along",
        differs: "over the decode steps of the prompts at hand in place of NarrativeQA's",
        measurement: Measurement::ReadAttention(ReadAttention {
            policies: |quick| beside_oracle(quick, fig8_policies),
            ..EIGHT_PROMPTS
        }),
        ..READ
    },
];

const EIGHT_PROMPTS: ReadAttention = ReadAttention {
    policies: |_| Vec::new(),
    prompts: Sizes { paper: 8, quick: 1 },
    steps: Sizes { paper: 128, quick: 24 },
};

/// Times the steps of the policies that `--policy` names, and of the full cache.
fn time_steps(bench: &OpBench<'_>, common: &Common, found: Sink<'_>) -> anyhow::Result<()> {
    let configs = step_policies(bench.length);
    subset_attention::time(bench, &common.select_beside_full(&configs)?, found)
}

/// CIS of a budget and block.
fn cis(name: &str, budget: &Value, block: usize) -> Value {
    json!({"policy": name, "budget": budget, "block": block})
}

/// HShare with one of the paper's two ratios.
fn hshare(budget: &Value, [layers, heads, queries]: [f64; 3]) -> Value {
    json!({
        "policy": "hshare", "budget": budget, "layers": layers, "heads": heads, "queries": queries
    })
}

/// The full cache, and policies that read a part of the tokens they keep.
fn table2_policies(budgets: &[Budget]) -> Vec<Value> {
    let mut configs = vec![json!({"policy": FULL})];
    for budget in budgets.iter().map(|budget| json!(budget)) {
        for name in ["top-k-oracle", "h2o", "quest", "double-sparsity"] {
            configs.push(json!({"policy": name, "budget": budget}));
        }
        configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
        for name in ["cis", "cis-star"] {
            configs.extend([8, 16, 20].map(|block| cis(name, &budget, block)));
        }
    }
    configs
}

/// The full cache, CIS*, PSAW, ETF and CPE with other parameters.
fn table6_policies(budgets: &[Budget], layers: usize, quick: bool) -> Vec<Value> {
    // Layers from three quarters of the depth on, as in the paper, and from a quarter on.
    let starts = [3 * layers / 4, layers / 4];
    let starts = if quick { &starts[1..] } else { &starts[..] };
    let mut configs = vec![json!({"policy": FULL})];
    configs.extend(budgets.iter().flat_map(|budget| shared(&json!(budget))));
    for &start in starts {
        configs.extend(pruned(start, quick));
        configs.extend(budgets.iter().flat_map(|budget| composed(&json!(budget), start, quick)));
    }
    configs
}

/// CIS* by block, threshold, radius, and by the vectors that are compared.
fn shared(budget: &Value) -> Vec<Value> {
    let parameters =
        [(4, 0.8, 1), (8, 0.8, 1), (8, 0.7, 1), (8, 0.8, 2), (16, 0.8, 1), (32, 0.8, 1)];
    let blocks = parameters.map(|(block, threshold, radius)| {
        let mut config = cis("cis-star", budget, block);
        config["threshold"] = json!(threshold);
        config["radius"] = json!(radius);
        config
    });
    // CIS compares queries before RoPE by default.
    let similarities = ["query", "key", "hidden"].map(|similarity| {
        let mut config = cis("cis-star", budget, 8);
        config["similarity"] = json!(similarity);
        config
    });
    blocks.into_iter().chain(similarities).collect()
}

/// PSAW and ETF from a layer on.
fn pruned(start: usize, quick: bool) -> Vec<Value> {
    if quick {
        return ["psaw", "etf"].map(|name| json!({"policy": name, "start": start})).into();
    }
    let psaw = [(0.7, 1.0), (0.5, 1.0), (0.7, 1.5)]
        .map(|(phi, alpha)| json!({"policy": "psaw", "phi": phi, "alpha": alpha, "start": start}));
    let etf = [(0.5, 1.0), (0.5, 1.5), (0.4, 1.0)]
        .map(|(psi, gamma)| json!({"policy": "etf", "psi": psi, "gamma": gamma, "start": start}));
    [psaw, etf].concat()
}

/// CPE, whose windows and frozen tokens begin at a layer.
fn composed(budget: &Value, start: usize, quick: bool) -> Vec<Value> {
    let of = |block: usize| {
        let mut config = cis("cpe", budget, block);
        config["psaw"] = json!({"start": start});
        config["etf"] = json!({"start": start});
        config
    };
    if quick {
        return vec![of(8)];
    }
    // The paper's other setting of all three.
    let mut steeper = of(8);
    steeper["radius"] = json!(2);
    steeper["psaw"]["alpha"] = json!(1.2);
    steeper["etf"]["gamma"] = json!(1.2);
    [8, 16, 32].map(of).into_iter().chain([steeper]).collect()
}

/// The full cache, and policies that read an eighth of `length` tokens.
fn step_policies(length: usize) -> Vec<Value> {
    let budget = json!((length as f64 * SHARE) as usize);
    let mut configs = vec![json!({"policy": FULL})];
    for name in ["h2o", "top-k-oracle"] {
        configs.push(json!({"policy": name, "budget": budget}));
    }
    for name in ["quest", "double-sparsity"] {
        configs.push(json!({"policy": name, "budget": budget, "dense_layers": 0}));
    }
    configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
    for name in ["cis", "cpe"] {
        configs.extend([8, 16].map(|block| cis(name, &budget, block)));
    }
    // Options of ours.
    for (option, value) in [("vote", json!(8)), ("tail", json!(true)), ("labels", json!(0.0625))] {
        let mut own = cis("cis", &budget, 16);
        own[option] = value;
        configs.push(own);
    }
    configs
}

/// The full cache, and policies that hold or read an eighth of the tokens.
fn throughput_policies(quick: bool) -> Vec<Value> {
    let budget = json!(SHARE);
    let mut configs = vec![json!({"policy": FULL}), json!({"policy": "h2o", "budget": budget})];
    for name in ["quest", "double-sparsity"] {
        configs.push(json!({"policy": name, "budget": budget}));
    }
    configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
    let blocks = if quick { &[16][..] } else { &[8, 16] };
    for name in ["cis", "cpe"] {
        configs.extend(blocks.iter().map(|&block| cis(name, &budget, block)));
        // The fewest retrievals that a block allows, whatever the queries. Those of random weights
        // are alike before RoPE, so that the rows above retrieve little more; trained models do.
        let mut shared = cis(name, &budget, 16);
        shared["threshold"] = json!(-1.0);
        configs.push(shared);
    }
    // Sets of an eighth with the neighbours that they bring along.
    let mut star = cis("cis-star", &budget, 16);
    star["threshold"] = json!(-1.0);
    configs.push(star);
    configs
}

/// The full cache, and at each of the paper's budgets the oracle and other policies.
fn beside_oracle(quick: bool, others: fn(usize) -> Vec<Value>) -> Vec<Value> {
    let budgets = if quick { &[128][..] } else { &[128, 512] };
    let mut configs = vec![json!({"policy": FULL})];
    for &budget in budgets {
        configs.push(json!({"policy": "top-k-oracle", "budget": budget}));
        configs.extend(others(budget));
    }
    configs
}

/// CIS, CIS without neighbours, HShare, and policies that choose anew every step.
fn fig7_policies(budget: usize) -> Vec<Value> {
    let mut configs = vec![json!({"policy": "quest", "budget": budget, "dense_layers": 0})];
    configs.push(json!({"policy": "double-sparsity", "budget": budget, "dense_layers": 0}));
    // Shares of heads and queries at which heads retrieve as often as CIS's; layers are measured by
    // themselves.
    for [heads, queries] in [[0.75, 0.5], [0.5, 0.5], [0.75, 0.25], [0.375, 0.25], [0.5, 0.125]] {
        configs.push(json!({
            "policy": "hshare", "budget": budget, "layers": 1.0, "heads": heads, "queries": queries
        }));
    }
    // Blocks at the paper's threshold, and blocks all of whose steps share, whatever their queries,
    // for ever fewer retrievals: 0.25 to 0.0625 of the steps.
    let similar = [8, 16, 32].map(|block| (block, None));
    let all = [4, 6, 12, 16].map(|block| (block, Some(-1.0)));
    for (block, threshold) in similar.into_iter().chain(all) {
        let mut cis = json!({"policy": "cis", "budget": budget, "block": block});
        if let Some(threshold) = threshold {
            cis["threshold"] = json!(threshold);
        }
        let (mut star, mut alone) = (cis.clone(), cis.clone());
        star["policy"] = json!("cis-star");
        // Sets have exactly the budget's size.
        alone["dilated"] = json!(0.0);
        configs.extend([cis, star, alone]);
    }
    configs
}

/// CIS, and CIS* as in the paper, by the number of tokens whose neighbours are read too.
fn fig8_policies(budget: usize) -> Vec<Value> {
    let of = |name: &str| {
        let cis = |dilated: f64, radius: usize| {
            json!({
                "policy": name, "budget": budget, "dilated": dilated, "radius": radius
            })
        };
        let shares = [0.0, 1.0 / 6.0, 1.0 / 3.0, 2.0 / 3.0, 1.0];
        let mut configs: Vec<Value> = shares.map(|dilated| cis(dilated, 1)).into();
        configs.extend([2, 4].map(|radius| cis(1.0 / 3.0, radius)));
        configs
    };
    ["cis", "cis-star"].map(of).concat()
}

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::{quick, ran};

    #[test]
    fn shared_sets_read_almost_what_the_oracle_does() {
        let (records, report) = quick("prhs-fig7");
        let mean = |policy: &str, name: &str| {
            let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
            let values: Vec<f64> = own.map(|record| record.value).collect();
            assert!(!values.is_empty(), "{policy} has no {name}");
            values.iter().sum::<f64>() / values.len() as f64
        };
        let oracle = mean("top-k-oracle", metric::RETAINED_MASS);
        assert!(mean("cis block=8", metric::RETAINED_MASS) > 0.9 * oracle);
        // Sets of exactly the budget's size, shared by ever more steps.
        let shared = |block: usize, name: &str| match block {
            16 => mean("cis dilated=0.0 threshold=-1.0", name),
            _ => mean(&format!("cis block={block} dilated=0.0 threshold=-1.0"), name),
        };
        let often = [4, 6, 12, 16].map(|block| shared(block, metric::RETRIEVAL_RATIO));
        assert!(often.is_sorted_by(|a, b| a > b), "{often:?}");
        for name in [metric::RETAINED_MASS, metric::OVERLAP] {
            assert!(shared(4, name) > shared(16, name), "{name}");
        }
        assert!(mean("top-k-oracle", metric::OVERLAP) > mean("hshare", metric::OVERLAP));
        assert_eq!(mean("cis", metric::BROKEN), 0.0);
        assert!(report.contains("top-k-oracle"), "the report shows who ran");
    }

    /// Bounds of the attention that PrHS drops, hides and moves, beside the measured attention.
    #[test]
    fn certificates_hold() {
        let policies = r#"["cis", {"policy": "cis", "sets": "query-heads"},
            {"policy": "psaw", "start": 0, "phi": 0.5}, {"policy": "etf", "start": 1},
            {"policy": "cpe", "threshold": -1.0, "psaw": {"start": 0, "phi": 0.3},
             "etf": {"start": 1}}]"#;
        let line = "attention --certificates --budget 64 --limit 4 --steps 24 --policy";
        let words: Vec<&str> = line.split(' ').chain([policies]).collect();
        let (records, _) = ran(&words).unwrap();
        let of = |policy: &str, name: &str| -> Vec<f64> {
            let own = records.iter().filter(|r| r.policy.starts_with(policy) && r.metric == name);
            own.map(|record| record.value).collect()
        };
        for (policy, observed, bound) in [
            ("cis", metric::DROPPED_MASS, metric::ODDS_BOUND),
            ("cis", metric::ORACLE_GAP_IN_SET, metric::ORACLE_GAP_IN_SET_BOUND),
            ("psaw", metric::WINDOW_DROPPED_MASS, metric::WINDOW_DROPPED_BOUND),
            ("etf", metric::FROZEN_KEY_TV, metric::FROZEN_KEY_TV_BOUND),
            ("cpe", metric::DROPPED_MASS, metric::ODDS_BOUND),
            ("cpe", metric::WINDOW_DROPPED_MASS, metric::WINDOW_DROPPED_BOUND),
            ("cpe", metric::FROZEN_KEY_TV, metric::FROZEN_KEY_TV_BOUND),
        ] {
            let (observed, bound) = (of(policy, observed), of(policy, bound));
            // The first of them has no window yet, and nothing frozen.
            assert!(observed.len() >= 2 && observed.len() == bound.len(), "{policy}: {observed:?}");
            assert!(observed.iter().any(|observed| *observed > 0.0), "{policy}: nothing is seen");
            let holds = observed.iter().zip(&bound).all(|(observed, bound)| observed <= bound);
            assert!(holds, "{policy}: {observed:?} above {bound:?}");
            assert!(of(policy, metric::BROKEN).iter().all(|broken| *broken == 0.0), "{policy}");
            let above_one = of(policy, metric::BOUND_GT_1_SHARE);
            assert!(
                !above_one.is_empty() && above_one.iter().all(|share| (0.0..=1.0).contains(share))
            );
        }
        // Not all of them for want of anything to say.
        assert!(of("psaw", metric::WINDOW_DROPPED_BOUND).iter().any(|bound| *bound < 0.9));
        // A cosine a layer, of some queries that are alike and some that are not.
        let (cosines, alike) =
            (of("full", metric::QUERY_COSINE), of("full", metric::QUERIES_ALIKE));
        assert!(cosines.len() > 1 && cosines.iter().all(|cosine| (-1.0..1.0).contains(cosine)));
        assert!(
            alike.len() == cosines.len() && alike.iter().all(|share| (0.0..1.0).contains(share))
        );
        // The bound on dropped attention covers visible tokens; hidden attention is a metric of its
        // own.
        assert!(of("cpe", metric::WINDOW_DROPPED_MASS).iter().any(|hidden| *hidden > 0.05));
    }

    #[test]
    fn hidden_states_are_not_compared_without_a_whole_model() {
        let policy = r#"{"policy": "cis", "budget": 64, "similarity": "hidden"}"#;
        let line = "attention --limit 1 --steps 8 --policy";
        let words: Vec<&str> = line.split(' ').chain([policy]).collect();
        let error = ran(&words).map(drop).unwrap_err().to_string();
        assert!(error.contains("hidden states") && error.contains("quality"), "{error}");
    }

    #[test]
    fn operators_are_timed_over_what_they_read() {
        let (records, _) = quick("prhs-table4");
        let of = |policy: &str, name: &str| {
            records
                .iter()
                .find(|r| r.policy.starts_with(policy) && r.metric == name)
                .map(|r| r.value)
        };
        assert!(of("full", metric::TIME_US).is_some());
        assert_eq!(of("full", metric::RETRIEVAL_RATIO), None, "it chooses nothing");
        let ratio = of("cis", metric::RETRIEVAL_RATIO).unwrap();
        assert!(ratio > 0.0 && ratio < 0.5, "{ratio} of the heads retrieve");
    }

    #[test]
    fn tables_run_those_that_are_named() {
        let ran = |line: &str| -> anyhow::Result<Vec<String>> {
            let (records, _) = ran(&line.split(' ').collect::<Vec<_>>())?;
            let mut names: Vec<String> = records.into_iter().map(|record| record.policy).collect();
            names.dedup();
            Ok(names)
        };
        let table4 = "paper prhs-table4 --quick --policy";
        let named = ran(&format!("{table4} cpe,h2o")).unwrap();
        assert_eq!(named, ["full", "h2o", "cpe block=8", "cpe"]);
        let error = ran(&format!("{table4} cpe,snapkv")).unwrap_err().to_string();
        assert!(error.contains("no `snapkv`") && error.contains("quest"), "{error}");
        let error = ran(&format!("{table4} ,")).unwrap_err().to_string();
        assert!(error.contains("quest"), "{error}");
        let error = ran(&format!("{table4} cpe --lengths 64")).unwrap_err().to_string();
        assert!(error.contains("--quick has one size"), "{error}");
        let error = ran("paper prhs-long --lengths 99999999").unwrap_err();
        assert!(error.to_string().contains("times up to 16777216 tokens"), "{error}");
        let error = ran("paper prhs-table5 --lengths 64").unwrap_err().to_string();
        assert!(error.contains("for GPUs"), "whole models are for them at any length: {error}");
        let other = "paper balancekv-fig3 --quick --policy cis";
        let error = ran(other).unwrap_err().to_string();
        assert!(error.contains("runs all of its own"), "{error}");
    }
}
