//! Parameters that are divided among ranks are gathered while they are used, and freed at the end. Stages without such actions
//! have their parameters all the time.

use super::super::action::Action;
use super::super::program::{Place, Program};
use super::VerifyError;

pub(super) fn check(program: &Program) -> Result<(), VerifyError> {
    let stages = program.stages.num_stages();
    let mut is_divided = vec![false; stages];
    for action in program.rows.iter().flatten() {
        if let Action::Unshard(stage) | Action::Reshard(stage) = *action {
            is_divided[stage] = true;
        }
    }
    let mut is_gathered: Vec<bool> = is_divided.iter().map(|is_divided| !is_divided).collect();
    for (rank, row) in program.rows.iter().enumerate() {
        for (position, &action) in row.iter().enumerate() {
            let expected = matches!(action, Action::Reshard(_)) || action.works().next().is_some();
            let used = |(stage, _): (usize, _)| stage;
            let concerned = match action {
                Action::Compute(_) | Action::Overlap(..) | Action::Unshard(_) | Action::Reshard(_) => true,
                Action::Send(_) | Action::Receive(_) | Action::ReduceGrad(_) => false,
            };
            let wrong = action.parts().map(used).find(|stage| concerned && is_gathered[*stage] != expected);
            if let Some(stage) = wrong {
                let place = Place { rank, position, action };
                return Err(VerifyError::Gathering { place, stage, is_gathered: !expected });
            }
            match action {
                Action::Unshard(stage) => is_gathered[stage] = true,
                Action::Reshard(stage) => is_gathered[stage] = false,
                _ => {}
            }
        }
    }
    let left = (0..stages).find(|stage| is_divided[*stage] && is_gathered[*stage]);
    left.map_or(Ok(()), |stage| {
        Err(VerifyError::NeverResharded { rank: program.stages.rank_of(stage), stage })
    })
}
