//! The keeper's own process: `drumline keeper`, which only an agent starts.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::fault::Fault;
use drumline_rendezvous::{JobKey, ServerOptions, TcpStoreServer};
use rustix::process::{Signal, getpid, set_child_subreaper, set_parent_process_death_signal, setsid};

use super::fault_injector::FaultInjector;
use super::protocol::{KeeperCommand, KeeperReport, Start, receive, send};
use super::sweep::{reap_all_but, sweep};
use crate::LaunchError;
use crate::agent::clock;
use crate::hosted_store::reporter;
use crate::key_memory::KeyMemory;
use crate::logs::AttemptLogs;
use crate::pump::Output;
use crate::report::Exit;
use crate::running::{JobControl, RunOptions, RunningJob};
use crate::supervise::{Hooks, OnExit};

/// How long to wait for killed processes to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the keeper reaps orphans of the workers that have ended by themselves.
const REAP_INTERVAL: Duration = Duration::from_secs(1);

/// Sends reports to the agent, from a thread of its own: a frozen agent does not read, and that must not block the
/// keeper.
#[derive(Clone)]
struct ReportSender(Sender<KeeperReport>);

impl ReportSender {
    fn start(agent: UnixStream) -> io::Result<(Self, JoinHandle<()>)> {
        let (sender, reports) = mpsc::channel::<KeeperReport>();
        let forward = move || {
            // If the agent is gone, sending fails, and the main thread sees the end of its socket.
            reports.iter().for_each(|report| drop(send(&agent, &report)));
        };
        let thread = std::thread::Builder::new().name("drumline-reports".to_string()).spawn(forward)?;
        Ok((Self(sender), thread))
    }

    fn send(&self, report: KeeperReport) {
        let _ = self.0.send(report);
    }
}

/// Runs a keeper: obeys the agent at the other end of stdin, and returns when nothing runs any more.
pub fn keep() -> io::Result<()> {
    // The terminal's Ctrl-C is for the agent.
    setsid()?;
    catch_signals()?;
    // If this process is frozen when its agent dies, this wakes it, so that it can kill the workers.
    set_parent_process_death_signal(Some(Signal::CONT))?;
    set_child_subreaper(Some(getpid()))?;
    let agent = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let Some(KeeperCommand::Start(start)) = receive(&agent)? else { return Ok(()) };
    let (reports, sender_thread) = ReportSender::start(agent.try_clone()?)?;
    let logs = start.logs.clone();
    match KeptRound::start(*start, &reports) {
        Ok(kept) => kept.run(&agent, &reports),
        Err(error) => {
            sweep(KILL_TIMEOUT);
            logs.remove_temporary();
            reports.send(KeeperReport::NotStarted(error.to_string()));
        }
    }
    drop(reports);
    // The thread ends once the last report is sent, or when the agent is gone.
    let _ = sender_thread.join();
    Ok(())
}

/// Slurm signals every process of a step, and so also the keeper. The agent decides which signals the workers get. A
/// handler, unlike `SIG_IGN`, is not inherited by the workers.
fn catch_signals() -> io::Result<()> {
    let unused = Arc::new(AtomicBool::new(false));
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2] {
        signal_hook::flag::register(signal.as_raw(), Arc::clone(&unused))?;
    }
    Ok(())
}

/// A round's workers, and their store if this node hosts it.
struct KeptRound {
    job: RunningJob,
    logs: AttemptLogs,
    lease: Option<Duration>,
    faults: Vec<Fault>,
    _store: Option<TcpStoreServer>,
}

impl KeptRound {
    fn start(start: Start, reports: &ReportSender) -> Result<Self, LaunchError> {
        let Start { mut workers, logs, stop, key, lease, store, faults } = start;
        let key = JobKey::from_bytes(key.0);
        let memory = KeyMemory::new(&key)?;
        for worker in &mut workers {
            worker.env.extend(memory.environment());
            worker.kept.push(memory.descriptor());
        }
        logs.make(workers.len())?;
        let round = u32::try_from(store.round).unwrap_or(u32::MAX);
        let options = ServerOptions { world_size: Some(store.world_size), round };
        let bind = |listen: &String| TcpStoreServer::bind(listen, &key, options);
        let hosted = store.listen.as_ref().map(bind).transpose().map_err(LaunchError::Store)?;
        let on_exit =
            reporting_failures(reporter(store.address, key, round, store.host_timeout), reports.clone());
        let hooks = Hooks { on_exit, on_end: Box::new(sweep_all) };
        let options = RunOptions { output: Output::Logged(logs.clone()), stop, deadline: None };
        let job = RunningJob::supervised(workers, options, hooks, None)?;
        Ok(Self { job, logs, lease, faults, _store: hosted })
    }

    /// Obeys the agent until it is gone and no worker runs any more.
    fn run(self, agent: &UnixStream, reports: &ReportSender) {
        let control = self.job.control();
        let _faults = FaultInjector::start(&self.faults, &control);
        let job = self.job;
        let reports = reports.clone();
        let waiter = std::thread::Builder::new().name("drumline-waiter".to_string()).spawn(move || {
            reports.send(KeeperReport::Over(job.wait()));
        });
        let agent_end = obey(agent, &control, self.lease);
        control.kill();
        if let Ok(waiter) = waiter {
            // The thread does not panic. If it did, dropping the job has killed the workers.
            let _ = waiter.join();
        }
        if agent_end == AgentEnd::Died {
            self.logs.remove_temporary();
        }
    }
}

/// Kills the processes that the workers have left behind, which may also hold the workers' output open.
fn sweep_all() {
    let left = sweep(KILL_TIMEOUT);
    if !left.is_empty() {
        tracing::warn!(?left, "gave up on processes that cannot be killed");
    }
}

/// How the agent left its keeper.
#[derive(Debug, PartialEq, Eq)]
enum AgentEnd {
    /// It said goodbye and keeps running.
    Released,
    Died,
}

/// Carries out the agent's commands, and kills the workers when their lease is over. Returns when the agent is gone.
fn obey(agent: &UnixStream, control: &JobControl, mut lease: Option<Duration>) -> AgentEnd {
    loop {
        if lease.is_some_and(|lease| clock::now() >= lease) {
            control.kill();
            lease = None;
        }
        reap_all_but(&control.pids());
        let left = lease.map_or(REAP_INTERVAL, |lease| lease.saturating_sub(clock::now()).min(REAP_INTERVAL));
        match next(agent, left) {
            Ok(Some(KeeperCommand::Stop { signal, settle, grace })) => {
                control.stop(Signal::from_named_raw(signal).unwrap_or(Signal::TERM), settle, grace);
            }
            Ok(Some(KeeperCommand::Signal(signal))) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    control.signal_all(signal);
                }
            }
            Ok(Some(KeeperCommand::Kill)) => control.kill(),
            Ok(Some(KeeperCommand::Lease(until))) => lease = Some(until),
            Ok(Some(KeeperCommand::Bye)) => return AgentEnd::Released,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(KeeperCommand::Start(_)) | None) | Err(_) => return AgentEnd::Died,
        }
    }
}

/// The next command; an error of kind `WouldBlock` if none came in time.
fn next(agent: &UnixStream, within: Duration) -> io::Result<Option<KeeperCommand>> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec::try_from(within).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(agent, PollFlags::IN)], Some(&within)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
        Ok(_) => receive(agent),
        Err(error) => Err(error.into()),
    }
}

/// Reports failures to the agent, and then calls `then`.
fn reporting_failures(mut then: OnExit, reports: ReportSender) -> OnExit {
    let began = Instant::now();
    Box::new(move |ended, exit| {
        if !exit.is_success() && exit != Exit::StoppedByUs {
            reports.send(KeeperReport::Failed {
                rank: ended.rank,
                exit,
                ran_for: ended.at.saturating_duration_since(began),
            });
        }
        then(ended, exit);
    })
}
