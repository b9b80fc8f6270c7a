//! PrHS, tables 2 and 6: retrieval and perplexity, and how often heads retrieve.

use serde_json::{Value, json};

use super::{HSHARE, cis, contenders, hshare};
use crate::args::{Figure, Mode, Paper};
use crate::prompts::Prompts;
use crate::record::FULL;
use crate::run::Bench;
use crate::suites::perplexity::{self, Text};
use crate::suites::quality;

/// The paper's budget for short prompts.
const BUDGET: usize = 128;
/// Share of the tokens that is read.
const SHARE: f64 = 0.125;
/// Steps of a block.
const BLOCKS: [usize; 3] = [8, 16, 20];
/// Prompts of the quick form.
const QUICK_PROMPTS: usize = 4;

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let configs = match options.figure {
        Figure::PrhsTable6 => table6(bench.model.config().num_layers, quick),
        _ => table2(quick),
    };
    let contenders = contenders(bench.common, &configs)?;
    let mut prompts = Prompts::load(options.prompts.as_deref())?;
    if let Some(limit) = options.limit.or(quick.then_some(QUICK_PROMPTS)) {
        prompts.limit(limit);
    }
    // Read first: a text that is not there must not cost a finished retrieval.
    let texts = Text::read(bench, options.text.as_deref(), &options.contexts)?;
    // What a prompt's question does to what is read shows either way.
    quality::retrieval(bench, &contenders, prompts, Mode::QuestionAware)?;
    perplexity::run(bench, &contenders, texts)?;
    if quick {
        bench.note("few prompts, little text: a first look, no comparison".into());
    }
    Ok(())
}

/// Who runs in table 2, at the paper's budget and at an eighth; the full cache first.
fn table2(quick: bool) -> Vec<Value> {
    let mut configs = vec![json!({"policy": FULL})];
    for budget in [json!(BUDGET), json!(SHARE)] {
        for name in ["top-k-oracle", "h2o", "quest", "double-sparsity"] {
            configs.push(json!({"policy": name, "budget": budget}));
        }
        configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
        for name in ["cis", "cis-star"] {
            configs.extend(BLOCKS.map(|block| cis(name, &budget, block)));
        }
        if quick {
            break;
        }
    }
    configs
}

/// Who runs in table 6: CIS*, PSAW, ETF and CPE with other parameters.
fn table6(layers: usize, quick: bool) -> Vec<Value> {
    let budget = json!(BUDGET);
    let shared = |block: usize, threshold: f64, radius: usize| {
        let mut config = cis("cis-star", &budget, block);
        config["threshold"] = json!(threshold);
        config["radius"] = json!(radius);
        config
    };
    let mut configs = vec![json!({"policy": FULL})];
    for (block, threshold, radius) in
        [(4, 0.8, 1), (8, 0.8, 1), (8, 0.7, 1), (8, 0.8, 2), (16, 0.8, 1), (32, 0.8, 1)]
    {
        configs.push(shared(block, threshold, radius));
    }
    for similarity in ["key", "hidden", "raw-query"] {
        let mut config = cis("cis-star", &budget, 8);
        config["similarity"] = json!(similarity);
        configs.push(config);
    }
    // From three quarters of the depth, as the paper, and from a quarter.
    let starts = [3 * layers / 4, layers / 4];
    let composed = |block: usize, start: usize| {
        let mut config = cis("cpe", &budget, block);
        config["psaw"] = json!({"start": start});
        config["etf"] = json!({"start": start});
        config
    };
    if quick {
        let start = starts[1];
        configs.push(json!({"policy": "psaw", "start": start}));
        configs.push(json!({"policy": "etf", "start": start}));
        configs.push(composed(8, start));
        return configs;
    }
    for start in starts {
        for (phi, alpha) in [(0.7, 1.0), (0.5, 1.0), (0.7, 1.5)] {
            configs.push(json!({"policy": "psaw", "phi": phi, "alpha": alpha, "start": start}));
        }
        for (psi, gamma) in [(0.5, 1.0), (0.5, 1.5), (0.4, 1.0)] {
            configs.push(json!({"policy": "etf", "psi": psi, "gamma": gamma, "start": start}));
        }
        configs.extend([8, 16, 32].map(|block| composed(block, start)));
        // The paper's other setting of all three.
        let mut steeper = composed(8, start);
        steeper["radius"] = json!(2);
        steeper["psaw"]["alpha"] = json!(1.2);
        steeper["etf"]["gamma"] = json!(1.2);
        configs.push(steeper);
    }
    configs
}
