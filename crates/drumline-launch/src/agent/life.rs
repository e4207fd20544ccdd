//! An agent that has met the others: what happens becomes events of membership, and what membership decides is done.

use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid};

use super::meet::Met;
use super::round_keeper::RoundKeeper;
use super::round_start::Ground;
use super::signals::asks_to_stop;
use super::silence::{Silence, Silences};
use super::waiting::Waiting;
use super::{AgentOptions, Happening, Outcome, clock, policy};
use crate::LaunchError;
use crate::failure::{Evidence, FailureReport, OomSources, OomWatch};
use crate::keeper::{News, Parting, reap_all_but, sweep};
use crate::logs::{AttemptLogs, LogFolder};
use crate::membership::{
    Act, Agent, AgentId, Cause, Doing, Ending, Event, Grace, Order, Reason, Round, Wish, WorkerFailure,
};
use crate::placing::Cores;
use crate::plan::{LaunchPlan, LedBy};
use crate::report::{JobReport, signal_name};
use crate::stop::StopPolicy;

/// The longest time between two looks at the clock.
const TICK: Duration = Duration::from_millis(250);
/// What workers get whose peers are gone.
const SHORT_GRACE: Duration = Duration::from_secs(2);
/// A signal for the whole job reaches its nodes so far apart: what it means to ranks is lost if another node's answer to it
/// stops them before it is here.
const APART: Duration = Duration::from_secs(1);
/// A signal that comes twice within this time was sent once, by two who meant the same (Slurm's daemon and `srun`).
/// Nobody presses Ctrl-C for another.
const ECHO: Duration = Duration::from_millis(500);

/// What an agent is given for its life.
pub(super) struct Fortune<'a> {
    pub(super) plan: &'a LaunchPlan,
    pub(super) options: &'a AgentOptions,
    pub(super) met: &'a Met,
    pub(super) folder: LogFolder,
    pub(super) cores: Vec<Option<Cores>>,
    pub(super) events: Sender<Happening>,
    /// Whether orphans of a keeper that was killed become ours.
    pub(super) adopts: bool,
}

/// An agent that has met the others.
pub(super) struct Life<'a> {
    own: Fortune<'a>,
    agent: Agent,
    oom: OomWatch,
    keeper: Option<RoundKeeper>,
    logs: AttemptLogs,
    first_rank: usize,
    stopped_by: Option<(Signal, Instant)>,
    /// The failure of this node's workers in the last round.
    failure: Option<Box<FailureReport>>,
    /// What is still to be taken in.
    events: Vec<Event>,
    waiting: Waiting,
    silences: Silences,
}

impl<'a> Life<'a> {
    pub(super) fn new(own: Fortune<'a>) -> Self {
        let policy = if own.met.alone { policy::alone(own.plan) } else { policy::of(own.plan) };
        Life {
            silences: Silences::new(&policy),
            agent: Agent::new(own.met.card.clone(), policy, clock::now()),
            own,
            oom: OomWatch::start(&OomSources::default()),
            keeper: None,
            logs: AttemptLogs::default(),
            first_rank: 0,
            stopped_by: None,
            failure: None,
            events: vec![Event::Tick],
            waiting: Waiting::default(),
        }
    }

    /// Lives until the end, and until the others know of it.
    pub(super) fn live(mut self, happenings: &Receiver<Happening>) -> Result<Outcome, LaunchError> {
        let ending = loop {
            let events = std::mem::take(&mut self.events);
            if let Some(ending) = events.into_iter().find_map(|event| self.step(event)) {
                break ending;
            }
            if self.events.is_empty() {
                self.look(happenings);
            }
        };
        self.outlive_others(happenings);
        self.let_keeper_go();
        Ok(self.outcome(ending))
    }

    /// Waits for something to happen, or for time to pass.
    fn look(&mut self, happenings: &Receiver<Happening>) {
        // This end holds a sender: the channel never ends.
        let events =
            happenings.recv_timeout(TICK).map_or_else(|_| vec![Event::Tick], |event| self.take(event));
        self.events.extend(events);
        if let Some(keeper) = &mut self.keeper {
            keeper.enforce();
        }
        let waits = self.waiting.due(Instant::now());
        let silence = self.silence();
        waits.into_iter().chain(silence).for_each(|what| (self.own.options.say)(&what));
        // The first process of a container takes away everybody's orphans.
        if getpid().is_init() {
            let own = self.keeper.as_ref().map(|keeper| keeper.pid().as_raw_nonzero().get().unsigned_abs());
            reap_all_but(own.as_slice());
        }
    }

    /// What to say of the store's host, if that is another one.
    fn silence(&mut self) -> Vec<String> {
        let has_met = self.agent.lease_end().is_some() && !self.own.met.control.is_host();
        let silence = has_met.then(|| Silence {
            agent: AgentId::default(),
            host: "the first node".to_string(),
            span: self.agent.silence(clock::now()),
        });
        self.silences.look(silence.as_slice())
    }

    /// The coordinator stays until all agents know that the job is over; those that save a checkpoint have their time. What
    /// hosts the workers' store stays with it. A second signal ends the waiting.
    fn outlive_others(&mut self, happenings: &Receiver<Happening>) {
        let control = &self.own.met.control;
        if !control.is_host() || self.own.met.alone {
            return;
        }
        let grace = self.stopped_by.map_or(Duration::ZERO, |_| self.own.plan.shutdown_timeout);
        let close = self.own.plan.contact.close_timeout;
        let until = Instant::now() + grace + close.unwrap_or(policy::of(self.own.plan).give_up_after);
        while !control.is_done() && Instant::now() < until {
            let wants_to_go = match happenings.recv_timeout(TICK / 10) {
                Ok(Happening::Signal(signal)) => asks_to_stop(self.own.plan, signal) && !self.is_echo(signal),
                Ok(Happening::LeaderGone) => true,
                _ => false,
            };
            if wants_to_go {
                return;
            }
        }
    }

    /// What membership should know of a happening.
    fn take(&mut self, happening: Happening) -> Vec<Event> {
        match happening {
            Happening::Order(order) => {
                self.note_waiting(&order);
                vec![Event::Order(*order)]
            }
            Happening::Told(what) => {
                (self.own.options.say)(&what);
                Vec::new()
            }
            Happening::StoreDied => vec![Event::StoreDied],
            Happening::News(round, news) if self.is_kept(round) => self.hear(round, *news),
            Happening::KeeperGone(round) if self.is_kept(round) => self.lose_keeper(round),
            Happening::Signal(signal) => self.signalled(signal),
            Happening::LeaderGone => {
                self.kill();
                self.leave(Signal::HUP)
            }
            Happening::News(..) | Happening::KeeperGone(_) | Happening::Reached(_) => Vec::new(),
        }
    }

    /// The first node says what all wait for; another one, why it waits for ever.
    fn note_waiting(&mut self, order: &Order) {
        let why = match &order.wish {
            Wish::Hold { why, .. } if self.agent.doing() == Doing::Idle => why,
            _ => return self.waiting.is_for(None),
        };
        let speaks = match why {
            Reason::TooFew { .. } | Reason::LastCall { .. } => self.own.met.control.is_host(),
            Reason::Spare => true,
            _ => false,
        };
        let longest = self.own.plan.join_timeout;
        self.waiting.is_for(speaks.then(|| format!("waiting for up to {longest:?}: {why}")));
    }

    fn is_kept(&self, round: u64) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.round() == round)
    }

    fn hear(&mut self, round: u64, news: News) -> Vec<Event> {
        match news {
            News::Failed { rank, exit, ran_for } => {
                vec![Event::WorkerFailed(self.failure_of(round, rank, ran_for, exit.to_string()))]
            }
            News::NotStarted(why) => self.fail(round, why),
            News::Over(report) => self.over(round, &report),
        }
    }

    /// All workers of this node have ended.
    fn over(&mut self, round: u64, report: &JobReport) -> Vec<Event> {
        if let Some(keeper) = &mut self.keeper {
            keeper.is_over();
        }
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
    fn fail(&self, round: u64, what: String) -> Vec<Event> {
        let failure = self.failure_of(round, self.first_rank, Duration::ZERO, what);
        vec![Event::WorkerFailed(failure), Event::WorkersStopped(round)]
    }

    fn failure_of(&self, round: u64, rank: usize, ran_for: Duration, what: String) -> WorkerFailure {
        WorkerFailure { round, rank, host: self.own.met.card.host.clone(), ran_for, what }
    }

    fn lose_keeper(&mut self, round: u64) -> Vec<Event> {
        self.let_keeper_go();
        if self.agent.doing().alive() != Some(round) {
            return Vec::new();
        }
        self.fail(round, "the keeper of this node's workers was killed".to_string())
    }

    /// Ends the keeper, if there is one, and what it may have left.
    fn let_keeper_go(&mut self) {
        let parting = self.keeper.take().map(RoundKeeper::finish);
        if parting == Some(Parting::Forced) && self.own.adopts {
            let left = sweep(SHORT_GRACE);
            if !left.is_empty() {
                tracing::warn!(?left, "processes that cannot be killed were given up");
            }
        }
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
                let at = Evidence::at(rank.rank, local_rank, &self.own.met.card.host);
                at.gather(rank, error_file.as_deref(), &mut self.oom)
            })
            .collect();
        FailureReport::new(report, &evidence)
    }

    fn signalled(&mut self, signal: Signal) -> Vec<Event> {
        if !asks_to_stop(self.own.plan, signal) {
            self.keeper.iter().for_each(|keeper| keeper.pass_on(signal));
            return Vec::new();
        }
        if self.is_echo(signal) {
            return Vec::new();
        }
        if self.stopped_by.is_some() {
            self.kill();
            return Vec::new();
        }
        self.leave(signal)
    }

    fn is_echo(&self, signal: Signal) -> bool {
        let same = |(first, at): &(Signal, Instant)| *first == signal && at.elapsed() < ECHO;
        signal != Signal::INT && self.stopped_by.as_ref().is_some_and(same)
    }

    fn leave(&mut self, signal: Signal) -> Vec<Event> {
        self.stopped_by = self.stopped_by.or(Some((signal, Instant::now())));
        self.own.met.control.leave(signal);
        if let Some(keeper) = &mut self.keeper {
            let (name, time) = (signal_name(signal.as_raw()), self.own.plan.shutdown_timeout);
            // A stop for another node's sake that has not reached the ranks yet reaches them with this signal.
            keeper.stop(signal, Duration::ZERO, time);
            self.waiting.is_for(Some(format!(
                "{name} was handed on to the ranks, which have {time:?} to end; once more kills them now"
            )));
        }
        vec![Event::Leave]
    }

    fn kill(&mut self) {
        self.keeper.iter_mut().for_each(RoundKeeper::kill);
    }

    /// Lets membership decide, and does what it says.
    fn step(&mut self, event: Event) -> Option<Ending> {
        let acts = self.agent.step(clock::now(), event);
        if let (Some(keeper), Some(lease)) = (&mut self.keeper, self.agent.lease_end())
            && !self.own.met.alone
        {
            keeper.renew(lease);
        }
        for act in acts {
            match act {
                Act::Start(round) => self.start_or_fail(&round),
                Act::Stop { round, grace, why } => self.stop(round, grace, &why),
                Act::Send(report) => self.own.met.control.report(report),
                Act::Exit(ending) => return Some(ending),
            }
        }
        None
    }

    fn start_or_fail(&mut self, round: &Round) {
        self.tell_of(round);
        self.waiting.is_for(None);
        // The last round's keeper goes before the next one comes.
        self.let_keeper_go();
        self.failure = None;
        self.first_rank = round.first_rank(self.own.met.card.id).unwrap_or(0);
        if let Err(error) = self.start(round) {
            let events = self.fail(round.number, error.to_string());
            self.events.extend(events);
        }
    }

    fn start(&mut self, round: &Round) -> Result<(), LaunchError> {
        let Fortune { plan, options, met, .. } = self.own;
        self.oom = OomWatch::start(&OomSources::default());
        self.logs = self.own.folder.attempt(round.restarts, plan.nproc)?;
        let ground = Ground {
            plan,
            visible: options.visible.as_deref(),
            agent: met.card.id,
            key: &met.key,
            listen: met.listen,
            lease: self.agent.lease_end().filter(|_| !met.alone),
            cores: &self.own.cores,
        };
        let Some(start) = ground.start(round, self.logs.clone()) else { return Ok(()) };
        let keeper = RoundKeeper::start(&options.keeper, round.number, start, self.own.events.clone());
        self.keeper = Some(keeper.map_err(LaunchError::system("start the keeper of the workers"))?);
        Ok(())
    }

    fn stop(&mut self, round: u64, grace: Grace, why: &Reason) {
        if !self.is_kept(round) {
            return;
        }
        tracing::debug!(round, ?grace, %why, "stopping the workers");
        self.tell_of_stop(why);
        let Some(keeper) = self.keeper.as_mut() else { return };
        let signal = self.stopped_by.map(|(signal, _)| signal);
        let signal = signal.or_else(|| why.signal()).unwrap_or(Signal::TERM);
        let longest = self.own.plan.shutdown_timeout;
        // The rank at fault may be here, and not have spoken yet, also where another node was the first to tell.
        let settle = match () {
            () if why.is_failure() => StopPolicy::default().settle,
            () if why.is_departure() => APART,
            () => Duration::ZERO,
        };
        match grace {
            Grace::Full => keeper.stop(signal, settle, longest),
            Grace::Short => keeper.stop(signal, settle, longest.min(SHORT_GRACE)),
            Grace::None => keeper.kill(),
        }
    }

    /// Says why this node's ranks are stopped, where nobody else says so: a failure is told by itself, and what the
    /// coordinator beside this agent decides by that one.
    fn tell_of_stop(&self, why: &Reason) {
        let word = match why {
            Reason::StoreLost { .. } => {
                let waits = self.agent.gives_up_after();
                format!(
                    "stopping this node's ranks, and waiting for up to {waits:?} for the first node: {why}"
                )
            }
            Reason::Closing(cause)
                if !matches!(cause, Cause::Failed(_)) && !self.own.met.control.is_host() =>
            {
                why.to_string()
            }
            _ => return,
        };
        (self.own.options.say)(&word);
    }

    /// Tells of a round that is not the first: the first node if all are shown in one place, else each node.
    fn tell_of(&self, round: &Round) {
        if let Some(failure) = &self.failure {
            (self.own.options.say)(&failure.headline());
        }
        let is_first = round.node_rank(self.own.met.card.id) == Some(0);
        if round.number == 1 || !(is_first || self.own.plan.led == LedBy::Nobody) {
            return;
        }
        let Round { number, restarts, members, after } = round;
        let max = self.own.plan.max_restarts;
        let used = if max == 0 { String::new() } else { format!(" ({restarts} of {max} restarts used)") };
        // A failure of this node's own ranks was told above.
        let after = after.as_ref().filter(|_| self.failure.is_none());
        let after = after.map_or_else(String::new, |cause| format!("; the one before ended: {cause}"));
        (self.own.options.say)(&format!(
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
