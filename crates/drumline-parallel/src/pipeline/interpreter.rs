//! The interpreter: one loop that carries out a rank's row of a program, whatever an action does.
//!
//! ```text
//!   for each action    F, B, I, W ─▶ Executor::compute    what it needs: received, or made by the stage before on this rank
//!                      SEND       ─▶ Executor::send       does not wait
//!                      RECV       ─▶ Executor::expect     does not wait; the computation that uses it does: receive
//! ```
//! Receives are posted as early as receive buffers allow: as many as the verifier counts, and not one for each micro-batch.
//! This does not change the order of messages between two ranks.

use std::collections::HashMap;

use drumline_plan::pipeline::{Action, Message, Work};

use super::plan::Plan;

/// What actions do. Messages are named as their sender names them.
pub trait Executor {
    /// What travels between stages.
    type Value;
    /// What can go wrong.
    type Error;

    /// Computes. `got` is what the computation needs from another stage; the result is what another stage needs from it.
    fn compute(&mut self, work: Work, got: Option<Self::Value>) -> Result<Option<Self::Value>, Self::Error>;

    /// Sends to a rank, without waiting.
    fn send(&mut self, message: Message, to: usize, value: Self::Value) -> Result<(), Self::Error>;

    /// Makes room for a message of a rank, without waiting.
    fn expect(&mut self, message: Message, from: usize) -> Result<(), Self::Error>;

    /// Waits for a message that is expected.
    fn receive(&mut self, message: Message, from: usize) -> Result<Self::Value, Self::Error>;

    /// Reduces the gradients of a stage over its replicas.
    fn reduce(&mut self, stage: usize) -> Result<(), Self::Error>;

    /// The error for a program that lacks something, which the verifier rules out.
    fn broken(&self, what: &'static str) -> Self::Error;
}

/// The action at which a row ended early, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Halted<E> {
    /// The action.
    pub action: Action,
    /// The executor's error.
    pub cause: E,
}

/// Carries out the row of `rank`.
pub fn run_row<E: Executor>(plan: &Plan, rank: usize, executor: &mut E) -> Result<(), Halted<E::Error>> {
    let mut row = Row::new(plan, rank, executor);
    for &action in &plan.program().rows[rank] {
        row.act(action).map_err(|cause| Halted { action, cause })?;
    }
    Ok(())
}

struct Row<'a, E: Executor> {
    plan: &'a Plan,
    rank: usize,
    executor: &'a mut E,
    /// Between two stages of this rank, as the stage gets them.
    handed_over: HashMap<Message, E::Value>,
    /// Made and not sent yet, as the stage sends them.
    to_send: HashMap<Message, E::Value>,
    /// The receives of the row, in order, and how many are posted.
    receives: Vec<Action>,
    num_posted: usize,
    num_held: usize,
}

impl<'a, E: Executor> Row<'a, E> {
    fn new(plan: &'a Plan, rank: usize, executor: &'a mut E) -> Self {
        let row = plan.program().rows[rank].iter().copied();
        Self {
            plan,
            rank,
            executor,
            handed_over: HashMap::new(),
            to_send: HashMap::new(),
            receives: row.filter(|action| matches!(action, Action::Receive(_))).collect(),
            num_posted: 0,
            num_held: 0,
        }
    }

    fn act(&mut self, action: Action) -> Result<(), E::Error> {
        self.post()?;
        match action {
            Action::Compute(work) => self.compute(work),
            Action::Overlap(first, second) => {
                self.compute(first)?;
                self.compute(second)
            }
            Action::Send(message) => {
                let to = self.plan.program().peer_of(&action);
                match (to, self.to_send.remove(&message)) {
                    (Some(to), Some(value)) => self.executor.send(message, to, value),
                    _ => Err(self.executor.broken("a message without a value is sent")),
                }
            }
            Action::ReduceGrad(stage) => self.executor.reduce(stage),
            // Posted already; and parameters are there all the time.
            Action::Receive(_) | Action::Unshard(_) | Action::Reshard(_) => Ok(()),
        }
    }

    /// Posts as many receives as there are buffers for.
    fn post(&mut self) -> Result<(), E::Error> {
        let most = self.plan.receive_buffers(self.rank);
        while self.num_held < most
            && let Some(receive) = self.receives.get(self.num_posted)
        {
            let (Some(message), Some(from)) = (receive.sent(), self.plan.program().peer_of(receive)) else {
                return Err(self.executor.broken("a receive without a sender"));
            };
            self.executor.expect(message, from)?;
            self.num_posted += 1;
            self.num_held += 1;
        }
        Ok(())
    }

    fn compute(&mut self, work: Work) -> Result<(), E::Error> {
        let program = self.plan.program();
        let got = match program.needs(work) {
            Some(needed) => Some(self.get(needed)?),
            None => None,
        };
        let made = self.executor.compute(work, got)?;
        match (program.gives(work), made) {
            (Some(at), Some(value)) if program.stages.rank_of(at.stage) == self.rank => {
                self.handed_over.insert(at, value);
                Ok(())
            }
            (Some(at), Some(value)) => {
                self.to_send.insert(Message { stage: work.stage, ..at }, value);
                Ok(())
            }
            (None, _) => Ok(()),
            (Some(_), None) => Err(self.executor.broken("a computation has no result")),
        }
    }

    /// What a stage needs: from another stage of this rank, or from another rank.
    fn get(&mut self, needed: Message) -> Result<E::Value, E::Error> {
        if let Some(value) = self.handed_over.remove(&needed) {
            return Ok(value);
        }
        let receive = Action::Receive(needed);
        let (Some(message), Some(from)) = (receive.sent(), self.plan.program().peer_of(&receive)) else {
            return Err(self.executor.broken("a tensor that no stage makes"));
        };
        let value = self.executor.receive(message, from)?;
        self.num_held -= 1;
        Ok(value)
    }
}
