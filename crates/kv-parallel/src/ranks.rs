//! How a program becomes one rank of several.

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use burn::tensor::Device;

#[cfg(feature = "cuda")]
use crate::processes::environment::DIRECT;
use crate::processes::environment::{NCCL, Place};
use crate::processes::meeting::Meeting;
use crate::processes::start;
use crate::{Collective, ParallelError, Result, Shard, Solo};

/// What a program that was asked for several ranks is.
#[derive(Debug)]
pub enum Role {
    /// One of the ranks.
    Rank(Ranks),
    /// The process that started the ranks. They have ended with this code.
    Starter(ExitCode),
}

/// A process among its group.
#[derive(Debug, Clone)]
pub struct Ranks {
    shard: Shard,
    local: usize,
    meeting: Option<Arc<Meeting>>,
}

impl Ranks {
    /// A program without others.
    pub const fn alone() -> Self {
        Self { shard: Shard::WHOLE, local: 0, meeting: None }
    }

    /// Becomes one of `asked` ranks: alone where one is asked for.
    ///
    /// * Where a launcher has started several processes (`RANK` and `WORLD_SIZE` of torchrun and
    ///   Kubernetes, or the variables of `mpirun` and `srun`), this process is one of them. Where
    ///   none are asked for, it must also be told where they meet.
    /// * Else, this process starts itself `asked` times and waits: [`Role::Starter`].
    ///
    /// # Errors
    /// [`ParallelError::Environment`], [`ParallelError::WorldSize`], [`ParallelError::Process`],
    /// and [`ParallelError::TimedOut`] where a rank does not come within a minute.
    pub fn join(asked: Option<usize>) -> Result<Role> {
        if asked == Some(1) {
            return Ok(Role::Rank(Self::alone()));
        }
        let Some(place) = Place::find(asked.is_some(), |name| env::var(name).ok())? else {
            return match asked {
                Some(world) if world > 1 => start::run(world).map(Role::Starter),
                _ => Ok(Role::Rank(Self::alone())),
            };
        };
        let found = place.shard.world();
        if let Some(asked) = asked.filter(|asked| *asked != found) {
            return Err(ParallelError::WorldSize { asked, found });
        }
        if !place.has_nccl {
            return Err(again(&place));
        }
        start::end_with_starter();
        let meeting = Some(Arc::new(Meeting::join(place.shard, place.meeting)?));
        Ok(Role::Rank(Self { shard: place.shard, local: place.local, meeting }))
    }

    /// This rank's share.
    pub const fn shard(&self) -> Shard {
        self.shard
    }

    /// The rank's number among those of its host, which is the number of its GPU.
    pub const fn local(&self) -> usize {
        self.local
    }

    /// The connections to the other ranks; `None` without other ranks.
    pub fn meeting(&self) -> Option<&Arc<Meeting>> {
        self.meeting.as_ref()
    }

    /// How the ranks add tensors of a device: through NCCL on CUDA, else through connections. Small
    /// tensors on CUDA are added by kernels that write into the other ranks' memory, unless
    /// `KV_DIRECT_SUMS=0` is in the environment of a rank. All ranks call it.
    ///
    /// # Errors
    /// [`ParallelError::Nccl`], [`ParallelError::RankLeft`].
    pub fn collective(&self, device: &Device) -> Result<Arc<dyn Collective>> {
        let Some(meeting) = &self.meeting else { return Ok(Arc::new(Solo)) };
        #[cfg(feature = "cuda")]
        if Device::enumerate(burn::tensor::DeviceType::Cuda).iter().any(|d| d == device) {
            let nccl = crate::Nccl::new(self.shard)?;
            if nccl.device() != device {
                let reason = format!(
                    "{} computes on {:?}, but its GPU is {:?}: let all ranks see the same GPUs \
                     (CUDA_VISIBLE_DEVICES), as many as there are ranks, and name none of them",
                    self.shard,
                    device,
                    nccl.device()
                );
                return Err(ParallelError::Nccl { reason });
            }
            let wanted = env::var_os(DIRECT).is_none_or(|value| value != "0");
            if !meeting.agree(wanted)? {
                return Ok(Arc::new(nccl));
            }
            return Ok(Arc::new(match crate::Direct::new(meeting, device) {
                Ok(direct) => nccl.with_direct(direct),
                Err(error @ ParallelError::Direct { .. }) => {
                    tracing::warn!("{error}; NCCL adds small tensors, too");
                    nccl
                }
                Err(error) => return Err(error),
            }));
        }
        let _ = device;
        Ok(Arc::clone(meeting) as Arc<dyn Collective>)
    }

    /// Leaves SIGTERM and SIGINT to the first rank, which then ends the others by [`Self::finish`].
    pub fn leave_signals_to_first(&self) {
        #[cfg(unix)]
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            // The signals end the process where no handler can be had.
            let _ = signal_hook::flag::register(signal, Arc::default());
        }
    }

    /// Says that this rank has done its work. A rank that ends without saying so has died, and ends
    /// the others.
    pub fn finish(&self) {
        if let Some(meeting) = &self.meeting {
            meeting.finish();
        }
    }
}

/// Starts this program again with NCCL's address, which NCCL reads from the environment itself.
/// Returns where that fails.
#[cfg(unix)]
fn again(place: &Place) -> ParallelError {
    use std::os::unix::process::CommandExt;

    let failed = |error: std::io::Error| ParallelError::Process {
        action: format!("starting again with {NCCL}"),
        reason: error.to_string(),
    };
    match env::current_exe() {
        Err(error) => failed(error),
        Ok(program) => {
            let mut command = std::process::Command::new(program);
            failed(command.args(env::args_os().skip(1)).env(NCCL, place.nccl.to_string()).exec())
        }
    }
}

#[cfg(not(unix))]
fn again(place: &Place) -> ParallelError {
    let reason = format!("set it to {}", place.nccl);
    ParallelError::Process { action: format!("reading {NCCL}"), reason }
}
