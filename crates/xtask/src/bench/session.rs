//! Running the units: gate, contender, probe, and again when the machine changed meanwhile.

use super::contender::{Case, Contender, Manner};
use super::peers::Built;
use super::placement::Placement;
use super::sizes::ByteSize;
use super::tally::{Key, Sample, Tally};
use super::{child, quiet, record};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A contender that failed this often at an operation is left out of the rest of it.
const FAILURES: usize = 2;
/// A unit disturbed while it ran is taken again, this often at most.
const ATTEMPTS: usize = 3;

/// One contender at one case in one block.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) block: usize,
    pub(crate) case: Case,
    pub(crate) contender: Contender,
}

/// A run under way: how it measures, and what it has so far.
pub(crate) struct Session {
    pub(crate) manner: Manner,
    pub(crate) patience: Duration,
    pub(crate) placement: Placement,
    pub(crate) built: Built,
    pub(crate) tally: Tally,
    /// How often each contender failed at each operation.
    pub(crate) failures: BTreeMap<String, usize>,
}

impl Session {
    /// Measures one unit, again when it was disturbed; a failure is shown and the run goes on.
    pub(crate) fn take(&mut self, unit: &Unit) {
        let who = format!("{} at {} x{}", unit.contender, unit.case.op, unit.case.world);
        if self.failures.get(&who).is_some_and(|failed| *failed >= FAILURES) {
            return;
        }
        match self.measure(unit) {
            Ok(()) => {}
            Err(error) => {
                eprintln!("\nno figure: {who}, {}: {error:#}", ByteSize(unit.case.bytes));
                *self.failures.entry(who).or_default() += 1;
            }
        }
    }

    fn measure(&mut self, unit: &Unit) -> anyhow::Result<()> {
        for attempt in 1..=ATTEMPTS {
            let Some(command) = unit.contender.command(unit.case, self.manner, &self.built) else {
                return Ok(());
            };
            let (calm, before) = self.wait_for_calm();
            let printed = child::run(command, self.manner.deadline())?;
            let after = self.placement.probe();
            let steady = calm && self.placement.suits(after) && self.placement.agree(before, after);
            if steady || !calm || attempt == ATTEMPTS {
                return self.keep(unit, &printed, steady);
            }
        }
        Ok(())
    }

    /// Bounded wait until the machine is quiet and placed as wanted: whether it became so, and the last probe.
    fn wait_for_calm(&mut self) -> (bool, Option<f64>) {
        let end = Instant::now() + self.patience;
        loop {
            let quiet = quiet::wait(end.saturating_duration_since(Instant::now()));
            let probe = self.placement.probe();
            if quiet && self.placement.suits(probe) {
                return (true, probe);
            }
            if Instant::now() >= end {
                return (false, probe);
            }
        }
    }

    fn keep(&mut self, unit: &Unit, printed: &child::Printed, steady: bool) -> anyhow::Result<()> {
        let records = record::parse(&printed.stdout)?;
        anyhow::ensure!(!records.is_empty(), "{}", printed.stderr.trim_end());
        for record in records.iter().filter(|record| record.bytes == unit.case.bytes) {
            let series = unit.contender.series_of(&record.backend);
            let key = Key { case: unit.case, series, setting: unit.contender.setting.to_owned() };
            let (median_us, p99_us) = (record.median_us, record.p99_us);
            self.tally.add(key, Sample { block: unit.block, median_us, p99_us, steady });
        }
        Ok(())
    }
}
