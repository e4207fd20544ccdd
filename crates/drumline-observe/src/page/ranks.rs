//! The ranks of a run: which are alive, what each waits for, how it spends its time, and which one holds up the others.
//!
//! In: the files `ranks/00000.json` as they were read, and our clock. Out: a row for each rank. Not here: reading files
//! (`run_folder`).
//!
//! A rank is *lost* when its file has not changed for [`SILENCE`] and it has not ended. That is told by our own clock from
//! one change to the next, as the clocks of other hosts may differ; only a file seen for the first time is told by the time
//! that stands in it. A *straggler* is a rank that others wait for, or whose own work of a step takes much longer than
//! that of most.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Deserializer, Serialize};

/// A living rank writes its file twice a second.
const SILENCE: f64 = 5.0;
/// Over how many seconds the shares of time are taken.
const WINDOW: f64 = 10.0;
/// Waiting that is worth a word.
const LONG_WAIT: f64 = 2.0;
/// How much longer than the median a straggler's work of a step takes.
const SLOW: f64 = 1.2;

/// What a rank says of itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) rank: usize,
    host: String,
    pid: u64,
    state: String,
    error: Option<String>,
    step: u64,
    epoch: u64,
    op: Option<String>,
    #[serde(deserialize_with = "or_zero")]
    op_s: f64,
    #[serde(deserialize_with = "or_zero")]
    load_s: f64,
    #[serde(deserialize_with = "or_zero")]
    compute_s: f64,
    #[serde(deserialize_with = "or_zero")]
    comm_s: f64,
    memory_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    samples_per_s: Option<f64>,
    #[serde(deserialize_with = "or_zero")]
    time: f64,
}

/// What is no number is written as null.
fn or_zero<'de, D: Deserializer<'de>>(given: D) -> Result<f64, D::Error> {
    Option::deserialize(given).map(Option::unwrap_or_default)
}

/// How a rank is, in our words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
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
    status: &'a Status,
    /// In place of what the file says.
    pub(super) condition: State,
    /// Parts of the last seconds: loading, computing, communicating.
    shares: [f64; 3],
    /// Why it is one.
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
    status: Status,
    /// By our clock.
    last_sign: f64,
    /// Of the last seconds, oldest first.
    history: VecDeque<Sample>,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    time: f64,
    step: u64,
    spent: [f64; 3],
}

impl Ranks {
    /// Takes over what was read at `now`. Ranks without a file are forgotten.
    pub(super) fn hear(&mut self, files: Vec<Status>, now: f64) {
        let mut before = std::mem::take(&mut self.seen);
        for status in files {
            let rank = status.rank;
            let seen = match before.remove(&rank) {
                Some(seen) => seen.then(status, now),
                None => Seen::new(status, now),
            };
            self.seen.insert(rank, seen);
        }
    }

    /// A row for each rank below `world_size`, where that is known; files of a larger world may lie about.
    pub(super) fn rows(&self, world_size: Option<usize>, now: f64) -> Vec<Row<'_>> {
        let ranks = self.seen.values().filter(|seen| world_size.is_none_or(|size| seen.status.rank < size));
        let mut rows: Vec<_> = ranks.map(|seen| (seen, seen.row(now))).collect();
        let holding_up = rows.iter().map(|(_, row)| row).filter_map(wait).max_by(|a, b| a.1.total_cmp(&b.1));
        let num_waiting = rows.iter().filter(|(_, row)| wait(row).is_some()).count();
        let holding_up = holding_up.map(|(op, seconds)| format!("{num_waiting} in {op} for {seconds:.0} s"));
        let median = median_work(&rows);
        for (seen, row) in &mut rows {
            row.straggler = straggling(seen, row, holding_up.as_deref(), median);
        }
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

impl Seen {
    fn new(status: Status, now: f64) -> Self {
        let last_sign = status.time.min(now);
        let history = VecDeque::from([Sample::of(&status)]);
        Self { status, last_sign, history }
    }

    fn then(mut self, status: Status, now: f64) -> Self {
        if status.time == self.status.time && status.pid == self.status.pid {
            return self;
        }
        if status.pid != self.status.pid || status.step < self.status.step {
            self.history.clear();
        }
        self.last_sign = now;
        self.history.push_back(Sample::of(&status));
        // The oldest one kept is the first that is a whole window old.
        while self.history.get(1).is_some_and(|second| second.time <= status.time - WINDOW) {
            self.history.pop_front();
        }
        self.status = status;
        self
    }

    fn row(&self, now: f64) -> Row<'_> {
        let silent_s = (now - self.last_sign).max(0.0);
        let condition = match self.status.state.as_str() {
            "ended" => State::Ended,
            "failed" => State::Failed,
            _ if silent_s > SILENCE => State::Lost,
            _ if self.status.op.is_some() && self.status.op_s >= LONG_WAIT => State::Waiting,
            _ => State::Running,
        };
        Row { status: &self.status, condition, shares: self.shares(condition), straggler: None, silent_s }
    }

    /// Of the last seconds while it runs, of all its time afterwards.
    fn shares(&self, condition: State) -> [f64; 3] {
        let last = Sample::of(&self.status);
        let first = self.history.front().filter(|_| matches!(condition, State::Running | State::Waiting));
        let (spent, time) = match first {
            Some(first) if last.time > first.time => (last.since(first), last.time - first.time),
            _ => (last.spent, last.spent.iter().sum()),
        };
        let total = time.max(spent.iter().sum()).max(f64::MIN_POSITIVE);
        spent.map(|part| (part / total).clamp(0.0, 1.0))
    }

    /// Seconds of its own work for a step, in the last seconds.
    fn work(&self) -> Option<f64> {
        let (first, last) = (self.history.front()?, self.history.back()?);
        let steps = last.step.checked_sub(first.step).filter(|steps| *steps > 0)?;
        let [load, compute, _] = last.since(first);
        Some((load + compute) / steps as f64)
    }
}

impl Sample {
    fn of(status: &Status) -> Self {
        let spent = [status.load_s, status.compute_s, status.comm_s];
        Self { time: status.time, step: status.step, spent }
    }

    fn since(&self, first: &Self) -> [f64; 3] {
        [0, 1, 2].map(|part| (self.spent[part] - first.spent[part]).max(0.0))
    }
}

/// What a rank has been waiting in for long.
fn wait<'a>(row: &Row<'a>) -> Option<(&'a str, f64)> {
    let op = row.status.op.as_deref().filter(|_| row.condition == State::Waiting)?;
    Some((op, row.status.op_s))
}

/// The lower one, so that of two ranks the slower is held against the faster.
fn median_work(rows: &[(&Seen, Row<'_>)]) -> Option<f64> {
    let mut work: Vec<_> = rows.iter().filter_map(|(seen, _)| seen.work()).collect();
    work.sort_by(f64::total_cmp);
    work.get(work.len().saturating_sub(1) / 2).copied()
}

fn straggling(seen: &Seen, row: &Row<'_>, held_up: Option<&str>, median: Option<f64>) -> Option<String> {
    if row.condition != State::Running {
        return None;
    }
    let waited_for =
        held_up.filter(|_| seen.status.op.is_none()).map(|held_up| format!("waited for: {held_up}"));
    waited_for.or_else(|| {
        let times = seen.work()? / median.filter(|median| *median > 0.0)?;
        (times >= SLOW).then(|| format!("its work of a step takes {times:.1} × the median"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(rank: usize, time: f64) -> Status {
        let (step, state) = ((time * 10.0) as u64, "running".to_owned());
        Status {
            rank,
            pid: 7,
            state,
            step,
            compute_s: time * 0.5,
            comm_s: time * 0.25,
            time,
            ..Status::default()
        }
    }

    fn conditions(ranks: &Ranks, now: f64) -> Vec<State> {
        ranks.rows(None, now).iter().map(|row| row.condition).collect()
    }

    #[test]
    fn a_silent_rank_is_lost_and_one_that_has_ended_is_not() {
        let mut ranks = Ranks::default();
        let ended = Status { state: "ended".to_owned(), ..status(2, 100.0) };
        ranks.hear(vec![status(0, 100.0), status(1, 100.0), ended.clone()], 100.0);
        assert_eq!(conditions(&ranks, 104.9), [State::Running, State::Running, State::Ended]);
        ranks.hear(vec![status(0, 106.0), status(1, 100.0), ended], 106.0);
        assert_eq!(conditions(&ranks, 106.0), [State::Running, State::Lost, State::Ended]);
        let lost = ranks.rows(None, 107.0)[1].silent_s;
        assert!((6.9..7.1).contains(&lost), "{lost}");
    }

    #[test]
    fn clocks_of_other_hosts_may_be_wrong() {
        let mut ranks = Ranks::default();
        ranks.hear(vec![status(0, 40.0), status(1, 5000.0)], 1000.0);
        assert_eq!(conditions(&ranks, 1000.0), [State::Lost, State::Running]);
        ranks.hear(vec![status(0, 40.5), status(1, 5000.5)], 1000.5);
        assert_eq!(conditions(&ranks, 1000.5), [State::Running, State::Running]);
        ranks.hear(vec![status(0, 46.5), status(1, 5000.5)], 1006.5);
        assert_eq!(conditions(&ranks, 1006.5), [State::Running, State::Lost]);
    }

    #[test]
    fn shares_are_of_the_last_seconds() {
        let mut ranks = Ranks::default();
        for tick in 0..100 {
            let time = f64::from(tick);
            // At first nothing but communication.
            let (compute_s, comm_s) = if tick < 50 { (0.0, time) } else { (time - 49.0, 49.0) };
            ranks.hear(vec![Status { compute_s, comm_s, ..status(0, time) }], time);
        }
        let [load, compute, comm] = ranks.rows(None, 99.0)[0].shares;
        assert!(load == 0.0 && compute > 0.99 && comm == 0.0, "{load} {compute} {comm}");
    }

    #[test]
    fn the_rank_that_others_wait_for_is_marked() {
        let mut ranks = Ranks::default();
        let op = Some("all_reduce(4 f32, sum) #9 at a.rs:1".to_owned());
        let waiting = |rank| Status { op: op.clone(), op_s: 3.0, ..status(rank, 9.0) };
        ranks.hear(vec![waiting(0), status(1, 9.0), waiting(2)], 9.0);
        let rows = ranks.rows(None, 9.0);
        assert_eq!(rows[0].condition, State::Waiting);
        let why = rows[1].straggler.as_deref().unwrap();
        assert_eq!(why, "waited for: 2 in all_reduce(4 f32, sum) #9 at a.rs:1 for 3 s");
        assert!(rows[0].straggler.is_none() && rows[2].straggler.is_none());
        // Nobody waits: nobody is waited for.
        ranks.hear(vec![status(0, 10.0), status(1, 10.0), status(2, 10.0)], 10.0);
        assert!(ranks.rows(None, 10.0).iter().all(|row| row.straggler.is_none()));
    }

    #[test]
    fn slow_work_is_marked_also_between_two() {
        let mut ranks = Ranks::default();
        for time in [0.0, 1.0, 2.0] {
            let slow = Status { compute_s: time * 0.7, ..status(1, time) };
            ranks.hear(vec![status(0, time), slow], time);
        }
        let rows = ranks.rows(None, 2.0);
        assert!(rows[0].straggler.is_none());
        assert_eq!(rows[1].straggler.as_deref(), Some("its work of a step takes 1.4 × the median"));
    }

    #[test]
    fn numbers_that_are_none_do_not_hide_a_rank() {
        let read: Status =
            serde_json::from_str(r#"{"rank":3,"op_s":null,"samples_per_s":null,"compute_s":1.5}"#).unwrap();
        assert_eq!(read, Status { rank: 3, compute_s: 1.5, ..Status::default() });
    }

    #[test]
    fn files_of_a_larger_world_are_not_shown() {
        let mut ranks = Ranks::default();
        ranks.hear((0..4).map(|rank| status(rank, 1.0)).collect(), 1.0);
        assert_eq!(ranks.rows(Some(2), 1.0).len(), 2);
        ranks.hear(vec![status(1, 1.0)], 1.0);
        assert_eq!(ranks.rows(None, 1.0).len(), 1);
    }
}
