//! The ranks of a run: which are alive, what each waits for, how it spends its time, and which one delays the others.
//!
//! In: the ranks' status files, and our clock. Out: a row for each rank. Not here: who waits for whom (`waits`).
//!
//! A *straggler* is a rank that others wait for, or one that the ranks themselves have found to be slower (`slow_ranks`).

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::waits;
use crate::status::{LastSign, RankStatus, State};

/// The number of seconds over which the shares of time are computed.
const WINDOW: f64 = 10.0;
/// A wait that is long enough to be shown, in seconds.
const LONG_WAIT: f64 = 2.0;

/// The condition of a rank, as the page shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Condition {
    Running,
    Waiting,
    Ended,
    Failed,
    Lost,
}

/// A row of the page's table.
#[derive(Debug, Serialize)]
pub(super) struct Row<'a> {
    #[serde(flatten)]
    pub(super) status: &'a RankStatus,
    /// Shown instead of the state in the file.
    pub(super) condition: Condition,
    /// Shares of the last seconds: loading, computing, communicating.
    shares: [f64; 3],
    /// Ranks that have not reached the collective that it is in.
    waits_for: Option<String>,
    /// Why it is a straggler, if it is one.
    pub(super) straggler: Option<String>,
    /// Seconds since the last sign of life.
    silent_s: f64,
}

/// All ranks that were seen.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    seen: BTreeMap<usize, Seen>,
}

#[derive(Debug)]
struct Seen {
    status: RankStatus,
    last_sign: LastSign,
    /// Samples of the last seconds, oldest first.
    history: VecDeque<Sample>,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    time: f64,
    spent: [f64; 3],
}

impl Ranks {
    /// Updates the ranks from files that were read at `now`. Ranks without a file are forgotten.
    pub(super) fn update(&mut self, files: Vec<RankStatus>, now: f64) {
        let mut before = std::mem::take(&mut self.seen);
        for status in files {
            let rank = status.rank;
            let seen = match before.remove(&rank) {
                Some(seen) => seen.updated(status, now),
                None => Seen::new(status, now),
            };
            self.seen.insert(rank, seen);
        }
    }

    /// A row for each rank below `world_size`, if that is known: there may be files of an earlier, larger world.
    pub(super) fn rows(&self, world_size: Option<usize>, now: f64) -> Vec<Row<'_>> {
        let ranks = self.seen.values().filter(|seen| world_size.is_none_or(|size| seen.status.rank < size));
        let mut rows: Vec<_> = ranks.map(|seen| seen.row(now)).collect();
        let late = waits::late(&rows);
        let is_late: Vec<_> = rows.iter().map(|row| late.binary_search(&row.status.rank).is_ok()).collect();
        for (row, is_late) in rows.iter_mut().zip(&is_late) {
            let waits = row.condition == Condition::Waiting && !late.is_empty() && !is_late;
            row.waits_for = waits.then(|| waits::named(&late));
        }
        let delay = delay(&rows);
        for (row, is_late) in rows.iter_mut().zip(is_late) {
            row.straggler = straggling(row, delay.as_ref().filter(|_| is_late));
        }
        rows
    }
}

impl Seen {
    fn new(status: RankStatus, now: f64) -> Self {
        let last_sign = LastSign::new(&status, now);
        let history = VecDeque::from([Sample::of(&status)]);
        Self { status, last_sign, history }
    }

    fn updated(mut self, status: RankStatus, now: f64) -> Self {
        if !self.last_sign.look(&status, now) {
            return self;
        }
        if status.pid != self.status.pid || status.step < self.status.step {
            self.history.clear();
        }
        self.history.push_back(Sample::of(&status));
        // The oldest one kept is the first that is a whole window old.
        while self.history.get(1).is_some_and(|second| second.time <= status.time - WINDOW) {
            self.history.pop_front();
        }
        self.status = status;
        self
    }

    fn row(&self, now: f64) -> Row<'_> {
        let condition = match self.status.state {
            State::Ended => Condition::Ended,
            State::Failed => Condition::Failed,
            State::Running if self.last_sign.is_lost(&self.status, now) => Condition::Lost,
            State::Running if self.status.op.is_some() && self.status.op_s >= LONG_WAIT => Condition::Waiting,
            State::Running => Condition::Running,
        };
        let (shares, silent_s) = (self.shares(condition), self.last_sign.silence(now));
        Row { status: &self.status, condition, shares, waits_for: None, straggler: None, silent_s }
    }

    /// Over the last seconds while it runs, over all its time afterwards.
    fn shares(&self, condition: Condition) -> [f64; 3] {
        let last = Sample::of(&self.status);
        let first =
            self.history.front().filter(|_| matches!(condition, Condition::Running | Condition::Waiting));
        let (spent, time) = match first {
            Some(first) if last.time > first.time => (last.since(first), last.time - first.time),
            _ => (last.spent, last.spent.iter().sum()),
        };
        let total = time.max(spent.iter().sum()).max(f64::MIN_POSITIVE);
        spent.map(|part| (part / total).clamp(0.0, 1.0))
    }
}

impl Sample {
    fn of(status: &RankStatus) -> Self {
        let spent = [status.load_s, status.compute_s, status.comm_s];
        Self { time: status.time, spent }
    }

    fn since(&self, first: &Self) -> [f64; 3] {
        [0, 1, 2].map(|part| (self.spent[part] - first.spent[part]).max(0.0))
    }
}

/// How many ranks wait for others, and in which collective for how long.
fn delay(rows: &[Row<'_>]) -> Option<String> {
    let waiting: Vec<_> = rows.iter().filter(|row| row.waits_for.is_some()).map(|row| row.status).collect();
    let longest = waiting.iter().max_by(|a, b| a.op_s.total_cmp(&b.op_s))?;
    Some(format!("{} in {} for {:.0} s", waiting.len(), longest.op.as_deref()?, longest.op_s))
}

fn straggling(row: &Row<'_>, delay: Option<&String>) -> Option<String> {
    if !matches!(row.condition, Condition::Running | Condition::Waiting) {
        return None;
    }
    let waited_for = delay.map(|delay| format!("waited for: {delay}"));
    let slow = row.status.slow.map(|times| format!("its work of a step takes {times:.1} × the median"));
    waited_for.or(slow)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(rank: usize, time: f64) -> RankStatus {
        let (compute_s, comm_s) = (time * 0.5, time * 0.25);
        RankStatus { rank, pid: 7, step: (time * 10.0) as u64, compute_s, comm_s, time, ..Default::default() }
    }

    fn conditions(ranks: &Ranks, now: f64) -> Vec<Condition> {
        ranks.rows(None, now).iter().map(|row| row.condition).collect()
    }

    #[test]
    fn a_silent_rank_is_lost_and_one_that_has_ended_is_not() {
        let mut ranks = Ranks::default();
        let ended = RankStatus { state: State::Ended, ..status(2, 100.0) };
        ranks.update(vec![status(0, 100.0), status(1, 100.0), ended.clone()], 100.0);
        assert_eq!(conditions(&ranks, 104.9), [Condition::Running, Condition::Running, Condition::Ended]);
        ranks.update(vec![status(0, 106.0), status(1, 100.0), ended], 106.0);
        assert_eq!(conditions(&ranks, 106.0), [Condition::Running, Condition::Lost, Condition::Ended]);
        let lost = ranks.rows(None, 107.0)[1].silent_s;
        assert!((6.9..7.1).contains(&lost), "{lost}");
    }

    #[test]
    fn shares_are_of_the_last_seconds() {
        let mut ranks = Ranks::default();
        for tick in 0..100 {
            let time = f64::from(tick);
            // At first nothing but communication.
            let (compute_s, comm_s) = if tick < 50 { (0.0, time) } else { (time - 49.0, 49.0) };
            ranks.update(vec![RankStatus { compute_s, comm_s, ..status(0, time) }], time);
        }
        let [load, compute, comm] = ranks.rows(None, 99.0)[0].shares;
        assert!(load == 0.0 && compute > 0.99 && comm == 0.0, "{load} {compute} {comm}");
    }

    #[test]
    fn the_rank_that_others_wait_for_is_named_and_marked() {
        let mut ranks = Ranks::default();
        let op = Some("all_reduce(4 f32, sum) #9 of world at a.rs:1".to_owned());
        let waiting = |rank| RankStatus { op: op.clone(), op_s: 3.0, ..status(rank, 9.0) };
        ranks.update(vec![waiting(0), status(1, 9.0), waiting(2)], 9.0);
        let rows = ranks.rows(None, 9.0);
        assert_eq!((rows[0].condition, rows[0].waits_for.as_deref()), (Condition::Waiting, Some("rank 1")));
        let why = rows[1].straggler.as_deref().unwrap();
        assert_eq!(why, "waited for: 2 in all_reduce(4 f32, sum) #9 of world at a.rs:1 for 3 s");
        assert!(rows[0].straggler.is_none() && rows[2].straggler.is_none() && rows[1].waits_for.is_none());
        // If it is killed, the others still wait for it, but it is no straggler.
        ranks.update(vec![waiting(0), status(1, 2.0)], 9.0);
        ranks.update(vec![RankStatus { time: 15.0, ..waiting(0) }, status(1, 2.0)], 15.0);
        let rows = ranks.rows(None, 15.0);
        assert_eq!((rows[1].condition, rows[0].waits_for.as_deref()), (Condition::Lost, Some("rank 1")));
        assert!(rows[1].straggler.is_none());
        // If nobody waits, nobody is waited for.
        ranks.update(vec![status(0, 20.0), status(1, 20.0), status(2, 20.0)], 20.0);
        let rows = ranks.rows(None, 20.0);
        assert!(rows.iter().all(|row| row.straggler.is_none() && row.waits_for.is_none()));
    }

    #[test]
    fn slow_ranks_that_the_ranks_have_found_are_marked() {
        let mut ranks = Ranks::default();
        for time in [0.0, 1.0, 2.0] {
            let slow = RankStatus { slow: Some(1.42), ..status(1, time) };
            ranks.update(vec![status(0, time), slow], time);
        }
        let rows = ranks.rows(None, 2.0);
        assert!(rows[0].straggler.is_none());
        assert_eq!(rows[1].straggler.as_deref(), Some("its work of a step takes 1.4 × the median"));
    }

    #[test]
    fn files_of_a_larger_world_are_not_shown() {
        let mut ranks = Ranks::default();
        ranks.update((0..4).map(|rank| status(rank, 1.0)).collect(), 1.0);
        assert_eq!(ranks.rows(Some(2), 1.0).len(), 2);
        ranks.update(vec![status(1, 1.0)], 1.0);
        assert_eq!(ranks.rows(None, 1.0).len(), 1);
    }
}
