//! Faults that a rank does to itself when it comes to a given step.
//!
//! The test says which with [`Ranks::fault`](crate::Ranks::fault), as `WHAT:rank=R@step=S`, several joined by `;`:
//!
//! ```text
//!   kill:rank=2@step=5    stop:rank=0@step=1    exit3:rank=1@step=0    panic:rank=1@step=4    sleep250ms:rank=3@step=2
//! ```
//!
//! and the body calls [`point`] at each step. Without a fault for this rank and step it does nothing, which is the
//! control of every such test.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use drumline_rendezvous::worker_env;
use rustix::process::{Signal, getpid, kill_process};

/// Holds the faults of a run.
pub(crate) const FAULTS: &str = "RANK_TEST_FAULTS";

/// What a rank does to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// Dies of SIGKILL.
    Kill,
    /// Stands still (SIGSTOP) until somebody continues it.
    Stop,
    /// Exits with this code at once, without unwinding.
    Exit(i32),
    /// Panics.
    Panic,
    /// Sleeps this long, then goes on.
    Sleep(Duration),
}

/// A deed at one rank and step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// What happens.
    pub deed: Deed,
    /// To which rank.
    pub rank: usize,
    /// At which step.
    pub step: u64,
}

/// Where a fault may happen: the body calls it at each of its steps.
pub fn point(step: u64) {
    let Ok(spec) = std::env::var(FAULTS) else { return };
    let rank = std::env::var(worker_env::RANK).ok().and_then(|rank| rank.parse().ok());
    let faults = parse_all(&spec).unwrap_or_else(|error| panic!("{FAULTS}: {error:#}"));
    for fault in faults.iter().filter(|fault| Some(fault.rank) == rank && fault.step == step) {
        eprintln!("rank-test: fault {fault}");
        commit(fault.deed);
    }
}

fn commit(deed: Deed) {
    match deed {
        Deed::Kill => raise(Signal::KILL),
        Deed::Stop => stand_still(),
        Deed::Exit(code) => std::process::exit(code),
        Deed::Panic => panic!("a fault was asked for here"),
        Deed::Sleep(time) => std::thread::sleep(time),
    }
}

/// Another thread may be the one to take the signal, so this one waits until it must have reached them all.
fn stand_still() {
    raise(Signal::STOP);
    std::thread::sleep(Duration::from_millis(200));
}

fn raise(signal: Signal) {
    kill_process(getpid(), signal).expect("a process may signal itself");
}

/// Reads several faults joined by `;`.
pub(crate) fn parse_all(spec: &str) -> Result<Vec<Fault>> {
    spec.split(';').filter(|part| !part.trim().is_empty()).map(str::parse).collect()
}

impl FromStr for Fault {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = || {
            let (deed, place) = text.trim().split_once(":rank=")?;
            let (rank, step) = place.split_once("@step=")?;
            Some((deed, rank, step))
        };
        let expected = || format!("a fault is WHAT:rank=R@step=S, got `{text}`");
        let (deed, rank, step) = parts().with_context(expected)?;
        Ok(Self {
            deed: deed.parse()?,
            rank: rank.parse().with_context(expected)?,
            step: step.parse().with_context(expected)?,
        })
    }
}

impl FromStr for Deed {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let exit = || text.strip_prefix("exit")?.parse().ok().map(Deed::Exit);
        let sleep = || worker_env::parse_duration(text.strip_prefix("sleep")?).map(Deed::Sleep);
        match text {
            "kill" => Ok(Deed::Kill),
            "stop" => Ok(Deed::Stop),
            "panic" => Ok(Deed::Panic),
            _ => match exit().or_else(sleep) {
                Some(deed) => Ok(deed),
                None => bail!("no fault `{text}`; try kill, stop, panic, exit3 or sleep250ms"),
            },
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.deed {
            Deed::Kill => f.write_str("kill")?,
            Deed::Stop => f.write_str("stop")?,
            Deed::Panic => f.write_str("panic")?,
            Deed::Exit(code) => write!(f, "exit{code}")?,
            Deed::Sleep(time) => write!(f, "sleep{}ms", time.as_millis())?,
        }
        write!(f, ":rank={}@step={}", self.rank, self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_read_back_as_written() {
        let spec = "kill:rank=2@step=5;stop:rank=0@step=0;exit3:rank=1@step=7;panic:rank=1@step=4;sleep250ms:rank=3@step=2";
        let written: Vec<_> = parse_all(spec).unwrap().iter().map(Fault::to_string).collect();
        assert_eq!(written.join(";"), spec);
        assert_eq!(parse_all("").unwrap(), []);
    }

    #[test]
    fn nonsense_is_refused_with_what_was_expected() {
        for (text, word) in [
            ("kill", "WHAT:rank=R@step=S"),
            ("kill:rank=two@step=5", "got `kill:rank=two@step=5`"),
            ("kill:rank=2@step=-1", "WHAT:rank=R@step=S"),
            ("kick:rank=2@step=5", "no fault `kick`; try kill"),
            ("exit:rank=2@step=5", "no fault `exit`"),
        ] {
            let error = format!("{:#}", text.parse::<Fault>().unwrap_err());
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
