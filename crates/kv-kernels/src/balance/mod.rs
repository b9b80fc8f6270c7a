//! BalanceKV's halving of token lists (SoftmaxBalance): every block of a list is split into two
//! classes whose attention is nearly equal, and the smaller class is kept.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
mod mean;
#[cfg(feature = "gpu")]
mod plain;
mod reference;
mod strategy;
#[cfg(feature = "gpu")]
mod tensor_core;
#[cfg(feature = "gpu")]
mod walk;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use args::{BalanceArgs, CentreArgs, DrawArgs};
use backend::BalanceOps;
use strategy::BalanceShape;

pub use strategy::BalanceStrategy;

const OP: &str = "balance";
/// The longest block on GPUs: each of its tokens has a unit of a cube.
const MOST: usize = 256;

/// How [`balance`] splits lists.
#[derive(Debug, Clone)]
pub struct BalanceOptions {
    /// Tokens that are balanced against each other: an even number of at least 2, and at most 256
    /// on GPUs.
    pub block: usize,
    /// Adjacent tokens that get one sign, so that they stay or go together: a divisor of half a
    /// block, so that both halves have equally many spans.
    pub span: usize,
    /// Factor of `⟨k_i, k_j⟩`; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// `ln γ` of every list, `[P]`, f32. A token gets `+1` with probability `1/2 − γ Σ K_ij η_i`.
    pub log_gamma: Tensor<1>,
    /// The `offset` that is added to `⟨v_i, v_j⟩`.
    pub value_offset: f32,
    /// The vector that is subtracted from keys.
    pub centre: Centre,
    /// Factors of the values, `[P, N]`, f32; `None` means 1.
    pub weights: Option<Tensor<2>>,
    /// The source of random numbers.
    pub draws: Draws,
    /// Whether each class gets half of a block: once a class has half, all later tokens join the
    /// other.
    pub halves: bool,
    /// The kernel that splits.
    pub strategy: BalanceStrategy,
}

/// The vector that is subtracted from the keys of a list. Attention does not depend on it, but the
/// walk does.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one a call")]
pub enum Centre {
    /// No vector.
    None,
    /// The mean of the list's keys.
    List,
    /// A given vector for each block, `[P, ⌈N / block⌉, D]`, f32.
    Block(Tensor<3>),
}

/// A source of uniform random numbers in `[0, 1)`.
#[derive(Debug, Clone)]
pub enum Draws {
    /// Two 32-bit seeds for each list, `[P, 2]`. The counter is the token's place in the list.
    Seeds(Tensor<2, Int>),
    /// The numbers themselves, `[P, N]`, f32.
    Numbers(Tensor<2>),
}

/// The results of [`balance`].
#[derive(Debug, Clone)]
pub struct Balanced {
    /// The class of every token, `±1`, `[P, N]`, 32-bit; 0 after a list's end.
    pub signs: Tensor<2, Int>,
    /// The slots of each block's smaller class (the positive class of equal ones), in the list's
    /// order, `[P, N / 2]` (at least 1), 32-bit. A block of `n` tokens has `⌊n / 2⌋` with
    /// [`BalanceOptions::halves`], else at most that; `-1` fills the rest of a block's half.
    pub kept: Tensor<2, Int>,
    /// Whether a probability in the block was outside `[0, 1]`, `[P, ⌈N / block⌉]`, 32-bit: FAIL in
    /// the paper's algorithm. Such a token got the likelier sign.
    pub failed: Tensor<2, Int>,
}

/// Splits every block of every list into two classes by a self-balancing walk, BalanceKV's
/// Algorithm 2. With `K_ij = exp(scale ⟨k_i, k_j⟩) (⟨v_i, v_j⟩ + offset)`, token `j` gets `+1` with
/// probability `1/2 − γ Σ_{i<j} K_ij η_i`, where `η_i` is the sign of token `i`. Then, for every
/// query `q`, `Σ exp(scale ⟨q, k⟩) v` over one class is near the sum over the other class. The
/// paper's `γ` is `1 / (2 c R²)`; blocks are from its appendix B.
///
/// With spans of several tokens the walk is over spans (ours): the vector of a span is the sum of
/// its tokens' vectors, so that `K` of two spans is the sum of `K_ij` over the tokens `i` of one
/// and `j` of the other. A span takes the random number of its first token. A block of `n` tokens,
/// the last of a list, has whole pairs of spans, and two shorter spans of the tokens behind them:
/// of the `r = n mod 2 span` tokens the first has `⌈r / 2⌉`, the second `⌊r / 2⌋`. So a block's
/// halves have as many tokens as without spans.
///
/// A sum carries an exponent of its own, so keys of any norm cause no overflow. Signs are those of
/// exact arithmetic, except for the rounding of f32 sums.
///
/// # Shapes
/// `keys` `[S, D]`, f32, f16 or bf16; `values` of the keys' shape and dtype, or `None` where all
/// are 1 (denominators); `lists` `[P, N]` of slots, 32-bit, of which the first `counts` `[P]` count
/// (on the device, not checked).
///
/// # Errors
/// [`KernelError`] where shapes, dtypes, devices or the block do not fit, and for a forced strategy
/// that cannot run the call.
pub fn balance(
    keys: Tensor<2>,
    values: Option<Tensor<2>>,
    lists: Tensor<2, Int>,
    counts: Tensor<1, Int>,
    options: BalanceOptions,
) -> Result<Balanced, KernelError> {
    let [slots, head_dim] = keys.dims();
    let [rows, longest] = lists.dims();
    let BalanceOptions { block, span, scale, log_gamma, value_offset, .. } = options;
    let check = Check::new(OP, &keys);
    check.supported()?;
    check.float("keys", &keys)?;
    check.filled("keys", &keys)?;
    check.counted("keys", &keys)?;
    if block < 2 || block % 2 == 1 || (check.on_gpu() && block > MOST) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "block",
            actual: block.to_string(),
            supported: "even numbers from 2 on, up to 256 on GPUs",
        });
    }
    if span == 0 || !(block / 2).is_multiple_of(span) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "span",
            actual: span.to_string(),
            supported: "divisors of half a block",
        });
    }
    if let Some(values) = &values {
        check.shape("values", values, &[slots, head_dim])?;
        check.same_dtype("values", values, "the keys' dtype", keys.dtype())?;
    }
    check.filled("lists", &lists)?;
    check.shape("lists", &lists, &[rows, longest])?;
    check.int("lists", &lists)?;
    check.shape("counts", &counts, &[rows])?;
    check.int("counts", &counts)?;
    check.shape("log_gamma", &log_gamma, &[rows])?;
    check.f32("log_gamma", &log_gamma)?;
    let strategy =
        check.chosen(options.strategy, keys.dtype(), &BalanceShape { head_dim, span })?;
    let blocks = longest.div_ceil(block);
    let centre = match options.centre {
        Centre::None => CentreArgs::None,
        Centre::List => CentreArgs::List,
        Centre::Block(means) => {
            check.shape("means", &means, &[rows, blocks, head_dim])?;
            check.f32("means", &means)?;
            CentreArgs::Block(means.into_dispatch())
        }
    };
    if let Some(weights) = &options.weights {
        check.shape("weights", weights, &[rows, longest])?;
        check.f32("weights", weights)?;
    }
    let draws = match options.draws {
        Draws::Seeds(seeds) => {
            check.shape("seeds", &seeds, &[rows, 2])?;
            check.int("seeds", &seeds)?;
            DrawArgs::Seeds(seeds.into_dispatch())
        }
        Draws::Numbers(numbers) => {
            check.shape("draws", &numbers, &[rows, longest])?;
            check.f32("draws", &numbers)?;
            DrawArgs::Numbers(numbers.into_dispatch())
        }
    };
    let config = WalkConfig {
        block,
        span,
        scale: scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        value_offset,
        halves: options.halves,
        strategy,
    };
    let classes = <Dispatch as BalanceOps>::balance(BalanceArgs {
        keys: keys.into_dispatch(),
        values: values.into(),
        lists: lists.into_dispatch(),
        counts: counts.into_dispatch(),
        log_gamma: log_gamma.into_dispatch(),
        centre,
        weights: options.weights.into(),
        draws,
        config,
    });
    Ok(Balanced {
        signs: Tensor::from_dispatch(classes.signs),
        kept: Tensor::from_dispatch(classes.kept),
        failed: Tensor::from_dispatch(classes.failed),
    })
}

/// Comptime configuration and scalars of a call, as backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WalkConfig {
    pub(crate) block: usize,
    pub(crate) span: usize,
    pub(crate) scale: f32,
    pub(crate) value_offset: f32,
    pub(crate) halves: bool,
    /// A kernel that can run the call; on a CPU any value.
    pub(crate) strategy: BalanceStrategy,
}
