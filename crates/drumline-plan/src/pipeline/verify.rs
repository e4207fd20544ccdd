//! The proof that a program can be carried out, before its first step.
//!
//! ```text
//!   each row alone     tensors: what an action takes is there, what it makes is freed, nothing is done twice or never
//!                      reduce:  gradients are reduced once, after the last backward
//!                      shards:  parameters are gathered while they are used, and freed
//!   pairs of ranks     order:   both list their messages in the same order
//!   all ranks          progress: nobody waits forever, whatever the rule by which messages pass
//! ```
//! A program without any backward is one for evaluation, and complete without it. Errors name the rank, the number of the
//! action in its row, the action, and what is missing; a deadlock is shown as the circle in which ranks wait.
//!
//! Only a [`Verified`] program has times and peaks of memory: those of one that stops would mean nothing.

mod order;
mod progress;
mod reduce;
mod rows;
mod shards;

use super::action::Action;
use super::program::{Place, Program, Unplaced};
use super::tensors::Tensor;

pub use progress::{Deadlock, MessageRule, Wait, progress};

/// What is wrong with a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// An action that has no place.
    #[error(transparent)]
    Unplaced(#[from] Unplaced),
    /// A message without another rank at its other end.
    #[error("no other rank is at the other end of {0}; try without it")]
    NoPeer(Place),
    /// A repeated action.
    #[error("{0} is done for the second time; try it once")]
    Twice(Place),
    /// An action without what it takes.
    #[error(transparent)]
    Missing(Box<Missing>),
    /// An action that is missing in a row.
    #[error("rank {rank} never does {action}; try to add it to the row of this rank")]
    Never {
        /// The rank.
        rank: usize,
        /// What is missing.
        action: Action,
    },
    /// A tensor that nobody takes.
    #[error("rank {rank} never frees {tensor}: it has no {taker}; try to add it to the row of this rank")]
    NeverFreed {
        /// The rank.
        rank: usize,
        /// What is left.
        tensor: Tensor,
        /// The action that would free it.
        taker: Action,
    },
    /// Gradients that are reduced before they are complete.
    #[error("{place} is before the last backward of the stage, {last}; try it afterwards")]
    ReducedEarly {
        /// The reduction.
        place: Place,
        /// The last computation that adds to the gradients.
        last: Action,
    },
    /// A reduction in a program without backwards.
    #[error("{0} reduces gradients, but nothing computes any; try without it")]
    NothingToReduce(Place),
    /// Parameters that are used while they are freed, gathered twice, or freed without having been gathered.
    #[error("{place}, but the parameters of stage {stage} are {} there; try {} before it", if *is_gathered { "already" } else { "not" },
        if *is_gathered { Action::Reshard(*stage) } else { Action::Unshard(*stage) })]
    Gathering {
        /// The action.
        place: Place,
        /// The stage.
        stage: usize,
        /// Whether they are gathered at that point.
        is_gathered: bool,
    },
    /// Gathered parameters at the end of a step.
    #[error("rank {rank} never frees the parameters of stage {stage}; try {} at the end", Action::Reshard(*stage))]
    NeverResharded {
        /// The rank.
        rank: usize,
        /// The stage.
        stage: usize,
    },
    /// The first message where two ranks list different ones.
    #[error(
        "ranks {} and {} list their messages in different orders: where the one has {}, the other has {}; try the \
         program without its messages, which are then listed in one order",
        .0[0].rank, .0[1].rank, .0[0], .0[1]
    )]
    Order(Box<[Place; 2]>),
    /// Ranks that wait for one another.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

/// An action without what it takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} needs {tensor}, which {}",
    if *was_there { "another action has taken".to_owned() } else { format!("is not there; try {maker} before it") }
)]
pub struct Missing {
    /// The action.
    pub place: Place,
    /// What it takes.
    pub tensor: Tensor,
    /// Whether another action has taken it.
    pub was_there: bool,
    /// The action that would make it.
    pub maker: Action,
}

/// A program that can be carried out.
#[derive(Debug, Clone, Copy)]
pub struct Verified<'a>(pub(super) &'a Program);

impl<'a> Verified<'a> {
    /// The program.
    pub fn program(&self) -> &'a Program {
        self.0
    }
}

/// Proves that a program can be carried out, or says where not.
pub fn verify(program: &Program) -> Result<Verified<'_>, VerifyError> {
    program.check_placed()?;
    rows::check(program)?;
    reduce::check(program)?;
    shards::check(program)?;
    order::check(program)?;
    for rule in MessageRule::ALL {
        progress(program, rule)?;
    }
    Ok(Verified(program))
}

#[cfg(test)]
mod tests {
    use super::super::schedule::tests_support::read;
    use super::super::stage_map::StageMap;
    use super::super::{PipelineSize, Schedule};
    use super::*;

    fn error_of(rows: &[&str], chunks: usize, num_micro_batches: usize) -> String {
        let stages = StageMap::Loop { ranks: rows.len(), chunks };
        let rows = rows.iter().map(|row| read(row)).collect();
        verify(&Program { stages, num_micro_batches, rows }).unwrap_err().to_string()
    }

    #[test]
    fn every_generated_program_is_verified_and_so_is_its_evaluation() {
        for schedule in Schedule::ALL {
            let sizes = (1..7).flat_map(|ranks| {
                (1..5).flat_map(move |chunks| {
                    (1..14).map(move |micro_batches| PipelineSize { ranks, chunks, micro_batches })
                })
            });
            for size in sizes {
                let Ok(program) = schedule.program(size) else { continue };
                verify(&program).unwrap_or_else(|error| panic!("{schedule} {size:?}: {error}"));
                verify(&program.forward_only())
                    .unwrap_or_else(|error| panic!("{schedule} {size:?}: {error}"));
            }
        }
    }

    #[test]
    fn what_is_missing_in_a_row_is_named() {
        for (rows, chunks, micro_batches, expected) in [
            (&["0F0 0B0"][..], 1, 2, "rank 0 never does 0F1; try to add it to the row of this rank"),
            (
                &["0B0 0F0"],
                1,
                1,
                "action 0 of rank 0 (0B0) needs the saved activations of stage 0 for micro-batch 0, which is not there; try 0F0 before it",
            ),
            (&["0F0 0F0 0B0"], 1, 1, "action 1 of rank 0 (0F0) is done for the second time; try it once"),
            (
                &["0F0 0B0 0B0"],
                1,
                1,
                "action 2 of rank 0 (0B0) needs the saved activations of stage 0 for micro-batch 0, which another action has taken",
            ),
            (
                &["0F0 0F1 0B0"],
                1,
                2,
                "rank 0 never frees the saved activations of stage 0 for micro-batch 1: it has no 0B1; try to add it to the row of this rank",
            ),
            (
                &["0F0 0I0"],
                1,
                1,
                "rank 0 never frees the inputs of the weight gradients of stage 0 for micro-batch 0: it has no 0W0; try to add it to the row of this rank",
            ),
            (
                &["1F0 0F0 1B0 0B0"],
                2,
                1,
                "action 0 of rank 0 (1F0) needs the input of stage 1 for micro-batch 0, which is not there; try 0F0 before it",
            ),
            (
                &["0F0 1F0 0B0 1B0"],
                2,
                1,
                "action 2 of rank 0 (0B0) needs the gradient of the output of stage 0 for micro-batch 0, which is not there; try 1B0 before it",
            ),
            (
                &["0F0 0SEND_F0 0B0"],
                1,
                1,
                "no other rank is at the other end of action 1 of rank 0 (0SEND_F0); try without it",
            ),
            (
                &["0F0 0REDUCE_GRAD 0B0"],
                1,
                1,
                "action 1 of rank 0 (0REDUCE_GRAD) is before the last backward of the stage, 0B0; try it afterwards",
            ),
            (
                &["0F0 0REDUCE_GRAD"],
                1,
                1,
                "action 1 of rank 0 (0REDUCE_GRAD) reduces gradients, but nothing computes any; try without it",
            ),
            (
                &["0F0 1F0 1B0 0B0 0REDUCE_GRAD"],
                2,
                1,
                "rank 0 never does 1REDUCE_GRAD; try to add it to the row of this rank",
            ),
            (
                &["0F0 0UNSHARD 0B0 0RESHARD"],
                1,
                1,
                "action 0 of rank 0 (0F0), but the parameters of stage 0 are not there; try 0UNSHARD before it",
            ),
            (
                &["0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD"],
                1,
                1,
                "action 2 of rank 0 (0UNSHARD), but the parameters of stage 0 are already there; try 0RESHARD before it",
            ),
            (
                &["0UNSHARD 0F0 0B0"],
                1,
                1,
                "rank 0 never frees the parameters of stage 0; try 0RESHARD at the end",
            ),
        ] {
            assert_eq!(error_of(rows, chunks, micro_batches), expected, "{rows:?}");
        }
    }

    #[test]
    fn messages_that_do_not_fit_are_named() {
        let first = "0F0 0SEND_F0 0RECV_B0 0B0";
        let rows = [first, "1F0 1B0 1SEND_B0"];
        let expected = "action 0 of rank 1 (1F0) needs the input of stage 1 for micro-batch 0, which is not there; try 1RECV_F0 before it";
        assert_eq!(error_of(&rows, 1, 1), expected);
        let rows = [first, "1RECV_F0 1F0 1B0"];
        let expected = "rank 1 never frees the gradient of the input of stage 1 for micro-batch 0: it has no 1SEND_B0; try to add it to the row of this rank";
        assert_eq!(error_of(&rows, 1, 1), expected);
    }

    #[test]
    fn both_ranks_must_list_their_messages_in_one_order() {
        let first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1";
        let second = "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1";
        assert_eq!(verify(&program([first, second])).map(|_| ()), Ok(()), "control");
        let swapped = second.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0");
        let error = verify(&program([first, &swapped])).unwrap_err().to_string();
        assert_eq!(
            error,
            "ranks 0 and 1 list their messages in different orders: where the one has action 1 of rank 0 (0SEND_F0), the other has \
             action 0 of rank 1 (1RECV_F1); try the program without its messages, which are then listed in one order"
        );
    }

    fn program(rows: [&str; 2]) -> Program {
        let stages = StageMap::Loop { ranks: 2, chunks: 1 };
        Program { stages, num_micro_batches: 2, rows: rows.iter().map(|row| read(row)).collect() }
    }

    #[test]
    fn a_deadlock_is_shown_as_a_circle() {
        // Both begin with a send: nobody is at the receive.
        let first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1";
        let second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1";
        let program = program([first, second]);
        assert_eq!(progress(&program, MessageRule::Mailbox), Ok(()));
        let error = progress(&program, MessageRule::Rendezvous).unwrap_err();
        assert_eq!(
            error.to_string(),
            "ranks wait for one another, with messages by the rule rendezvous: action 3 of rank 0 (0SEND_F1) waits for \
             1RECV_F1 of rank 1, action 3 of rank 1 (1SEND_B0) waits for 0RECV_B0 of rank 0; try the program without its \
             messages, which are then listed in an order that works"
        );
        assert!(error.is_circle && error.waits.len() == 2);
        let error = progress(&program, MessageRule::Fifo).unwrap_err();
        assert!(error.is_circle && error.to_string().contains("by the rule fifo"), "{error}");
    }

    #[test]
    fn who_waits_for_a_rank_that_has_ended_waits_forever() {
        let program = program(["0F0", "1RECV_F0 1F0"]);
        for rule in MessageRule::ALL {
            let error = progress(&program, rule).unwrap_err();
            assert!(!error.is_circle && error.waits.len() == 1, "{error}");
            let expected = "a rank waits forever, with messages by the rule ";
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }
}
