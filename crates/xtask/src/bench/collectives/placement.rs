//! How far apart are our cores? On a virtual machine the host moves them: two cores may for some seconds be the two
//! threads of one real core and then two real cores again, and cache lines cross 2 to 3 times faster in the first case.
//! Contenders measured in different cases cannot be compared, so each unit is probed before and after, and taken again
//! when the case was not the wanted one.
//!
//! The probe is the floor program at 64 KiB for a few milliseconds: it moves cache lines and does nothing else.

use super::record;
use crate::bench::child;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SAMPLES_AT_START: usize = 30;
const BETWEEN_SAMPLES: Duration = Duration::from_millis(250);
/// Two groups of probes are two cases when they differ by more than this.
const TWO_CASES: f64 = 1.6;

/// Which case is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Cores {
    /// Different real cores (the slower probes), as on a machine of one's own
    Apart,
    /// Threads of one real core (the faster probes)
    Together,
    /// Whatever comes
    Any,
}

/// The probes seen so far.
#[derive(Debug)]
pub(crate) struct Placement {
    wanted: Cores,
    floor: PathBuf,
    seen: Vec<f64>,
}

impl Placement {
    /// Watches the machine for some seconds first, unless any case will do.
    pub(crate) fn watch(floor: &Path, wanted: Cores) -> Self {
        let mut placement = Self { wanted, floor: floor.to_path_buf(), seen: Vec::new() };
        if wanted != Cores::Any {
            for _ in 0..SAMPLES_AT_START {
                placement.probe();
                std::thread::sleep(BETWEEN_SAMPLES);
            }
        }
        placement
    }

    /// Microseconds of one probe; `None` when it cannot be run.
    pub(crate) fn probe(&mut self) -> Option<f64> {
        let mut command = Command::new(&self.floor);
        command.args(["all-reduce", "--world", "2", "--sizes", "64K", "--seconds-per-size", "0.01"]);
        let printed = child::run(command, Duration::from_secs(20)).ok()?;
        let micros = record::parse(&printed.stdout).ok()?.first()?.median_us;
        self.seen.push(micros);
        Some(micros)
    }

    /// Whether a probe shows the wanted case; anything does where only one was ever seen.
    pub(crate) fn suits(&self, probe: Option<f64>) -> bool {
        let (Some(probe), Some(border)) = (probe, border(&self.seen)) else { return true };
        match self.wanted {
            Cores::Apart => probe >= border,
            Cores::Together => probe < border,
            Cores::Any => true,
        }
    }

    /// Whether the probes around a unit may be of one case.
    pub(crate) fn agree(&self, before: Option<f64>, after: Option<f64>) -> bool {
        let (Some(before), Some(after)) = (before, after) else { return true };
        self.wanted == Cores::Any || before.max(after) <= TWO_CASES * before.min(after)
    }

    /// For the report.
    pub(crate) fn describe(&self) -> String {
        let (low, high) = (quantile(&self.seen, 0.1), quantile(&self.seen, 0.9));
        match (border(&self.seen), self.wanted) {
            (_, Cores::Any) | (None, _) => format!("one case or any: probes {low:.2} to {high:.2} us"),
            (Some(_), wanted) => {
                let share =
                    self.seen.iter().filter(|p| self.suits(Some(**p))).count() * 100 / self.seen.len();
                format!(
                    "two cases, probes {low:.2} and {high:.2} us; only `{wanted:?}` is counted ({share} % of probes)"
                )
            }
        }
    }
}

/// The line between the two cases, where there are two.
fn border(probes: &[f64]) -> Option<f64> {
    let (low, high) = (quantile(probes, 0.1), quantile(probes, 0.9));
    (high > TWO_CASES * low).then(|| (low * high).sqrt())
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(index).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(wanted: Cores, seen: &[f64]) -> Placement {
        Placement { wanted, floor: PathBuf::new(), seen: seen.to_vec() }
    }

    #[test]
    fn two_cases_are_distinguished() {
        let probes = [0.92, 0.92, 2.36, 0.93, 2.38, 2.40, 1.1, 2.33, 0.91, 3.0];
        let apart = seen(Cores::Apart, &probes);
        let together = seen(Cores::Together, &probes);
        assert_eq!([0.92, 2.36].map(|p| apart.suits(Some(p))), [false, true]);
        assert_eq!([0.92, 2.36].map(|p| together.suits(Some(p))), [true, false]);
        assert!(seen(Cores::Any, &probes).suits(Some(0.92)));
    }

    #[test]
    fn a_change_in_mid_unit_is_seen() {
        let apart = seen(Cores::Apart, &[]);
        assert!(apart.agree(Some(0.92), Some(1.1)) && apart.agree(None, Some(2.4)));
        assert!(!apart.agree(Some(0.92), Some(2.4)) && !apart.agree(Some(2.4), Some(0.92)));
        assert!(seen(Cores::Any, &[]).agree(Some(0.92), Some(2.4)));
    }

    #[test]
    fn noise_alone_is_one_case() {
        let steady = seen(Cores::Apart, &[2.3, 2.4, 2.5, 2.2, 2.35, 2.6]);
        assert!(steady.suits(Some(2.2)) && steady.suits(Some(0.9)) && steady.suits(None));
        assert!(seen(Cores::Apart, &[]).suits(Some(1.0)));
    }
}
