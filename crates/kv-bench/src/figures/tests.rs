//! The options that figures take, and their titles and notes.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Parser;
use kv_core::Budget;
use serde_json::json;

use super::{Paper, all};
use crate::args::{Args, Suite};
use crate::record::{Record, metric, mode};
use crate::testing::{quick, ran};

/// The options that a line has.
fn options(line: &str) -> (Paper, Args) {
    let args = Args::try_parse_from(line.split(' ')).unwrap();
    let Some(Suite::Paper(paper)) = args.suite.clone() else { panic!("{line} is no figure") };
    (paper, args)
}

/// A file of two prompts of many tokens.
fn prompts(folder: &Path) -> String {
    let path = folder.join("own.jsonl");
    let context = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(40);
    let line = |length: usize| {
        json!({"task": "own", "length": length, "depth": 0.5, "context": context,
            "question": "\nQuestion: What lay upon the sand?\nAnswer: ", "answer": "boat"})
    };
    std::fs::write(&path, format!("{}\n{}\n", line(600), line(700))).unwrap();
    path.display().to_string()
}

fn names(records: &[Record]) -> BTreeSet<&str> {
    records.iter().map(|record| record.policy.as_str()).collect()
}

#[test]
fn figures_say_what_they_measure_and_what_is_not_the_paper_s() {
    for figure in all() {
        let (name, differs) = (figure.name, figure.differs);
        assert!(!figure.measures.is_empty() && !figure.about.is_empty(), "{name}");
        let (paper, _) = options(&format!("kv-bench paper {name}"));
        let notes = paper.notes(false);
        assert!(differs.is_empty() || notes[0].contains(differs), "{name}");
        assert!(paper.notes(true).len() == notes.len() + 1, "{name}");
    }
    let (_, report) = quick("kvreviver-bounds");
    let title = "burn-kv: kvreviver-bounds: variance of the sketch&#39;s estimates against the \
        paper&#39;s bound (drawn tokens;";
    assert!(report.contains(&format!("<h1>{title}")), "the title says what is measured");
    assert!(report.contains("kvreviver-bounds differs from the paper: the paper proves the bound"));
    assert!(report.contains("--quick: small sizes"));
}

/// Whatever does not run the paper's own tasks or model says in its title what it runs instead.
#[test]
fn titles_say_what_stands_in_for_the_paper_s_model_or_data() {
    let title = |line: &str| {
        let (paper, args) = options(line);
        paper.title(&args.common)
    };
    for figure in all() {
        let (name, stands_in) = (figure.name, figure.stands_in);
        let own = title(&format!("kv-bench paper {name}"));
        assert_eq!(own.ends_with(&format!("({stands_in})")), !stands_in.is_empty(), "{own}");
        assert!(figure.preset().is_some() || !stands_in.is_empty(), "{name}");
        let prompts = figure.prompts && name != "balancekv-fig3";
        assert_eq!(own.ends_with("(needles, not the paper's workload)"), prompts, "{own}");
        assert!(figure.quality().is_none_or(|_| figure.prompts), "{name}");
    }
    let own = title("kv-bench paper kvreviver-fig6-needles --prompts folder/mine.jsonl");
    assert!(own.ends_with("(prompts of mine.jsonl, not the paper's workload)"), "{own}");
    let own = title("kv-bench paper longflow-table1 --model models/smollm2");
    assert!(own.ends_with("(smollm2, not the paper's model)"), "{own}");
    for model in ["models/Qwen3-8B", "hub/models--Qwen--Qwen3-8B/snapshots/4f", "Qwen3-8B.gguf"] {
        let own = title(&format!("kv-bench paper longflow-table1 --model {model}"));
        assert!(!own.contains('('), "{own}");
    }
}

#[test]
fn tables_run_at_their_paper_s_budgets() {
    let ratios = |shares: &[f64]| shares.iter().copied().map(Budget::Ratio).collect::<Vec<_>>();
    for (name, budgets) in [
        ("keepkv-table3-needles", ratios(&[0.01, 0.1])),
        ("keepkv-table4-needles", ratios(&[0.04])),
        ("kvreviver-table2-needles", ratios(&[0.1])),
        ("kvreviver-fig5", ratios(&[0.25])),
        ("prhs-table2-needles", vec![Budget::Tokens(128), Budget::Ratio(0.125)]),
    ] {
        let (paper, args) = options(&format!("kv-bench paper {name}"));
        assert_eq!(paper.figure.quality().unwrap().budgets(&args.common), budgets, "{name}");
        let (paper, args) = options(&format!("kv-bench paper {name} --budget 0.3,64"));
        paper.check(&args.common).unwrap();
        let asked = paper.figure.quality().unwrap().budgets(&args.common);
        assert_eq!(asked, [Budget::Ratio(0.3), Budget::Tokens(64)]);
    }
    let refused = |line: &str| {
        let (paper, args) = options(line);
        paper.check(&args.common).unwrap_err().to_string()
    };
    assert!(refused("kv-bench paper keepkv-fig2 --budget 0.3").contains("paper's budgets"));
    assert!(refused("kv-bench paper prhs-fig7 --mode both").contains("asks no questions"));
    assert!(refused("kv-bench paper prhs-table6 --contexts 64").contains("that --text names"));
    assert!(refused("kv-bench paper kvreviver-fig5 --text t").contains("reads no text"));
}

#[test]
fn figures_of_quality_take_prompts_modes_budgets_and_texts() {
    let folder = tempfile::tempdir().unwrap();
    let own = prompts(folder.path());
    let text = folder.path().join("own.txt");
    std::fs::write(&text, "The sea was calm that day, and the boat lay still. ".repeat(60))
        .unwrap();
    let text = text.display().to_string();
    for figure in [
        "keepkv-table4-needles",
        "kvreviver-table3-needles",
        "prhs-table6-needles",
        "balancekv-needle",
    ] {
        let line = format!(
            "paper {figure} --quick --budget 0.5 --mode question-agnostic --lengths 600 --prompts \
             {own}"
        );
        let reads = figure != "balancekv-needle";
        let line = if reads { format!("{line} --text {text} --contexts 200") } else { line };
        let (records, _) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
        let of = |name: &str| records.iter().filter(|r| r.metric == name).collect::<Vec<_>>();
        let answers = of(metric::EXACT_MATCH);
        assert!(!answers.is_empty() && answers.len() == names(&records).len(), "{figure}");
        for record in answers {
            let case = &record.case;
            assert_eq!(case.mode.as_deref(), Some(mode::AGNOSTIC), "{figure}");
            assert_eq!((case.length, case.source.as_deref()), (Some(600), Some("own.jsonl")));
            assert!(record.budget.is_none_or(|budget| budget == 0.5), "{figure}");
        }
        let texts = of(metric::PERPLEXITY);
        assert_eq!(texts.is_empty(), !reads, "{figure}");
        assert!(texts.iter().all(|r| r.case.source.as_deref() == Some("own.txt")), "{figure}");
        let prefills = of(metric::PREFILL_PERPLEXITY);
        assert_eq!(prefills.is_empty(), figure != "prhs-table6-needles");
        let judged: BTreeSet<_> = prefills.iter().map(|r| r.policy.split(' ').next()).collect();
        let expected = ["cpe", "etf", "full", "psaw"].map(Some);
        assert!(prefills.is_empty() || judged == BTreeSet::from(expected), "{judged:?}");
    }
}

#[test]
fn attention_errors_are_of_the_prompts_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let own = prompts(folder.path());
    let line = format!("paper balancekv-fig1 --quick --lengths 700 --prompts {own}");
    let (records, _) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
    let layers = records.iter().filter(|r| r.case.layer.is_some());
    assert!(layers.clone().count() > 0);
    for record in layers {
        let case = &record.case;
        assert_eq!((case.source.as_deref(), case.samples), (Some("own.jsonl"), Some(1)));
    }
}

#[test]
fn configurations_join_a_table_s_own() {
    let folder = tempfile::tempdir().unwrap();
    let gates = folder.path().join("gates.tsv");
    // Four layers of two key-value heads.
    std::fs::write(&gates, "0.1\t0.9\n".repeat(4)).unwrap();
    let duo = json!(["snapkv", {"policy": "duo-attention", "alpha": gates.display().to_string()}]);
    let (records, _) =
        ran(&["paper", "kvreviver-fig5", "--quick", "--policy", &duo.to_string()]).unwrap();
    let names = names(&records).into_iter().map(|name| name.split(' ').next().unwrap());
    assert_eq!(names.collect::<BTreeSet<_>>(), BTreeSet::from(["duo-attention", "full", "snapkv"]));

    let output = folder.path().join("channels.json").display().to_string();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "The sea was calm, and the boat lay on the sand. ".repeat(8)).unwrap();
    let calibrate =
        ["kv-bench", "calibrate", "--window", "32", "--samples", "2", "--device", "cpu"];
    let files = ["--text", &text.display().to_string(), "--output", &output];
    crate::run::run(&Args::try_parse_from(calibrate.iter().chain(&files)).unwrap()).unwrap();
    let sparse = json!([{"policy": "double-sparsity", "channels": output, "dense_layers": 0}]);
    let (records, _) =
        ran(&["paper", "prhs-table2-needles", "--quick", "--policy", &sparse.to_string()]).unwrap();
    let label = format!("double-sparsity channels={output} dense_layers=0");
    assert_eq!(self::names(&records), BTreeSet::from(["full", label.as_str()]));
    let error = ran(&["paper", "prhs-table5", "--quick", "--policy", "[\"h2o\"]"]).unwrap_err();
    assert!(error.to_string().contains("expected names"), "{error}");
}

#[test]
fn kvreviver_s_layers_share_by_fisher_information_where_it_is_known() {
    let (records, report) = quick("kvreviver-table3-needles");
    assert!(report.contains("layers share the budget evenly"));
    assert!(records.iter().all(|r| !r.policy.contains("layers=")));
    let folder = tempfile::tempdir().unwrap();
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kv-models/assets/needle-1m");
    for entry in std::fs::read_dir(assets).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let layer = |keys: f32| kv_models::LayerFisher { keys, values: keys };
    let (model, text) = ("m".into(), "t".into());
    let layers = [1.0, 2.0, 3.0, 4.0].map(layer).to_vec();
    let fisher = kv_models::Fisher { model, text, window: 2, samples: 1, layers };
    fisher.save(folder.path().join("fisher.json")).unwrap();
    let model = folder.path().display().to_string();
    let line = ["paper", "kvreviver-table3-needles", "--quick", "--limit", "1", "--model", &model];
    let (records, report) = ran(&line).unwrap();
    assert!(!report.contains("layers share the budget evenly"));
    let own = names(&records);
    assert!(own.len() > 1);
    assert!(own.iter().all(|name| *name == "full" || name.contains("layers=fisher")), "{own:?}");
}
