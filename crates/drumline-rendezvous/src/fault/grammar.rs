//! Parses and formats faults. Pure.

use crate::worker_env::parse_duration;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What a fault does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// Kills the rank with SIGKILL.
    Kill,
    /// Stops the rank (SIGSTOP) for this long, or until someone continues it.
    Stop(Option<Duration>),
    /// Exits with this code at once, without unwinding.
    Exit(i32),
    /// Panics.
    Panic,
    /// Sleeps once for this long.
    Sleep(Duration),
    /// From now on, each step takes longer by this factor, in thousandths: 2000 is twice as long.
    Slow(u32),
    /// Breaks the connections to this rank.
    Drop(usize),
    /// From now on, delays what is sent to `peer`.
    Delay {
        /// The rank.
        peer: usize,
        /// The delay.
        by: Duration,
    },
}

/// When a fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// When the rank reaches this step.
    Step(u64),
    /// This long after the rank was started; the launcher injects it.
    After(Duration),
}

/// In which runs of a job a fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restarts {
    /// In the run after this many restarts.
    Exactly(usize),
    /// In every run.
    Any,
}

impl Restarts {
    /// Whether the run after `restarts` restarts is included.
    pub fn includes(self, restarts: usize) -> bool {
        match self {
            Restarts::Exactly(number) => number == restarts,
            Restarts::Any => true,
        }
    }
}

/// A fault: which rank, when, and what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The rank.
    pub rank: usize,
    /// When it happens.
    pub when: When,
    /// In which runs it happens.
    pub restarts: Restarts,
    /// What it does.
    pub kind: FaultKind,
}

/// What a rank prints on stderr before it injects a fault, and before the fault itself.
const ANNOUNCED: &str = "drumline: fault ";

impl Fault {
    /// The line that a rank prints on stderr before it injects this fault.
    pub fn announcement(&self) -> String {
        format!("{ANNOUNCED}{self}")
    }

    /// The fault that a line of a rank's stderr announces.
    ///
    /// ```
    /// use drumline_rendezvous::fault::Fault;
    /// let fault: Fault = "rank=1,step=20,kill".parse()?;
    /// assert_eq!(Fault::announced_by(&fault.announcement()), Some(fault));
    /// assert_eq!(Fault::announced_by("loss 0.3"), None);
    /// # Ok::<(), drumline_rendezvous::fault::FaultError>(())
    /// ```
    pub fn announced_by(line: &str) -> Option<Fault> {
        line.trim_end().strip_prefix(ANNOUNCED)?.parse().ok()
    }
}

/// Why a text is not a valid fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// A word is unknown.
    #[error(
        "`{word}` in fault `{fault}` is unknown; try rank=N, step=N or after=30s, restart=N, and one of kill, stop, \
         stop=5s, exit=3, panic, sleep=250ms, slow=2, drop=RANK, or delay=50ms with peer=RANK"
    )]
    Word {
        /// The whole fault.
        fault: String,
        /// The word.
        word: String,
    },
    /// A required part is missing.
    #[error("fault `{fault}` does not say {what}; try `{example}`")]
    Missing {
        /// The whole fault.
        fault: String,
        /// What is missing.
        what: &'static str,
        /// A complete fault.
        example: &'static str,
    },
    /// A part is given twice.
    #[error("fault `{fault}` says {what} twice; try several faults joined by `;`")]
    Twice {
        /// The whole fault.
        fault: String,
        /// What is given twice.
        what: &'static str,
    },
    /// The launcher can inject only `kill` and `stop`.
    #[error(
        "fault `{fault}`: after a time only `kill` and `stop` can happen, because the launcher injects them; try \
         `step=N` in a program that reports its steps"
    )]
    NotByLauncher {
        /// The whole fault.
        fault: String,
    },
    /// There are faults, and the rank of this process is unknown.
    #[error(
        "DRUMLINE_FAULTS is set, but RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not, so it is unknown \
         which faults belong to this process; try RANK=0 for a single process, or Faults::for_rank(group.rank())"
    )]
    NoRank,
    /// The variable of the rank is not a rank.
    #[error(
        "{variable} is `{value}`, which is not a rank, so it is unknown which faults belong to this process"
    )]
    BadRank {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
    },
}

/// Parses faults joined by `;`.
///
/// ```
/// use drumline_rendezvous::fault::parse_faults;
/// let faults = parse_faults("rank=1,step=20,kill; rank=0,after=5s,stop=2s")?;
/// assert_eq!(faults.len(), 2);
/// assert_eq!(faults[0].to_string(), "rank=1,step=20,kill");
/// assert!(parse_faults("rank=1,kill").is_err());
/// # Ok::<(), drumline_rendezvous::fault::FaultError>(())
/// ```
pub fn parse_faults(text: &str) -> Result<Vec<Fault>, FaultError> {
    text.split(';').map(str::trim).filter(|part| !part.is_empty()).map(str::parse).collect()
}

/// The parts of a fault that were parsed so far.
#[derive(Default)]
struct Parts {
    rank: Option<usize>,
    when: Option<When>,
    restarts: Option<Restarts>,
    kind: Option<FaultKind>,
    peer: Option<usize>,
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let mut parts = Parts::default();
        for word in text.split(',').map(str::trim) {
            parts.add(word, text)?;
        }
        parts.finish(text)
    }
}

impl Parts {
    fn add(&mut self, word: &str, text: &str) -> Result<(), FaultError> {
        let unknown = || FaultError::Word { fault: text.into(), word: word.into() };
        let twice = |what| FaultError::Twice { fault: text.into(), what };
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            None => (word, None),
        };
        let number = || value.and_then(|value| value.parse::<usize>().ok()).ok_or_else(unknown);
        let time = || value.and_then(parse_duration).ok_or_else(unknown);
        match name {
            "rank" => put(&mut self.rank, number()?, || twice("the rank")),
            "peer" => put(&mut self.peer, number()?, || twice("the peer")),
            "step" => put(&mut self.when, When::Step(number()? as u64), || twice("when")),
            "after" => put(&mut self.when, When::After(time()?), || twice("when")),
            "restart" => {
                let which = if value == Some("any") { Restarts::Any } else { Restarts::Exactly(number()?) };
                put(&mut self.restarts, which, || twice("after which restart"))
            }
            _ => {
                let kind = FaultKind::read(name, value).ok_or_else(unknown)?;
                put(&mut self.kind, kind, || twice("what happens"))
            }
        }
    }

    fn finish(self, text: &str) -> Result<Fault, FaultError> {
        const EXAMPLE: &str = "rank=1,step=20,kill";
        let missing = |what, example| FaultError::Missing { fault: text.into(), what, example };
        let rank = self.rank.ok_or_else(|| missing("which rank", EXAMPLE))?;
        let when = self.when.ok_or_else(|| missing("when", EXAMPLE))?;
        let kind = match (self.kind.ok_or_else(|| missing("what happens", EXAMPLE))?, self.peer) {
            (FaultKind::Delay { by, .. }, Some(peer)) => FaultKind::Delay { peer, by },
            (FaultKind::Delay { .. }, None) => {
                return Err(missing("to which peer", "rank=0,step=4,delay=50ms,peer=1"));
            }
            (_, Some(peer)) => {
                return Err(FaultError::Word { fault: text.into(), word: format!("peer={peer}") });
            }
            (kind, None) => kind,
        };
        if matches!(when, When::After(_)) && !matches!(kind, FaultKind::Kill | FaultKind::Stop(_)) {
            return Err(FaultError::NotByLauncher { fault: text.into() });
        }
        Ok(Fault { rank, when, restarts: self.restarts.unwrap_or(Restarts::Exactly(0)), kind })
    }
}

fn put<T>(place: &mut Option<T>, value: T, twice: impl FnOnce() -> FaultError) -> Result<(), FaultError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(twice()),
    }
}

impl FaultKind {
    fn read(name: &str, value: Option<&str>) -> Option<FaultKind> {
        let time = || value.and_then(parse_duration);
        match (name, value) {
            ("kill", None) => Some(FaultKind::Kill),
            ("panic", None) => Some(FaultKind::Panic),
            ("stop", None) => Some(FaultKind::Stop(None)),
            ("stop", Some(_)) => time().map(|time| FaultKind::Stop(Some(time))),
            ("exit", Some(code)) => code.parse().ok().map(FaultKind::Exit),
            ("sleep", Some(_)) => time().map(FaultKind::Sleep),
            ("slow", Some(factor)) => {
                let factor = factor.parse().ok().filter(|factor: &f64| (1.0..=1000.0).contains(factor))?;
                Some(FaultKind::Slow((factor * 1000.0).round() as u32))
            }
            ("drop", Some(peer)) => peer.parse().ok().map(FaultKind::Drop),
            // The peer is given by another word.
            ("delay", Some(_)) => time().map(|by| FaultKind::Delay { peer: usize::MAX, by }),
            _ => None,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={},", self.rank)?;
        match self.when {
            When::Step(step) => write!(f, "step={step},")?,
            When::After(time) => write!(f, "after={},", millis(time))?,
        }
        match self.restarts {
            Restarts::Exactly(0) => {}
            Restarts::Exactly(number) => write!(f, "restart={number},")?,
            Restarts::Any => f.write_str("restart=any,")?,
        }
        write!(f, "{}", self.kind)
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::Kill => f.write_str("kill"),
            FaultKind::Stop(None) => f.write_str("stop"),
            FaultKind::Stop(Some(time)) => write!(f, "stop={}", millis(*time)),
            FaultKind::Exit(code) => write!(f, "exit={code}"),
            FaultKind::Panic => f.write_str("panic"),
            FaultKind::Sleep(time) => write!(f, "sleep={}", millis(*time)),
            FaultKind::Slow(factor) => write!(f, "slow={}", f64::from(*factor) / 1000.0),
            FaultKind::Drop(peer) => write!(f, "drop={peer}"),
            FaultKind::Delay { peer, by } => write!(f, "delay={},peer={peer}", millis(*by)),
        }
    }
}

/// Whole seconds as such, anything else in milliseconds.
fn millis(time: Duration) -> String {
    let millis = time.as_millis();
    if millis.is_multiple_of(1000) { format!("{}s", millis / 1000) } else { format!("{millis}ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn time() -> impl Strategy<Value = Duration> {
        (0u64..100_000_000).prop_map(Duration::from_millis)
    }

    fn kind() -> impl Strategy<Value = FaultKind> {
        prop_oneof![
            Just(FaultKind::Kill),
            Just(FaultKind::Panic),
            proptest::option::of(time()).prop_map(FaultKind::Stop),
            any::<i32>().prop_map(FaultKind::Exit),
            time().prop_map(FaultKind::Sleep),
            (1000u32..1_000_000).prop_map(FaultKind::Slow),
            (0usize..9999).prop_map(FaultKind::Drop),
            (0usize..9999, time()).prop_map(|(peer, by)| FaultKind::Delay { peer, by }),
        ]
    }

    proptest! {
        #[test]
        fn every_fault_round_trips(
            rank in 0usize..9999, step in any::<u32>(), kind in kind(), restart in proptest::option::of(0usize..9),
        ) {
            let restarts = restart.map_or(Restarts::Any, Restarts::Exactly);
            let fault = Fault { rank, when: When::Step(step.into()), restarts, kind };
            prop_assert_eq!(fault.to_string().parse::<Fault>(), Ok(fault));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}") {
            let _ = parse_faults(&text);
        }
    }

    #[test]
    fn several_faults_and_timed_faults_are_parsed() {
        let faults = parse_faults(" rank=1,step=20,kill ; ;restart=any,stop=1.5s,after=2,rank=0;").unwrap();
        let written: Vec<_> = faults.iter().map(Fault::to_string).collect();
        assert_eq!(written, ["rank=1,step=20,kill", "rank=0,after=2s,restart=any,stop=1500ms"]);
        assert_eq!(parse_faults(""), Ok(vec![]));
    }

    #[test]
    fn invalid_faults_are_errors() {
        for (text, word) in [
            ("kill", "does not say which rank; try `rank=1,step=20,kill`"),
            ("rank=2,kill", "does not say when"),
            ("rank=2,step=5", "does not say what happens"),
            ("rank=two,step=5,kill", "`rank=two` in fault `rank=two,step=5,kill` is unknown; try rank=N"),
            ("rank=2,step=-1,kill", "`step=-1`"),
            ("rank=2,step=5,kick", "`kick`"),
            ("rank=2,step=5,exit", "`exit`"),
            ("rank=2,step=5,slow=0.5", "`slow=0.5`"),
            ("rank=2,step=5,slow=NaN", "`slow=NaN`"),
            ("rank=2,step=5,delay=5ms", "does not say to which peer"),
            ("rank=2,step=5,kill,peer=1", "`peer=1`"),
            ("rank=2,step=5,kill,panic", "says what happens twice"),
            ("rank=2,step=5,after=3s,kill", "says when twice"),
            ("rank=2,after=3s,exit=1", "only `kill` and `stop`"),
            ("rank=2,step=5,kill,", "`` in fault"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
