//! BalanceKV, figure 3: error and run time of one layer's compression by block and rate, at the size of
//! Llama 3.1 8B's layers.

use burn::tensor::{DType, Device};
use serde_json::json;

use super::SUITE;
use super::layer::{Clustered, relative_error, spread};
use crate::contenders::Contender;
use crate::journal::Records;
use crate::progress::Progress;
use crate::record::{Case, FULL, Record, metric};

const BLOCKS: [usize; 3] = [64, 128, 256];
const ROUNDS: [u32; 3] = [1, 2, 3];
/// What the paper's figure shows of blocks of 256, in seconds, on an A100: layers 1 and 15.
const PUBLISHED: [(&str, [f64; 3]); 2] = [
    ("A100, published: layer 1", [0.0603, 0.1190, 0.1793]),
    ("A100, published: layer 15", [0.3920, 0.4505, 0.5096]),
];
const WINDOW: usize = 256;
const SEEDS: u64 = 5;

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(
    device: &Device,
    device_name: &str,
    dtype: Option<DType>,
    quick: bool,
    seed: u64,
    records: &mut Records,
) -> anyhow::Result<()> {
    let layer = match quick {
        false => Clustered { query_heads: 32, kv_heads: 8, tokens: 8192, head_dim: 128 },
        true => Clustered { query_heads: 4, kv_heads: 2, tokens: 2048, head_dim: 64 },
    };
    let dtype = dtype.unwrap_or(if device_name == "cpu" { DType::F32 } else { DType::BF16 });
    let prompt = layer.draw(seed, device, dtype);
    let full = Contender::of(&json!({"policy": FULL}))?;
    let exact = prompt.run(&*full.policy, WINDOW, 0)?.output;
    let mut record = |policy: &str, rate: f64, metric: &str, value: f64, unit: &str| {
        records.push(Record {
            suite: SUITE.into(),
            case: Case {
                task: Some("balancekv-fig3".into()),
                length: Some(layer.tokens),
                ..Case::default()
            },
            model: String::new(),
            device: device_name.into(),
            policy: policy.into(),
            budget: Some(rate),
            metric: metric.into(),
            value,
            unit: unit.into(),
        });
    };
    let mut progress = Progress::new(BLOCKS.len() * ROUNDS.len(), "balancekv-fig3");
    let tokens = layer.tokens - WINDOW;
    for block in BLOCKS {
        for rounds in ROUNDS {
            let budget = WINDOW + ((tokens - WINDOW) >> rounds);
            let config = json!({
                "policy": "balancekv", "budget": budget, "block": block, "sinks": WINDOW, "recents": 0,
            });
            let contender = Contender::of(&config)?;
            let (mut errors, mut seconds) = (Vec::new(), Vec::new());
            // The first run compiles.
            for turn in 0..=SEEDS {
                let outcome = prompt.run(&*contender.policy, WINDOW, seed + turn)?;
                if turn > 0 {
                    errors.push(relative_error(&outcome.output, &exact));
                    seconds.push(outcome.seconds);
                }
            }
            seconds.sort_by(f64::total_cmp);
            let median = seconds[seconds.len() / 2];
            let (label, rate) = (format!("balancekv block={block}"), 0.5f64.powi(rounds as i32));
            record(&label, rate, metric::RELATIVE_ERROR, spread(&errors).0, "ratio");
            record(&label, rate, metric::TIME_US, median * 1e6, "us");
            progress.step();
        }
    }
    progress.finish();
    if !quick {
        for (label, seconds) in PUBLISHED {
            for (rounds, seconds) in ROUNDS.into_iter().zip(seconds) {
                record(label, 0.5f64.powi(rounds as i32), metric::TIME_US, seconds * 1e6, "us");
            }
        }
    }
    Ok(())
}
