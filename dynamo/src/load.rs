//! What the engine does, as Dynamo's routers and metrics hear of it.

use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::{ComponentSnapshot, SnapshotPublisher};
use kv_models::{Engine, Load, ModelCard, Totals};

/// Tokens of a block, in which Dynamo counts room. It is Dynamo's size for workers that name none.
const BLOCK: usize = 16;

/// The time between two snapshots.
const INTERVAL: Duration = Duration::from_millis(500);

/// Blocks of uncompressed tokens that the engine's memory for caches has room for.
pub(crate) fn blocks(engine: &Engine) -> u64 {
    let bytes = engine.options().bytes / (BLOCK * token_bytes(engine.card()));
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Bytes of an uncompressed token's keys and values.
fn token_bytes(card: &ModelCard) -> usize {
    let config = &card.config;
    (2 * config.num_layers * config.num_kv_heads * config.head_dim * card.dtype.size()).max(1)
}

/// Tells an engine's load until the engine ends, which ends the process: Dynamo learns of a worker
/// that is gone, and whoever started it can start another one.
pub(crate) async fn publish(engine: Engine, publisher: Arc<SnapshotPublisher>) {
    let (mut before, total) = (Totals::default(), blocks(&engine));
    loop {
        let load = engine.load();
        publisher.publish(0, snapshot(&load, before, total));
        before = load.totals;
        tokio::time::sleep(INTERVAL).await;
        if !engine.is_open() {
            tracing::error!("the engine has ended, and this worker with it");
            std::process::exit(1);
        }
    }
}

/// The load, with what happened since `before`. Memory is taken as far as the fullest group is, of
/// its slots or of its rows: a request for that group waits, whatever room the others have.
fn snapshot(load: &Load, before: Totals, total: u64) -> ComponentSnapshot {
    let cached = load.totals.cached_tokens - before.cached_tokens;
    let computed = load.totals.prompt_tokens - before.prompt_tokens;
    let prompts = cached + computed;
    ComponentSnapshot {
        kv_used_blocks: (load.fullest * total as f64).ceil() as u64,
        kv_total_blocks: total,
        gpu_cache_usage: load.fullest as f32,
        kv_cache_hit_rate: (prompts > 0).then(|| cached as f32 / prompts as f32),
        dp_rank: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_tell_shares_and_what_is_new() {
        let totals = Totals { prompt_tokens: 90, cached_tokens: 30, ..Totals::default() };
        let load = Load { fullest: 0.25, totals, ..Load::default() };
        let before = Totals { prompt_tokens: 60, cached_tokens: 20, ..Totals::default() };
        let snapshot = snapshot(&load, before, 10);
        assert_eq!((snapshot.kv_used_blocks, snapshot.kv_total_blocks), (3, 10));
        assert_eq!((snapshot.gpu_cache_usage, snapshot.kv_cache_hit_rate), (0.25, Some(0.25)));
        let nothing = super::snapshot(&load, totals, 10);
        assert_eq!(nothing.kv_cache_hit_rate, None);
    }
}
