//! The loop of an agent that has joined its job: it turns what happens into events for membership, and carries out what
//! membership decides.

use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid};

use super::join::JoinedJob;
use super::round_keeper::RoundKeeper;
use super::round_start::RoundInputs;
use super::signals::asks_to_stop;
use super::silence::{Silence, SilenceNotices};
use super::waiting::Waiting;
use super::{AgentEvent, AgentOptions, Outcome, clock, policy};
use crate::LaunchError;
use crate::failure::{Evidence, FailureReport, OomSources, OomWatch};
use crate::keeper::{KeeperExit, KeeperReport, reap_all_but, sweep};
use crate::logs::{AttemptLogs, LogFolder};
use crate::membership::{
    Act, Agent, AgentId, Cause, Doing, Ending, Event, Grace, Instruction, Order, Reason, Round, WorkerFailure,
};
use crate::placing::Cores;
use crate::plan::{LaunchPlan, LedBy};
use crate::report::{JobReport, signal_name};
use crate::stop::StopPolicy;

/// The longest time between two checks of the clock.
const TICK: Duration = Duration::from_millis(250);
/// The grace time of workers whose peers are gone.
const SHORT_GRACE: Duration = Duration::from_secs(2);
/// A signal for the whole job may reach its nodes this far apart. If another node's reaction stopped the ranks before
/// the signal itself arrives here, they would not see which signal it was.
const SIGNAL_SPREAD: Duration = Duration::from_secs(1);
/// The same signal twice within this time counts once: two senders meant the same stop (Slurm's daemon and `srun`).
/// Ctrl-C is exempt: only a user presses it.
const REPEAT_WINDOW: Duration = Duration::from_millis(500);

/// What an agent keeps from its start to its end.
pub(super) struct AgentContext<'a> {
    pub(super) plan: &'a LaunchPlan,
    pub(super) options: &'a AgentOptions,
    pub(super) job: &'a JoinedJob,
    pub(super) folder: LogFolder,
    pub(super) cores: Vec<Option<Cores>>,
    pub(super) events: Sender<AgentEvent>,
    /// Whether this process adopts the orphans of a killed keeper.
    pub(super) adopts: bool,
}

/// An agent that has joined its job.
pub(super) struct AgentLoop<'a> {
    context: AgentContext<'a>,
    agent: Agent,
    oom: OomWatch,
    keeper: Option<RoundKeeper>,
    logs: AttemptLogs,
    first_rank: usize,
    /// How many restarts came before the last round.
    restarts: usize,
    stopped_by: Option<(Signal, Instant)>,
    /// The failure of this node's workers in the last round.
    failure: Option<Box<FailureReport>>,
    /// Events that membership has not processed yet.
    events: Vec<Event>,
    waiting: Waiting,
    silences: SilenceNotices,
}

impl<'a> AgentLoop<'a> {
    pub(super) fn new(context: AgentContext<'a>) -> Self {
        let AgentContext { plan, job, .. } = context;
        let policy = if job.is_single_node { policy::single_node(plan) } else { policy::of(plan) };
        AgentLoop {
            silences: SilenceNotices::new(&policy),
            agent: Agent::new(job.card.clone(), policy, clock::now()),
            context,
            oom: OomWatch::start(&OomSources::default()),
            keeper: None,
            logs: AttemptLogs::default(),
            first_rank: 0,
            restarts: 0,
            stopped_by: None,
            failure: None,
            events: vec![Event::Tick],
            waiting: Waiting::default(),
        }
    }

    /// Runs until the job ends and the other agents know it.
    pub(super) fn run(mut self, inbox: &Receiver<AgentEvent>) -> Result<Outcome, LaunchError> {
        let ending = loop {
            let events = std::mem::take(&mut self.events);
            if let Some(ending) = events.into_iter().find_map(|event| self.step(event)) {
                break ending;
            }
            if self.events.is_empty() {
                self.wait_for_event(inbox);
            }
        };
        self.wait_for_others(inbox);
        self.release_keeper();
        self.warn_of_missed_faults();
        Ok(self.outcome(ending))
    }

    /// Warns of faults that are for a run after more restarts than there were.
    fn warn_of_missed_faults(&self) {
        let plan = self.context.plan;
        let here = self.first_rank..self.first_rank + plan.nproc;
        for fault in plan.faults_after(self.restarts).filter(|fault| here.contains(&fault.rank)) {
            let restarts = counted(self.restarts, "restart");
            tracing::warn!("fault {fault} did not happen: the job ended after {restarts}");
        }
    }

    /// Waits for something to happen, or for time to pass.
    fn wait_for_event(&mut self, inbox: &Receiver<AgentEvent>) {
        // This loop holds a sender itself, so the channel never closes.
        let events = inbox.recv_timeout(TICK).map_or_else(|_| vec![Event::Tick], |event| self.handle(event));
        self.events.extend(events);
        if let Some(keeper) = &mut self.keeper {
            keeper.enforce();
        }
        let waiting = self.waiting.due(Instant::now());
        let silence = self.silence_notices();
        waiting.into_iter().chain(silence).for_each(|notice| (self.context.options.say)(&notice));
        // The first process of a container must reap all orphans.
        if getpid().is_init() {
            let own = self.keeper.as_ref().map(|keeper| keeper.pid().as_raw_nonzero().get().unsigned_abs());
            reap_all_but(own.as_slice());
        }
    }

    /// Notices about the store's host, if that is another host.
    fn silence_notices(&mut self) -> Vec<String> {
        let has_remote_host = self.agent.lease_end().is_some() && !self.context.job.control.is_host();
        let silence = has_remote_host.then(|| Silence {
            agent: AgentId::default(),
            host: "the first node".to_string(),
            span: self.agent.silence(clock::now()),
        });
        self.silences.update(silence.as_slice())
    }

    /// If the coordinator runs here, waits until all agents know that the job is over, which includes the time that
    /// ranks need for a last checkpoint. The workers' store, if hosted here, stays as long. A second signal ends the
    /// wait.
    fn wait_for_others(&mut self, inbox: &Receiver<AgentEvent>) {
        let control = &self.context.job.control;
        if !control.is_host() || self.context.job.is_single_node {
            return;
        }
        let grace = self.stopped_by.map_or(Duration::ZERO, |_| self.context.plan.shutdown_timeout);
        let close = self.context.plan.contact.close_timeout;
        let until = Instant::now() + grace + close.unwrap_or(policy::of(self.context.plan).give_up_after);
        while !control.is_done() && Instant::now() < until {
            let is_interrupted = match inbox.recv_timeout(TICK / 10) {
                Ok(AgentEvent::Signal(signal)) => {
                    asks_to_stop(self.context.plan, signal) && !self.is_repeat(signal)
                }
                Ok(AgentEvent::LeaderGone) => true,
                _ => false,
            };
            if is_interrupted {
                return;
            }
        }
    }

    /// Handles an event, and returns the events that follow for membership.
    fn handle(&mut self, event: AgentEvent) -> Vec<Event> {
        match event {
            AgentEvent::Order(order) => {
                self.note_waiting(&order);
                vec![Event::Order(*order)]
            }
            AgentEvent::Notice(notice) => {
                (self.context.options.say)(&notice);
                Vec::new()
            }
            AgentEvent::StoreDied => vec![Event::StoreDied],
            AgentEvent::KeeperReport(round, report) if self.is_current(round) => {
                self.handle_keeper(round, *report)
            }
            AgentEvent::KeeperExited(round) if self.is_current(round) => self.handle_keeper_exit(round),
            AgentEvent::Signal(signal) => self.handle_signal(signal),
            AgentEvent::LeaderGone => {
                self.kill_workers();
                self.leave(Signal::HUP)
            }
            AgentEvent::KeeperReport(..) | AgentEvent::KeeperExited(_) | AgentEvent::Reached(_) => Vec::new(),
        }
    }

    /// Notes what this node waits for. The first node announces what all wait for; a spare node, why it waits.
    fn note_waiting(&mut self, order: &Order) {
        let why = match &order.instruction {
            Instruction::Hold { why, .. } if self.agent.doing() == Doing::Idle => why,
            _ => return self.waiting.set(None),
        };
        let is_announced = match why {
            Reason::TooFew { .. } | Reason::LastCall { .. } => self.context.job.control.is_host(),
            Reason::Spare => true,
            _ => false,
        };
        let longest = self.context.plan.join_timeout;
        self.waiting.set(is_announced.then(|| format!("waiting for up to {longest:?}: {why}")));
    }

    /// Whether this round's keeper runs.
    fn is_current(&self, round: u64) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.round() == round)
    }

    fn handle_keeper(&mut self, round: u64, report: KeeperReport) -> Vec<Event> {
        match report {
            KeeperReport::Failed { rank, exit, ran_for } => {
                vec![Event::WorkerFailed(self.failure_of(round, rank, ran_for, exit.to_string()))]
            }
            KeeperReport::NotStarted(why) => self.fail(round, why),
            KeeperReport::Over(report) => self.handle_round_end(round, &report),
        }
    }

    /// All workers of this node have ended.
    fn handle_round_end(&mut self, round: u64, report: &JobReport) -> Vec<Event> {
        if let Some(keeper) = &mut self.keeper {
            keeper.mark_over();
        }
        if self.agent.doing() == Doing::Running(round) && report.is_success() {
            return vec![Event::WorkersDone(round)];
        }
        self.failure = self.failure_report(report).map(Box::new);
        let mut events = Vec::new();
        if let (Doing::Running(_), Some(failed)) = (self.agent.doing(), report.failed()) {
            let what = failed.exit.to_string();
            events.push(Event::WorkerFailed(self.failure_of(round, failed.rank, failed.ended_after, what)));
        }
        events.push(Event::WorkersStopped(round));
        events
    }

    /// The events of a round that failed on this node without the fault of a worker.
    fn fail(&self, round: u64, what: String) -> Vec<Event> {
        let failure = self.failure_of(round, self.first_rank, Duration::ZERO, what);
        vec![Event::WorkerFailed(failure), Event::WorkersStopped(round)]
    }

    fn failure_of(&self, round: u64, rank: usize, ran_for: Duration, what: String) -> WorkerFailure {
        WorkerFailure { round, rank, host: self.context.job.card.host.clone(), ran_for, what }
    }

    fn handle_keeper_exit(&mut self, round: u64) -> Vec<Event> {
        self.release_keeper();
        if self.agent.doing().alive() != Some(round) {
            return Vec::new();
        }
        self.fail(round, "the keeper of this node's workers was killed".to_string())
    }

    /// Ends the keeper, if there is one, and kills what it may have left behind.
    fn release_keeper(&mut self) {
        let exit = self.keeper.take().map(RoundKeeper::finish);
        if exit == Some(KeeperExit::Killed) && self.context.adopts {
            let left = sweep(SHORT_GRACE);
            if !left.is_empty() {
                tracing::warn!(?left, "gave up on processes that cannot be killed");
            }
        }
    }

    fn failure_report(&mut self, report: &JobReport) -> Option<FailureReport> {
        report.root_cause?;
        let first = report.ranks.first()?.rank;
        let faults = self.context.plan.timed_faults(self.restarts);
        let evidence: Vec<_> = report
            .ranks
            .iter()
            .map(|rank| {
                let local_rank = rank.rank - first;
                let error_file = self.logs.error_file(local_rank);
                let at = Evidence::at(rank.rank, local_rank, &self.context.job.card.host);
                let at = Evidence { timed_faults: faults.clone(), ..at };
                at.gather(rank, error_file.as_deref(), &mut self.oom)
            })
            .collect();
        FailureReport::new(report, &evidence)
    }

    fn handle_signal(&mut self, signal: Signal) -> Vec<Event> {
        if !asks_to_stop(self.context.plan, signal) {
            self.keeper.iter().for_each(|keeper| keeper.forward(signal));
            return Vec::new();
        }
        if self.is_repeat(signal) {
            return Vec::new();
        }
        if self.stopped_by.is_some() {
            self.kill_workers();
            return Vec::new();
        }
        self.leave(signal)
    }

    fn is_repeat(&self, signal: Signal) -> bool {
        let same = |(first, at): &(Signal, Instant)| *first == signal && at.elapsed() < REPEAT_WINDOW;
        signal != Signal::INT && self.stopped_by.as_ref().is_some_and(same)
    }

    fn leave(&mut self, signal: Signal) -> Vec<Event> {
        self.stopped_by = self.stopped_by.or(Some((signal, Instant::now())));
        self.context.job.control.leave(signal);
        if let Some(keeper) = &mut self.keeper {
            let name = signal_name(signal.as_raw());
            let time = self.context.plan.shutdown_timeout;
            // If another node's stop is pending, the ranks now get this signal instead.
            keeper.stop(signal, Duration::ZERO, time);
            self.waiting.set(Some(format!(
                "{name} was forwarded to the ranks, which have {time:?} to end; once more kills them now"
            )));
        }
        vec![Event::Leave]
    }

    fn kill_workers(&mut self) {
        self.keeper.iter_mut().for_each(RoundKeeper::kill);
    }

    /// Passes an event to membership, and carries out what it decides.
    fn step(&mut self, event: Event) -> Option<Ending> {
        let acts = self.agent.step(clock::now(), event);
        if let (Some(keeper), Some(lease)) = (&mut self.keeper, self.agent.lease_end())
            && !self.context.job.is_single_node
        {
            keeper.renew(lease);
        }
        for act in acts {
            match act {
                Act::Start(round) => self.start_or_fail(&round),
                Act::Stop { round, grace, why } => self.stop(round, grace, &why),
                Act::Send(report) => self.context.job.control.report(report),
                Act::Exit(ending) => return Some(ending),
            }
        }
        None
    }

    fn start_or_fail(&mut self, round: &Round) {
        self.announce_round(round);
        self.waiting.set(None);
        // The last round's keeper must be gone before the next one starts.
        self.release_keeper();
        self.failure = None;
        self.first_rank = round.first_rank(self.context.job.card.id).unwrap_or(0);
        self.restarts = round.restarts;
        if let Err(error) = self.start(round) {
            let events = self.fail(round.number, error.to_string());
            self.events.extend(events);
        }
    }

    fn start(&mut self, round: &Round) -> Result<(), LaunchError> {
        let AgentContext { plan, options, job, .. } = self.context;
        self.oom = OomWatch::start(&OomSources::default());
        self.logs = self.context.folder.attempt(round.restarts, plan.nproc)?;
        let inputs = RoundInputs {
            plan,
            visible: options.visible.as_deref(),
            agent: job.card.id,
            key: &job.key,
            listen: job.listen,
            lease: self.agent.lease_end().filter(|_| !job.is_single_node),
            cores: &self.context.cores,
        };
        let Some(start) = inputs.start(round, self.logs.clone()) else { return Ok(()) };
        let keeper = RoundKeeper::start(&options.keeper, round.number, start, self.context.events.clone());
        self.keeper = Some(keeper.map_err(LaunchError::system("start the keeper of the workers"))?);
        Ok(())
    }

    fn stop(&mut self, round: u64, grace: Grace, why: &Reason) {
        if !self.is_current(round) {
            return;
        }
        tracing::debug!(round, ?grace, %why, "stopping the workers");
        self.announce_stop(why);
        let Some(keeper) = self.keeper.as_mut() else { return };
        let signal = self.stopped_by.map(|(signal, _)| signal);
        let signal = signal.or_else(|| why.signal()).unwrap_or(Signal::TERM);
        let longest = self.context.plan.shutdown_timeout;
        // Even if another node reported first, the rank at fault may be here and not have printed its error yet.
        let settle = if why.is_failure() {
            StopPolicy::default().settle
        } else if why.is_departure() {
            SIGNAL_SPREAD
        } else {
            Duration::ZERO
        };
        match grace {
            Grace::Full => keeper.stop(signal, settle, longest),
            Grace::Short => keeper.stop(signal, settle, longest.min(SHORT_GRACE)),
            Grace::None => keeper.kill(),
        }
    }

    /// Shows why this node's ranks are stopped, unless something else shows it: a failure has its own report, and the
    /// coordinator in this process announces its decisions.
    fn announce_stop(&self, why: &Reason) {
        let notice = match why {
            Reason::StoreLost { .. } => {
                let patience = self.agent.gives_up_after();
                format!(
                    "stopping this node's ranks, and waiting for up to {patience:?} for the first node: {why}"
                )
            }
            Reason::Closing(cause)
                if !matches!(cause, Cause::Failed(_)) && !self.context.job.control.is_host() =>
            {
                why.to_string()
            }
            _ => return,
        };
        (self.context.options.say)(&notice);
    }

    /// Announces every round after the first: on the first node if one terminal shows all nodes, else on each node.
    fn announce_round(&self, round: &Round) {
        if let Some(failure) = &self.failure {
            (self.context.options.say)(&failure.headline());
        }
        let is_first = round.node_rank(self.context.job.card.id) == Some(0);
        if round.number == 1 || !(is_first || self.context.plan.led == LedBy::Nobody) {
            return;
        }
        let Round { number, restarts, members, after } = round;
        let max = self.context.plan.max_restarts;
        let used = if max == 0 { String::new() } else { format!(" ({restarts} of {max} restarts used)") };
        // A failure of this node's own ranks was shown above.
        let after = after.as_ref().filter(|_| self.failure.is_none());
        let after = after.map_or_else(String::new, |cause| format!("; the one before ended: {cause}"));
        (self.context.options.say)(&format!(
            "round {number} begins{used}: {} on {}{after}",
            counted(round.world(), "rank"),
            counted(members.len(), "node"),
        ));
    }

    fn outcome(&mut self, ending: Ending) -> Outcome {
        match (self.stopped_by, ending) {
            (Some((signal, _)), _) => Outcome::Stopped(signal),
            (None, Ending::Success) => Outcome::Success,
            (None, Ending::Failure(why)) => Outcome::Failure { report: self.failure.take(), why },
            (None, Ending::Left) => Outcome::Failure { report: None, why: Reason::AskedToLeave },
        }
    }
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
