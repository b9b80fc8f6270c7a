//! The connections between rank 0 and the others.
//!
//! ```text
//!   rank 1 ──hello──▶ rank 0        each rank introduces itself
//!   rank 1 ◀─hello─── rank 0        once all are there
//!   rank 1 ◀─command─ rank 0        what to do next, where rank 0 decides
//!   rank 1 ──numbers─▶ rank 0       parts of sums, where there is no NCCL
//!   rank 1 ──done───▶ rank 0        the end
//! ```
//!
//! A thread reads each connection. A connection that breaks without `done` means that the process
//! on its other side has died, which ends this process, too: the device may be in the midst of a
//! sum that never comes.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::frame::{Frame, numbers};
use crate::threads::{sum, through_host};
use crate::{Collective, ParallelError, Result, Shard};

/// How long ranks wait for each other to come, as one may load slowly from a cold disk.
const GATHERING: Duration = Duration::from_secs(60);
/// How often a rank knocks where rank 0 does not listen yet.
const KNOCKING: Duration = Duration::from_millis(50);
/// How long a connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// After how long a rank that others wait for is named in the log.
const SILENT: Duration = Duration::from_secs(30);
/// The most bytes of an introduction.
const LONGEST_HELLO: u64 = 4 << 10;
/// The exit code of a rank that ends because another one has died.
pub(super) const LOST: i32 = 75;

/// What a process says first.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    rank: usize,
    world: usize,
    /// Programs of different versions would compute different things.
    version: String,
}

impl Hello {
    fn of(shard: Shard) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_string();
        Self { rank: shard.rank(), world: shard.world(), version }
    }
}

/// One rank's connections: rank 0 has one to each other rank, in their order; the others have one
/// to rank 0.
#[derive(Debug)]
pub struct Meeting {
    shard: Shard,
    writers: Mutex<Vec<TcpStream>>,
    /// What each connection has said.
    parts: Mutex<Vec<Receiver<Vec<u8>>>>,
    commands: Mutex<Receiver<Vec<u8>>>,
}

impl Meeting {
    /// Meets the other ranks at `address`, where rank 0 listens.
    ///
    /// # Errors
    /// [`ParallelError::TimedOut`] where a rank does not come, [`ParallelError::Process`] where the
    /// address cannot be used.
    pub fn join(shard: Shard, address: SocketAddr) -> Result<Self> {
        tracing::info!("{shard} meets the others at {address}");
        let streams = match shard.is_first() {
            true => gather(shard, address)?,
            false => vec![knock(shard, address)?],
        };
        Self::over(shard, streams, |message| exit(message))
    }

    /// A meeting over connections; `lost` is called with a message when one breaks.
    fn over(shard: Shard, streams: Vec<TcpStream>, lost: fn(&str)) -> Result<Self> {
        let failed = |error: io::Error| failed("watching a rank", &error);
        let (told, commands) = channel();
        let mut parts = Vec::new();
        for (at, stream) in streams.iter().enumerate() {
            stream.set_read_timeout(None).map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            let (heard, part) = channel();
            let (stream, told) = (stream.try_clone().map_err(failed)?, told.clone());
            let other = if shard.is_first() { at + 1 } else { 0 };
            let watch = move || watch(stream, (shard, other), &heard, &told, lost);
            thread::Builder::new().name(format!("rank {other}")).spawn(watch).map_err(failed)?;
            parts.push(part);
        }
        let (writers, parts, commands) = (streams.into(), parts.into(), commands.into());
        Ok(Self { shard, writers, parts, commands })
    }

    /// Tells all other ranks what to do.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`].
    pub fn command(&self, bytes: &[u8]) -> Result<()> {
        self.tell(&Frame::Command(bytes.to_vec()))
    }

    /// Waits for rank 0's next command; `None` once rank 0 has done its work.
    pub fn next_command(&self) -> Option<Vec<u8>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
    }

    /// Whether all ranks say yes. All ranks call it.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`].
    pub fn agree(&self, own: bool) -> Result<bool> {
        let yes = self.add(vec![f32::from(u8::from(own))])?;
        Ok(yes.first().is_some_and(|&yes| yes as usize == self.shard.world()))
    }

    /// Whether all ranks fail in one place: each that fails calls it. A rank that goes on does not
    /// answer, and one that adds meanwhile finds parts of different sizes.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`]; [`ParallelError::UnequalParts`] where another rank adds.
    pub fn fail_together(&self, patience: Duration) -> Result<bool> {
        let all = self.add_within(vec![1.0], Some(patience))?;
        Ok(all
            .is_some_and(|all| all.first().is_some_and(|&all| all as usize == self.shard.world())))
    }

    /// The bytes of all ranks, as many on each, in the order of ranks. All ranks call it.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`].
    pub fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (rank, world) = (self.shard.rank(), self.shard.world());
        // A sum in which each rank has its own place.
        let mut padded = vec![0.0; world * own.len()];
        for (place, byte) in padded[rank * own.len()..].iter_mut().zip(own) {
            *place = f32::from(*byte);
        }
        let all: Vec<u8> = self.add(padded)?.into_iter().map(|byte| byte as u8).collect();
        Ok((0..world).map(|of| all[of * own.len()..(of + 1) * own.len()].to_vec()).collect())
    }

    /// Says that this rank has done its work. A rank that ends without saying so has died, and ends
    /// the others.
    pub fn finish(&self) {
        // Those that have ended already need not hear it.
        let _ = self.tell(&Frame::Done);
    }

    /// Ends this process, and by that all other ranks' processes: they may wait for a sum to which
    /// this rank adds nothing any more.
    pub fn abandon(&self, reason: &str) -> ! {
        exit(&format!("{}: {reason}; all ranks end", self.shard))
    }

    fn tell(&self, frame: &Frame) -> Result<()> {
        let mut writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        // All are told, also behind one that has left.
        let mut told = Ok(());
        for (at, writer) in writers.iter_mut().enumerate() {
            if frame.write(writer).is_err() {
                told = told.and(Err(self.left(at)));
            }
        }
        told
    }

    /// The next numbers of a connection; `None` where they do not come in time.
    fn hear(&self, at: usize, patience: Option<Duration>) -> Result<Option<Vec<f32>>> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let part = parts.get(at).ok_or_else(|| self.left(at))?;
        let heard = match patience {
            None => loop {
                match part.recv_timeout(SILENT) {
                    Err(RecvTimeoutError::Timeout) => {
                        let (rank, world) = (self.rank_at(at), self.shard.world());
                        tracing::warn!("rank {rank} of {world} has said nothing for {SILENT:?}");
                    }
                    heard => break heard,
                }
            },
            Some(patience) => part.recv_timeout(patience),
        };
        match heard {
            Ok(bytes) => Ok(Some(numbers(&bytes))),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.left(at)),
        }
    }

    fn left(&self, at: usize) -> ParallelError {
        ParallelError::RankLeft { rank: self.rank_at(at), world: self.shard.world() }
    }

    /// The rank on the other side of a connection.
    fn rank_at(&self, at: usize) -> usize {
        if self.shard.is_first() { at + 1 } else { 0 }
    }

    /// Adds the numbers of all ranks, in the order of ranks.
    fn add(&self, own: Vec<f32>) -> Result<Vec<f32>> {
        // Without a limit of time they come, or the rank leaves.
        self.add_within(own, None)?.ok_or_else(|| self.left(0))
    }

    /// [`Self::add`]; `None` where a rank does not come in time.
    fn add_within(&self, own: Vec<f32>, patience: Option<Duration>) -> Result<Option<Vec<f32>>> {
        if !self.shard.is_first() {
            self.tell(&Frame::numbers(&own))?;
            return self.hear(0, patience);
        }
        let mut parts = vec![own];
        for at in 0..self.shard.world() - 1 {
            let Some(part) = self.hear(at, patience)? else { return Ok(None) };
            let (expected, actual) = (parts[0].len(), part.len());
            if expected != actual {
                return Err(ParallelError::UnequalParts { rank: at + 1, expected, actual });
            }
            parts.push(part);
        }
        let sum = sum(parts.into_iter());
        self.tell(&Frame::numbers(&sum))?;
        Ok(Some(sum))
    }
}

/// Sums through rank 0's memory and the connections, for ranks without NCCL: slow, for tests.
impl Collective for Meeting {
    fn shard(&self) -> Shard {
        self.shard
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>> {
        through_host(tensor, |own| self.add(own))
    }
}

/// Waits for all other ranks; returns their connections in the order of ranks.
fn gather(shard: Shard, address: SocketAddr) -> Result<Vec<TcpStream>> {
    let failed = |error: io::Error| failed(&format!("listening at {address}"), &error);
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut found: Vec<Option<TcpStream>> = (1..shard.world()).map(|_| None).collect();
    let (knocked, came) = channel();
    let begun = Instant::now();
    while found.iter().any(Option::is_none) {
        match listener.accept() {
            // Whoever knocks may be silent: others are heard meanwhile.
            Ok((stream, _)) => {
                let knocked = knocked.clone();
                thread::spawn(move || {
                    if let Some(found) = introduced(shard, stream) {
                        // Nobody waits for it any more.
                        let _ = knocked.send(found);
                    }
                });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(KNOCKING),
            Err(error) => return Err(failed(error)),
        }
        for (rank, stream) in came.try_iter() {
            match found.get_mut(rank.wrapping_sub(1)) {
                Some(free @ None) => *free = Some(stream),
                _ => tracing::warn!("a second process came as rank {rank}, and is not heard"),
            }
        }
        for (at, stream) in found.iter().enumerate() {
            if stream.as_ref().is_some_and(has_ended) {
                return Err(ParallelError::RankLeft { rank: at + 1, world: shard.world() });
            }
        }
        if begun.elapsed() > GATHERING {
            let present = 1 + found.iter().flatten().count();
            return Err(ParallelError::TimedOut {
                present,
                world: shard.world(),
                waited: GATHERING,
            });
        }
    }
    let mut streams: Vec<TcpStream> = found.into_iter().flatten().collect();
    let hello = hello(shard);
    for stream in &mut streams {
        hello.write(stream).map_err(failed)?;
    }
    Ok(streams)
}

/// Whether the other side has closed a connection from which nothing has come.
fn has_ended(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let _ = stream.set_nonblocking(false);
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// A connection that is read until a time.
struct Until<'a> {
    stream: &'a TcpStream,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        // A time of 0 would mean no limit.
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.stream.read(to)
    }
}

/// A connection's rank, if it introduces itself as one of the group in time.
fn introduced(shard: Shard, stream: TcpStream) -> Option<(usize, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    let until = Until { stream: &stream, end: Instant::now() + INTRODUCTION };
    let Ok(Frame::Hello(bytes)) = Frame::read(&mut until.take(LONGEST_HELLO)) else { return None };
    let hello: Hello = serde_json::from_slice(&bytes).ok()?;
    let expected = Hello { rank: hello.rank, ..Hello::of(shard) };
    if hello != expected {
        tracing::warn!("a process of another group knocked: {hello:?}, expected {expected:?}");
        return None;
    }
    Some((hello.rank, stream))
}

/// Connects to rank 0.
fn knock(shard: Shard, address: SocketAddr) -> Result<TcpStream> {
    let begun = Instant::now();
    let mut last = None;
    while begun.elapsed() < GATHERING {
        match TcpStream::connect_timeout(&address, INTRODUCTION) {
            Ok(mut stream) => {
                let failed = |error: io::Error| failed(&format!("meeting at {address}"), &error);
                hello(shard).write(&mut stream).map_err(failed)?;
                let left = GATHERING.saturating_sub(begun.elapsed()) + INTRODUCTION;
                stream.set_read_timeout(Some(left)).map_err(failed)?;
                let Frame::Hello(_) = Frame::read(&mut stream).map_err(failed)? else {
                    let error = io::Error::from(io::ErrorKind::InvalidData);
                    return Err(failed(error));
                };
                return Ok(stream);
            }
            Err(error) => {
                last = Some(error);
                thread::sleep(KNOCKING);
            }
        }
    }
    let error = last.unwrap_or_else(|| io::ErrorKind::TimedOut.into());
    Err(failed(&format!("meeting rank 0 at {address}"), &error))
}

fn hello(shard: Shard) -> Frame {
    Frame::Hello(serde_json::to_vec(&Hello::of(shard)).unwrap_or_default())
}

/// Reads the messages of a connection, and puts each into the channel of its kind, until the
/// connection ends.
fn watch(
    mut stream: TcpStream,
    (shard, other): (Shard, usize),
    heard: &Sender<Vec<u8>>,
    told: &Sender<Vec<u8>>,
    lost: fn(&str),
) {
    loop {
        let sent = match Frame::read(&mut stream) {
            Ok(Frame::Numbers(bytes)) => heard.send(bytes).is_ok(),
            Ok(Frame::Command(bytes)) => told.send(bytes).is_ok(),
            Ok(Frame::Hello(_)) => true,
            Ok(Frame::Done) => return,
            Err(error) => {
                let (own, world) = (shard.rank(), shard.world());
                tracing::debug!("the connection to rank {other}: {error}");
                lost(&format!(
                    "the connection to rank {other} of {world} broke: rank {own} ends, too"
                ));
                return;
            }
        };
        // Nobody listens: this rank ends by itself.
        if !sent {
            return;
        }
    }
}

/// Ends the process, whose other threads may wait for a device forever.
pub(super) fn exit(message: &str) -> ! {
    // Whoever read the errors may have died, too, and `eprintln!` would panic. One write, since
    // ranks share their standard error.
    let _ = io::stderr().write_all(format!("error: {message}\n").as_bytes());
    std::process::exit(LOST);
}

fn failed(action: &str, error: &io::Error) -> ParallelError {
    ParallelError::Process { action: action.into(), reason: error.to_string() }
}
