//! Running the units: gate, contender, probe, and again when the machine changed meanwhile.

use super::built::Built;
use super::contenders::{self, Case, Kind, Manner, Peer};
use super::placement::Placement;
use super::record;
use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, Taken, Unit, UnitOf};
use crate::bench::{child, quiet};
use anyhow::Context;
use std::time::{Duration, Instant};

/// A unit disturbed while it ran is taken again, this often at most.
const ATTEMPTS: usize = 3;

/// One series' figures of one turn: a peer's program may measure more than one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    /// A column of the table: `ours-heap`, `openmpi`, …
    pub(crate) series: String,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
}

/// The contest: who takes part, and how they are measured.
pub(crate) struct Calls {
    pub(crate) manner: Manner,
    pub(crate) placement: Placement,
    pub(crate) built: Built,
    pub(crate) peers: Vec<Peer>,
    pub(crate) with_ours: bool,
    pub(crate) cores: usize,
}

impl Contest for Calls {
    type Case = Case;
    type Kind = Kind;
    type Figures = Vec<Sample>;

    /// Those that could be built.
    fn contenders(&self, case: Case) -> Vec<Contender<Kind>> {
        let ours = if self.with_ours { contenders::ours(case.op, case.world) } else { Vec::new() };
        let theirs =
            self.peers.iter().flat_map(|peer| contenders::of_peer(*peer, case.op, case.world, self.cores));
        let is_built = |contender: &Contender<Kind>| {
            contenders::command(&Unit { case, contender: *contender }, self.manner, &self.built).is_some()
        };
        ours.into_iter().chain(theirs).filter(is_built).collect()
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Vec<Sample>> {
        let command = contenders::command(unit, self.manner, &self.built).context("it was not built")?;
        let printed = child::run(command, self.manner.deadline())?;
        let records = record::parse(&printed.stdout)?;
        anyhow::ensure!(!records.is_empty(), "{}", printed.stderr.trim_end());
        let of_case = records.into_iter().filter(|record| record.bytes == unit.case.bytes);
        Ok(of_case.map(|record| sample(unit.contender, record)).collect())
    }

    /// Measures again when the machine was disturbed meanwhile.
    fn take(&mut self, unit: &UnitOf<Self>, patience: Duration) -> anyhow::Result<Taken<Vec<Sample>>> {
        let mut attempt = 1;
        loop {
            let Calm { is_calm, probe } = self.wait_for_calm(patience);
            let figures = self.measure(unit)?;
            let after = self.placement.probe();
            let steady = is_calm && self.placement.suits(after) && self.placement.agree(probe, after);
            if steady || !is_calm || attempt == ATTEMPTS {
                return Ok(Taken { figures, steady });
            }
            attempt += 1;
        }
    }

    /// What fails at one size fails at the others.
    fn place(&self, case: Case) -> String {
        format!("{} x{}", case.op, case.world)
    }
}

fn sample(contender: Contender<Kind>, record: record::Record) -> Sample {
    let is_ours = matches!(contender.kind, Kind::Ours(_));
    let series = if is_ours { contender.name.to_owned() } else { record.backend };
    Sample { series, median_us: record.median_us, p99_us: record.p99_us }
}

/// The machine before a unit.
struct Calm {
    /// It became quiet and placed as wanted in time.
    is_calm: bool,
    /// The last probe.
    probe: Option<f64>,
}

impl Calls {
    fn wait_for_calm(&mut self, patience: Duration) -> Calm {
        let end = Instant::now() + patience;
        loop {
            let quiet = quiet::wait(end.saturating_duration_since(Instant::now()));
            let probe = self.placement.probe();
            let is_calm = quiet && self.placement.suits(probe);
            if is_calm || Instant::now() >= end {
                return Calm { is_calm, probe };
            }
        }
    }
}
