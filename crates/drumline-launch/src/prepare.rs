//! What a worker does between `fork` and `exec`, and the only unsafe code of this crate.
//!
//! ```text
//!   fork ─▶ own session and process group ─▶ no signal blocked ─▶ the user's limit of descriptors ─▶ its own cores
//!        ─▶ "kill me when my parent's thread ends" ─▶ is the parent still alive? ─▶ the key stays open ─▶ exec
//! ```
//!
//! The session shields the worker from the terminal's Ctrl-C (the launcher decides what to do about it) and gives each
//! worker its own process group, which is signalled as a whole.
//!
//! The kernel ties the death signal to the *thread* that forked: the caller must be a thread that outlives the
//! worker (here, the job's supervisor).

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::Arc;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, set_parent_process_death_signal, setrlimit, setsid,
};
use rustix::thread::{CpuSet, sched_setaffinity};

/// What happens to a worker when the process that started it is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// The kernel kills it at once.
    Die,
    /// It keeps running. Only the control of a test uses this.
    #[cfg(test)]
    KeepRunning,
}

/// What is set up in a worker before `exec`.
#[derive(Debug)]
pub(crate) struct ChildSetup {
    /// Descriptors that stay open across exec, under the same numbers.
    pub(crate) kept: Vec<Arc<OwnedFd>>,
    /// The cores it may run on; all of the launcher's if `None`.
    pub(crate) cores: Option<CpuSet>,
    /// How many descriptors it may open.
    pub(crate) limit: Rlimit,
    pub(crate) orphans: Orphans,
}

/// Makes `command` start as a worker.
pub(crate) fn prepare(command: &mut Command, setup: ChildSetup) {
    let parent = getpid();
    let in_child = move || {
        setsid()?;
        unblock_signals()?;
        setrlimit(Resource::Nofile, setup.limit)?;
        if let Some(cores) = &setup.cores {
            sched_setaffinity(None, cores)?;
        }
        if setup.orphans == Orphans::Die {
            die_with(parent)?;
        }
        setup.kept.iter().try_for_each(|fd| Ok(fcntl_setfd(fd.as_fd(), FdFlags::empty())?))
    };
    // SAFETY: after fork only async-signal-safe work is allowed, as another thread may have held a lock (malloc's
    // for one) at that moment. The closure makes bare system calls on values made before the fork, and its errors
    // are OS codes, so that it neither allocates nor locks. It closes no descriptor and touches no shared memory.
    unsafe { command.pre_exec(in_child) };
}

/// Unblocks all signals: a launcher that blocks signals to read them in another way must not pass that on.
fn unblock_signals() -> io::Result<()> {
    let mut none = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` fills the set it is given, which `pthread_sigmask` then only reads; the old mask is not
    // asked for. Both are async-signal-safe.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Requests SIGKILL when `parent` ends; an error if it has already ended.
fn die_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::OWNERDEAD.into()) }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Stdio};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

    use super::*;
    use crate::descriptors::FdLimit;
    use crate::pump::Output;
    use crate::worker::{Worker, WorkerSpec};

    /// The variable that makes `launcher` below act, in a process of its own.
    const LAUNCHER: &str = "DRUMLINE_LAUNCH_TEST_LAUNCHER";

    #[test]
    fn launcher() {
        let orphans = match std::env::var(LAUNCHER).as_deref() {
            Ok("die") => Orphans::Die,
            Ok("live on") => Orphans::KeepRunning,
            _ => return,
        };
        let status = |file| std::fs::read_to_string(file).unwrap();
        println!("\nlauncher {}", blocked(&status("/proc/thread-self/status")));
        let spec = WorkerSpec { program: "sleep".into(), args: vec!["60".into()], ..WorkerSpec::default() };
        let (worker, _) =
            Worker::start(&spec, &Output::Inherit, FdLimit::raise_for(1).before, orphans).unwrap();
        println!("worker {}", blocked(&status(&format!("/proc/{}/status", worker.pid()))));
        println!("pid {}", worker.pid());
        std::thread::sleep(Duration::from_secs(60));
    }

    fn blocked(status: &str) -> &str {
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap()
    }

    /// A launcher with one worker, both ended when dropped.
    struct Launched {
        launcher: Child,
        worker: Option<OwnedFd>,
        output: String,
    }

    fn launch(orphans: &str) -> Launched {
        let launcher = Command::new("env")
            .args(["--block-signal=TERM", std::env::current_exe().unwrap().to_str().unwrap()])
            .args(["--exact", "prepare::tests::launcher", "--nocapture", "--quiet"])
            .env(LAUNCHER, orphans)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut launched = Launched { launcher, worker: None, output: String::new() };
        let stdout = launched.launcher.stdout.take().unwrap();
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            launched.output += &format!("{line}\n");
            if let Some(pid) = line.strip_prefix("pid ").and_then(|pid| Pid::from_raw(pid.parse().unwrap())) {
                launched.worker = Some(pidfd_open(pid, PidfdFlags::empty()).unwrap());
                return launched;
            }
        }
        panic!("the launcher ended early: {}", launched.output);
    }

    impl Launched {
        fn kill_launcher(&mut self) {
            self.launcher.kill().unwrap();
            self.launcher.wait().unwrap();
        }

        fn worker_ends_within(&self, within: Duration) -> bool {
            let within = Timespec::try_from(within).unwrap();
            poll(&mut [PollFd::new(self.worker.as_ref().unwrap(), PollFlags::IN)], Some(&within)).unwrap()
                == 1
        }
    }

    impl Drop for Launched {
        fn drop(&mut self) {
            let _ = self.worker.as_ref().map(|worker| pidfd_send_signal(worker, Signal::KILL));
            let _ = self.launcher.kill().and_then(|()| self.launcher.wait());
        }
    }

    #[test]
    fn sigkill_of_the_launcher_ends_the_worker() {
        let mut launched = launch("die");
        assert!(!launched.worker_ends_within(Duration::from_millis(50)), "it runs while its launcher does");
        launched.kill_launcher();
        assert!(launched.worker_ends_within(Duration::from_secs(1)));
    }

    #[test]
    fn without_the_death_signal_the_worker_keeps_running() {
        let mut launched = launch("live on");
        launched.kill_launcher();
        assert!(!launched.worker_ends_within(Duration::from_secs(1)), "control: the signal is what ends it");
    }

    #[test]
    fn a_worker_starts_with_no_signal_blocked() {
        let output = launch("die").output.clone();
        assert!(
            output.contains("launcher SigBlk:\t0000000000004000"),
            "control: SIGTERM is blocked here: {output}"
        );
        assert!(output.contains("worker SigBlk:\t0000000000000000"), "{output}");
    }

    #[test]
    fn a_parent_that_has_already_ended_is_noticed() {
        assert!(die_with(getpid()).is_err());
        set_parent_process_death_signal(None).unwrap();
    }
}
