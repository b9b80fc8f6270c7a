//! Draws the next tokens on the device, so that the host reads only one number a sequence.
//! Temperature, top k, top p and min p restrict the tokens.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, assign_ints, scatter_ints, scatter_scalars};
use args::SampleTensors;
use backend::SampleOps;

const OP: &str = "draw";
/// Settings of a row that are floats: temperature, top p, min p.
pub(crate) const FLOATS: usize = 3;
/// Settings of a row that are integers: top k, seed (two), whether positions advance.
pub(crate) const INTS: usize = 4;
/// The largest vocabulary.
const MOST: usize = 1 << 20;

/// How a row's token is drawn. The restrictions apply in the order of the fields, each to the
/// tokens that the earlier ones left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawSettings {
    /// Divisor of the logits. 0 takes the likeliest token, the lowest id among equals.
    pub temperature: f32,
    /// Keep only the `k` likeliest tokens, the lower ids among equals.
    pub top_k: Option<usize>,
    /// Keep only the likeliest tokens that together reach this share of the probability.
    pub top_p: Option<f32>,
    /// Keep only tokens with at least this fraction of the likeliest token's probability.
    pub min_p: Option<f32>,
    /// The seed of the row's random numbers: its `n`-th draw depends on nothing else.
    pub seed: u64,
}

impl DrawSettings {
    fn check(&self) -> Result<(), KernelError> {
        let invalid = |argument, actual: String, supported| {
            Err(KernelError::Unsupported { op: OP, argument, actual, supported })
        };
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return invalid("temperature", self.temperature.to_string(), "finite, at least 0");
        }
        if self.top_k == Some(0) {
            return invalid("top_k", "0".into(), "at least 1");
        }
        match (self.top_p, self.min_p) {
            (Some(p), _) if !(0.0..=1.0).contains(&p) => invalid("top_p", p.to_string(), "0 to 1"),
            (_, Some(p)) if !(0.0..=1.0).contains(&p) => invalid("min_p", p.to_string(), "0 to 1"),
            _ => Ok(()),
        }
    }
}

/// The state of a batch of sequences on the device: settings, and the numbers that every draw
/// changes in place.
#[derive(Debug)]
pub struct DrawState {
    /// Float settings, `[B * 3]`.
    floats: Tensor<1>,
    /// Integer settings, `[B * 4]`.
    ints: Tensor<1, Int>,
    /// Draws so far, `[B]`.
    draws: Tensor<1, Int>,
    positions: Tensor<1, Int>,
    tokens: Tensor<1, Int>,
    rows: Vec<DrawSettings>,
    /// The restrictions of all rows so far: replaced rows may not take one away, as recorded steps
    /// launch the kernel with it.
    config: DrawConfig,
}

/// Which restrictions at least one row has. The kernel leaves out the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct DrawConfig {
    pub(crate) draws: bool,
    pub(crate) ranks: bool,
    pub(crate) nucleus: bool,
}

impl DrawState {
    /// Sequences before their first draw. `positions` are the positions of the tokens to be drawn.
    ///
    /// # Errors
    /// [`KernelError`] where the numbers of positions and rows differ, for no rows, and for
    /// settings outside their ranges.
    pub fn new(
        rows: &[DrawSettings],
        positions: &[usize],
        device: &Device,
    ) -> Result<Self, KernelError> {
        let batch = rows.len();
        if batch == 0 || positions.len() != batch {
            return Err(KernelError::Shape {
                op: OP,
                argument: "positions",
                expected: vec![batch.max(1)],
                actual: vec![positions.len()],
            });
        }
        rows.iter().try_for_each(DrawSettings::check)?;
        let floats = rows.iter().flat_map(|row| {
            // Even the smallest share keeps a token.
            let top_p = row.top_p.unwrap_or(1.0).max(f32::MIN_POSITIVE);
            [row.temperature, top_p, row.min_p.unwrap_or(0.0)]
        });
        let floats: Vec<f32> = floats.collect();
        let ints = rows.iter().flat_map(|row| {
            let top_k = row.top_k.map_or(i32::MAX, |k| k.min(i32::MAX as usize) as i32);
            [top_k, row.seed as i32, (row.seed >> 32) as i32, 1]
        });
        // The first draw moves positions on by one.
        let before = positions.iter().map(|&position| position as i32 - 1);
        Ok(Self {
            floats: Tensor::from_data(floats.as_slice(), (device, DType::F32)),
            ints: upload(ints.collect(), device),
            draws: Tensor::zeros([batch], (device, DType::I32)),
            positions: upload(before.collect(), device),
            tokens: Tensor::zeros([batch], (device, DType::I32)),
            rows: rows.to_vec(),
            config: DrawConfig::of(rows),
        })
    }

    /// The last drawn tokens, `[B]`, 32-bit: written in place by every draw.
    pub fn tokens(&self) -> &Tensor<1, Int> {
        &self.tokens
    }

    /// The positions of the last drawn tokens, `[B]`, 32-bit: moved on in place by every draw.
    pub fn positions(&self) -> &Tensor<1, Int> {
        &self.positions
    }

    /// Replaces the last drawn tokens by others, one a sequence.
    ///
    /// # Errors
    /// [`KernelError`] for another number of tokens than sequences, and where the device fails.
    pub fn force(&mut self, tokens: &[u32]) -> Result<(), KernelError> {
        let tokens = tokens.iter().map(|&token| token as i32).collect();
        let forced = upload(tokens, &self.tokens.device());
        assign_ints(&mut self.tokens, forced)
    }

    /// Moves sequences on by `tokens`, as that many draws do: the numbers of draws, and the
    /// positions of sequences that have not ended.
    ///
    /// # Errors
    /// [`KernelError`] where the device fails.
    pub fn skip(&mut self, tokens: usize) -> Result<(), KernelError> {
        let batch = self.rows.len();
        let moves = self.ints.clone().reshape([batch, INTS]).narrow(1, INTS - 1, 1);
        let moved = self.positions.clone() + moves.reshape([batch]).mul_scalar(tokens as i32);
        assign_ints(&mut self.positions, moved)?;
        let draws = self.draws.clone().add_scalar(tokens as i32);
        assign_ints(&mut self.draws, draws)
    }

    /// Ends a sequence: it stays at `position`, and later draws for it are meaningless.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for a row that does not exist.
    pub fn end(&mut self, row: usize, position: usize) -> Result<(), KernelError> {
        self.check_row(row)?;
        let device = self.tokens.device();
        let at = |slot: usize| upload(vec![slot as i32], &device);
        scatter_ints(&mut self.ints, at(row * INTS + 3), at(0))?;
        scatter_ints(&mut self.positions, at(row), at(position))
    }

    /// Puts the one sequence of another state in the place of a row, in place. Returns whether the
    /// kernel needs restrictions that no row has had before. Recorded steps are void then.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for a row that does not exist, [`KernelError::Shape`] for a
    /// state of several sequences, and where the device fails.
    pub fn replace_row(&mut self, row: usize, from: &Self) -> Result<bool, KernelError> {
        self.check_row(row)?;
        let [settings] = from.rows[..] else {
            return Err(KernelError::Shape {
                op: OP,
                argument: "rows",
                expected: vec![1],
                actual: vec![from.rows.len()],
            });
        };
        let device = self.tokens.device();
        let at = |first: usize, count: usize| {
            upload((first..first + count).map(|index| index as i32).collect(), &device)
        };
        scatter_scalars(&mut self.floats, at(row * FLOATS, FLOATS), from.floats.clone())?;
        scatter_ints(&mut self.ints, at(row * INTS, INTS), from.ints.clone())?;
        for (own, other) in [
            (&mut self.draws, &from.draws),
            (&mut self.positions, &from.positions),
            (&mut self.tokens, &from.tokens),
        ] {
            scatter_ints(own, at(row, 1), other.clone())?;
        }
        self.rows[row] = settings;
        let before = self.config;
        self.config = before.union(from.config);
        Ok(self.config != before)
    }

    /// Replaces the last drawn token of a row.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for a row that does not exist, and where the device fails.
    pub fn force_row(&mut self, row: usize, token: u32) -> Result<(), KernelError> {
        self.check_row(row)?;
        let device = self.tokens.device();
        let at = upload(vec![row as i32], &device);
        scatter_ints(&mut self.tokens, at, upload(vec![token as i32], &device))
    }

    fn check_row(&self, row: usize) -> Result<(), KernelError> {
        if row < self.rows.len() {
            return Ok(());
        }
        Err(KernelError::Unsupported {
            op: OP,
            argument: "row",
            actual: row.to_string(),
            supported: "rows of the batch",
        })
    }
}

impl DrawConfig {
    fn of(rows: &[DrawSettings]) -> Self {
        let drawing = || rows.iter().filter(|row| row.temperature > 0.0);
        Self {
            draws: drawing().next().is_some(),
            ranks: drawing().any(|row| row.top_k.is_some()),
            nucleus: drawing().any(|row| row.top_p.is_some_and(|p| p < 1.0)),
        }
    }

    fn union(self, other: Self) -> Self {
        Self {
            draws: self.draws || other.draws,
            ranks: self.ranks || other.ranks,
            nucleus: self.nucleus || other.nucleus,
        }
    }
}

fn upload(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values.as_slice(), (device, DType::I32))
}

/// Draws a token for every row of `logits`, and moves `state` on in place. A row with NaN or
/// infinite logits gets `-1`, and the state holds token 0 for it.
///
/// The softmax subtracts the maximum; weights and their sums are f32. Equal states draw equal
/// tokens on every device, unless a random number lies within rounding of a border between tokens.
///
/// # Shapes
/// `logits` `[B, V]`, f32, `V` up to 1,048,576; returns `[B]`, 32-bit.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; the state is unchanged.
pub fn draw(logits: Tensor<2>, state: &mut DrawState) -> Result<Tensor<1, Int>, KernelError> {
    let [_, vocabulary] = logits.dims();
    let batch = state.rows.len();
    let check = Check::new(OP, &logits);
    check.supported()?;
    check.f32("logits", &logits)?;
    check.shape("logits", &logits, &[batch, vocabulary])?;
    check.shape("state", &state.tokens, &[batch])?;
    if vocabulary == 0 || vocabulary > MOST {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "vocabulary",
            actual: vocabulary.to_string(),
            supported: "1 to 1,048,576 tokens",
        });
    }
    let tensors = SampleTensors {
        floats: state.floats.clone().into_dispatch(),
        ints: state.ints.clone().into_dispatch(),
        draws: check.take_ints(&mut state.draws).into_dispatch(),
        positions: check.take_ints(&mut state.positions).into_dispatch(),
        tokens: check.take_ints(&mut state.tokens).into_dispatch(),
    };
    let drawn = <Dispatch as SampleOps>::draw(logits.into_dispatch(), tensors, state.config);
    state.draws = Tensor::from_dispatch(drawn.draws);
    state.positions = Tensor::from_dispatch(drawn.positions);
    state.tokens = Tensor::from_dispatch(drawn.tokens);
    Ok(Tensor::from_dispatch(drawn.drawn))
}
