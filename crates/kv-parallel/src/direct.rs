//! Ranks with a GPU each, whose kernels add by writing into each other's memory.

use burn::tensor::{Device, DeviceType, Tensor};
use kv_kernels::{INBOX_HANDLE, Inbox, LinearOptions, MOST_PEER_BYTES, PeerSums, linear};

use crate::{Collective, Meeting, ParallelError, Result, Shard};

/// Bytes that sums take whole multiples of.
const LINE: usize = 8;

/// One rank of a group of processes on one host, whose GPUs reach each other's memory. A sum is one
/// launch on each rank ([`PeerSums`]), queued on the device, and may be part of a recording. It is
/// made for the small sums of decode steps: each rank sends all of its numbers to each other rank.
#[derive(Debug)]
pub struct Direct {
    shard: Shard,
    sums: PeerSums,
}

impl Direct {
    /// A rank of a meeting. All ranks call it. Several ranks may share a GPU, to try this out:
    /// their kernels then take turns, which takes milliseconds a sum.
    ///
    /// # Errors
    /// [`ParallelError::Direct`] on all ranks where one has no CUDA device, or cannot reach another
    /// one's memory; [`ParallelError::RankLeft`].
    pub fn new(meeting: &Meeting, device: &Device) -> Result<Self> {
        let shard = meeting.shard();
        // All ranks take part in all exchanges, whatever has failed on one of them.
        let own = own_inbox(device, shard.world());
        let handle = own.as_ref().map_or([0; INBOX_HANDLE], |(_, handle)| *handle);
        let handles: Vec<[u8; INBOX_HANDLE]> = meeting
            .gather(&handle)?
            .into_iter()
            .map(|bytes| bytes.try_into().unwrap_or([0; INBOX_HANDLE]))
            .collect();
        let (inbox, _) = on_all(meeting, own)?;
        let sums = PeerSums::connect(&inbox, shard.rank(), &handles, device);
        let sums = on_all(meeting, sums.map_err(failed))?;
        Ok(Self { shard, sums })
    }

    /// Whether one launch adds the tensor.
    pub(crate) fn takes(tensor: &Tensor<2>) -> bool {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        bytes.is_multiple_of(LINE) && (1..=MOST_PEER_BYTES).contains(&bytes)
    }

    /// The sum of all ranks' products, where one kernel multiplies and adds.
    pub(crate) fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Tensor<2>,
        options: &LinearOptions,
    ) -> Result<Option<Tensor<2>>> {
        Ok(self.sums.linear(x, weight, options)?)
    }
}

/// A new inbox of a device, and its handle.
fn own_inbox(device: &Device, ranks: usize) -> Result<(Inbox, [u8; INBOX_HANDLE])> {
    let found = Device::enumerate(DeviceType::Cuda).into_vec();
    let number = found.iter().position(|other| other == device);
    let number = number.ok_or_else(|| failed(format!("{device:?} is no CUDA device")))?;
    let inbox = Inbox::new(number, ranks).map_err(failed)?;
    let handle = inbox.handle().map_err(failed)?;
    Ok((inbox, handle))
}

fn failed(reason: impl ToString) -> ParallelError {
    ParallelError::Direct { reason: reason.to_string() }
}

/// The result where all ranks have succeeded.
fn on_all<T>(meeting: &Meeting, own: Result<T>) -> Result<T> {
    let all = meeting.agree(own.is_ok())?;
    match (own, all) {
        (Ok(own), true) => Ok(own),
        (Err(error), _) => Err(error),
        (Ok(_), false) => Err(ParallelError::Direct { reason: "another rank has failed".into() }),
    }
}

impl Collective for Direct {
    fn shard(&self) -> Shard {
        self.shard
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>> {
        let sum = |tensor| self.sums.sum(tensor).map_err(failed);
        if Self::takes(&tensor) {
            return sum(tensor);
        }
        // Whole lines, and not too many at once.
        let (shape, size) = (tensor.dims(), tensor.dtype().size());
        let count = shape[0] * shape[1];
        let padding = count.next_multiple_of(LINE / size) - count;
        let zeros = Tensor::zeros([1, padding], (&tensor.device(), tensor.dtype()));
        let flat = Tensor::cat(vec![tensor.reshape([1, count]), zeros], 1);
        let pieces = flat.split(MOST_PEER_BYTES / size, 1).into_iter().map(sum);
        let added = Tensor::cat(pieces.collect::<Result<Vec<_>>>()?, 1);
        Ok(added.narrow(1, 0, count).reshape(shape))
    }

    fn linear_all_reduce(
        &self,
        x: Tensor<2>,
        weight: Tensor<2>,
        options: LinearOptions,
    ) -> Result<Tensor<2>> {
        match self.linear(&x, &weight, &options)? {
            Some(sum) => Ok(sum),
            None => self.all_reduce(linear(x, weight, options)?),
        }
    }
}
