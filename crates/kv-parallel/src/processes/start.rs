//! Starting all ranks from one command, and waiting for them.

use std::env;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::environment::Place;
use super::meeting::{LOST, exit};
use crate::{ParallelError, Result, Shard};

/// How long ranks may take to end by themselves once one has died.
const GRACE: Duration = Duration::from_secs(5);
/// How often the ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Tells a rank that its standard input stays open as long as the process that started it lives.
const STARTED: &str = "KV_STARTED";

/// Starts this program `world` times with its own arguments, as ranks 0 to `world - 1`, and waits
/// for all of them. Only rank 0 reads the standard input and writes to the standard output. A rank
/// that fails ends the others. Signals to end are passed on.
pub(crate) fn run(world: usize) -> Result<ExitCode> {
    let failed = |action: &str| {
        let action = action.to_string();
        move |error: io::Error| ParallelError::Process { action, reason: error.to_string() }
    };
    let program = env::current_exe().map_err(failed("finding this program"))?;
    let [meeting, nccl] = free_addresses().map_err(failed("finding free ports"))?;
    // Signals that come while ranks are started are passed on, too.
    let signals = Signals::new();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..world {
        let shard = Shard::new(rank, world)?;
        let place = Place { shard, local: rank, meeting, nccl, has_nccl: true };
        let mut command = Command::new(&program);
        command.args(env::args_os().skip(1)).envs(place.variables());
        if !shard.is_first() {
            command.stdin(Stdio::piped()).stdout(Stdio::null()).env(STARTED, "1");
        }
        // A signal to the group of this process, as of a terminal or of a service manager, would
        // reach ranks twice: by itself, and as it is passed on.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        ranks.0.push(command.spawn().map_err(failed(&format!("starting {shard}")))?);
    }
    signals.pass_on(ranks.0.iter().map(Child::id).collect());
    ranks.wait().map_err(failed("waiting for ranks"))
}

/// Ends this rank when the process that started it has died, which could then not end the ranks.
/// The first rank ends behind the others.
pub(crate) fn end_with_starter() {
    if env::var_os(STARTED).is_none() {
        return;
    }
    let watch = || {
        // Nobody writes to it: it ends when the other end does.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        exit("the process that started this rank has died");
    };
    if let Err(error) = thread::Builder::new().name("starter".into()).spawn(watch) {
        tracing::warn!("a rank cannot watch the process that started it: {error}");
    }
}

/// The ranks' processes; those that run when it is dropped are killed.
struct Ranks(Vec<Child>);

impl Ranks {
    fn wait(&mut self) -> io::Result<ExitCode> {
        // When the first rank failed.
        let mut since: Option<Instant> = None;
        loop {
            let mut running = false;
            for rank in &mut self.0 {
                match rank.try_wait()? {
                    None => running = true,
                    Some(status) if !status.success() => {
                        since.get_or_insert_with(Instant::now);
                    }
                    Some(_) => {}
                }
            }
            match since {
                Some(since) if !running || since.elapsed() > GRACE => return self.conclude(),
                None if !running => return Ok(ExitCode::SUCCESS),
                _ => thread::sleep(LOOK),
            }
        }
    }
}

impl Ranks {
    /// Says which ranks did not end because of others, and returns the code of the first of them.
    fn conclude(&mut self) -> io::Result<ExitCode> {
        let world = self.0.len();
        let mut found = None;
        for (rank, child) in self.0.iter_mut().enumerate() {
            let Some(status) = child.try_wait()?.filter(|status| !status.success()) else {
                continue;
            };
            if status.code() != Some(LOST) {
                // Whoever read the errors may have died, too, and `eprintln!` would panic.
                let _ = writeln!(io::stderr(), "error: rank {rank} of {world} has ended: {status}");
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                found.get_or_insert(code.map_or(ExitCode::FAILURE, ExitCode::from));
            }
        }
        Ok(found.unwrap_or_else(|| ExitCode::from(LOST as u8)))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            if matches!(rank.try_wait(), Ok(None)) {
                let _ = rank.kill();
                let _ = rank.wait();
            }
        }
    }
}

/// Two addresses of this host that nobody listens at.
fn free_addresses() -> io::Result<[SocketAddr; 2]> {
    let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let both = [free()?, free()?];
    Ok([both[0].local_addr()?, both[1].local_addr()?])
}

/// SIGTERM and SIGINT, which ranks are told of: they end as they do alone. This process goes on
/// until they have ended.
#[cfg(unix)]
struct Signals(Option<signal_hook::iterator::Signals>);

#[cfg(unix)]
impl Signals {
    fn new() -> Self {
        use signal_hook::consts::{SIGINT, SIGTERM};
        Self(signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).ok())
    }

    fn pass_on(self, ranks: Vec<u32>) {
        use rustix::process::{Pid, Signal, kill_process};

        let Some(mut signals) = self.0 else { return };
        thread::spawn(move || {
            for signal in signals.forever() {
                let is_interrupt = signal == signal_hook::consts::SIGINT;
                let passed = if is_interrupt { Signal::INT } else { Signal::TERM };
                for rank in &ranks {
                    if let Some(pid) = Pid::from_raw(*rank as i32) {
                        let _ = kill_process(pid, passed);
                    }
                }
            }
        });
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Self {
        Self
    }

    fn pass_on(self, _ranks: Vec<u32>) {}
}
