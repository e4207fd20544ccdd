//! One run under faults, from its start to what was seen of it.
//!
//! ```text
//!   Draw ─┬─ faults ─▶ drumline run --fault …     the ranks and launchers carry them out, and say so on stderr
//!         └─ acts ───▶ Outside: cable, agent      carried out here when the training has come to their step
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use anyhow::Result;
use rank_test::fault::{Fault, FaultKind};
use rank_test::netns::Hosts;

use super::draw::{Act, ActKind, Draw, MOST_FATAL};
use super::verdict::Seen;
use crate::faults::training::{Launcher, Recipe, Start, TrainingRun};

/// Time between looks at a run.
const LOOK: Duration = Duration::from_millis(20);
/// A run takes some ten seconds; one that takes this long hangs.
const LONGEST_RUN: Duration = Duration::from_secs(150);
/// What is still there so long after the end was left behind.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// An agent that comes back in the last steps would find nobody.
const LAST_STEPS: usize = 5;
/// The host whose agent may die.
const SECOND: usize = 1;

/// What came of a run.
pub(super) struct Disturbed {
    pub(super) seen: Seen,
    pub(super) span: Duration,
}

/// Runs a training in a folder of this name and does to it what was drawn.
pub(super) fn disturb(recipe: &Recipe, hosts: &Hosts, name: &str, draw: &Draw) -> Result<Disturbed> {
    let began = Instant::now();
    let flags = draw.faults.iter().flat_map(|fault| ["--fault".to_owned(), fault.to_string()]).collect();
    let launcher = Launcher::Fixed { max_restarts: MOST_FATAL };
    let run = TrainingRun::start(recipe, hosts, Start { name: name.to_owned(), launcher, flags })?;
    let last_act = recipe.num_steps().saturating_sub(LAST_STEPS);
    let acts = draw.acts.iter().copied().filter(|act| act.step < last_act).collect();
    let mut outside = Outside {
        run,
        hosts,
        acts,
        ever: BTreeSet::new(),
        cut: None,
        agent_back: None,
        done: Vec::new(),
        pace: Pace { steps: 0, since: began, longest_wait: Duration::ZERO },
    };
    while !outside.is_over() && began.elapsed() < LONGEST_RUN {
        outside.look()?;
        std::thread::sleep(LOOK);
    }
    let Outside { mut run, mut ever, cut, done, pace, .. } = outside;
    cut.map_or(Ok(()), |cut| hosts.restore(cut.host))?;
    let ends = run.end(Duration::ZERO);
    let span = began.elapsed();
    ever.extend(run.steps_before());
    let happened = (0..2).flat_map(|host| happened(&run.printed(host), host, recipe.ranks_per_host()));
    let kinds = happened.map(|fault| kind(fault.kind)).chain(done).collect();
    let (left, restarts) = (run.left_behind(GONE_WITHIN), run.restarts());
    let (steps, weights, files) = (run.steps(), run.weights(), run.files());
    let longest_wait = pace.longest_wait;
    Ok(Disturbed {
        seen: Seen { ends, kinds, restarts, longest_wait, steps, ever, weights, files, left },
        span,
    })
}

/// A run and what is done to it from outside.
struct Outside<'a> {
    run: TrainingRun<'a>,
    hosts: &'a Hosts,
    acts: VecDeque<Act>,
    /// Each step's figures that were ever seen.
    ever: BTreeSet<String>,
    cut: Option<Cut>,
    /// When the agent that was killed is started again.
    agent_back: Option<Instant>,
    done: Vec<&'static str>,
    pace: Pace,
}

/// How long a run waits between steps.
struct Pace {
    steps: usize,
    since: Instant,
    longest_wait: Duration,
}

impl Pace {
    fn note(&mut self, steps: usize, now: Instant) {
        self.longest_wait = self.longest_wait.max(now - self.since);
        if steps != self.steps {
            (self.steps, self.since) = (steps, now);
        }
    }
}

/// A cable that is pulled.
struct Cut {
    host: usize,
    until: Instant,
}

impl Outside<'_> {
    fn is_over(&mut self) -> bool {
        self.agent_back.is_none() && self.run.has_ended()
    }

    /// Notes the steps, and does what is due.
    fn look(&mut self) -> Result<()> {
        let steps = self.run.steps();
        let step = steps.len();
        self.ever.extend(steps);
        let now = Instant::now();
        self.pace.note(step, now);
        if let Some(cut) = self.cut.take_if(|cut| now >= cut.until) {
            self.hosts.restore(cut.host)?;
        }
        if self.agent_back.take_if(|back| now >= *back).is_some() {
            self.run.start_node(SECOND)?;
        }
        let is_free = self.cut.is_none() && self.agent_back.is_none();
        if is_free && self.acts.front().is_some_and(|act| step >= act.step) {
            let act = self.acts.pop_front();
            act.map_or(Ok(()), |act| self.carry_out(act.kind))?;
        }
        Ok(())
    }

    fn carry_out(&mut self, kind: ActKind) -> Result<()> {
        match kind {
            ActKind::Outage { host, span } => {
                self.hosts.cut(host)?;
                self.cut = Some(Cut { host, until: Instant::now() + span });
                self.done.push("outage");
            }
            ActKind::KillAgent { away } => {
                self.run.kill_node(SECOND);
                self.agent_back = Some(Instant::now() + away);
                self.done.push("agent killed");
            }
        }
        Ok(())
    }
}

/// The faults of a host's ranks that it says have happened.
fn happened(printed: &str, host: usize, ranks_per_host: usize) -> Vec<Fault> {
    let lines = printed.lines().filter(|line| !line.contains(" did not happen: "));
    let texts = lines.filter_map(|line| line.split_once("fault rank="));
    let texts = texts.filter_map(|(_, rest)| rest.split([' ', ':', ')', ';']).next());
    // Failure reports quote the ranks' last words, and a stop has an end.
    let texts: BTreeSet<_> = texts.map(|rest| format!("rank={rest}")).collect();
    let faults = texts.iter().filter_map(|text| text.parse::<Fault>().ok());
    faults.filter(|fault| fault.rank / ranks_per_host == host).collect()
}

fn kind(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Kill => "kill",
        FaultKind::Stop(_) => "stop",
        FaultKind::Exit(_) => "exit",
        FaultKind::Panic => "panic",
        FaultKind::Sleep(_) => "sleep",
        FaultKind::Slow(_) => "slow",
        FaultKind::Drop(_) => "drop",
        FaultKind::Delay { .. } => "delay",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_counts_once_and_where_its_rank_is() {
        let printed = "[rank 1]: drumline: fault rank=1,step=20,kill\n\
            warning: fault rank=0,after=300ms,kill: SIGKILL\n\
            warning: fault rank=1,after=300ms,stop=1s: SIGSTOP\n\
            warning: fault rank=1,after=300ms,stop=1s: SIGCONT\n\
            note: rank 1 on host b failed first: killed by SIGKILL after 2.0 s (the rehearsed fault rank=1,step=20,kill)\n\
            [rank 1]: drumline: warning: fault rank=1,step=90,exit=3 did not happen: the last step was 40\n\
            error: rank 1 said: drumline: fault rank=1,step=20,kill\n\
            [rank 1]: no fault at all\n";
        let kinds =
            |host| happened(printed, host, 1).iter().map(|fault| kind(fault.kind)).collect::<Vec<_>>();
        assert_eq!((kinds(0), kinds(1)), (vec!["kill"], vec!["stop", "kill"]));
        assert_eq!(happened("", 0, 1), []);
    }
}
