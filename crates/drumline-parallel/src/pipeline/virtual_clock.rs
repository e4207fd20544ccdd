//! The executor that only counts time: each rank has a clock, and messages carry the time at which they were sent.
//!
//! It goes through the interpreter, as training does, so that a difference from
//! [`Verified::simulate`](drumline_plan::pipeline::Verified::simulate) would show a mistake in one of them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Condvar, Mutex, PoisonError};

use drumline_plan::pipeline::{Message, Span, Timeline, Times, Work};

use super::interpreter::{Executor, run_row};
use super::plan::Plan;

/// Messages that were sent, by the time of their send.
#[derive(Default)]
struct Mail {
    sent: Mutex<HashMap<Message, f64>>,
    changed: Condvar,
}

/// What travels: the time of the send, or `None` from a stage of the same rank.
#[derive(Debug, Clone, Copy)]
pub struct SentAt(Option<f64>);

/// A rank with a clock that computes nothing.
pub struct VirtualClock<'a> {
    times: &'a Times,
    mail: &'a Mail,
    now: f64,
    spans: Vec<Span>,
}

impl std::fmt::Debug for VirtualClock<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualClock")
            .field("now", &self.now)
            .field("spans", &self.spans)
            .finish_non_exhaustive()
    }
}

impl VirtualClock<'_> {
    /// When each computation of a plan runs: its ranks are threads, each with a clock.
    ///
    /// # Panics
    ///
    /// If the plan has more stages than times are given for.
    pub fn timeline(plan: &Plan, times: &Times) -> Timeline {
        let mail = Mail::default();
        let run = |rank: usize| {
            let mut clock = VirtualClock { times, mail: &mail, now: 0.0, spans: Vec::new() };
            match run_row(plan, rank, &mut clock) {
                Ok(()) => (clock.spans, clock.now),
                Err(halted) => match halted.cause {},
            }
        };
        let ranks = 0..plan.program().rows.len();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || run(rank))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let makespan = outcomes.iter().map(|(_, end)| *end).fold(0.0, f64::max);
        Timeline { ranks: outcomes.into_iter().map(|(spans, _)| spans).collect(), makespan }
    }
}

impl Executor for VirtualClock<'_> {
    type Value = SentAt;
    type Error = Infallible;

    fn compute(&mut self, work: Work, got: Option<SentAt>) -> Result<Option<SentAt>, Infallible> {
        let sent = got.and_then(|SentAt(sent)| sent);
        let start = self.now.max(sent.map_or(0.0, |sent| sent + self.times.hop));
        self.now = start + self.times.stages[work.stage].of(work.compute);
        let sent = sent.map_or(start, |sent| sent.min(start));
        self.spans.push(Span { work, start, end: self.now, sent });
        Ok(Some(SentAt(None)))
    }

    fn send(&mut self, message: Message, _: usize, _: SentAt) -> Result<(), Infallible> {
        self.mail.sent.lock().unwrap_or_else(PoisonError::into_inner).insert(message, self.now);
        self.mail.changed.notify_all();
        Ok(())
    }

    fn expect(&mut self, _: Message, _: usize) -> Result<(), Infallible> {
        Ok(())
    }

    fn receive(&mut self, message: Message, _: usize) -> Result<SentAt, Infallible> {
        let mut sent = self.mail.sent.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(time) = sent.remove(&message) {
                return Ok(SentAt(Some(time)));
            }
            sent = self.mail.changed.wait(sent).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn reduce(&mut self, _: usize) -> Result<(), Infallible> {
        Ok(())
    }

    fn broken(&self, what: &'static str) -> Infallible {
        // Only a verified program becomes a plan.
        unreachable!("{what}")
    }
}

#[cfg(test)]
mod tests {
    use drumline_plan::pipeline::{Schedule, StageTimes, verify};

    use super::super::plan::Order;
    use super::*;

    #[test]
    fn it_agrees_with_the_simulator() {
        for schedule in Schedule::ALL {
            for (ranks, micro_batches) in [(1, 3), (2, 4), (3, 9), (4, 8), (8, 16)] {
                let plan = Order::from(schedule).plan(ranks, micro_batches).unwrap();
                let num_stages = plan.program().stages.num_stages();
                let stage = |stage: usize| {
                    let part = 1.0 + stage as f64 / 7.0;
                    StageTimes { forward: part, input: 1.2 * part, weight: 0.7 * part }
                };
                let times = Times { stages: (0..num_stages).map(stage).collect(), hop: 0.3 };
                let simulated = verify(plan.program()).unwrap().simulate(&times);
                assert_eq!(
                    VirtualClock::timeline(&plan, &times),
                    simulated,
                    "{schedule} {ranks} {micro_batches}"
                );
            }
        }
    }
}
