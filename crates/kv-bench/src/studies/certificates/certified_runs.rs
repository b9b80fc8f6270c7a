//! The options that policies need for certificates.

use kv_core::Budget;
use kv_policies::build;
use serde_json::json;

use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;

/// The policies, each with the options that certificates need where it has certificates and bounds
/// cover prompts from so many tokens on. A note names the others that have certificates.
pub(crate) fn certified(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    tokens: usize,
) -> Vec<PolicyRun> {
    let mut uncovered = Vec::new();
    let runs = policy_runs.iter().map(|run| {
        let has_certificates = run.policy.config().get("certified").is_some();
        let certified = has_certificates.then(|| with_certificates(run, tokens)).flatten();
        if has_certificates && certified.is_none() {
            uncovered.push(run.label.clone());
        }
        certified.unwrap_or_else(|| run.clone())
    });
    let runs = runs.collect();
    uncovered.dedup();
    if !uncovered.is_empty() {
        bench.note(format!(
            "no certificates of {} at some budgets: fewer recents than a block has tokens, or \
             another similarity than queries'",
            uncovered.join(", ")
        ));
    }
    runs
}

/// A policy with its certificates, where bounds cover prompts from so many tokens on.
fn with_certificates(run: &PolicyRun, tokens: usize) -> Option<PolicyRun> {
    let mut config = run.policy.config();
    config["certified"] = json!(true);
    // Bounds take the distance of queries after RoPE; policies compare queries before RoPE by
    // default.
    if config["similarity"] == "raw-query" {
        config["similarity"] = json!("query");
    }
    let mut shortest = config.clone();
    if let Ok(budget) = serde_json::from_value::<Budget>(config["budget"].clone()) {
        shortest["budget"] = json!(Budget::Tokens(budget.resolve(tokens)));
    }
    build(&shortest).ok()?;
    Some(PolicyRun { policy: build(&config).ok()?, ..run.clone() })
}
