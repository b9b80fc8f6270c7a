//! Causal attention of a prompt or of a chunk of one, with what policies want to know of it as
//! by-products.

#[cfg(feature = "cuda")]
mod backend;
mod blocks;
#[cfg(feature = "cuda")]
mod column_sums;
#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "cuda")]
mod launch;
mod strategy;

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, Share};
use strategy::PrefillShape;

pub use strategy::PrefillStrategy;

const OP: &str = "prefill_attention";

/// What queries see, and what is returned beside the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillOptions {
    /// How far back a query sees. Blocks of keys that no query of a block sees cost nothing.
    pub window: PrefillWindow,
    /// First keys that every query sees, whatever the window.
    pub sinks: usize,
    /// Sums of the attention that each key gets, over the last so many queries (`usize::MAX` for
    /// all).
    pub column_sums: Option<usize>,
    /// The logarithm of each query's sum of exponentials.
    pub log_sum_exp: bool,
    /// Which kernel attends.
    pub strategy: PrefillStrategy,
}

/// How far back queries see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefillWindow {
    /// All keys up to the query's own.
    #[default]
    All,
    /// The last so many, the query's own included.
    Last(usize),
    /// Those from [`Share::first_seen`] of the query's own index among the keys on: the start moves
    /// on with the query.
    From(Share),
}

/// What one call returns.
#[derive(Debug, Clone)]
pub struct PrefillOutput {
    /// `[B, Hq, N, D]`, in the query's dtype.
    pub output: Tensor<4>,
    /// `sum_i A[h, i, t]` over the counted queries that see token `t`, `[B, Hq, T]`, f32.
    pub column_sums: Option<Tensor<3>>,
    /// `[B, Hq, N]`, f32.
    pub log_sum_exp: Option<Tensor<3>>,
}

/// Causal attention, `softmax(q kᵀ / sqrt(D)) v` over keys up to the query's own: the queries are
/// the last `N` of `T` tokens.
///
/// Softmax subtracts the maximum and sums in f32. The matrix of all queries and keys is never
/// whole.
///
/// # Shapes
/// `query` `[B, Hq, N, D]`, `keys` and `values` `[B, Hkv, T, D]`, with `Hq` a multiple of `Hkv` and
/// `N <= T`.
///
/// # Errors
/// [`KernelError`] where shapes do not fit, for a window of 0, for no queries, and for a forced
/// strategy that does not serve.
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
    #[cfg(feature = "cuda")]
    if strategy == PrefillStrategy::Hopper {
        return Ok(on_hopper(query, keys, values, options));
    }
    debug_assert_ne!(strategy, PrefillStrategy::Hopper, "it is built with `cuda` alone");
    Ok(blocks::attend(query, keys, values, options))
}

/// Which keys queries see.
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
    /// The first key that the query at key `at` sees, but for the sinks; it never falls with `at`.
    fn start(self, at: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Last(window) => (at + 1).saturating_sub(window),
            Self::From(share) => share.first_seen(at),
        }
    }
}

impl Mask {
    /// The keys that any of `queries` sees: one range, or the sinks' and the window's.
    fn indexer(&self, queries: Range<usize>) -> Vec<Range<usize>> {
        let back = self.window.start(queries.start);
        let sinks = self.sinks.min(back);
        let near = if sinks == back { 0 } else { back }..queries.end;
        let far = (sinks > 0 && sinks < back).then_some(0..sinks);
        far.into_iter().chain([near]).collect()
    }
}

#[cfg(feature = "cuda")]
fn on_hopper(
    query: &Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    options: &PrefillOptions,
) -> PrefillOutput {
    use burn::backend::Dispatch;

    let tokens = keys.dims()[2];
    let config = PrefillConfig {
        scale: 1.0 / (query.dims()[3] as f32).sqrt(),
        // What reaches over all keys is no window.
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

/// [`PrefillOptions`] as the kernels take them.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillConfig {
    pub(crate) scale: f32,
    pub(crate) window: PrefillWindow,
    pub(crate) sinks: u32,
    /// Last queries whose attention is summed.
    pub(crate) counted: Option<u32>,
}
