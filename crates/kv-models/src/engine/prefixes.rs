//! Prompts whose whole keys and values are kept for prompts that begin alike.
//!
//! The prefix of a prompt is found by its tokens, in a sorted map: the prompt with the longest
//! common beginning is a neighbour in the order of tokens. Nothing is hashed, so that nothing can
//! be taken for something else. Prompts that were used least recently make room.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_policies::Policy;

use crate::llama::{PromptPrefix, SharedPrefix};

/// The shortest beginning that is worth sharing.
const SHORTEST: usize = 16;

/// Kept prompts, within a number of bytes.
#[derive(Debug)]
pub(super) struct Prefixes {
    kept: BTreeMap<Vec<u32>, Kept>,
    limit: usize,
    bytes: usize,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    prefix: Arc<PromptPrefix>,
    bytes: usize,
    used: u64,
}

impl Prefixes {
    pub(super) fn new(limit: usize) -> Self {
        Self { kept: BTreeMap::new(), limit, bytes: 0, clock: 0 }
    }

    /// The most bytes of all kept prompts.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes of all kept prompts.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether prompts under a policy may share prefixes: their own computation must not depend on
    /// the policy, nor may it need queries that are not kept.
    pub(super) fn serve(&self, policy: &dyn Policy) -> bool {
        self.limit > 0 && !policy.capabilities().changes_prefill && !policy.needs().raw_queries
    }

    /// The longest beginning of a prompt that is kept and that a policy can use. Behind it, the
    /// queries that the policy looks at are computed.
    pub(super) fn find(&mut self, prompt: &[u32], policy: &dyn Policy) -> Option<SharedPrefix> {
        if !self.serve(policy) {
            return None;
        }
        let needs = policy.needs();
        let most = prompt.len().saturating_sub(needs.window.max(1));
        let shares = |prefix: &PromptPrefix| {
            prefix.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
        };
        let usable = |kept: &Kept| {
            let prefix = &kept.prefix;
            let tokens = shares(prefix).min(most);
            // Sums are over the queries of the whole prefix.
            let sums =
                !needs.column_sums || (prefix.has_column_sums() && tokens == prefix.tokens.len());
            (tokens >= SHORTEST && sums)
                .then(|| SharedPrefix { prefix: Arc::clone(prefix), tokens })
        };
        // Away from the prompt, in both directions, beginnings get shorter.
        let near = |kept: &&Kept| shares(&kept.prefix) >= SHORTEST;
        let key = prompt.to_vec();
        let before = self.kept.range(..=key.clone()).rev().map(|(_, kept)| kept).take_while(near);
        let behind = self.kept.range(key..).map(|(_, kept)| kept).take_while(near);
        let found = before.chain(behind).filter_map(usable);
        let best = found.max_by_key(|shared| shared.tokens)?;
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(&best.prefix.tokens) {
            kept.used = self.clock;
        }
        Some(best)
    }

    /// Keeps a prompt. Prompts that it begins with, and the ones used least recently, make room.
    pub(super) fn keep(&mut self, prefix: PromptPrefix) {
        let bytes = prefix.bytes();
        if bytes > self.limit || prefix.tokens.len() < SHORTEST {
            return;
        }
        // A beginning with column sums serves policies that the longer prompt cannot serve.
        let covered: Vec<Vec<u32>> = self
            .kept
            .iter()
            .filter(|(tokens, kept)| {
                let shorter = prefix.tokens.starts_with(tokens) && !kept.prefix.has_column_sums();
                shorter || **tokens == prefix.tokens
            })
            .map(|(tokens, _)| tokens.clone())
            .collect();
        covered.iter().for_each(|tokens| self.drop_one(tokens));
        while self.bytes + bytes > self.limit {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used);
            let Some(tokens) = oldest.map(|(tokens, _)| tokens.clone()) else { break };
            self.drop_one(&tokens);
        }
        self.clock += 1;
        self.bytes += bytes;
        let kept = Kept { bytes, used: self.clock, prefix: Arc::new(prefix) };
        self.kept.insert(kept.prefix.tokens.clone(), kept);
    }

    fn drop_one(&mut self, tokens: &[u32]) {
        if let Some(kept) = self.kept.remove(tokens) {
            self.bytes -= kept.bytes;
        }
    }
}
