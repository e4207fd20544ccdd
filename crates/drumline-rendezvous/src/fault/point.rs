//! Injects the faults of one rank.

use super::grammar::{Fault, FaultError, FaultKind, When, parse_faults};
use crate::worker_env;
use rustix::process::{Signal, getpid, kill_process};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The faults of this rank in this run of the job. A loop calls [`at`](Self::at) in each of its steps; without faults
/// that costs nothing. When it is dropped, it prints a warning for each fault whose step did not come.
///
/// ```
/// use drumline_rendezvous::fault::Faults;
/// let mut faults = Faults::from_env()?; // set by `drumline run --fault …`
/// for step in 0..10 {
///     faults.at(step);
///     // forward, backward, …
/// }
/// # Ok::<(), drumline_rendezvous::fault::FaultError>(())
/// ```
#[derive(Debug, Default)]
pub struct Faults {
    mine: Vec<Fault>,
    /// The last step that was begun.
    last: Option<u64>,
    /// Set if each step takes longer from now on.
    slow: Option<Slow>,
}

#[derive(Debug)]
struct Slow {
    /// The additional time, as a fraction of the step's time.
    more: f64,
    /// When the current step began.
    began: Instant,
}

/// A fault of the link to another rank, which the group injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkFault {
    /// Break the connections to this rank.
    Drop(usize),
    /// Delay what is sent to `peer` from now on.
    Delay {
        /// The rank.
        peer: usize,
        /// The delay.
        by: Duration,
    },
}

impl Faults {
    /// The faults of `DRUMLINE_FAULTS` for this rank and restart. The rank is that of the launcher, `mpirun` or `srun`:
    /// the first of `RANK`, `OMPI_COMM_WORLD_RANK`, `PMI_RANK` and `SLURM_PROCID` that is set. An error if there are
    /// faults and none of these is set.
    pub fn from_env() -> Result<Faults, FaultError> {
        Self::found_in(&|name| std::env::var(name).ok(), rank_in)
    }

    /// The same for a process that knows its rank in the job, whatever the variables are.
    pub fn for_rank(rank: usize) -> Result<Faults, FaultError> {
        Self::found_in(&|name| std::env::var(name).ok(), |_| Ok(rank))
    }

    fn found_in(
        env: Env<'_>,
        rank: impl Fn(Env<'_>) -> Result<usize, FaultError>,
    ) -> Result<Faults, FaultError> {
        let Some(text) = env(worker_env::DRUMLINE_FAULTS) else { return Ok(Faults::default()) };
        let faults = parse_faults(&text)?;
        if faults.is_empty() {
            return Ok(Faults::default());
        }
        let restarts = env(worker_env::TORCHELASTIC_RESTART_COUNT).and_then(|text| text.trim().parse().ok());
        Ok(Faults::of(faults, rank(env)?, restarts.unwrap_or(0)))
    }

    /// Those of `faults` that rank `rank` has in the run after `restarts` restarts.
    pub fn of(faults: Vec<Fault>, rank: usize, restarts: usize) -> Faults {
        let is_mine = |fault: &Fault| fault.rank == rank && fault.restarts.includes(restarts);
        Faults { mine: faults.into_iter().filter(is_mine).collect(), last: None, slow: None }
    }

    /// Injects the faults of `step`, each once: prints them on stderr and then carries them out. Returns those that
    /// concern links.
    pub fn at(&mut self, step: u64) -> Vec<LinkFault> {
        self.slow_down();
        if self.mine.is_empty() {
            return Vec::new();
        }
        self.last = Some(step);
        let due: Vec<Fault> = self.mine.extract_if(.., |fault| fault.when == When::Step(step)).collect();
        due.into_iter().filter_map(|fault| self.inject(fault)).collect()
    }

    fn inject(&mut self, fault: Fault) -> Option<LinkFault> {
        eprintln!("{}", fault.announcement());
        match fault.kind {
            FaultKind::Kill => raise(Signal::KILL),
            FaultKind::Stop(time) => stop_self(time),
            FaultKind::Exit(code) => std::process::exit(code),
            FaultKind::Panic => panic!("an injected fault: {fault}"),
            FaultKind::Sleep(time) => std::thread::sleep(time),
            FaultKind::Slow(factor) => {
                self.slow = Some(Slow { more: f64::from(factor) / 1000.0 - 1.0, began: Instant::now() });
            }
            FaultKind::Drop(peer) => return Some(LinkFault::Drop(peer)),
            FaultKind::Delay { peer, by } => return Some(LinkFault::Delay { peer, by }),
        }
        None
    }

    /// Sleeps for the additional time of the step that has just ended.
    fn slow_down(&mut self) {
        if let Some(slow) = &mut self.slow {
            std::thread::sleep(slow.began.elapsed().mul_f64(slow.more));
            slow.began = Instant::now();
        }
    }
}

impl Faults {
    /// A warning for each fault whose step did not come. Timed faults are the launcher's.
    fn missed(&self) -> Vec<String> {
        let reached = self.last.map_or_else(
            || "no step was made".to_owned(),
            |last| format!("the last step of this process was {last}"),
        );
        let of_steps = self.mine.iter().filter(|fault| matches!(fault.when, When::Step(_)));
        of_steps.map(|fault| format!("drumline: warning: fault {fault} did not happen: {reached}")).collect()
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        for warning in self.missed() {
            // Not eprintln, which panics if stderr is closed.
            let _ = writeln!(std::io::stderr(), "{warning}");
        }
    }
}

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The rank of the first family of variables that has one, as in the rendezvous. (Slurm sets `PMI_RANK` in some
/// configurations; it is the same number then.)
fn rank_in(env: Env<'_>) -> Result<usize, FaultError> {
    use worker_env::{OMPI_COMM_WORLD_RANK, PMI_RANK, RANK, SLURM_PROCID};
    let given = |variable| Some((variable, env(variable).filter(|value| !value.trim().is_empty())?));
    let (variable, value) = [RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID]
        .into_iter()
        .find_map(given)
        .ok_or(FaultError::NoRank)?;
    value.trim().parse().map_err(|_| FaultError::BadRank { variable, value })
}

/// Stops this process. It cannot continue itself, so a child does, if the stop has a time. Another thread may receive
/// the signal, so this one waits until it must have reached them all.
fn stop_self(time: Option<Duration>) {
    if let Some(time) = time {
        let script = format!("sleep {:.3}; kill -CONT {}", time.as_secs_f64(), std::process::id());
        let child = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn();
        match child {
            Ok(mut child) => {
                raise(Signal::STOP);
                // The child has continued this process.
                let _ = child.wait();
            }
            Err(error) => eprintln!(
                "drumline: fault without effect, cannot start the process that would end it: {error}"
            ),
        }
        return;
    }
    raise(Signal::STOP);
    std::thread::sleep(Duration::from_millis(200));
}

fn raise(signal: Signal) {
    kill_process(getpid(), signal).expect("a process may signal itself");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str, rank: usize, restarts: usize) -> Faults {
        Faults::of(parse_faults(text).unwrap(), rank, restarts)
    }

    #[test]
    fn a_rank_has_only_its_own_faults_of_this_run() {
        let text = "rank=1,step=3,drop=0; rank=1,step=3,restart=1,drop=2; rank=0,step=3,drop=1; rank=1,step=4,restart=any,drop=3";
        let dropped = |rank, restarts, step| {
            let links = faults(text, rank, restarts).at(step);
            links.into_iter().filter(|link| matches!(link, LinkFault::Drop(_))).count()
        };
        assert_eq!([dropped(1, 0, 3), dropped(1, 1, 3), dropped(1, 2, 3), dropped(2, 0, 3)], [1, 1, 0, 0]);
        assert_eq!([dropped(1, 0, 4), dropped(1, 7, 4), dropped(1, 0, 5)], [1, 1, 0]);
        assert_eq!(faults(text, 1, 1).at(3), [LinkFault::Drop(2)]);
    }

    #[test]
    fn a_fault_whose_step_never_comes_is_a_warning() {
        let mut faults = faults("rank=0,step=2,drop=1; rank=0,step=20,kill; rank=0,after=9s,kill", 0, 0);
        assert_eq!(
            faults.missed(),
            [
                "drumline: warning: fault rank=0,step=2,drop=1 did not happen: no step was made",
                "drumline: warning: fault rank=0,step=20,kill did not happen: no step was made"
            ]
        );
        (1..=7).for_each(|step| drop(faults.at(step)));
        let expected = "drumline: warning: fault rank=0,step=20,kill did not happen: the last step of this process was 7";
        assert_eq!(faults.missed(), [expected]);
        assert!(Faults::default().missed().is_empty(), "control: no fault, no warning");
    }

    /// The ranks whose faults a process with these variables has, of one fault for each of ranks 0 to 2.
    fn ranks_with(variables: &str) -> Result<Vec<usize>, FaultError> {
        let faults = "DRUMLINE_FAULTS=rank=0,step=3,drop=1;rank=1,step=3,drop=2;rank=2,step=3,drop=0";
        let pairs: Vec<_> =
            variables.split_whitespace().chain([faults]).filter_map(|pair| pair.split_once('=')).collect();
        let env = |name: &str| Some(pairs.iter().find(|pair| pair.0 == name)?.1.to_owned());
        Ok(Faults::found_in(&env, rank_in)?.mine.iter().map(|fault| fault.rank).collect())
    }

    #[test]
    fn the_rank_is_found_in_every_launchers_variables() {
        let cases = [
            ("RANK=1 SLURM_PROCID=0", 1),
            ("SLURM_PROCID=2", 2),
            ("OMPI_COMM_WORLD_RANK=1 SLURM_PROCID=0", 1),
            ("PMI_RANK=2", 2),
            ("RANK= SLURM_PROCID=1", 1),
        ];
        for (variables, rank) in cases {
            assert_eq!(ranks_with(variables), Ok(vec![rank]), "{variables}");
        }
        assert_eq!(ranks_with("SLURM_PROCID=7"), Ok(Vec::new()), "a rank without faults");
    }

    #[test]
    fn faults_without_a_rank_are_an_error() {
        assert_eq!(ranks_with(""), Err(FaultError::NoRank));
        let first = FaultError::BadRank { variable: worker_env::RANK, value: "first".into() };
        assert_eq!(ranks_with("RANK=first"), Err(first));
        // Control: without faults no rank is needed.
        assert!(Faults::found_in(&|_| None, rank_in).unwrap().mine.is_empty());
        let known = Faults::found_in(
            &|name| (name == worker_env::DRUMLINE_FAULTS).then(|| "rank=1,step=3,kill".into()),
            |_| Ok(1),
        );
        assert_eq!(known.unwrap().mine.len(), 1, "a process that knows its rank needs no variable");
    }

    #[test]
    fn a_slow_rank_is_slow_from_its_step() {
        let mut faults = faults("rank=0,step=1,slow=3", 0, 0);
        let mut step = |number| {
            let began = Instant::now();
            faults.at(number);
            let waited = began.elapsed();
            std::thread::sleep(Duration::from_millis(40));
            waited
        };
        let waits = [step(0), step(1), step(2), step(3)];
        assert!(waits[..2].iter().all(|wait| *wait < Duration::from_millis(40)), "{waits:?}");
        assert!(waits[2..].iter().all(|wait| *wait >= Duration::from_millis(75)), "{waits:?}");
    }
}
