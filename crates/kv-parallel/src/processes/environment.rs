//! Which rank a process is, as launchers say it in the environment.

use std::net::SocketAddr;

use crate::{ParallelError, Result, Shard};

/// Variables of the rank, the number of ranks, and the rank within its host, by launcher.
const LAUNCHERS: [[&str; 3]; 3] = [
    // torchrun, Kubernetes' PyTorch jobs, and `--tensor-parallel`.
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];
/// Where rank 0 listens for the other ranks.
pub(super) const MEETING: &str = "KV_MEETING";
/// Where NCCL's ranks meet. NCCL reads it itself.
pub(crate) const NCCL: &str = "NCCL_COMM_ID";
/// `0` leaves small tensors to NCCL, which else are added through the memory of other GPUs.
#[cfg(feature = "cuda")]
pub(crate) const DIRECT: &str = "KV_DIRECT_SUMS";
/// The host and port of torchrun's own meeting, from which the other two are derived.
const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

/// A process's place among its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) shard: Shard,
    /// The process's number among the processes of its host, counted from 0.
    pub(crate) local: usize,
    /// Where rank 0 listens.
    pub(crate) meeting: SocketAddr,
    /// Where NCCL's ranks meet.
    pub(crate) nccl: SocketAddr,
    /// Whether the environment already has NCCL's address.
    pub(crate) has_nccl: bool,
}

impl Place {
    /// What the environment says; `None` where it names no ranks, or only one. A job of Slurm or of
    /// another launcher may run programs that are no ranks of each other: where nobody has `asked`
    /// for ranks, they are ranks only if they are told where to meet.
    pub(crate) fn find(
        asked: bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>> {
        let launcher = LAUNCHERS
            .iter()
            .find(|names| variable(names[0]).is_some() && variable(names[1]).is_some());
        if !asked && variable(MEETING).is_none() && variable(MASTER[0]).is_none() {
            let several = |names: &&[&str; 3]| variable(names[1]).is_some_and(|all| all != "1");
            if let Some([rank, world, _]) = launcher.filter(several) {
                tracing::warn!(
                    "{rank} and {world} are not heeded, so that this process computes alone: set \
                     {MEETING} or {}, or give `--tensor-parallel`",
                    MASTER[0]
                );
            }
            return Ok(None);
        }
        let Some([rank, world, local]) = launcher else { return Ok(None) };
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(value) = variable(name) else { return Ok(None) };
            let parsed = value.parse();
            parsed.map(Some).map_err(|_| refuse(name, &value, "expected a number from 0"))
        };
        let (Some(own), Some(all)) = (number(rank)?, number(world)?) else { return Ok(None) };
        if all == 1 {
            return Ok(None);
        }
        let shard = Shard::new(own, all).map_err(|_| {
            refuse(world, &all.to_string(), &format!("expected more than {rank}, which is {own}"))
        })?;
        let address = |name: &str, beyond: u16| -> Result<SocketAddr> {
            if let Some(value) = variable(name) {
                let parsed = value.parse();
                return parsed.map_err(|_| refuse(name, &value, "expected an address and a port"));
            }
            let [host, port] = MASTER.map(|name| variable(name).unwrap_or_default());
            if host.is_empty() {
                let reason = format!(
                    "where rank 0 listens is unknown: set {name} to an address and a port of its \
                     host, or {} and {}",
                    MASTER[0], MASTER[1]
                );
                return Err(refuse(rank, &own.to_string(), &reason));
            }
            let base: u16 =
                port.parse().map_err(|_| refuse(MASTER[1], &port, "expected a port"))?;
            let port = base
                .checked_add(beyond)
                .ok_or_else(|| refuse(MASTER[1], &port, "the ports behind it are needed, too"))?;
            let found = std::net::ToSocketAddrs::to_socket_addrs(&(host.as_str(), port));
            let first = found.ok().and_then(|mut found| found.next());
            first.ok_or_else(|| refuse(MASTER[0], &host, "no such host"))
        };
        let meeting = address(MEETING, 1)?;
        Ok(Some(Self {
            shard,
            local: number(local)?.unwrap_or(own),
            meeting,
            nccl: match (variable(NCCL), variable(MASTER[0])) {
                // Ranks that add without NCCL need no address of it. Others meet behind this one.
                (None, None) => SocketAddr::new(meeting.ip(), meeting.port().wrapping_add(1)),
                _ => address(NCCL, 2)?,
            },
            has_nccl: variable(NCCL).is_some(),
        }))
    }

    /// The variables that tell a process its place.
    pub(super) fn variables(&self) -> [(&'static str, String); 5] {
        let [rank, world, local] = LAUNCHERS[0];
        [
            (rank, self.shard.rank().to_string()),
            (world, self.shard.world().to_string()),
            (local, self.local.to_string()),
            (MEETING, self.meeting.to_string()),
            (NCCL, self.nccl.to_string()),
        ]
    }
}

fn refuse(variable: &str, value: &str, reason: &str) -> ParallelError {
    ParallelError::Environment {
        variable: variable.into(),
        value: value.into(),
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<Option<Place>> {
        let all: BTreeMap<_, _> = variables.iter().copied().collect();
        Place::find(true, |name| all.get(name).map(|value| (*value).to_string()))
    }

    #[test]
    fn every_launcher_is_understood() {
        let master = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        for [rank, world, local] in LAUNCHERS {
            let own = [(rank, "3"), (world, "4"), (local, "1")];
            let place = find(&[&own[..], &master[..]].concat()).unwrap().unwrap();
            assert_eq!((place.shard, place.local), (Shard::new(3, 4).unwrap(), 1));
            assert_eq!(place.meeting, "127.0.0.1:29501".parse().unwrap());
            assert_eq!(place.nccl, "127.0.0.1:29502".parse().unwrap());
            assert!(!place.has_nccl);
            assert_eq!(find(&[(rank, "0"), (world, "1")]), Ok(None));
        }
        assert_eq!(find(&[]), Ok(None));
    }

    #[test]
    fn programs_of_a_job_are_no_ranks_unless_they_can_meet() {
        let all = |meets: bool| {
            move |name: &str| {
                let value = match name {
                    "SLURM_PROCID" => "1",
                    "SLURM_NTASKS" => "4",
                    "MASTER_ADDR" if meets => "127.0.0.1",
                    "MASTER_PORT" if meets => "29500",
                    _ => return None,
                };
                Some(value.to_string())
            }
        };
        assert_eq!(Place::find(false, all(false)), Ok(None));
        assert!(Place::find(false, all(true)).unwrap().is_some());
        let text = Place::find(true, all(false)).unwrap_err().to_string();
        assert!(text.contains("set KV_MEETING"), "{text}");
    }

    #[test]
    fn a_place_tells_others_what_it_is() {
        let place = Place {
            shard: Shard::new(1, 2).unwrap(),
            local: 1,
            meeting: "127.0.0.1:4000".parse().unwrap(),
            nccl: "127.0.0.1:4001".parse().unwrap(),
            has_nccl: true,
        };
        let variables = place.variables();
        let variables: Vec<_> = variables.iter().map(|(n, v)| (*n, v.as_str())).collect();
        assert_eq!(find(&variables), Ok(Some(place)));
    }

    #[test]
    fn wrong_variables_are_named() {
        let message = |variables: &[(&str, &str)]| find(variables).unwrap_err().to_string();
        let text = message(&[("RANK", "x"), ("WORLD_SIZE", "2")]);
        assert_eq!(text, "RANK=x: expected a number from 0");
        let text = message(&[("RANK", "2"), ("WORLD_SIZE", "2")]);
        assert_eq!(text, "WORLD_SIZE=2: expected more than RANK, which is 2");
        let text = message(&[("RANK", "1"), ("WORLD_SIZE", "2")]);
        assert!(text.contains("set KV_MEETING"), "{text}");
        // NCCL's address follows from the meeting's.
        let own = [("RANK", "1"), ("WORLD_SIZE", "2"), ("KV_MEETING", "127.0.0.1:4000")];
        assert_eq!(find(&own).unwrap().unwrap().nccl, "127.0.0.1:4001".parse().unwrap());
        let own = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
        let text = message(&[&own[..], &[("MASTER_PORT", "65535")]].concat());
        assert!(text.contains("MASTER_PORT=65535"), "{text}");
    }
}
