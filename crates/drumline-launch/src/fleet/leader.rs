//! Starts the hosts' commands, speaks to their agents, and sees every one of them to its end.
//!
//! ```text
//!   Running ─ a host fails, or a signal ─▶ the signal's name to all ─ grace ─▶ stdin closed: agents kill and end
//!      └── all have ended ─▶ over             ─ patience ─▶ the commands themselves are killed, and said to be lost
//! ```
//! The phases are those of a job on one node (`stop`). One thread: it polls the commands' ends, its handle's wake-up,
//! and the stdins that have not taken everything yet; a pump (`pump`) shows their lines.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use drumline_rendezvous::JobKey;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::commands::HostCommand;
use super::outcome::{FleetEnd, HostEnd, HostProblem, outcome};
use crate::logs::{Channel, Sink};
use crate::pump::Pump;
use crate::stop::{FirstFailure, OnFailure, Phase, Request, StopPolicy, View, decide, next_look};
use crate::streams::{Stream, Streams};
use crate::{Exit, LaunchError, signal_name};

/// An agent that failed has told the others: they may end by themselves, and say why, for so long.
const LINGER: Duration = Duration::from_secs(5);
/// What an agent may need beyond its own grace.
const MARGIN: Duration = Duration::from_secs(5);
/// From the end of its stdin to the end of an agent.
const PATIENCE: Duration = Duration::from_secs(5);
/// How much of a host's stderr is kept, for its last line.
const KEPT: usize = 4 << 10;

/// The agents of all hosts, started and led.
#[derive(Debug)]
pub struct Leader {
    hosts: Vec<Host>,
    orders: Arc<Orders>,
    streams: Arc<Streams>,
    pump: Option<Pump>,
    policy: StopPolicy,
    /// In the order in which they came.
    ends: Vec<HostEnd>,
    failed: Option<Failed>,
}

/// The first host that did not end well.
#[derive(Debug, Clone, Copy)]
struct Failed {
    index: usize,
    /// When the others are stopped for it.
    others_stop: Instant,
}

/// Speaks to a [`Leader`] from other threads.
#[derive(Debug, Clone)]
pub struct LeaderHandle(Arc<Orders>);

#[derive(Debug)]
struct Orders {
    wishes: Mutex<Vec<Wish>>,
    wake: OwnedFd,
}

/// What is asked of a leader.
#[derive(Debug, Clone, Copy)]
enum Wish {
    Stop(Signal),
    PassOn(Signal),
}

impl LeaderHandle {
    /// The first signal is handed on to all agents, which stop; the second makes them kill and end.
    pub fn stop(&self, signal: Signal) {
        self.wish(Wish::Stop(signal));
    }

    /// Hands a signal on to all agents that does not ask them to stop.
    pub fn pass_on(&self, signal: Signal) {
        self.wish(Wish::PassOn(signal));
    }

    fn wish(&self, wish: Wish) {
        self.0.wishes.lock().unwrap_or_else(PoisonError::into_inner).push(wish);
        let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
    }
}

/// One host's command.
#[derive(Debug)]
struct Host {
    name: String,
    child: Child,
    pidfd: OwnedFd,
    /// `None` once it is closed.
    stdin: Option<OwnedFd>,
    unwritten: VecDeque<u8>,
    running: bool,
}

impl Leader {
    /// Starts every command and gives each agent its order and `key`. `grace` is the agents' own time between a signal
    /// and SIGKILL.
    pub fn start(commands: &[HostCommand], key: &JobKey, grace: Duration) -> Result<Self, LeaderError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LaunchError::system("lead the other hosts"))?;
        let orders = Arc::new(Orders { wishes: Mutex::default(), wake });
        let policy = StopPolicy {
            on_failure: OnFailure::StopOthers,
            settle: Duration::ZERO,
            grace: grace + MARGIN,
            patience: PATIENCE,
        };
        let streams = Arc::<Streams>::default();
        let (hosts, ends) = (Vec::new(), Vec::new());
        let mut leader = Self { hosts, orders, streams, pump: None, policy, ends, failed: None };
        let mut sources = Vec::new();
        for (index, command) in commands.iter().enumerate() {
            let (host, pipes) = Host::start(command, key)?;
            leader.hosts.push(host);
            for (pipe, channel) in pipes.into_iter().zip(Channel::BOTH) {
                leader.streams.lock().push(Stream::new(index, channel, KEPT));
                sources.push((pipe, Sink::shown(channel)));
            }
        }
        let pump = Pump::start(sources, Arc::clone(&leader.streams));
        leader.pump = Some(pump.map_err(LaunchError::system("read the other hosts' output"))?);
        Ok(leader)
    }

    /// For whoever has signals to hand on.
    pub fn handle(&self) -> LeaderHandle {
        LeaderHandle(Arc::clone(&self.orders))
    }

    /// Leads until every agent has ended, or was given up.
    pub fn wait(mut self) -> FleetEnd {
        let (mut phase, mut request) = (Phase::Running, None);
        loop {
            request = self.hear(request);
            let (now, view) = (Instant::now(), self.view(request));
            let next = decide(now, phase, &view, &self.policy);
            if next != phase {
                phase = next;
                self.enter(phase, request);
            }
            if phase == Phase::Over {
                return self.end();
            }
            self.sleep(next_look(phase, &view, &self.policy));
            self.write();
            self.reap();
        }
    }

    /// What is asked for by now, if `before` was asked for already.
    fn hear(&mut self, before: Option<Request>) -> Option<Request> {
        let wishes = std::mem::take(&mut *self.orders.wishes.lock().unwrap_or_else(PoisonError::into_inner));
        wishes.into_iter().fold(before, |request, wish| match (wish, request) {
            (Wish::Stop(signal), None) => Some(Request::Stop { signal, grace: None, not_before: None }),
            (Wish::Stop(_), Some(_)) => Some(Request::Kill),
            (Wish::PassOn(signal), request) => {
                self.hosts.iter_mut().for_each(|host| host.hand_on(signal));
                request
            }
        })
    }

    fn view(&self, request: Option<Request>) -> View {
        let alive = self.hosts.iter().filter(|host| host.running).count();
        let first_failed =
            self.failed.map(|failed| FirstFailure { rank: failed.index, at: failed.others_stop });
        View { alive, first_failed, request, deadline: None }
    }

    fn enter(&mut self, phase: Phase, request: Option<Request>) {
        tracing::debug!(?phase, "leading the hosts to their end");
        for host in self.hosts.iter_mut().filter(|host| host.running) {
            match phase {
                Phase::Terminating { .. } => host.hand_on(request.unwrap_or(Request::STOP).signal()),
                Phase::Killing { .. } => host.stdin = None,
                Phase::Running | Phase::Over => {}
            }
        }
    }

    /// Until something happens, or `until`.
    fn sleep(&self, until: Option<Instant>) {
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = vec![PollFd::new(&self.orders.wake, PollFlags::IN)];
        for host in self.hosts.iter().filter(|host| host.running) {
            fds.push(PollFd::new(&host.pidfd, PollFlags::IN));
            let waiting = host.stdin.as_ref().filter(|_| !host.unwritten.is_empty());
            fds.extend(waiting.map(|stdin| PollFd::new(stdin, PollFlags::OUT)));
        }
        // An error (interrupted) means that nothing is ready; the caller's loop comes back here.
        let _ = poll(&mut fds, timeout.as_ref());
        let _ = rustix::io::read(&self.orders.wake, &mut [0; 8]);
    }

    fn write(&mut self) {
        self.hosts.iter_mut().for_each(Host::write);
    }

    fn reap(&mut self) {
        for index in 0..self.hosts.len() {
            let Some(exit) = self.hosts[index].reap() else { continue };
            let end = self.ended(index, exit);
            tracing::debug!(host = end.host, exit = %end.exit, "host ended");
            if !exit.is_success() && self.failed.is_none() {
                // An agent has told the others; what never was one has not.
                let linger = if end.problem().is_none() { LINGER } else { Duration::ZERO };
                self.failed = Some(Failed { index, others_stop: Instant::now() + linger });
            }
            self.ends.push(end);
        }
    }

    fn ended(&self, index: usize, exit: Exit) -> HostEnd {
        if !exit.is_success() {
            self.streams.wait_for_end(index, Instant::now() + crate::pump::DRAIN);
        }
        let stderr = self.streams.of_rank(index).1;
        let said = String::from_utf8_lossy(&stderr).trim_end().lines().next_back().unwrap_or("").to_string();
        let said = if said.is_empty() { "no reason was given".to_string() } else { said };
        HostEnd { host: self.hosts[index].name.clone(), exit, said }
    }

    /// Gives up those that are left.
    fn end(mut self) -> FleetEnd {
        for index in 0..self.hosts.len() {
            if self.hosts[index].running {
                self.hosts[index].kill();
                let end = self.ended(index, Exit::Unkillable);
                self.ends.push(end);
            }
        }
        self.pump = None;
        outcome(&self.ends)
    }
}

/// A leader that is let go of takes its agents with it.
impl Drop for Leader {
    fn drop(&mut self) {
        for host in self.hosts.iter_mut().filter(|host| host.running) {
            host.stdin = None;
        }
        let deadline = Instant::now() + PATIENCE;
        while self.hosts.iter().any(|host| host.running) && Instant::now() < deadline {
            self.sleep(Some(deadline));
            self.reap();
        }
        self.hosts.iter_mut().filter(|host| host.running).for_each(Host::kill);
    }
}

/// Why not every host's command could be started; those that were are ended again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaderError {
    /// A host's command.
    #[error(transparent)]
    Host(#[from] HostProblem),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] LaunchError),
}

impl Host {
    fn start(command: &HostCommand, key: &JobKey) -> Result<(Self, Vec<OwnedFd>), HostProblem> {
        let failed = |source: io::Error| HostProblem::NoStarter {
            host: command.host.clone(),
            program: command.program.to_string_lossy().into_owned(),
            said: source.to_string(),
        };
        // In a group of its own: a terminal's Ctrl-C is the leader's to hand on.
        let piped = || Stdio::piped();
        let mut child = Command::new(&command.program)
            .args(&command.args)
            .stdin(piped())
            .stdout(piped())
            .stderr(piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let pidfd = pidfd.inspect_err(|_| drop(child.kill().and_then(|()| child.wait())));
        let pidfd = pidfd.map_err(|error| failed(error.into()))?;
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let stdin = child.stdin.take().map(OwnedFd::from);
        let unwritten = VecDeque::new();
        let mut host = Self { name: command.host.clone(), child, pidfd, stdin, unwritten, running: true };
        host.never_wait().map_err(failed)?;
        host.say(&command.order.line());
        host.say(&format!("{}\n", *key.to_hex()));
        Ok((host, pipes.into_iter().flatten().collect()))
    }

    fn never_wait(&self) -> io::Result<()> {
        let Some(stdin) = &self.stdin else { return Ok(()) };
        Ok(rustix::io::ioctl_fionbio(stdin, true)?)
    }

    fn say(&mut self, line: &str) {
        self.unwritten.extend(line.bytes());
        self.write();
    }

    fn hand_on(&mut self, signal: Signal) {
        self.say(&format!("{}\n", signal_name(signal.as_raw())));
    }

    /// Writes as much as is taken.
    fn write(&mut self) {
        while let Some(stdin) = self.stdin.as_ref().filter(|_| !self.unwritten.is_empty()) {
            match rustix::io::write(stdin, self.unwritten.as_slices().0) {
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR) => {}
                // Nobody reads it any more: how that came is in the command's end.
                Err(_) => self.stdin = None,
            }
        }
    }

    /// How it ended, once.
    fn reap(&mut self) -> Option<Exit> {
        let status = self.child.try_wait().ok().flatten().filter(|_| self.running)?;
        self.running = false;
        self.stdin = None;
        Some(status.signal().map_or_else(|| Exit::Code(status.code().unwrap_or(1)), Exit::Signal))
    }

    fn kill(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        // One that is stuck in the kernel is not waited for.
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&second));
        let _ = self.child.try_wait();
        self.running = false;
    }
}
