//! How faults are written and read. Pure.

use crate::worker_env::parse_duration;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Deed {
    /// Dies of SIGKILL.
    Kill,
    /// Stands still (SIGSTOP) for this long, or until somebody continues it.
    Stop(Option<Duration>),
    /// Exits with this code at once, without unwinding.
    Exit(i32),
    /// Panics.
    Panic,
    /// Sleeps once for this long.
    Sleep(Duration),
    /// From now on each step takes longer by this factor, in thousandths: 2000 is twice as long.
    Slow(u32),
    /// Breaks the connections to this rank.
    Drop(usize),
    /// From now on holds back what it sends to `peer`.
    Delay {
        /// To which rank.
        peer: usize,
        /// For how long.
        by: Duration,
    },
}

/// When it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// When the rank comes to this step.
    Step(u64),
    /// So long after the rank was started, by the launcher.
    After(Duration),
}

/// In which of a job's runs it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restarts {
    /// In the one that comes after so many restarts.
    Exactly(usize),
    /// In each.
    Any,
}

impl Restarts {
    /// Whether a run after `restarts` restarts is meant.
    pub fn includes(self, restarts: usize) -> bool {
        match self {
            Restarts::Exactly(number) => number == restarts,
            Restarts::Any => true,
        }
    }
}

/// A fault: who, when and what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which rank.
    pub rank: usize,
    /// When.
    pub when: When,
    /// After how many restarts.
    pub restarts: Restarts,
    /// What.
    pub deed: Deed,
}

/// Why a text is no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// A word that means nothing.
    #[error(
        "`{word}` in fault `{fault}` means nothing; try rank=N, step=N or after=30s, restart=N, and one of kill, stop, \
         stop=5s, exit=3, panic, sleep=250ms, slow=2, drop=RANK, or delay=50ms with peer=RANK"
    )]
    Word {
        /// The whole fault.
        fault: String,
        /// The word.
        word: String,
    },
    /// Something that must be there is not.
    #[error("fault `{fault}` does not say {what}; try `{example}`")]
    Missing {
        /// The whole fault.
        fault: String,
        /// What is missing.
        what: &'static str,
        /// A fault that is whole.
        example: &'static str,
    },
    /// The same thing is said twice.
    #[error("fault `{fault}` says {what} twice; try several faults joined by `;`")]
    Twice {
        /// The whole fault.
        fault: String,
        /// What.
        what: &'static str,
    },
    /// The launcher can only kill and stop.
    #[error(
        "fault `{fault}`: after a time only `kill` and `stop` can happen, since the launcher carries them out; try \
         `step=N` in a program that reports its steps"
    )]
    NotByLauncher {
        /// The whole fault.
        fault: String,
    },
    /// There are faults, and nothing says whose this process would be.
    #[error(
        "DRUMLINE_FAULTS is set, but RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not, so that it is not known \
         which faults are this process's; try RANK=0 for a single process, or Faults::for_rank(group.rank())"
    )]
    NoRank,
    /// The variable of the rank holds something else.
    #[error(
        "{variable} is `{value}`, which is no rank, so that it is not known which faults are this process's"
    )]
    BadRank {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        value: String,
    },
}

/// Reads faults joined by `;`.
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

/// What has been read of a fault so far.
#[derive(Default)]
struct Read {
    rank: Option<usize>,
    when: Option<When>,
    restarts: Option<Restarts>,
    deed: Option<Deed>,
    peer: Option<usize>,
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let mut read = Read::default();
        for word in text.split(',').map(str::trim) {
            read.take(word, text)?;
        }
        read.finish(text)
    }
}

impl Read {
    fn take(&mut self, word: &str, text: &str) -> Result<(), FaultError> {
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
                let deed = Deed::read(name, value).ok_or_else(unknown)?;
                put(&mut self.deed, deed, || twice("what happens"))
            }
        }
    }

    fn finish(self, text: &str) -> Result<Fault, FaultError> {
        const EXAMPLE: &str = "rank=1,step=20,kill";
        let missing = |what, example| FaultError::Missing { fault: text.into(), what, example };
        let rank = self.rank.ok_or_else(|| missing("which rank", EXAMPLE))?;
        let when = self.when.ok_or_else(|| missing("when", EXAMPLE))?;
        let deed = match (self.deed.ok_or_else(|| missing("what happens", EXAMPLE))?, self.peer) {
            (Deed::Delay { by, .. }, Some(peer)) => Deed::Delay { peer, by },
            (Deed::Delay { .. }, None) => {
                return Err(missing("to which peer", "rank=0,step=4,delay=50ms,peer=1"));
            }
            (_, Some(peer)) => {
                return Err(FaultError::Word { fault: text.into(), word: format!("peer={peer}") });
            }
            (deed, None) => deed,
        };
        if matches!(when, When::After(_)) && !matches!(deed, Deed::Kill | Deed::Stop(_)) {
            return Err(FaultError::NotByLauncher { fault: text.into() });
        }
        Ok(Fault { rank, when, restarts: self.restarts.unwrap_or(Restarts::Exactly(0)), deed })
    }
}

fn put<T>(place: &mut Option<T>, value: T, twice: impl FnOnce() -> FaultError) -> Result<(), FaultError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(twice()),
    }
}

impl Deed {
    fn read(name: &str, value: Option<&str>) -> Option<Deed> {
        let time = || value.and_then(parse_duration);
        match (name, value) {
            ("kill", None) => Some(Deed::Kill),
            ("panic", None) => Some(Deed::Panic),
            ("stop", None) => Some(Deed::Stop(None)),
            ("stop", Some(_)) => time().map(|time| Deed::Stop(Some(time))),
            ("exit", Some(code)) => code.parse().ok().map(Deed::Exit),
            ("sleep", Some(_)) => time().map(Deed::Sleep),
            ("slow", Some(factor)) => {
                let factor = factor.parse().ok().filter(|factor: &f64| (1.0..=1000.0).contains(factor))?;
                Some(Deed::Slow((factor * 1000.0).round() as u32))
            }
            ("drop", Some(peer)) => peer.parse().ok().map(Deed::Drop),
            // The peer is another word.
            ("delay", Some(_)) => time().map(|by| Deed::Delay { peer: usize::MAX, by }),
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
        write!(f, "{}", self.deed)
    }
}

impl fmt::Display for Deed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Deed::Kill => f.write_str("kill"),
            Deed::Stop(None) => f.write_str("stop"),
            Deed::Stop(Some(time)) => write!(f, "stop={}", millis(*time)),
            Deed::Exit(code) => write!(f, "exit={code}"),
            Deed::Panic => f.write_str("panic"),
            Deed::Sleep(time) => write!(f, "sleep={}", millis(*time)),
            Deed::Slow(factor) => write!(f, "slow={}", f64::from(*factor) / 1000.0),
            Deed::Drop(peer) => write!(f, "drop={peer}"),
            Deed::Delay { peer, by } => write!(f, "delay={},peer={peer}", millis(*by)),
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

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            Just(Deed::Kill),
            Just(Deed::Panic),
            proptest::option::of(time()).prop_map(Deed::Stop),
            any::<i32>().prop_map(Deed::Exit),
            time().prop_map(Deed::Sleep),
            (1000u32..1_000_000).prop_map(Deed::Slow),
            (0usize..9999).prop_map(Deed::Drop),
            (0usize..9999, time()).prop_map(|(peer, by)| Deed::Delay { peer, by }),
        ]
    }

    proptest! {
        #[test]
        fn every_fault_reads_back_as_written(
            rank in 0usize..9999, step in any::<u32>(), deed in deed(), restart in proptest::option::of(0usize..9),
        ) {
            let restarts = restart.map_or(Restarts::Any, Restarts::Exactly);
            let fault = Fault { rank, when: When::Step(step.into()), restarts, deed };
            prop_assert_eq!(fault.to_string().parse::<Fault>(), Ok(fault));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}") {
            let _ = parse_faults(&text);
        }
    }

    #[test]
    fn several_and_the_launchers_own() {
        let faults = parse_faults(" rank=1,step=20,kill ; ;restart=any,stop=1.5s,after=2,rank=0;").unwrap();
        let written: Vec<_> = faults.iter().map(Fault::to_string).collect();
        assert_eq!(written, ["rank=1,step=20,kill", "rank=0,after=2s,restart=any,stop=1500ms"]);
        assert_eq!(parse_faults(""), Ok(vec![]));
    }

    #[test]
    fn nonsense_is_refused_with_what_was_expected() {
        for (text, word) in [
            ("kill", "does not say which rank; try `rank=1,step=20,kill`"),
            ("rank=2,kill", "does not say when"),
            ("rank=2,step=5", "does not say what happens"),
            ("rank=two,step=5,kill", "`rank=two` in fault `rank=two,step=5,kill` means nothing; try rank=N"),
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
