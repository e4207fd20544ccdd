//! Starts the hosts' commands, sends orders to their agents, and waits until all of them have ended.
//!
//! ```text
//!   Running ─ a host fails, or a signal ─▶ send the signal's name to all ─ grace ─▶ close stdin: agents kill and exit
//!      └── all have ended ─▶ over              ─ patience ─▶ kill the commands themselves, and report them as lost
//! ```
//! The phases are those of a job on one node (`stop`). One thread polls the commands' ends, the handle's wake-up, and
//! the stdins that have not taken all their input yet. A pump (`pump`) shows their output lines.

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
use crate::stop::{FirstFailure, OnFailure, Phase, Request, StopPolicy, View, decide, next_deadline};
use crate::streams::{Stream, Streams};
use crate::{Exit, LaunchError, signal_name};

/// An agent that failed has informed the others. They get this long to end by themselves and say why.
const LINGER: Duration = Duration::from_secs(5);
/// What an agent may need beyond its own grace time.
const MARGIN: Duration = Duration::from_secs(5);
/// How long an agent may take to end after its stdin is closed.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many bytes of a host's stderr are kept, to find its last line.
const KEPT: usize = 4 << 10;

/// The agents of all hosts, started and led.
#[derive(Debug)]
pub struct Leader {
    hosts: Vec<Host>,
    requests: Arc<Requests>,
    streams: Arc<Streams>,
    pump: Option<Pump>,
    policy: StopPolicy,
    /// How the hosts ended, in order of time.
    ends: Vec<HostEnd>,
    failed: Option<Failed>,
    /// The signal that asked for the job's end before any host had failed.
    stopped_by: Option<Signal>,
}

/// The first host that failed.
#[derive(Debug, Clone, Copy)]
struct Failed {
    index: usize,
    /// When the others are stopped because of it.
    others_stop: Instant,
}

/// Sends requests to a [`Leader`] from other threads.
#[derive(Debug, Clone)]
pub struct LeaderHandle(Arc<Requests>);

#[derive(Debug)]
struct Requests {
    queue: Mutex<Vec<LeaderRequest>>,
    wake: OwnedFd,
}

/// A request to the leader.
#[derive(Debug, Clone, Copy)]
enum LeaderRequest {
    Stop(Signal),
    Forward(Signal),
}

impl LeaderHandle {
    /// The first signal is forwarded to all agents, which stop their workers. The second makes them kill their workers
    /// and exit.
    pub fn stop(&self, signal: Signal) {
        self.request(LeaderRequest::Stop(signal));
    }

    /// Forwards a signal that does not stop the job to all agents.
    pub fn pass_on(&self, signal: Signal) {
        self.request(LeaderRequest::Forward(signal));
    }

    fn request(&self, request: LeaderRequest) {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).push(request);
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
    /// Starts every command, and gives each agent its order and `key`. `grace` is the time that agents leave between a
    /// signal and SIGKILL.
    pub fn start(commands: &[HostCommand], key: &JobKey, grace: Duration) -> Result<Self, LeaderError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LaunchError::system("lead the other hosts"))?;
        let requests = Arc::new(Requests { queue: Mutex::default(), wake });
        let policy = StopPolicy {
            on_failure: OnFailure::StopOthers,
            settle: Duration::ZERO,
            grace: grace + MARGIN,
            patience: PATIENCE,
        };
        let streams = Arc::<Streams>::default();
        let mut leader = Self {
            hosts: Vec::new(),
            requests,
            streams,
            pump: None,
            policy,
            ends: Vec::new(),
            failed: None,
            stopped_by: None,
        };
        let mut sources = Vec::new();
        for (index, command) in commands.iter().enumerate() {
            let (host, pipes) = Host::start(command, key)?;
            leader.hosts.push(host);
            for (pipe, channel) in pipes.into_iter().zip(Channel::BOTH) {
                leader.streams.lock().push(Stream::new(index, channel, KEPT));
                sources.push((pipe, Sink::console_only(channel)));
            }
        }
        let pump = Pump::start(sources, Arc::clone(&leader.streams));
        leader.pump = Some(pump.map_err(LaunchError::system("read the other hosts' output"))?);
        Ok(leader)
    }

    /// A handle for threads that forward signals.
    pub fn handle(&self) -> LeaderHandle {
        LeaderHandle(Arc::clone(&self.requests))
    }

    /// Leads until every agent has ended or was given up.
    pub fn wait(mut self) -> FleetEnd {
        let mut phase = Phase::Running;
        let mut request = None;
        loop {
            request = self.handle_requests(request);
            let view = self.view(request);
            let next = decide(Instant::now(), phase, &view, &self.policy);
            if next != phase {
                phase = next;
                self.enter(phase, request);
            }
            if phase == Phase::Over {
                return self.end();
            }
            self.sleep(next_deadline(phase, &view, &self.policy));
            self.write();
            self.reap();
        }
    }

    /// Handles the queued requests. Returns the stop request in force, given the one `before`.
    fn handle_requests(&mut self, before: Option<Request>) -> Option<Request> {
        let queue = std::mem::take(&mut *self.requests.queue.lock().unwrap_or_else(PoisonError::into_inner));
        queue.into_iter().fold(before, |stop, request| match (request, stop) {
            (LeaderRequest::Stop(signal), None) => {
                self.stopped_by = self.failed.is_none().then_some(signal);
                Some(Request::Stop { signal, grace: None, not_before: None })
            }
            (LeaderRequest::Stop(_), Some(_)) => {
                self.stopped_by = None; // The agents report that they have killed their workers.
                Some(Request::Kill)
            }
            (LeaderRequest::Forward(signal), stop) => {
                self.hosts.iter_mut().for_each(|host| host.forward(signal));
                stop
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
        tracing::debug!(?phase, "entering a phase of the hosts' end");
        for host in self.hosts.iter_mut().filter(|host| host.running) {
            match phase {
                Phase::Terminating { .. } => host.forward(request.unwrap_or(Request::STOP).signal()),
                Phase::Killing { .. } => host.stdin = None,
                Phase::Running | Phase::Over => {}
            }
        }
    }

    /// Sleeps until something happens, or until the given time.
    fn sleep(&self, until: Option<Instant>) {
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = vec![PollFd::new(&self.requests.wake, PollFlags::IN)];
        for host in self.hosts.iter().filter(|host| host.running) {
            fds.push(PollFd::new(&host.pidfd, PollFlags::IN));
            let waiting = host.stdin.as_ref().filter(|_| !host.unwritten.is_empty());
            fds.extend(waiting.map(|stdin| PollFd::new(stdin, PollFlags::OUT)));
        }
        // An error (interrupted) means that nothing is ready; the caller's loop polls again.
        let _ = poll(&mut fds, timeout.as_ref());
        let _ = rustix::io::read(&self.requests.wake, &mut [0; 8]);
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
                // An agent has informed the others; a command that failed before it became an agent has not.
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
        let output =
            String::from_utf8_lossy(&stderr).trim_end().lines().next_back().unwrap_or("").to_string();
        let output = if output.is_empty() { "it gave no reason".to_string() } else { output };
        HostEnd { host: self.hosts[index].name.clone(), exit, output }
    }

    /// Gives up the hosts that still run, and returns the outcome.
    fn end(mut self) -> FleetEnd {
        for index in 0..self.hosts.len() {
            if self.hosts[index].running {
                self.hosts[index].kill();
                let end = self.ended(index, Exit::Unkillable);
                self.ends.push(end);
            }
        }
        self.pump = None;
        outcome(&self.ends, self.stopped_by)
    }
}

/// Dropping a leader ends its agents.
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

/// Why a host's command could not be started. Commands that were already started are ended again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaderError {
    /// The command of a host failed to start.
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
            error: source.to_string(),
        };
        // In its own process group: a terminal's Ctrl-C must reach only the leader, which forwards it.
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
        host.set_nonblocking().map_err(failed)?;
        host.send(&command.order.line());
        host.send(&format!("{}\n", *key.to_hex()));
        Ok((host, pipes.into_iter().flatten().collect()))
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        let Some(stdin) = &self.stdin else { return Ok(()) };
        Ok(rustix::io::ioctl_fionbio(stdin, true)?)
    }

    fn send(&mut self, line: &str) {
        self.unwritten.extend(line.bytes());
        self.write();
    }

    fn forward(&mut self, signal: Signal) {
        self.send(&format!("{}\n", signal_name(signal.as_raw())));
    }

    /// Writes as much as the pipe takes.
    fn write(&mut self) {
        while let Some(stdin) = self.stdin.as_ref().filter(|_| !self.unwritten.is_empty()) {
            match rustix::io::write(stdin, self.unwritten.as_slices().0) {
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR) => {}
                // The reader is gone; the command's exit status says why.
                Err(_) => self.stdin = None,
            }
        }
    }

    /// How the command ended; returned once.
    fn reap(&mut self) -> Option<Exit> {
        let status = self.child.try_wait().ok().flatten().filter(|_| self.running)?;
        self.running = false;
        self.stdin = None;
        Some(status.signal().map_or_else(|| Exit::Code(status.code().unwrap_or(1)), Exit::Signal))
    }

    fn kill(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        // The wait is bounded, as the process may be stuck in the kernel.
        let one_second = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&one_second));
        let _ = self.child.try_wait();
        self.running = false;
    }
}
