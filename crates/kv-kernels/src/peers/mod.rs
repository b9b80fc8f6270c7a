//! Sums over several GPUs, each with a process of its own, by kernels that write into each other's
//! memory.
//!
//! Every rank has an [`Inbox`] in its GPU's memory. In one launch a rank's kernel writes its
//! numbers into the inboxes of all other ranks, waits for theirs in its own inbox, and adds. A line
//! of an inbox holds two words of numbers and, beside each word, the turn of the sum: whoever sees
//! the turn sees the word, since both arrive together. So a sum costs one flight between GPUs. NCCL
//! calls this its LL protocol.
//!
//! ```text
//! rank 0                                rank 1
//! own numbers ──write──▶ inbox of rank 1 ──wait──▶ add
//!         add ◀──wait── inbox of rank 0 ◀──write── own numbers
//! ```
//!
//! A product sends its results itself ([`PeerSums::linear`]), number by number and with a turn
//! beside each.
//!
//! An inbox has two halves, for even and odd turns. A rank begins turn `t + 2` once it has
//! everybody's numbers of turn `t + 1`, which they wrote behind their reads of turn `t`. So nothing
//! is overwritten before it is read.

mod backend;
mod kernel;
mod launch;
mod memory;
mod slots;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::backend::check::Check;
use crate::layers::linear::{linear_over_peers, sends_results};
use crate::{KernelError, LinearOptions};
use backend::PeerOps;
use kernel::{LINES, UNITS};
use slots::{SLOTS, TURNS};

pub use memory::{HANDLE, Inbox, PeerError};
pub(crate) use slots::{
    PeerArgs, PeerGroup, PeerSlots, PeerSlotsLaunch, PeerTurn, begin_turn, count_turn, receive,
    send,
};

const OP: &str = "sum_over_peers";

/// The most bytes that one sum takes.
pub const MOST_PEER_BYTES: usize = LINES * LINE_BYTES;

/// Bytes of numbers in a line of an inbox.
const LINE_BYTES: usize = 8;

/// A rank's connections to the inboxes of all ranks. Sums are counted, so that one thread, whose
/// launches come in one order, must make all of them.
#[derive(Debug)]
pub struct PeerSums {
    rank: usize,
    ranks: usize,
    /// The addresses of all inboxes, `[ranks, 2]`: lower and upper half.
    addresses: Tensor<2, Int>,
    /// Turns that each cube has had, `[cubes]`.
    turns: Tensor<1, Int>,
    /// Turns of sums at the end of products, `[TURNS]`.
    slot_turns: Tensor<1, Int>,
}

impl PeerSums {
    /// Connects to the inboxes of all ranks, whose handles are in the ranks' order. `inbox` is this
    /// rank's.
    ///
    /// # Errors
    /// [`PeerError`] where the device cannot reach another rank's memory.
    pub fn connect(
        inbox: &Inbox,
        rank: usize,
        handles: &[[u8; HANDLE]],
        device: &Device,
    ) -> Result<Self, PeerError> {
        let mut words = Vec::with_capacity(2 * handles.len());
        for (other, handle) in handles.iter().enumerate() {
            let address = if other == rank { inbox.address() } else { inbox.open(handle)? };
            words.extend([address as u32 as i32, (address >> 32) as u32 as i32]);
        }
        let ranks = handles.len();
        let addresses = Tensor::<1, Int>::from_data(words.as_slice(), (device, DType::I32));
        let turns = Tensor::zeros([LINES.div_ceil(UNITS)], (device, DType::I32));
        let slot_turns = Tensor::zeros([TURNS], (device, DType::I32));
        Ok(Self { rank, ranks, addresses: addresses.reshape([ranks, 2]), turns, slot_turns })
    }

    /// The sum of all ranks' `x`, with equal bits on every rank: added in f32 in the order of
    /// ranks, and rounded once. All ranks call it with equal shapes and in an equal order.
    ///
    /// # Errors
    /// [`KernelError`] for numbers that are not floats of 16 or 32 bits, that fill no whole line of
    /// eight bytes, or that are more than [`MOST_PEER_BYTES`].
    pub fn sum<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, KernelError> {
        let check = Check::new(OP, &x);
        check.supported()?;
        check.float("x", &x)?;
        check.filled("x", &x)?;
        check.shape("the device of the inboxes", &self.addresses, &[self.ranks, 2])?;
        let bytes = x.shape().num_elements() * x.dtype().size();
        if !bytes.is_multiple_of(LINE_BYTES) || bytes > MOST_PEER_BYTES {
            let supported = "multiples of 8 up to `MOST_PEER_BYTES`";
            return Err(check.unsupported("bytes of x", bytes, supported));
        }
        let sum = <Dispatch as PeerOps>::sum_over_peers(
            x.into_dispatch(),
            self.addresses.clone().into_dispatch(),
            self.turns.clone().into_dispatch(),
            self.rank,
            self.ranks,
        );
        Ok(Tensor::from_dispatch(sum))
    }

    /// The sum of all ranks' [`linear`](crate::linear), or `None` where no kernel both multiplies
    /// and adds: on Hopper GPUs one does, for up to 32 rows in f16 and bf16. It sends each result
    /// as soon as it has it, so that the sum needs no launch and no way through memory of its own.
    /// Results are added in f32 in the order of ranks, and rounded once, with equal bits on every
    /// rank. All ranks call it with equal shapes and in an equal order.
    ///
    /// # Errors
    /// The errors of [`linear`](crate::linear).
    pub fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Tensor<2>,
        options: &LinearOptions,
    ) -> Result<Option<Tensor<2>>, KernelError> {
        let outputs = weight.dims()[0];
        let fits = x.dims()[0] * outputs <= SLOTS;
        if !fits || !sends_results(x, weight, options)? {
            return Ok(None);
        }
        let (x, weight, options) = (x.clone(), weight.clone(), options.clone());
        Ok(Some(linear_over_peers(x, weight, options, PeerArgs::of(self))))
    }
}
