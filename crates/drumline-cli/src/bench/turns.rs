//! The measuring protocol, the same as the peers' (`bench/README.md`):
//!
//! ```text
//!   agree on the phase ─▶ check (first and last turn) ─▶ rewrite the buffer ─▶ barrier ─▶ clock, one call, clock
//! ```
//! A *turn* is one such round; its time is that of its slowest rank. Warm-up turns are not counted. This program neither
//! allocates nor prints between the two readings of the clock.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, ProcessGroup};

use super::buffers::{Buffer, Memory, Slots};
use super::op::Op;
use super::values::{Value, Values};

const MAX_TURNS: usize = 20_000;
const SMALL_BYTES: usize = 64 << 10;
const SMALL_TURNS: usize = 200;
const LARGE_TURNS: usize = 5;
const WARM_UP_TURNS: usize = 3;

/// What is measured, and how.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) op: Op,
    pub(super) memory: Memory,
    pub(super) per_size: Duration,
    /// The size of the cache that buffers must have left; `None` measures hot.
    pub(super) cold: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    WarmUp,
    Measure,
    Stop,
}

/// Measures one size; returns the slowest rank's microseconds for each turn, on rank 0 only.
pub(super) fn measure<T: Value>(group: &ProcessGroup, plan: &Plan, bytes: usize) -> anyhow::Result<Vec<f64>> {
    let mut stage = Stage::<T>::new(group, plan, bytes)?;
    let mut times = Vec::with_capacity(MAX_TURNS);
    let (mut phase, mut began, mut turn) = (Phase::WarmUp, Instant::now(), 0);
    group.barrier()?;
    loop {
        let done = Done { turns: turn, recorded: times.len() };
        let next = agree(group, next_phase(phase, began.elapsed(), done, plan, bytes))?;
        if turn == 1 || next == Phase::Stop {
            stage.verify()?;
        }
        if next != phase {
            (phase, began) = (next, Instant::now());
        }
        if phase == Phase::Stop {
            return slowest(group, &times);
        }
        turn += 1;
        stage.prepare(turn);
        group.barrier()?;
        let start = Instant::now();
        stage.perform()?;
        let took = start.elapsed();
        if phase == Phase::Measure {
            times.push(took.as_nanos() as f64 * 1e-3 * plan.op.share_of_time());
        }
    }
}

impl Op {
    /// Half of a round trip counts.
    fn share_of_time(self) -> f64 {
        if self == Op::SendRecv { 0.5 } else { 1.0 }
    }
}

/// What has been done so far.
#[derive(Debug, Clone, Copy)]
struct Done {
    turns: usize,
    recorded: usize,
}

fn next_phase(phase: Phase, elapsed: Duration, done: Done, plan: &Plan, bytes: usize) -> Phase {
    let Done { turns, recorded } = done;
    if phase == Phase::WarmUp {
        let warm = turns >= WARM_UP_TURNS && elapsed > plan.per_size / 10;
        return if warm { Phase::Measure } else { Phase::WarmUp };
    }
    let least = if bytes <= SMALL_BYTES { SMALL_TURNS } else { LARGE_TURNS };
    let enough = recorded >= least || recorded >= LARGE_TURNS && elapsed > 5 * plan.per_size;
    let over = enough && elapsed > plan.per_size || recorded == MAX_TURNS;
    if over { Phase::Stop } else { Phase::Measure }
}

/// Sends rank 0's decision to all.
fn agree(group: &ProcessGroup, phase: Phase) -> Result<Phase, CommError> {
    let mut code = [phase as u8];
    group.broadcast(&mut code, 0)?;
    Ok([Phase::WarmUp, Phase::Measure, Phase::Stop][usize::from(code[0])])
}

fn slowest(group: &ProcessGroup, times: &[f64]) -> anyhow::Result<Vec<f64>> {
    if group.rank() != 0 {
        group.gather(times, None, 0)?;
        return Ok(Vec::new());
    }
    let mut all = vec![0.0; times.len() * group.size()];
    group.gather(times, Some(&mut all), 0)?;
    let of_turn = |turn: usize| all.iter().skip(turn).step_by(times.len()).copied().fold(0.0, f64::max);
    Ok((0..times.len()).map(of_turn).collect())
}

/// The buffers for one size, and the call on them.
struct Stage<'a, T> {
    group: &'a ProcessGroup,
    op: Op,
    values: Values,
    len: usize,
    slots: Slots,
    slot: usize,
    /// The turn that each slot was last rewritten for.
    stamps: Vec<u32>,
    input: Buffer<T>,
    output: Buffer<T>,
}

impl<'a, T: Value> Stage<'a, T> {
    fn new(group: &'a ProcessGroup, plan: &Plan, bytes: usize) -> anyhow::Result<Self> {
        let (op, len) = (plan.op, bytes / size_of::<T>());
        let slots = plan.cold.map_or(Slots::hot(bytes), |cache| Slots::cold(bytes, cache));
        let total = slots.count * slots.stride / size_of::<T>();
        let values = Values::new::<T>(op, group.rank(), group.size(), len)?;
        let input = Buffer::new(group, plan.memory, total)?;
        let output = Buffer::new(group, plan.memory, if op.is_in_place() { 0 } else { total })?;
        let stamps = vec![0; slots.count];
        let mut stage = Self { group, op, values, len, slots, slot: 0, stamps, input, output };
        for slot in 0..slots.count {
            stage.rewrite(slot, 0);
        }
        Ok(stage)
    }

    fn range(&self, slot: usize) -> std::ops::Range<usize> {
        let start = slot * self.slots.stride / size_of::<T>();
        start..start + self.len
    }

    fn rewrite(&mut self, slot: usize, stamp: u32) {
        let range = self.range(slot);
        self.values.rewrite(&mut self.input[range], stamp);
        self.stamps[slot] = stamp;
    }

    /// Selects the next slot, and rewrites the one half a rotation ahead.
    fn prepare(&mut self, turn: usize) {
        self.slot = turn % self.slots.count;
        self.rewrite((self.slot + self.slots.count / 2) % self.slots.count, turn as u32);
    }

    #[inline]
    fn perform(&mut self) -> Result<(), CommError> {
        let (group, range) = (self.group, self.range(self.slot));
        let input = &mut self.input[range.clone()];
        let output = if self.op.is_in_place() { &mut [] } else { &mut self.output[range] };
        self.op.perform(group, input, output)
    }

    fn verify(&self) -> anyhow::Result<()> {
        let buffer = if self.op.is_in_place() { &self.input } else { &self.output };
        self.values.verify(&buffer[self.range(self.slot)], self.stamps[self.slot])
    }
}
