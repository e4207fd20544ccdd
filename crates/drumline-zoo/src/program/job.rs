//! All ranks of a run, and how they agree before they train.
//!
//! A rank that fails alone would leave the others waiting in a collective, and each would tell of its own surprise. So what
//! can fail on one rank is put to the vote: all end together, with one text.

use std::cell::OnceCell;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use drumline::{GroupOptions, ProcessGroup, Signal, StopRequest, WorkQueue, worker_env};
use drumline_torch::cuda::Properties;
use tch::Device;

use super::checked::{check_writable, device};
use crate::config::DeviceKind;

/// A run that was killed may still hold its folder while the kernel takes it apart.
const TO_LEAVE: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(50);

pub(super) struct Job {
    pub(super) group: ProcessGroup,
    pub(super) local_rank: usize,
    pub(super) stop: StopRequest,
    /// For work that ranks take piece by piece.
    pub(super) queue: WorkQueue,
    /// Its launcher has started it again after a failure.
    pub(super) is_restarted: bool,
    /// No launcher started it.
    is_alone: bool,
    /// The folder that this run alone writes to, held as long as the run is.
    claimed: OnceCell<File>,
}

impl Job {
    /// Joins the job that a launcher has started, or is one alone.
    pub(super) fn join() -> anyhow::Result<Self> {
        let stop = StopRequest::listen().context("cannot listen for signals")?;
        let member = drumline::from_env()?;
        let is_alone = std::env::var_os(worker_env::DRUMLINE_ALONE).is_some() || !has_rank();
        let local_rank = member.local_rank;
        let queue = WorkQueue::new(&member, "job", 0);
        let restarts = std::env::var(worker_env::TORCHELASTIC_RESTART_COUNT).ok();
        let is_restarted =
            restarts.and_then(|count| count.parse::<u64>().ok()).is_some_and(|count| count > 0);
        let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
        Ok(Self { group, local_rank, stop, queue, is_restarted, is_alone, claimed: OnceCell::new() })
    }

    /// Makes the folder for what the run writes, once for a run; an error if that cannot be, or if another run of this machine writes there.
    pub(super) fn claim(&self, name: &str, folder: &Path) -> anyhow::Result<()> {
        let claim = || -> anyhow::Result<()> {
            check_writable(name, folder)?;
            let claimed = File::open(folder).with_context(|| format!("{name} {}", folder.display()))?;
            let give_up = Instant::now() + TO_LEAVE;
            // Where folders cannot be locked, nobody is kept out.
            while matches!(claimed.try_lock(), Err(TryLockError::WouldBlock)) {
                ensure!(
                    Instant::now() < give_up,
                    "another run writes to {name} {}; try another, or wait for its end",
                    folder.display()
                );
                std::thread::sleep(TICK);
            }
            let _ = self.claimed.set(claimed);
            Ok(())
        };
        self.agree(if self.is_first() { claim() } else { Ok(()) })
    }

    /// The line that every rank says.
    pub(super) fn say_hello(&self) {
        say(&init_line(self.local_rank, self.group.rank()));
    }

    /// The device of this rank, when all have one of the same kind. Which GPU is told on rank 0.
    pub(super) fn device(&self, kind: DeviceKind) -> anyhow::Result<Device> {
        let device = self.agree(device(kind, self.local_rank))?;
        let all = self.group.all_gather_object(&(device.is_cuda(), host()))?;
        self.agree(same_kind(&all))?;
        if let Device::Cuda(gpu) = device {
            let line = format!("[init] == device: cuda:{gpu}, {} ==", Properties::of(gpu)?.name);
            self.tell(Some(&line));
        }
        Ok(device)
    }

    /// Shows a line on rank 0, if there is one.
    pub(super) fn tell(&self, line: Option<&str>) {
        if let Some(line) = line.filter(|_| self.is_first()) {
            say(line);
        }
    }

    pub(super) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// This rank, and the number of ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.group.rank(), self.group.size())
    }

    /// The outcome if all ranks had a good one; otherwise what went wrong, the same on all.
    #[track_caller]
    pub(super) fn agree<T>(&self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        Ok(drumline::agree_on(&self.group, outcome)?)
    }

    /// The signal to stop, if it is up to this process to tell of it by its end: a launcher tells by its own.
    pub(super) fn signal_that_ended_it(&self) -> Option<Signal> {
        self.stop.signal().filter(|_| self.is_alone)
    }

    /// The seed of the run: the one given, or one that rank 0 draws.
    pub(super) fn seed(&self, given: Option<u64>) -> anyhow::Result<u64> {
        let own = given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            // Small enough to be typed again, and exact in any JSON reader.
            now.map_or(1, |now| now.subsec_nanos() as u64 ^ now.as_secs()) & 0xffff_ffff
        });
        let mut seed = [own];
        self.group.broadcast(&mut seed, 0)?;
        Ok(seed[0])
    }
}

/// Whether a launcher has given this process a rank.
fn has_rank() -> bool {
    use worker_env::{OMPI_COMM_WORLD_RANK, PMI_RANK, RANK, SLURM_PROCID};
    [RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID].iter().any(|name| std::env::var_os(name).is_some())
}

/// This machine's name.
pub(super) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// An error if some ranks have a GPU and others have not, of which each has its host.
fn same_kind(all: &[(bool, String)]) -> anyhow::Result<()> {
    let without: Vec<(usize, &str)> = all
        .iter()
        .enumerate()
        .filter(|(_, (has_gpu, _))| !has_gpu)
        .map(|(rank, (_, host))| (rank, &host[..]))
        .collect();
    if without.is_empty() || without.len() == all.len() {
        return Ok(());
    }
    let ranks =
        without.iter().map(|(rank, host)| format!("rank {rank} ({host})")).collect::<Vec<_>>().join(", ");
    anyhow::bail!(
        "no GPU can be used by {ranks}, while other ranks have theirs; try `drumline doctor gpu` there, or --device cpu"
    )
}

/// Shows a line. A stdout that is gone ends nothing.
pub(super) fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn init_line(local_rank: usize, rank: usize) -> String {
    format!("[init] == local rank: {local_rank}, global rank: {rank} ==")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_without_a_gpu_among_those_with_one_are_named() {
        let all = |has: &[bool]| has.iter().map(|has| (*has, "node2".to_owned())).collect::<Vec<_>>();
        assert!(same_kind(&all(&[true, true])).is_ok() && same_kind(&all(&[false, false])).is_ok());
        let told = same_kind(&all(&[true, false, true, false])).unwrap_err().to_string();
        assert!(told.contains("by rank 1 (node2), rank 3 (node2), while"), "{told}");
    }

    #[test]
    fn every_rank_says_hello_as_in_the_tutorial() {
        assert_eq!(init_line(1, 3), "[init] == local rank: 1, global rank: 3 ==");
    }
}
