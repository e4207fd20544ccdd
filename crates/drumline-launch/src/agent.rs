//! The agent: this node's launcher, from the meeting to the end.
//!
//! ```text
//!   meet ─▶ loop: order · news of the keeper · signal · time ─▶ membership::Agent ─▶ start · stop · report · exit
//!                                                                                     │
//!                                                                 keeper ─▶ workers ◀─┘
//! ```
//!
//! It decides nothing itself: what to do comes from [`membership`](crate::membership), what has happened from threads that
//! listen, and the workers belong to a [`keeper`](crate::keeper).

pub(crate) mod clock;
mod control;
mod coordinate;
mod life;
mod line;
mod lives;
mod meet;
mod policy;
mod reach;
mod round_keeper;
mod round_start;
mod signals;
mod silence;
mod waiting;

use std::ffi::OsString;
use std::io;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use drumline_rendezvous::{Hello, JobKey, Role};
use rustix::process::{Signal, getpid, set_child_subreaper};

use crate::LaunchError;
use crate::failure::FailureReport;
use crate::keeper::{News, has_children};
use crate::led::{Led, Listener};
use crate::logs::LogFolder;
use crate::membership::{Order, Reason};
use crate::placing::{self, Topology};
use crate::plan::LaunchPlan;
use life::{Fortune, Life};
use meet::Meeting;
use reach::Reached;

/// How long an agent's own last word may take.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What the agent needs besides its plan.
pub struct AgentOptions {
    /// The command that is this program's keeper (see [`keep`](crate::keep)).
    pub keeper: Vec<OsString>,
    /// What `CUDA_VISIBLE_DEVICES` says to the launcher.
    pub visible: Option<String>,
    /// The job's secret; `None`: what the environment says. A job of one node draws its own.
    pub key: Option<JobKey>,
    /// Who leads this agent, if somebody does.
    pub led: Option<Listener>,
    /// Says something to the person who started the job.
    pub say: Box<dyn Fn(&str)>,
}

/// How a job ended, as this node knows it.
#[derive(Debug)]
pub enum Outcome {
    /// All workers ended well.
    Success,
    /// The job failed.
    Failure {
        /// What happened to this node's workers, if one of them failed.
        report: Option<Box<FailureReport>>,
        /// Why the job ended.
        why: Reason,
    },
    /// This signal stopped it.
    Stopped(Signal),
}

/// What happens to an agent.
#[derive(Debug)]
pub(crate) enum Happening {
    Reached(Box<Result<Reached, LaunchError>>),
    Order(Box<Order>),
    News(u64, Box<News>),
    KeeperGone(u64),
    /// What the coordinator beside this agent has seen or decided, and why.
    Told(String),
    /// The process of the agent that hosts the store is proved dead.
    StoreDied,
    Signal(Signal),
    /// Whoever started this agent on another host's behalf is gone.
    LeaderGone,
}

/// Runs this node's part of the job to its end.
pub fn run_agent(plan: &LaunchPlan, mut options: AgentOptions) -> Result<Outcome, LaunchError> {
    let (events, happenings) = mpsc::channel();
    signals::listen(&plan.signals, events.clone()).map_err(LaunchError::system("listen for signals"))?;
    if let Some(leader) = options.led.take() {
        follow(leader, events.clone()).map_err(LaunchError::system("listen to the leading launcher"))?;
    }
    // What a keeper leaves that was killed itself becomes ours, unless others' processes could be taken for it: those of
    // the shell that became this program, or all orphans of a container.
    let adopts = !has_children() && !getpid().is_init();
    if adopts {
        set_child_subreaper(Some(getpid())).map_err(LaunchError::system("adopt orphans"))?;
    }
    let cores = placing::cores(plan, &Topology::here(), &|name| std::env::var_os(name))?;
    let folder = LogFolder::create(plan.logs.clone(), &plan.run_id, &plan.role)?;
    if let (None, Some(path), true) = (&plan.logs.dir, folder.path(), plan.logs.writes_files()) {
        (options.say)(&format!("logs are in {}", path.display()));
    }
    let met = match meet::meet(plan, options.key.clone(), (&events, &happenings), &*options.say)? {
        Meeting::Met(met) => *met,
        Meeting::Stopped(signal) => return Ok(Outcome::Stopped(signal)),
    };
    let own = Fortune { plan, options: &options, met: &met, folder, cores, events, adopts };
    let outcome = Life::new(own).live(&happenings)?;
    met.control.finish(LAST_WORD);
    Ok(outcome)
}

/// What a leader says is taken as if it had come to this process.
fn follow(leader: Listener, events: Sender<Happening>) -> io::Result<()> {
    let tell = move |led| {
        let happening = match led {
            Led::Signal(signal) => Happening::Signal(signal),
            Led::Gone => Happening::LeaderGone,
        };
        // Nobody listens any more at the very end.
        drop(events.send(happening));
    };
    leader.listen(tell).map(drop)
}

fn this_host() -> String {
    Hello::new(Role::Store).host
}
