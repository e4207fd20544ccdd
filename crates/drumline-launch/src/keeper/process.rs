//! The keeper's own life: `drumline keeper`, which only an agent starts.

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

use super::protocol::{News, Start, Wish, receive, send};
use super::rehearsal::Rehearsal;
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

/// How long killed processes are waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often the keeper takes away what workers have left and has ended by itself.
const LOOK: Duration = Duration::from_secs(1);

/// How news reaches the agent: from a thread of its own, as an agent that is frozen does not read, and nobody here may
/// stand still because of that.
#[derive(Clone)]
struct Teller(Sender<News>);

impl Teller {
    fn start(agent: UnixStream) -> io::Result<(Self, JoinHandle<()>)> {
        let (teller, news) = mpsc::channel();
        let speak = move || {
            // An agent that is gone hears nothing, and the end of its socket is seen by the main thread.
            news.iter().for_each(|news| drop(send(&agent, &news)));
        };
        let thread = std::thread::Builder::new().name("drumline-news".to_string()).spawn(speak)?;
        Ok((Self(teller), thread))
    }

    fn tell(&self, news: News) {
        let _ = self.0.send(news);
    }
}

/// Carries out what the agent at the other end of stdin says. Returns when nothing runs any more.
pub fn keep() -> io::Result<()> {
    // The terminal's Ctrl-C is for the agent.
    setsid()?;
    outlive_signals()?;
    // If somebody has frozen this process, it wakes for its last duty.
    set_parent_process_death_signal(Some(Signal::CONT))?;
    set_child_subreaper(Some(getpid()))?;
    let agent = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let Some(Wish::Start(start)) = receive(&agent)? else { return Ok(()) };
    let (teller, speaker) = Teller::start(agent.try_clone()?)?;
    let logs = start.logs.clone();
    match Kept::start(*start, &teller) {
        Ok(kept) => kept.until_over(&agent, &teller),
        Err(error) => {
            sweep(PATIENCE);
            logs.remove_passing();
            teller.tell(News::NotStarted(error.to_string()));
        }
    }
    drop(teller);
    // It ends with its last word, or with the agent.
    let _ = speaker.join();
    Ok(())
}

/// Slurm sends a signal to every process of a step, and so to the keeper too; what the workers are to hear of it comes
/// from the agent. Handlers, unlike a signal that is ignored, are not handed down to the workers.
fn outlive_signals() -> io::Result<()> {
    let unused = Arc::new(AtomicBool::new(false));
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2] {
        signal_hook::flag::register(signal.as_raw(), Arc::clone(&unused))?;
    }
    Ok(())
}

/// A round's workers, and their store if it is here.
struct Kept {
    job: RunningJob,
    logs: AttemptLogs,
    lease: Option<Duration>,
    faults: Vec<Fault>,
    _store: Option<TcpStoreServer>,
}

impl Kept {
    fn start(start: Start, teller: &Teller) -> Result<Self, LaunchError> {
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
        let on_exit = telling(reporter(store.address, key, round, store.host_timeout), teller.clone());
        let hooks = Hooks { on_exit, on_end: Box::new(sweep_all) };
        let options = RunOptions { output: Output::Logged(logs.clone()), stop, deadline: None };
        let job = RunningJob::supervised(workers, options, hooks, None)?;
        Ok(Self { job, logs, lease, faults, _store: hosted })
    }

    /// Obeys until the agent is gone and nothing runs any more.
    fn until_over(self, agent: &UnixStream, teller: &Teller) {
        let control = self.job.control();
        let _rehearsal = Rehearsal::start(&self.faults, &control);
        let (job, teller) = (self.job, teller.clone());
        let waiter = std::thread::Builder::new().name("drumline-waiter".to_string()).spawn(move || {
            teller.tell(News::Over(job.wait()));
        });
        let parting = obey(agent, &control, self.lease);
        control.kill();
        if let Ok(waiter) = waiter {
            // It does not panic; if it did, the job's end has killed the workers.
            let _ = waiter.join();
        }
        if parting == Parting::Death {
            self.logs.remove_passing();
        }
    }
}

/// Kills what the workers have left behind, which may also hold their output open.
fn sweep_all() {
    let left = sweep(PATIENCE);
    if !left.is_empty() {
        tracing::warn!(?left, "processes that cannot be killed were given up");
    }
}

/// How the agent went.
#[derive(Debug, PartialEq, Eq)]
enum Parting {
    Bye,
    Death,
}

/// Does what the agent says, and kills the workers when their lease is over; returns when the agent is gone.
fn obey(agent: &UnixStream, control: &JobControl, mut lease: Option<Duration>) -> Parting {
    loop {
        if lease.is_some_and(|lease| clock::now() >= lease) {
            control.kill();
            lease = None;
        }
        reap_all_but(&control.pids());
        let left = lease.map_or(LOOK, |lease| lease.saturating_sub(clock::now()).min(LOOK));
        match next(agent, left) {
            Ok(Some(Wish::Stop { signal, settle, grace })) => {
                control.stop(Signal::from_named_raw(signal).unwrap_or(Signal::TERM), settle, grace);
            }
            Ok(Some(Wish::Signal(signal))) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    control.signal_all(signal);
                }
            }
            Ok(Some(Wish::Kill)) => control.kill(),
            Ok(Some(Wish::Lease(until))) => lease = Some(until),
            Ok(Some(Wish::Bye)) => return Parting::Bye,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(Some(Wish::Start(_)) | None) | Err(_) => return Parting::Death,
        }
    }
}

/// The next wish; an error of the kind `WouldBlock` if none came in time.
fn next(agent: &UnixStream, within: Duration) -> io::Result<Option<Wish>> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec::try_from(within).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(agent, PollFlags::IN)], Some(&within)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
        Ok(_) => receive(agent),
        Err(error) => Err(error.into()),
    }
}

/// Tells the agent of failures, besides what `others` tell.
fn telling(mut others: OnExit, teller: Teller) -> OnExit {
    let began = Instant::now();
    Box::new(move |ended, exit| {
        if !exit.is_success() && exit != Exit::StoppedByUs {
            teller.tell(News::Failed {
                rank: ended.rank,
                exit,
                ran_for: ended.at.saturating_duration_since(began),
            });
        }
        others(ended, exit);
    })
}
