//! Ranks as processes: they add, and none outlives another.

#![allow(clippy::unwrap_used)]

#[cfg(feature = "cuda")]
mod direct;

use std::env;
use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use kv_parallel::{Ranks, Role};

/// What a rank does, for [`rank`].
const TASK: &str = "KV_TEST_TASK";
const RANKS: usize = 3;
/// How soon all ranks have ended once one has died.
const SOON: Duration = Duration::from_secs(10);

/// This executable again, which runs [`rank`] alone.
fn again(task: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["rank", "--exact", "--nocapture"]).env(TASK, task);
    command
}

/// One rank of the other tests, or the process that starts them; nothing without a task.
#[test]
fn rank() {
    let Ok(task) = env::var(TASK) else { return };
    match Ranks::join(Some(RANKS)) {
        Ok(Role::Starter(code)) => std::process::exit(i32::from(code != ExitCode::SUCCESS)),
        Ok(Role::Rank(ranks)) => {
            work(&task, &ranks);
            ranks.finish();
            std::process::exit(0);
        }
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    }
}

fn work(task: &str, ranks: &Ranks) {
    let device = Device::flex();
    let (own, is_second) = (ranks.shard().rank(), ranks.shard().rank() == 1);
    let sums = || {
        let collective = ranks.collective(&device).unwrap();
        let sum = |round: usize| {
            let own = Tensor::<2>::full([1, 5], (own + round) as f32, &device);
            collective.all_reduce(own).unwrap().into_data().try_into_vec::<f32>().unwrap()[0]
        };
        (0..100).map(sum).sum::<f32>()
    };
    match task {
        "add" => println!("rank {own}: {}", sums()),
        "exit" if is_second => std::process::exit(3),
        "kill" if is_second => std::process::abort(),
        // As where a device waits for a sum that never comes.
        "exit" | "kill" | "kill-starter" => std::thread::sleep(Duration::from_secs(60)),
        "obey" => {
            let meeting = ranks.meeting().unwrap();
            if ranks.shard().is_first() {
                for command in ["one", "two"] {
                    meeting.command(command.as_bytes()).unwrap();
                }
                return;
            }
            let mut heard = Vec::new();
            while let Some(command) = meeting.next_command() {
                heard.push(String::from_utf8(command).unwrap());
            }
            // Ranks write to one pipe, and `eprintln` writes its pieces one by one.
            let line = format!("rank {own} heard {}\n", heard.join(" "));
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
        "gather" => {
            let all = ranks.meeting().unwrap().gather(&[own as u8, 255, 0]).unwrap();
            assert_eq!(all, (0..RANKS).map(|rank| vec![rank as u8, 255, 0]).collect::<Vec<_>>());
        }
        #[cfg(feature = "cuda")]
        "direct" => direct::sums(ranks),
        other => panic!("{other}"),
    }
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}{err}")
}

#[test]
fn ranks_that_one_command_starts_add() {
    let output = again("add").output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    // Three ranks add 3 r + 3, for r from 0 to 99. Only rank 0 writes to the standard output.
    assert!(text.contains("rank 0: 15150"), "{text}");
    assert!(!text.contains("rank 1:"), "{text}");
}

#[test]
fn ranks_tell_each_other_bytes() {
    let output = again("gather").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

/// All ranks share the first GPU: their kernels take turns, which is slow and right.
#[cfg(feature = "cuda")]
#[test]
fn ranks_add_through_the_memory_of_gpus() {
    if Device::enumerate(burn::tensor::DeviceType::Cuda).is_empty() {
        eprintln!("no CUDA device: nothing was added");
        return;
    }
    let output = again("direct").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn ranks_that_a_launcher_starts_add() {
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // The two ports behind it are used, too.
    let port = (0..100).map(|_| free()).find(|port| {
        let next = |beyond| TcpListener::bind(("127.0.0.1", port + beyond)).is_ok();
        *port < 65_000 && next(1) && next(2)
    });
    let started = (0..RANKS).map(|rank| {
        again("add")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.unwrap().to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let started: Vec<_> = started.collect();
    for (rank, child) in started.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let text = text(&output);
        assert!(output.status.success(), "rank {rank}: {text}");
        assert!(text.contains(&format!("rank {rank}: 15150")), "{text}");
    }
}

#[test]
fn a_rank_that_dies_ends_all() {
    for task in ["exit", "kill"] {
        let begun = Instant::now();
        let output = again(task).output().unwrap();
        let text = text(&output);
        assert!(!output.status.success(), "{text}");
        assert!(text.contains("rank 1 of 3 has ended: "), "{text}");
        assert!(text.contains("the connection to rank 1 of 3 broke"), "{text}");
        assert!(begun.elapsed() < SOON, "{task}: {:?}", begun.elapsed());
    }
}

/// A starter that is killed cannot end its ranks.
#[cfg(target_os = "linux")]
#[test]
fn ranks_end_with_the_process_that_started_them() {
    let mut starter = again("kill-starter").stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let starter = starter.as_mut().unwrap();
    // Nobody reads what the ranks have to say.
    drop(starter.stderr.take());
    let of = starter.id();
    // The test's thread starts the ranks, rather than the main one.
    let threads = || std::fs::read_dir(format!("/proc/{of}/task")).unwrap();
    let children = || -> Vec<String> {
        let each = threads().filter_map(|thread| {
            std::fs::read_to_string(thread.ok()?.path().join("children")).ok()
        });
        each.flat_map(|ids| ids.split_whitespace().map(str::to_string).collect::<Vec<_>>())
            .collect()
    };
    let begun = Instant::now();
    let mut ranks = children();
    while ranks.len() < RANKS {
        assert!(begun.elapsed() < SOON, "{ranks:?}");
        std::thread::sleep(Duration::from_millis(10));
        ranks = children();
    }
    // They have met: a rank that has not would wait for the others.
    std::thread::sleep(Duration::from_millis(300));
    starter.kill().unwrap();
    starter.wait().unwrap();
    let begun = Instant::now();
    let runs = |id: &String| {
        let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // A process that has ended may wait for whoever adopts it.
        !state.is_empty() && !state.contains(") Z ")
    };
    while ranks.iter().any(runs) {
        assert!(begun.elapsed() < SOON, "{ranks:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ranks_hear_the_commands_of_rank_0_in_order() {
    let output = again("obey").output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for rank in 1..RANKS {
        assert!(text.contains(&format!("rank {rank} heard one two")), "{text}");
    }
}

#[test]
fn a_number_of_ranks_that_the_launcher_contradicts_is_refused() {
    let output = again("add")
        .env("RANK", "0")
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "29400")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let expected = "3 ranks were asked for, but the environment says 2";
    assert!(text(&output).contains(expected), "{}", text(&output));
}
