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
mod meet;
mod policy;
mod round_start;
mod signals;

use std::ffi::OsString;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use drumline_rendezvous::{Hello, JobKey, Role, StoreError, TcpStore};
use rustix::process::{Signal, getpid, set_child_subreaper};

use crate::LaunchError;
use crate::failure::{Evidence, FailureReport, OomSources, OomWatch};
use crate::keeper::{Keeper, News, has_children, sweep};
use crate::logs::{AttemptLogs, LogFolder};
use crate::membership::{Act, Agent, Doing, Ending, Event, Grace, Order, Reason, Round, WorkerFailure};
use crate::placing::{self, Cores, Topology};
use crate::plan::LaunchPlan;
use crate::report::JobReport;
use meet::{Meeting, Met};
use round_start::Ground;

/// The longest time between two looks at the clock.
const TICK: Duration = Duration::from_millis(250);
/// What workers get whose peers are gone.
const SHORT_GRACE: Duration = Duration::from_secs(2);
/// How long the coordinator stays until all agents know that the job is over.
const LAST_WORDS: Duration = Duration::from_secs(7);
/// How long an agent's own last word may take, or that of somebody in a hurry.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What the agent needs besides its plan.
pub struct AgentOptions {
    /// The command that is this program's keeper (see [`keep`](crate::keep)).
    pub keeper: Vec<OsString>,
    /// What `CUDA_VISIBLE_DEVICES` says to the launcher.
    pub visible: Option<String>,
    /// The job's secret; `None`: what the environment says. A job of one node draws its own.
    pub key: Option<JobKey>,
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
    Connected(Box<Result<TcpStore, StoreError>>),
    Order(Box<Order>),
    News(u64, Box<News>),
    KeeperGone(u64),
    Signal(Signal),
    /// Whoever started this agent on another host's behalf is gone.
    LeaderGone,
}

/// Runs this node's part of the job to its end.
pub fn run_agent(plan: &LaunchPlan, options: AgentOptions) -> Result<Outcome, LaunchError> {
    let (events, happenings) = mpsc::channel();
    signals::listen(&plan.signals, events.clone()).map_err(LaunchError::system("listen for signals"))?;
    // What a keeper leaves that was killed itself becomes ours, unless others' processes could be taken for it.
    let adopts = !has_children();
    if adopts {
        set_child_subreaper(Some(getpid())).map_err(LaunchError::system("adopt orphans"))?;
    }
    let cores = placing::cores(plan, &Topology::here(), &|name| std::env::var_os(name))?;
    let folder = LogFolder::create(plan.logs.clone(), &plan.run_id, &plan.role)?;
    let met = match meet::meet(plan, options.key.clone(), (&events, &happenings))? {
        Meeting::Met(met) => *met,
        Meeting::Stopped(signal) => return Ok(Outcome::Stopped(signal)),
    };
    let policy = if met.alone { policy::alone(plan) } else { policy::of(plan) };
    let agent = Agent::new(met.card.clone(), policy, clock::now());
    let oom = OomWatch::start(&OomSources::default());
    let life = Life {
        plan,
        options: &options,
        met: &met,
        folder,
        cores,
        events,
        agent,
        oom,
        keeper: None,
        logs: AttemptLogs::default(),
        adopts,
        first_rank: 0,
        lease: None,
        stopped_by: None,
        failure: None,
    };
    let (outcome, patience) = life.live(&happenings)?;
    met.control.finish(patience);
    Ok(outcome)
}

/// An agent that has met the others.
struct Life<'a> {
    plan: &'a LaunchPlan,
    options: &'a AgentOptions,
    met: &'a Met,
    folder: LogFolder,
    cores: Vec<Option<Cores>>,
    events: Sender<Happening>,
    agent: Agent,
    oom: OomWatch,
    keeper: Option<(u64, Keeper)>,
    logs: AttemptLogs,
    /// Whether orphans of a keeper that was killed become ours.
    adopts: bool,
    first_rank: usize,
    /// What the keeper was told last.
    lease: Option<Duration>,
    stopped_by: Option<Signal>,
    /// The failure of this node's workers in the last round.
    failure: Option<Box<FailureReport>>,
}

impl Life<'_> {
    /// Lives until the end, and says how long the others may take to hear of it.
    fn live(mut self, happenings: &Receiver<Happening>) -> Result<(Outcome, Duration), LaunchError> {
        let mut events = vec![Event::Tick];
        loop {
            for event in events {
                if let Some(ending) = self.step(event)? {
                    // Its workers have ended; what hosts their store may go.
                    self.keeper = None;
                    let stays = self.met.control.is_host() && self.stopped_by.is_none() && !self.met.alone;
                    let patience = if stays { LAST_WORDS } else { LAST_WORD };
                    return Ok((self.outcome(ending), patience));
                }
            }
            events = match happenings.recv_timeout(TICK) {
                Ok(happening) => self.take(happening),
                // This end holds a sender: the channel never ends.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => vec![Event::Tick],
            };
        }
    }

    /// What membership should know of a happening.
    fn take(&mut self, happening: Happening) -> Vec<Event> {
        match happening {
            Happening::Order(order) => vec![Event::Order(*order)],
            Happening::News(round, news) if self.is_kept(round) => self.hear(round, *news),
            Happening::KeeperGone(round) if self.is_kept(round) => self.lose_keeper(round),
            Happening::Signal(signal) => self.signalled(signal),
            Happening::LeaderGone => {
                self.kill();
                self.leave(Signal::HUP)
            }
            Happening::News(..) | Happening::KeeperGone(_) | Happening::Connected(_) => Vec::new(),
        }
    }

    fn is_kept(&self, round: u64) -> bool {
        self.keeper.as_ref().is_some_and(|(kept, _)| *kept == round)
    }

    fn hear(&mut self, round: u64, news: News) -> Vec<Event> {
        match news {
            News::Started => Vec::new(),
            News::Failed { rank, exit, ran_for } => {
                vec![Event::WorkerFailed(self.failure_of(round, rank, ran_for, exit.to_string()))]
            }
            News::NotStarted(why) => self.fail(round, why),
            News::Over(report) => self.over(round, &report),
        }
    }

    /// All workers of this node have ended.
    fn over(&mut self, round: u64, report: &JobReport) -> Vec<Event> {
        if self.agent.doing() == Doing::Running(round) && report.is_success() {
            return vec![Event::WorkersDone(round)];
        }
        self.failure = self.judge(report).map(Box::new);
        let mut events = Vec::new();
        if let (Doing::Running(_), Some(failed)) = (self.agent.doing(), report.failed()) {
            let what = failed.exit.to_string();
            events.push(Event::WorkerFailed(self.failure_of(round, failed.rank, failed.ended_after, what)));
        }
        events.push(Event::WorkersStopped(round));
        events
    }

    /// Nothing runs on this node although it should, for a reason that is no worker's.
    fn fail(&mut self, round: u64, what: String) -> Vec<Event> {
        let failure = self.failure_of(round, self.first_rank, Duration::ZERO, what);
        vec![Event::WorkerFailed(failure), Event::WorkersStopped(round)]
    }

    fn failure_of(&self, round: u64, rank: usize, ran_for: Duration, what: String) -> WorkerFailure {
        WorkerFailure { round, rank, host: self.met.card.host.clone(), ran_for, what }
    }

    fn lose_keeper(&mut self, round: u64) -> Vec<Event> {
        self.keeper = None;
        if self.agent.doing().alive() != Some(round) {
            return Vec::new();
        }
        if self.adopts {
            sweep(SHORT_GRACE);
        }
        self.fail(round, "the keeper of this node's workers was killed".to_string())
    }

    fn judge(&mut self, report: &JobReport) -> Option<FailureReport> {
        report.root_cause?;
        let first = report.ranks.first()?.rank;
        let evidence: Vec<_> = report
            .ranks
            .iter()
            .map(|rank| {
                let local_rank = rank.rank - first;
                let error_file = self.logs.error_file(local_rank);
                let at = Evidence::at(rank.rank, local_rank, &self.met.card.host);
                at.gather(rank, error_file.as_deref(), &mut self.oom)
            })
            .collect();
        FailureReport::new(report, &evidence)
    }

    fn signalled(&mut self, signal: Signal) -> Vec<Event> {
        let asks_to_stop = self.plan.signals.contains(&signal);
        if !asks_to_stop && signals::PASSED_ON.contains(&signal) {
            self.keeper.iter().for_each(|(_, keeper)| keeper.signal(signal));
            return Vec::new();
        }
        if self.stopped_by.is_some() {
            self.kill();
            return Vec::new();
        }
        self.leave(signal)
    }

    fn leave(&mut self, signal: Signal) -> Vec<Event> {
        self.stopped_by = self.stopped_by.or(Some(signal));
        self.met.control.leave();
        vec![Event::Leave]
    }

    fn kill(&self) {
        self.keeper.iter().for_each(|(_, keeper)| keeper.kill());
    }

    /// Lets membership decide, and does what it says.
    fn step(&mut self, event: Event) -> Result<Option<Ending>, LaunchError> {
        let acts = self.agent.step(clock::now(), event);
        self.renew_lease();
        for act in acts {
            match act {
                Act::Start(round) => self.start(&round)?,
                Act::Stop { round, grace, why } => self.stop(round, grace, &why),
                Act::Send(report) => self.met.control.report(report),
                Act::Exit(ending) => return Ok(Some(ending)),
            }
        }
        Ok(None)
    }

    fn renew_lease(&mut self) {
        let lease = self.agent.lease_end();
        if self.met.alone || lease == self.lease {
            return;
        }
        if let (Some((_, keeper)), Some(until)) = (&self.keeper, lease) {
            keeper.lease(until);
            self.lease = lease;
        }
    }

    fn start(&mut self, round: &Round) -> Result<(), LaunchError> {
        self.tell_of(round);
        // The last round's keeper goes before the next one comes.
        self.keeper = None;
        self.failure = None;
        self.logs = self.folder.attempt(round.restarts, self.plan.nproc)?;
        let visible = self.options.visible.as_deref();
        let (agent, key, listen) = (self.met.card.id, &self.met.key, self.met.listen);
        let ground = Ground { plan: self.plan, visible, agent, key, listen, cores: &self.cores };
        let Some(start) = ground.start(round, self.logs.clone()) else { return Ok(()) };
        let keeper = Keeper::start(&self.options.keeper, round.number, start, self.events.clone())
            .map_err(LaunchError::system("start the keeper of the workers"))?;
        self.keeper = Some((round.number, keeper));
        self.first_rank = round.first_rank(agent).unwrap_or(0);
        self.lease = None;
        self.renew_lease();
        Ok(())
    }

    fn stop(&self, round: u64, grace: Grace, why: &Reason) {
        let Some((_, keeper)) = self.keeper.as_ref().filter(|_| self.is_kept(round)) else { return };
        tracing::debug!(round, ?grace, %why, "stopping the workers");
        let signal = self.stopped_by.unwrap_or(Signal::TERM);
        match grace {
            Grace::Full => keeper.stop(signal, self.plan.shutdown_timeout),
            Grace::Short => keeper.stop(signal, self.plan.shutdown_timeout.min(SHORT_GRACE)),
            Grace::None => keeper.kill(),
        }
    }

    /// One node tells of a round that is not the first.
    fn tell_of(&self, round: &Round) {
        if let Some(failure) = &self.failure {
            (self.options.say)(&failure.headline());
        }
        if round.number == 1 || round.node_rank(self.met.card.id) != Some(0) {
            return;
        }
        let Round { number, restarts, members } = round;
        let (nodes, max) = (members.len(), self.plan.max_restarts);
        (self.options.say)(&format!(
            "round {number} begins ({restarts} of {max} restarts used): {} ranks on {nodes} node{}",
            round.world(),
            if nodes == 1 { "" } else { "s" },
        ));
    }

    fn outcome(&mut self, ending: Ending) -> Outcome {
        match (self.stopped_by, ending) {
            (Some(signal), _) => Outcome::Stopped(signal),
            (None, Ending::Success) => Outcome::Success,
            (None, Ending::Failure(why)) => Outcome::Failure { report: self.failure.take(), why },
            (None, Ending::Left) => Outcome::Failure { report: None, why: Reason::AskedToLeave },
        }
    }
}

fn this_host() -> String {
    Hello::new(Role::Store).host
}
