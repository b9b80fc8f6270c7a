//! Budgets of policies that keep the whole cache and read a part of it.

use kv_core::LayerCache;

use crate::policy::state_tensors::{EXACT, int_numbers};

/// State of each head's budget, integers `[B, H, 3]`: tokens to choose, sinks, recents.
pub(crate) const BUDGETS: &str = "budgets";

/// Budgets of equal heads, as the state [`BUDGETS`] has them.
pub(crate) fn set_budgets(cache: &mut LayerCache, heads: usize, budget: [usize; 3]) {
    let batch = cache.layout().batch();
    // A budget beyond 2^24 tokens is one beyond any prompt; kernels add the three numbers.
    let row = budget.map(|count| count.min(EXACT));
    let rows = row.repeat(batch * heads);
    let state = int_numbers(rows, [batch, heads, row.len()], &cache.options().device);
    cache.set_int_state(BUDGETS, state);
}
