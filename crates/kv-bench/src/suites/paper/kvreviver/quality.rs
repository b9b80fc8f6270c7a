//! KVReviver's tables 2 and 3, and figures 5 and 6: retrieval and perplexity.

use serde_json::{Value, json};

use crate::args::{Figure, Mode, Paper};
use crate::contenders::Contender;
use crate::prompts::Prompts;
use crate::record::FULL;
use crate::run::Bench;
use crate::suites::perplexity::{self, Text};
use crate::suites::quality;

/// Share kept in tables 2 and 3.
const OF_TABLES: f64 = 0.1;
/// Share kept in figure 5.
const OF_NEEDLE: f64 = 0.25;
/// Shares kept in figure 6.
const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const QUICK_BUDGETS: [f64; 2] = [0.25, 0.1];
/// The sketch's shares of table 2.
const VAGUE: [f64; 5] = [0.1, 0.15, 0.2, 0.3, 0.4];
/// Candidates' and recents' shares of table 3.
const EXACT: [(f64, f64); 6] =
    [(0.7, 0.2), (0.6, 0.3), (0.5, 0.4), (0.45, 0.45), (0.4, 0.5), (0.3, 0.6)];
/// What the paper compares with.
const OTHERS: [&str; 4] = ["streaming-llm", "h2o", "cam", "snapkv"];
/// Prompts of the quick form.
const QUICK_PROMPTS: usize = 4;
/// What the paper's tables show.
const TABLE_2: &str = "the paper, ROUGE-1 on XSum at 10 %, by the sketch's share: 0.1 35.7, 0.15 35.2, \
    0.2 34.4, 0.3 34.1, 0.4 33.3";
const TABLE_3: &str = "the paper, ROUGE-1 on XSum at 10 %, by the shares of candidates and recents: \
    0.7/0.2 32.9, 0.6/0.3 34.5, 0.5/0.4 35.6, 0.45/0.45 35.7, 0.4/0.5 35.0, 0.3/0.6 35.5";

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let configs = configs(options.figure, quick);
    let contenders = configs.iter().map(Contender::of).collect::<anyhow::Result<Vec<_>>>()?;
    let mut prompts = Prompts::load(options.prompts.as_deref())?;
    if options.figure == Figure::KvreviverFig5 {
        // Those whose depths are known.
        prompts.list.retain(|prompt| prompt.depth.is_some());
    }
    if let Some(limit) = options.limit.or(quick.then_some(QUICK_PROMPTS)) {
        prompts.limit(limit);
    }
    // Read first: a text that is not there must not cost a finished retrieval.
    let texts = match options.figure {
        Figure::KvreviverFig5 => {
            anyhow::ensure!(
                options.contexts.is_empty(),
                "--contexts: kvreviver-fig5 reads no text"
            );
            None
        }
        _ => Some(Text::read(bench, options.text.as_deref(), &options.contexts)?),
    };
    quality::retrieval(bench, &contenders, prompts, Mode::QuestionAgnostic)?;
    if let Some(texts) = texts {
        perplexity::run(bench, &contenders, texts)?;
    }
    match options.figure {
        Figure::KvreviverTable2 => bench.note(TABLE_2.into()),
        Figure::KvreviverTable3 => bench.note(TABLE_3.into()),
        _ => {}
    }
    if quick {
        bench.note("few prompts, little text: a first look, no comparison".into());
    }
    Ok(())
}

/// Who runs; the full cache first.
fn configs(figure: Figure, quick: bool) -> Vec<Value> {
    let alone = |name: &str, budget: f64| json!({"policy": name, "budget": budget});
    // The paper's, and those whose keys have signs too.
    let revivers = |budget: f64| {
        [false, true]
            .map(|signed| json!({"policy": "kvreviver", "budget": budget, "signed_keys": signed}))
    };
    let mut configs = vec![json!({"policy": FULL})];
    match figure {
        Figure::KvreviverTable2 => configs.extend(VAGUE.map(|vague| {
            // To four digits, as they are written.
            let exact = ((1.0 - vague) / 2.0 * 1e4).round() / 1e4;
            let mut config = alone("kvreviver", OF_TABLES);
            config["vague"] = json!(vague);
            config["candidate"] = json!(exact);
            config["recent"] = json!(exact);
            config
        })),
        Figure::KvreviverTable3 => configs.extend(EXACT.map(|(candidate, recent)| {
            let mut config = alone("kvreviver", OF_TABLES);
            config["candidate"] = json!(candidate);
            config["recent"] = json!(recent);
            config
        })),
        Figure::KvreviverFig5 => {
            configs.extend(OTHERS.map(|name| alone(name, OF_NEEDLE)));
            configs.extend(revivers(OF_NEEDLE));
        }
        _ => {
            let budgets: &[f64] = if quick { &QUICK_BUDGETS } else { &BUDGETS };
            for name in OTHERS {
                configs.extend(budgets.iter().map(|&budget| alone(name, budget)));
            }
            configs.extend(budgets.iter().flat_map(|&budget| revivers(budget)));
        }
    }
    configs
}
