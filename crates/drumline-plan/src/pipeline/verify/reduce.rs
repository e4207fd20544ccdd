//! Gradients are reduced once for each stage, after its last backward. A program without any reduction has no replicas.

use super::super::action::{Action, Compute};
use super::super::program::{Place, Program};
use super::VerifyError;

pub(super) fn check(program: &Program) -> Result<(), VerifyError> {
    let stages = program.stages.num_stages();
    let mut reductions: Vec<Option<Place>> = vec![None; stages];
    for (rank, row) in program.rows.iter().enumerate() {
        for (position, &action) in row.iter().enumerate() {
            let place = Place { rank, position, action };
            if let Action::ReduceGrad(stage) = action
                && reductions[stage].replace(place).is_some()
            {
                return Err(VerifyError::Twice(place));
            }
            let adds = |compute| matches!(compute, Compute::Backward | Compute::Weight);
            let early =
                action.works().filter(|work| adds(work.compute)).find_map(|work| reductions[work.stage]);
            if let Some(place) = early {
                return Err(VerifyError::ReducedEarly { place, last: action });
            }
        }
    }
    if let Some(place) = reductions.iter().flatten().next().filter(|_| program.is_forward_only()) {
        return Err(VerifyError::NothingToReduce(*place));
    }
    let missing =
        reductions.iter().position(Option::is_none).filter(|_| reductions.iter().any(Option::is_some));
    let never =
        |stage| VerifyError::Never { rank: program.stages.rank_of(stage), action: Action::ReduceGrad(stage) };
    missing.map_or(Ok(()), |stage| Err(never(stage)))
}
