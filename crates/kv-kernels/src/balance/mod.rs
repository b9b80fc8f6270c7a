//! BalanceKV's halving of token lists (SoftmaxBalance).

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
use burn::tensor::{DType, Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use args::BalanceArgs;
use backend::BalanceOps;
use strategy::BalanceShape;

pub use strategy::BalanceStrategy;

const OP: &str = "balance";
/// The longest block on GPUs, where each of its tokens has a unit of a cube.
const MOST: usize = 256;

/// How [`balance`] walks.
#[derive(Debug, Clone)]
pub struct BalanceOptions {
    /// Tokens that are balanced against each other: even, from 2 on, up to 256 on GPUs.
    pub block: usize,
    /// Factor of the keys' products; `1/√D` by default.
    pub scale: Option<f32>,
    /// `ln γ` of every list, `[P]`, f32: a token is kept with probability `1/2 − γ Σ K_ij η_i`.
    pub log_gamma: Tensor<1>,
    /// Added to the values' products.
    pub value_offset: f32,
    /// What is subtracted from the keys.
    pub centre: Centre,
    /// Factors of the values, `[P, N]`, f32.
    pub weights: Option<Tensor<2>>,
    /// Where random numbers come from.
    pub draws: Draws,
    /// Whether both classes of a block get half of it: when one has, the rest joins the other.
    pub halves: bool,
    /// Which kernel walks.
    pub strategy: BalanceStrategy,
}

/// What is subtracted from the keys of a list: attention is invariant to it, the walk is not.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "a few handles to tensors, one a call")]
pub enum Centre {
    /// Nothing.
    None,
    /// The mean of the list's keys.
    List,
    /// One given key a block, `[P, ⌈N / block⌉, D]`, f32.
    Block(Tensor<3>),
}

/// Uniform random numbers in `[0, 1)`.
#[derive(Debug, Clone)]
pub enum Draws {
    /// Two 32-bit seeds a list, `[P, 2]`; the place in the list is the counter.
    Seeds(Tensor<2, Int>),
    /// The numbers themselves, `[P, N]`, f32.
    Numbers(Tensor<2>),
}

/// What [`balance`] found.
#[derive(Debug, Clone)]
pub struct Balanced {
    /// `±1` for every token, `[P, N]`, 32-bit; 0 behind a list's end.
    pub signs: Tensor<2, Int>,
    /// The slots of each block's smaller class (the positive one of equals), `[P, N / 2]` (at least
    /// 1), 32-bit, in the list's order: `⌊n / 2⌋` of `n` with `halves`. Without, a class may be
    /// smaller; `-1` fills its block's half, as it fills what is behind a list's end.
    pub kept: Tensor<2, Int>,
    /// Whether a probability of the block was outside `[0, 1]`, `[P, ⌈N / block⌉]`, 32-bit: what
    /// the paper's algorithm calls FAIL. Such a token took the likelier sign.
    pub failed: Tensor<2, Int>,
}

/// Splits every block of every list into two classes by a self-balancing walk: with
/// `K_ij = exp(scale ⟨k_i, k_j⟩) (⟨v_i, v_j⟩ + offset)`, token `j` gets `+1` with probability
/// `1/2 − γ Σ_{i<j} K_ij η_i`, so that `Σ exp(scale ⟨q, k⟩) v` over one class is near that over the
/// other for every query. BalanceKV's Algorithm 2, whose `γ` is `1 / (2 c R²)`; blocks are
/// appendix B's.
///
/// Sums carry an exponent of their own: for keys of any norm nothing overflows, and signs are those
/// of exact arithmetic but for the rounding of f32 sums.
///
/// # Shapes
/// `keys` `[S, D]`, f32, f16 or bf16; `values` the same, or `None` where all are 1 (denominators);
/// `lists` `[P, N]` of slots, 32-bit, of which the first `counts` `[P]` count (on the device, not
/// checked).
///
/// # Errors
/// [`KernelError`] where shapes, dtypes, devices or the block do not fit, and for a forced strategy
/// that does not serve.
pub fn balance(
    keys: Tensor<2>,
    values: Option<Tensor<2>>,
    lists: Tensor<2, Int>,
    counts: Tensor<1, Int>,
    options: BalanceOptions,
) -> Result<Balanced, KernelError> {
    let [slots, head_dim] = keys.dims();
    let [rows, longest] = lists.dims();
    let BalanceOptions { block, scale, log_gamma, value_offset, .. } = options;
    let device = keys.device();
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
    let strategy = check.chosen(options.strategy, keys.dtype(), &BalanceShape { head_dim })?;
    let blocks = longest.div_ceil(block);
    // An extension takes no optional tensors: where nothing is read, any tensor of a vector's size
    // serves.
    let none = || Tensor::<1>::empty([4], (&device, DType::F32));
    let (means, centring) = match options.centre {
        Centre::None => (none(), Centring::None),
        Centre::List => (none(), Centring::List),
        Centre::Block(means) => {
            check.shape("means", &means, &[rows, blocks, head_dim])?;
            check.f32("means", &means)?;
            (means.reshape([rows * blocks * head_dim]), Centring::Block)
        }
    };
    let weighted = options.weights.is_some();
    if let Some(weights) = &options.weights {
        check.shape("weights", weights, &[rows, longest])?;
        check.f32("weights", weights)?;
    }
    let weights = options.weights.map_or_else(none, |weights| weights.reshape([rows * longest]));
    let seeded = matches!(options.draws, Draws::Seeds(_));
    let (seeds, numbers) = match options.draws {
        Draws::Seeds(seeds) => {
            check.shape("seeds", &seeds, &[rows, 2])?;
            check.int("seeds", &seeds)?;
            (seeds.reshape([rows * 2]), none())
        }
        Draws::Numbers(numbers) => {
            check.shape("draws", &numbers, &[rows, longest])?;
            check.f32("draws", &numbers)?;
            (counts.clone(), numbers.reshape([rows * longest]))
        }
    };
    let config = WalkConfig {
        block,
        scale: scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        value_offset,
        centring,
        valued: values.is_some(),
        weighted,
        seeded,
        halves: options.halves,
        strategy,
    };
    let values = values.unwrap_or_else(|| keys.clone());
    let classes = <Dispatch as BalanceOps>::balance(BalanceArgs {
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        lists: lists.into_dispatch(),
        counts: counts.into_dispatch(),
        log_gamma: log_gamma.into_dispatch(),
        means: means.into_dispatch(),
        weights: weights.into_dispatch(),
        seeds: seeds.into_dispatch(),
        numbers: numbers.into_dispatch(),
        config,
    });
    Ok(Balanced {
        signs: Tensor::from_dispatch(classes.signs),
        kept: Tensor::from_dispatch(classes.kept),
        failed: Tensor::from_dispatch(classes.failed),
    })
}

/// Comptime configuration and scalars, as the backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WalkConfig {
    pub(crate) block: usize,
    pub(crate) scale: f32,
    pub(crate) value_offset: f32,
    pub(crate) centring: Centring,
    pub(crate) valued: bool,
    pub(crate) weighted: bool,
    pub(crate) seeded: bool,
    pub(crate) halves: bool,
    /// A kernel that serves, or any on a CPU.
    pub(crate) strategy: BalanceStrategy,
}

/// [`Centre`] without its tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Centring {
    None,
    List,
    Block,
}
