//! All ranks of a run, and how they agree before and between steps.
//!
//! A rank that fails alone would leave the others waiting in a collective, and each would tell of its own surprise. So what
//! can fail on one rank is put to the vote: all end together, with one text.

use anyhow::Context;
use drumline::{
    GroupOptions, InitError, InitOptions, ProcessGroup, ReduceOp, Signal, StopRequest, worker_env,
};

use super::failure::{Shared, in_words};

pub(super) struct Job {
    pub(super) group: ProcessGroup,
    pub(super) local_rank: usize,
    stop: StopRequest,
    /// No launcher started it.
    is_alone: bool,
}

/// What a rank knows before a step; the answer is what any rank knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vote {
    /// There is a batch.
    GoOn,
    /// No batch is left.
    Ended,
    /// A signal asked for the end.
    Stop,
    /// Something is wrong.
    Failed,
}

impl Job {
    /// Joins the job that a launcher has started, or is one alone.
    pub(super) fn join() -> anyhow::Result<Self> {
        let stop = StopRequest::listen().context("cannot listen for signals")?;
        let (member, is_alone) = match drumline::from_env() {
            Err(InitError::Missing { variable: worker_env::RANK, .. }) => {
                let alone = InitOptions { rank: Some(0), world_size: Some(1), ..InitOptions::default() };
                (drumline::init("env://", alone)?, true)
            }
            member => (member?, false),
        };
        let local_rank = member.local_rank;
        let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
        Ok(Self { group, local_rank, stop, is_alone })
    }

    /// The line that every rank says.
    pub(super) fn say_hello(&self) {
        use std::io::Write;
        // A stdout that is gone ends nothing.
        let _ = writeln!(std::io::stdout(), "{}", init_line(self.local_rank, self.group.rank()));
    }

    pub(super) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// This rank, and the number of ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.group.rank(), self.group.size())
    }

    /// The outcome if all ranks had a good one; otherwise what went wrong, the same on all.
    #[track_caller]
    pub(super) fn agree<T>(&self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let own = outcome.as_ref().err().map(in_words);
        let all = self.group.all_gather_object(&own)?;
        match Shared::of(&all) {
            Some(shared) => Err(shared.into()),
            None => outcome,
        }
    }

    /// The signal to stop, if it is up to this process to tell of it by its end: a launcher tells by its own.
    pub(super) fn signal_that_ended_it(&self) -> Option<Signal> {
        self.stop.signal().filter(|_| self.is_alone)
    }

    /// Whether a signal has reached this rank; the others need not know of it yet.
    pub(super) fn is_asked_to_stop(&self) -> bool {
        self.stop.is_requested()
    }

    /// The gravest of all ranks' votes; a signal to any of them counts.
    #[track_caller]
    pub(super) fn vote(&self, own: Vote) -> anyhow::Result<Vote> {
        let asked = self.stop.is_requested() && own != Vote::Failed;
        let mut most = [if asked { Vote::Stop as u8 } else { own as u8 }];
        self.group.all_reduce(&mut most, ReduceOp::Max)?;
        Ok(match most[0] {
            0 => Vote::GoOn,
            1 => Vote::Ended,
            2 => Vote::Stop,
            _ => Vote::Failed,
        })
    }

    /// The seed of the run: the one given, or one that rank 0 draws.
    pub(super) fn seed(&self, given: Option<u64>) -> anyhow::Result<u64> {
        let own = given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            // Small enough to be typed again, and exact in any JSON reader.
            now.map_or(1, |now| now.subsec_nanos() as u64 ^ now.as_secs()) & 0xffff_ffff
        });
        let mut seed = [own];
        self.group.broadcast(&mut seed, 0)?;
        Ok(seed[0])
    }
}

fn init_line(local_rank: usize, rank: usize) -> String {
    format!("[init] == local rank: {local_rank}, global rank: {rank} ==")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_says_hello_as_in_the_tutorial() {
        assert_eq!(init_line(1, 3), "[init] == local rank: 1, global rank: 3 ==");
    }
}
