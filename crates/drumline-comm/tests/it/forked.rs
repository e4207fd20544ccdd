//! A rank that dies while another process holds copies of all its sockets, as a forked child does: none of its connections ends,
//! and yet the others learn of its death.
//!
//! There is no launcher to report it: the ranks meet at a store that rank 0 hosts. The test takes the copies with
//! `pidfd_getfd`, which gives exactly what a fork would.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, ProcessGroup, ReduceOp};
use drumline_rendezvous::InitOptions;
use rank_test::anyhow::{Result, ensure};
use rank_test::{Ranks, ranks_test};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};

use crate::frozen_host::meeting_in_a_file;

const SOON: Duration = Duration::from_secs(30);

/// How long survivors may take to learn of it, on a busy machine.
const REPORTED: Duration = Duration::from_secs(6);

fn live() -> Result<()> {
    let member = drumline_rendezvous::init(&std::env::var("MEETING")?, InitOptions::default())?;
    let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
    let sum = || group.all_reduce(&mut [1f32; 5_000], ReduceOp::Sum);
    sum()?;
    println!("ready");
    let victim: usize = std::env::var("VICTIM")?.parse()?;
    if group.rank() == victim {
        std::thread::sleep(SOON);
    }
    let verdict = sum().map_or_else(|error| error.to_string(), |()| "all went well".into());
    println!("verdict: {}", verdict.replace('\n', " | "));
    Ok(())
}

/// Copies of all sockets of a process.
fn sockets_of(pid: Pid) -> Result<Vec<OwnedFd>> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let mut copies = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()))? {
        let entry = entry?;
        let is_socket = std::fs::read_link(entry.path())?.to_string_lossy().starts_with("socket:");
        if let (true, Some(number)) =
            (is_socket, entry.file_name().to_str().and_then(|name| name.parse().ok()))
        {
            copies.push(pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?);
        }
    }
    Ok(copies)
}

fn die_with_copies(ranks: &Ranks, victim: usize) -> Result<()> {
    let running = ranks.clone().env([("VICTIM", victim.to_string())]).start()?;
    (0..3).try_for_each(|rank| running.wait_for_line(rank, "ready", SOON).map(drop))?;
    let pid = Pid::from_raw(running.pid(victim)? as i32).expect("a rank has a pid");
    let copies = sockets_of(pid)?;
    ensure!(copies.len() >= 2, "only {} sockets", copies.len());
    kill_process(pid, Signal::KILL)?;
    let begin = Instant::now();
    for rank in (0..3).filter(|rank| *rank != victim) {
        let line = running.wait_for_line(rank, "verdict: ", SOON)?;
        let time = begin.elapsed();
        ensure!(line.contains(&format!("lost rank {victim} ")), "rank {rank}: {line}");
        ensure!(time < REPORTED, "rank {rank} only after {time:?}: {line}");
    }
    // Closed only now: until here all sockets looked as if the rank were alive.
    drop(copies);
    running.wait_all(SOON).map(drop)
}

ranks_test!(a_forked_child_does_not_hide_the_death_of_its_rank, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        for victim in [1, 0] {
            meeting_in_a_file(&ranks, transport, |ranks| {
                die_with_copies(&ranks.env([("DRUMLINE_TIMEOUT", "25s")]), victim)
            })?;
        }
    }
});
