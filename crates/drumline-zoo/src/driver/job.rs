//! The process group of a run, and how its ranks agree before training.
//!
//! A rank that fails alone would leave the others waiting in a collective until they time out, each with an error of
//! its own. So ranks exchange the outcome of everything that can fail on one of them: all stop together, with one
//! message.

use std::cell::OnceCell;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use drumline::comm::{GroupOptions, WorkQueue, worker_env};
use drumline::launch::Signal;
use drumline::{ProcessGroup, StopRequest};
use drumline_observe::runs::{self, Run};
use drumline_torch::cuda::Properties;
use tch::Device;

use super::host::{check_writable, device};
use crate::config::DeviceKind;

/// How long to wait for the lock of a folder: a killed run may hold it until the kernel has cleaned up.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(50);

/// A signal stopped a process that has no launcher. It is not a failure, but the work is not complete either.
#[derive(Debug, thiserror::Error)]
#[error("stopped by signal {}", signal.as_raw())]
pub(crate) struct Stopped {
    pub(crate) signal: Signal,
}

pub(crate) struct Job {
    pub(crate) group: ProcessGroup,
    pub(crate) local_rank: usize,
    pub(crate) stop: StopRequest,
    /// The queue from which ranks take work.
    pub(crate) queue: WorkQueue,
    /// Whether the launcher has restarted the job after a failure.
    pub(crate) is_restarted: bool,
    /// Whether this process was started without a launcher.
    is_alone: bool,
    /// The lock of the run's folder, held until the run ends.
    claimed: OnceCell<File>,
}

impl Job {
    /// Joins the group that a launcher has started, or creates a group of one rank.
    pub(crate) fn join() -> anyhow::Result<Self> {
        let stop = StopRequest::listen().context("cannot listen for signals")?;
        let member = drumline::comm::from_env()?;
        let is_alone = std::env::var_os(worker_env::DRUMLINE_ALONE).is_some() || !has_rank();
        let local_rank = member.local_rank;
        let queue = WorkQueue::new(&member, "job", 0);
        let restarts = std::env::var(worker_env::TORCHELASTIC_RESTART_COUNT).ok();
        let is_restarted =
            restarts.and_then(|count| count.parse::<u64>().ok()).is_some_and(|count| count > 0);
        let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
        Ok(Self { group, local_rank, stop, queue, is_restarted, is_alone, claimed: OnceCell::new() })
    }

    /// Creates and locks the folder that the run writes to. Returns an error if it cannot be written, or if another run
    /// on this machine writes to it.
    pub(crate) fn claim(&self, name: &str, folder: &Path) -> anyhow::Result<()> {
        let claim = || -> anyhow::Result<()> {
            check_writable(name, folder)?;
            let claimed = File::open(folder).with_context(|| format!("{name} {}", folder.display()))?;
            lock(&claimed, || format!("{} writes to {name} {}", owner(folder), folder.display()))?;
            let _ = self.claimed.set(claimed);
            Ok(())
        };
        self.on_rank_0(claim)
    }

    /// Prints the first line of every rank.
    pub(crate) fn say_hello(&self) {
        say(&init_line(self.local_rank, self.group.rank()));
    }

    /// The device of this rank. Returns an error unless all ranks have a device of the same kind. Rank 0 prints its
    /// GPU.
    pub(crate) fn device(&self, kind: DeviceKind) -> anyhow::Result<Device> {
        let device = self.agree(device(kind, self.local_rank))?;
        let all = self.group.all_gather_object(&(device.is_cuda(), host()))?;
        self.agree(same_kind(&all))?;
        if let Device::Cuda(gpu) = device {
            let line = format!("[init] == device: cuda:{gpu}, {} ==", Properties::of(gpu)?.name);
            self.say(&line);
        }
        Ok(device)
    }

    /// Prints a line on rank 0.
    pub(crate) fn say(&self, line: &str) {
        if self.is_rank_0() {
            say(line);
        }
    }

    /// Runs `act` on rank 0 only; all ranks return its error.
    pub(crate) fn on_rank_0(&self, act: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.agree(if self.is_rank_0() { act() } else { Ok(()) })
    }

    pub(crate) fn is_rank_0(&self) -> bool {
        self.group.rank() == 0
    }

    /// Returns this rank's value if all ranks succeeded; otherwise the same error on all ranks.
    #[track_caller]
    pub(crate) fn agree<T>(&self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        Ok(drumline::comm::agree_on(&self.group, outcome)?)
    }

    /// Returns an error if a signal has stopped a process that no launcher started. The exit code then names the
    /// signal, as a launcher's exit code would.
    pub(crate) fn check_signal(&self) -> Result<(), Stopped> {
        match self.stop.signal().filter(|_| self.is_alone) {
            Some(signal) => Err(Stopped { signal }),
            None => Ok(()),
        }
    }

    /// The seed of the run: the configured one, or one that rank 0 draws.
    pub(crate) fn seed(&self, given: Option<u64>) -> anyhow::Result<u64> {
        let own = given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            // Short enough to be typed again, and exact in every JSON reader.
            now.map_or(1, |now| now.subsec_nanos() as u64 ^ now.as_secs()) & 0xffff_ffff
        });
        let mut seed = [own];
        self.group.broadcast(&mut seed, 0)?;
        Ok(seed[0])
    }
}

/// Locks a run's folder. If another run has locked it, this says so on stderr and waits for a while. `busy` describes
/// the other run.
fn lock(claimed: &File, busy: impl Fn() -> String) -> anyhow::Result<()> {
    // On file systems without locks, two runs are not detected.
    let is_busy = || matches!(claimed.try_lock(), Err(TryLockError::WouldBlock));
    if !is_busy() {
        return Ok(());
    }
    let give_up = Instant::now() + LOCK_TIMEOUT;
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "note: {}; waiting for its end for up to {LOCK_TIMEOUT:?}", busy());
    while is_busy() {
        ensure!(Instant::now() < give_up, "{}; try another, or wait for its end", busy());
        std::thread::sleep(TICK);
    }
    Ok(())
}

/// The run of this user that writes to the folder, as far as it is known.
fn owner(folder: &Path) -> String {
    let same = |run: &Run| {
        folder.canonicalize().is_ok_and(|path| run.dir.canonicalize().is_ok_and(|dir| dir == path))
    };
    match runs::running().unwrap_or_default().into_iter().find(same) {
        Some(run) => format!("another run (pid {})", run.pid),
        None => "another run".to_owned(),
    }
}

/// Whether a launcher has assigned a rank to this process.
fn has_rank() -> bool {
    use worker_env::{OMPI_COMM_WORLD_RANK, PMI_RANK, RANK, SLURM_PROCID};
    [RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID].iter().any(|name| std::env::var_os(name).is_some())
}

/// The name of this machine.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns an error if some ranks have a GPU and others do not. Each rank gives its host name too.
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

/// Prints a line, and ignores a closed stdout.
pub(crate) fn say(line: &str) {
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
        let said = same_kind(&all(&[true, false, true, false])).unwrap_err().to_string();
        assert!(said.contains("by rank 1 (node2), rank 3 (node2), while"), "{said}");
    }

    #[test]
    fn every_rank_says_hello_as_in_the_tutorial() {
        assert_eq!(init_line(1, 3), "[init] == local rank: 1, global rank: 3 ==");
    }
}
