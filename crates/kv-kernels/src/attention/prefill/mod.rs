//! Causal attention of a prompt, or of a part of one, `softmax(q kᵀ / sqrt(D)) v`. Its by-products
//! serve policies that select tokens after a prompt: column sums of the attention matrix and
//! log-sum-exps.

#[cfg(any(feature = "cuda", feature = "flex"))]
mod backend;
mod blocks;
#[cfg(feature = "cuda")]
mod column_sums;
#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "cuda")]
mod launch;
mod strategy;
#[cfg(feature = "flex")]
mod vectorised;

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, Share};
use strategy::PrefillShape;

pub use strategy::PrefillStrategy;

const OP: &str = "prefill_attention";

/// The keys that queries see, and the results besides the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillOptions {
    /// How far back a query sees. A block of keys that no query of a block sees costs nothing.
    pub window: PrefillWindow,
    /// First keys, which every query sees despite the window.
    pub sinks: usize,
    /// Also return the attention that each key gets from the last `n` queries (`usize::MAX` for
    /// all).
    pub column_sums: Option<usize>,
    /// Also return the log-sum-exp of each query's logits.
    pub log_sum_exp: bool,
    /// The kernel to run.
    pub strategy: PrefillStrategy,
}

/// How far back queries see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefillWindow {
    /// All keys up to the query's own.
    #[default]
    All,
    /// The last `n` keys, the query's own included.
    Last(usize),
    /// The keys from [`Share::first_seen`] on, for the query's own index among the keys: the start
    /// moves on with the query.
    From(Share),
}

/// The results of prefill attention.
#[derive(Debug, Clone)]
pub struct PrefillOutput {
    /// The attention output, `[B, Hq, N, D]`, in the query's dtype.
    pub output: Tensor<4>,
    /// Column sums `sum_i A[h, i, t]` over the counted queries `i` that see token `t`, `[B, Hq,
    /// T]`, f32.
    pub column_sums: Option<Tensor<3>>,
    /// The log-sum-exp of each query's logits, `[B, Hq, N]`, f32.
    pub log_sum_exp: Option<Tensor<3>>,
}

/// Causal attention, `softmax(q kᵀ / sqrt(D)) v`, of queries over the keys up to their own. The
/// queries are the last `N` of `T` tokens.
///
/// The softmax subtracts the maximum, and sums in f32. The matrix of all queries and keys is never
/// stored.
///
/// # Shapes
/// `query` `[B, Hq, N, D]`, `keys` and `values` `[B, Hkv, T, D]`, with `Hq` a multiple of `Hkv` and
/// `N <= T`.
///
/// # Errors
/// [`KernelError`] where shapes do not fit, for a window of 0, for no queries, and for a forced
/// strategy that cannot run the call.
pub fn prefill_attention(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    options: &PrefillOptions,
) -> Result<PrefillOutput, KernelError> {
    let [batch, heads, queries, head_dim] = query.dims();
    let [_, kv_heads, tokens, _] = keys.dims();
    let check = Check::new(OP, query);
    check.float("query", query)?;
    check.shape("keys", keys, &[batch, kv_heads, tokens, head_dim])?;
    check.shape("values", values, &[batch, kv_heads, tokens, head_dim])?;
    check.same_dtype("keys", keys, "the query's dtype", query.dtype())?;
    check.same_dtype("values", values, "the query's dtype", query.dtype())?;
    check.filled("query", query)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads: heads, kv_heads });
    }
    let unsupported = |argument, actual: usize, supported| {
        Err(KernelError::Unsupported { op: OP, argument, actual: actual.to_string(), supported })
    };
    if queries > tokens {
        return unsupported("queries", queries, "at most as many as keys");
    }
    if options.window == PrefillWindow::Last(0) {
        return unsupported("window", 0, "at least 1");
    }
    let shape = PrefillShape { head_dim, halves: query.dtype() != DType::F32 };
    let strategy = check.chosen(options.strategy, query.dtype(), &shape)?;
    #[cfg(any(feature = "cuda", feature = "flex"))]
    if strategy == PrefillStrategy::Hopper || (strategy == PrefillStrategy::Auto && check.on_cpu())
    {
        return Ok(by_backend(query, keys, values, options));
    }
    debug_assert_ne!(strategy, PrefillStrategy::Hopper, "it is built with `cuda` alone");
    blocks::attend(query, keys, values, options)
}

/// The keys that queries see.
#[derive(Debug, Clone, Copy)]
struct Mask {
    window: PrefillWindow,
    sinks: usize,
}

impl PrefillOptions {
    fn mask(&self) -> Mask {
        Mask { window: self.window, sinks: self.sinks }
    }
}

impl PrefillWindow {
    /// The first key, besides the sinks, that the query at key `at` sees. It never falls as `at`
    /// grows.
    fn start(self, at: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Last(window) => (at + 1).saturating_sub(window),
            Self::From(share) => share.first_seen(at),
        }
    }
}

impl Mask {
    /// The keys that any of `queries` sees: one range, or the sinks' range and the window's range.
    fn seen(&self, queries: Range<usize>) -> Vec<Range<usize>> {
        let back = self.window.start(queries.start);
        let sinks = self.sinks.min(back);
        let near = if sinks == back { 0 } else { back }..queries.end;
        let far = (sinks > 0 && sinks < back).then_some(0..sinks);
        far.into_iter().chain([near]).collect()
    }
}

/// Attention by an implementation of the device's own.
#[cfg(any(feature = "cuda", feature = "flex"))]
fn by_backend(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    options: &PrefillOptions,
) -> PrefillOutput {
    use burn::backend::Dispatch;

    let tokens = keys.dims()[2];
    let config = PrefillConfig {
        scale: 1.0 / (query.dims()[3] as f32).sqrt(),
        // A window over all keys is no window.
        window: match options.window {
            PrefillWindow::Last(window) if window < tokens => options.window,
            PrefillWindow::From(share) if share.of(tokens) > 1 => options.window,
            _ => PrefillWindow::All,
        },
        sinks: options.sinks.min(tokens) as u32,
        counted: options.column_sums.map(|counted| counted.min(tokens) as u32),
    };
    let (output, log_sum_exp, sums) = <Dispatch as backend::PrefillAttentionOps>::causal_attention(
        query.clone().into_dispatch(),
        keys.clone().into_dispatch(),
        values.clone().into_dispatch(),
        config,
    );
    PrefillOutput {
        output: Tensor::from_dispatch(output),
        column_sums: options.column_sums.map(|_| Tensor::from_dispatch(sums)),
        log_sum_exp: options.log_sum_exp.then(|| Tensor::from_dispatch(log_sum_exp)),
    }
}

/// [`PrefillOptions`] as backends receive them.
#[cfg(any(feature = "cuda", feature = "flex"))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillConfig {
    pub(crate) scale: f32,
    pub(crate) window: PrefillWindow,
    pub(crate) sinks: u32,
    /// How many of the last queries count in column sums.
    pub(crate) counted: Option<u32>,
}
