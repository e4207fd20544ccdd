//! The agent: this node's launcher. It joins the job, runs this node's workers, and returns how the job ended.
//!
//! ```text
//!   join ─▶ loop: order · keeper's report · signal · time ─▶ membership::Agent ─▶ start · stop · report · exit
//!                                                                                    │
//!                                                                keeper ─▶ workers ◀─┘
//! ```
//!
//! The agent makes no decisions itself. [`membership`](crate::membership) decides what to do. Listening threads report
//! events. A [`keeper`](crate::keeper) owns the workers.

mod agent_loop;
pub(crate) mod clock;
mod control;
mod coordinate;
mod coordinator_link;
mod join;
mod liveness;
mod policy;
mod reach;
mod round_keeper;
mod round_start;
mod signals;
mod silence;
mod waiting;

use std::ffi::OsString;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use drumline_rendezvous::{Hello, JobKey, Role};
use rustix::process::{Signal, getpid, set_child_subreaper};

use crate::LaunchError;
use crate::failure::FailureReport;
use crate::keeper::{KeeperReport, has_children};
use crate::led::{Led, Listener};
use crate::logs::LogFolder;
use crate::membership::{Order, Reason};
use crate::placing::{self, Topology};
use crate::plan::LaunchPlan;
use agent_loop::{AgentContext, AgentLoop};
use reach::Reached;

/// How long sending the agent's last report may take.
const LAST_REPORT: Duration = Duration::from_millis(500);

/// What the agent needs besides its plan.
pub struct AgentOptions {
    /// The command that starts this program as a keeper (see [`keep`](crate::keep)).
    pub keeper: Vec<OsString>,
    /// The launcher's own `CUDA_VISIBLE_DEVICES`.
    pub visible: Option<String>,
    /// The job's secret key. `None` takes it from the environment. A job of one node creates its own.
    pub key: Option<JobKey>,
    /// The connection to the leading launcher, if another launcher started this agent.
    pub led: Option<Listener>,
    /// Shows a message to the user who started the job.
    pub say: Box<dyn Fn(&str)>,
}

/// How a job ended, as seen from this node.
#[derive(Debug)]
pub enum Outcome {
    /// All workers ended with exit code 0.
    Success,
    /// The job failed.
    Failure {
        /// The failure of this node's workers, if one of them failed.
        report: Option<Box<FailureReport>>,
        /// Why the job ended.
        why: Reason,
    },
    /// This signal stopped the job.
    Stopped(Signal),
}

/// A result that a stop signal may interrupt.
pub(crate) enum Interruptible<T> {
    Done(Box<T>),
    Stopped(Signal),
}

/// An event that the agent's threads report to its loop.
#[derive(Debug)]
pub(crate) enum AgentEvent {
    /// The connection attempt to the control store has ended.
    Reached(Box<Result<Reached, LaunchError>>),
    Order(Box<Order>),
    /// The keeper of this round reports something.
    KeeperReport(u64, Box<KeeperReport>),
    /// The keeper of this round has exited.
    KeeperExited(u64),
    /// A message for the user from the coordinator in this process.
    Notice(String),
    /// It is proved that the process of the agent that hosts the store has ended.
    StoreDied,
    Signal(Signal),
    /// The leading launcher, which started this agent from another host, has ended.
    LeaderGone,
}

/// Both ends of the agent's event channel.
#[derive(Clone, Copy)]
pub(crate) struct EventChannel<'a> {
    pub(crate) sender: &'a Sender<AgentEvent>,
    pub(crate) inbox: &'a Receiver<AgentEvent>,
}

/// Runs this node's part of the job until the job ends.
pub fn run_agent(plan: &LaunchPlan, mut options: AgentOptions) -> Result<Outcome, LaunchError> {
    let (events, inbox) = mpsc::channel();
    signals::listen(&plan.signals, events.clone()).map_err(LaunchError::system("listen for signals"))?;
    if let Some(leader) = options.led.take() {
        follow(leader, events.clone()).map_err(LaunchError::system("listen to the leading launcher"))?;
    }
    // If a keeper is killed, this process adopts what the keeper leaves behind. It does not adopt when other processes
    // could be mistaken for those: children of the shell that became this program, or all orphans of a container.
    let adopts = !has_children() && !getpid().is_init();
    if adopts {
        set_child_subreaper(Some(getpid())).map_err(LaunchError::system("adopt orphans"))?;
    }
    let cores = placing::cores(plan, &Topology::here(), &|name| std::env::var_os(name))?;
    let folder = LogFolder::create(plan.logs.clone(), &plan.run_id, &plan.role)?;
    if let (None, Some(path), true) = (&plan.logs.dir, folder.path(), plan.logs.writes_files()) {
        (options.say)(&format!("logs are in {}", path.display()));
    }
    let channel = EventChannel { sender: &events, inbox: &inbox };
    let job = match join::join(plan, options.key.clone(), channel, &*options.say)? {
        Interruptible::Done(job) => *job,
        Interruptible::Stopped(signal) => return Ok(Outcome::Stopped(signal)),
    };
    let context = AgentContext { plan, options: &options, job: &job, folder, cores, events, adopts };
    let outcome = AgentLoop::new(context).run(&inbox)?;
    job.control.finish(LAST_REPORT);
    Ok(outcome)
}

/// Forwards the leading launcher's signals as if this process had received them.
fn follow(leader: Listener, events: Sender<AgentEvent>) -> io::Result<()> {
    let forward = move |led| {
        let event = match led {
            Led::Signal(signal) => AgentEvent::Signal(signal),
            Led::Gone => AgentEvent::LeaderGone,
        };
        // At the very end the receiver may already be gone.
        drop(events.send(event));
    };
    leader.listen(forward).map(drop)
}

fn this_host() -> String {
    Hello::new(Role::Store).host
}
