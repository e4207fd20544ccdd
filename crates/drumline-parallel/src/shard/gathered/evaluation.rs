//! Forwards of an evaluation.
//!
//! ```text
//!   counted   rank 0: 3 forwards   ── ── ──        units are gathered when they are used, as in training;
//!             rank 1: 2 forwards   ── ── gathers   a rank that has fewer forwards takes part in the others' gathers;
//!                                                  after each forward ranks agree whether one asks for the end
//!   any       all units are gathered once, and ranks use them in any order and number
//! ```

use super::super::residency::Residency;
use super::super::{Result, engine};
use super::{Gatherer, Mode, NUM_SLOTS, State};
use crate::engine::{Ending, Forwards};
use crate::error::ParallelError;
use crate::reduction::Site;
use tch::{Kind, Tensor};

/// An evaluation whose forwards all ranks make together.
pub(super) struct Counted {
    /// The forwards of the rank that has most.
    most: usize,
    done: usize,
    ending: Ending,
    /// Whether it ends before all forwards.
    is_cut: bool,
    /// What a step of the training used, for the next step.
    training: Residency,
    micro_batch: Vec<Vec<usize>>,
}

impl Gatherer {
    /// All ranks call it.
    pub(in super::super) fn begin_evaluation(&self, forwards: Forwards) -> Result {
        let mut state = self.0.state();
        let begun = state.begin_evaluation(forwards);
        if let Err(error) = &begun {
            state.is_evaluating = false;
            let _ = state.rest();
            state.group.abort(&error.to_string());
        }
        begun
    }

    /// Runs a forward.
    pub(in super::super) fn evaluate(&self, site: Site, body: impl FnOnce()) -> Result {
        if !self.is_counted() {
            body();
            return self.check();
        }
        self.begin_micro_batch();
        self.begin_forward();
        self.together(site, || {
            body();
            Ok(())
        })?;
        self.end_forward(site)?;
        let is_cut = self
            .0
            .state()
            .counted
            .as_ref()
            .is_some_and(|counted| counted.done == counted.most && counted.is_cut);
        if is_cut { Err(ParallelError::EvaluationCut) } else { Ok(()) }
    }

    /// Asks for the end of an evaluation after the next forward of all ranks.
    pub(in super::super) fn cut(&self) {
        self.0.state().counted.iter().for_each(|counted| counted.ending.ask());
    }

    /// Whether ranks wait for each other in forwards of an evaluation.
    pub(in super::super) fn is_counted(&self) -> bool {
        self.0.state().counted.is_some()
    }

    /// Takes part in the forwards that other ranks still make, unless this rank has `failed`.
    pub(in super::super) fn end_evaluation(&self, site: Site, ends: engine::Evaluated) -> Result {
        let joined = match ends {
            engine::Evaluated::All => self.join_forwards(site),
            engine::Evaluated::Failed => Ok(()),
        };
        let mut state = self.0.state();
        if let Some(Counted { training, micro_batch, .. }) = state.counted.take() {
            state.residency = training;
            state.micro_batch = micro_batch;
        }
        (state.is_evaluating, state.has_ended) = (false, true);
        state.end_whole()?;
        drop(state);
        self.0.leave_out(None);
        joined
    }

    fn join_forwards(&self, site: Site) -> Result {
        while self.0.state().counted.as_ref().is_some_and(|counted| counted.done < counted.most) {
            self.join_micro_batch(site)?;
            self.end_forward(site)?;
        }
        Ok(())
    }

    fn end_forward(&self, site: Site) -> Result {
        let mut state = self.0.state();
        state.join()?;
        state.residency.end_step();
        state.rest()?;
        state.agree_on_end(site)?;
        drop(state);
        self.0.leave_out(None);
        Ok(())
    }
}

impl State {
    /// A forward has ended on all ranks: if one of them asks for it, it was the last one.
    fn agree_on_end(&mut self, site: Site) -> Result {
        let Some(counted) = &mut self.counted else { return Ok(()) };
        counted.done += 1;
        if counted.ending.agree([&*self.group], site)? {
            (counted.most, counted.is_cut) = (counted.done, true);
        }
        Ok(())
    }

    fn begin_evaluation(&mut self, forwards: Forwards) -> Result {
        self.join()?;
        self.end_whole()?;
        self.is_evaluating = true;
        let own = match forwards {
            Forwards::Counted(own) => own as u64,
            Forwards::Any => 0,
        };
        let mut all = vec![0; self.group.size()];
        self.group.all_gather(&[own], &mut all)?;
        match (all.iter().min(), all.iter().max()) {
            // A rank without a forward would not know which units are used.
            (Some(1..), Some(most)) => {
                let mut training = std::mem::replace(&mut self.residency, Residency::new(NUM_SLOTS));
                training.release();
                let micro_batch = std::mem::take(&mut self.micro_batch);
                self.rest()?;
                let (most, ending) = (*most as usize, Ending::default());
                self.counted = Some(Counted { most, done: 0, ending, is_cut: false, training, micro_batch });
                Ok(())
            }
            _ => self.gather_whole(),
        }
    }

    /// Gathers all units until [`end_whole`](Self::end_whole).
    pub(super) fn gather_whole(&mut self) -> Result {
        self.residency.forget();
        let mut whole = Vec::new();
        for unit in &self.units {
            let memory = Tensor::f_empty([unit.num_bytes() as i64], (Kind::Uint8, unit.own.device()))?;
            unit.gather(&self.group, &memory)?;
            unit.movable.point_at(&memory)?;
            whole.push(memory);
        }
        (self.whole, self.mode) = (whole, Mode::Whole);
        Ok(())
    }

    /// No unit is gathered any more.
    pub(super) fn end_whole(&mut self) -> Result {
        self.mode = Mode::Outside;
        self.rest()?;
        self.whole.clear();
        Ok(())
    }
}
