//! Several models and optimizers in one checkpoint, which has room for one of each. Names then begin with a number, as
//! in `1.weight`.

use drumline_torch::{Named, OptimizerState};

use crate::data::loader::Cause;

/// Separates the kinds of several optimizers.
const AND: char = '+';

/// The name with its number in front. A single model or optimizer keeps its names.
pub(super) fn numbered(name: &str, place: usize, num: usize) -> String {
    if num == 1 { name.to_owned() } else { format!("{place}.{name}") }
}

/// Merges several lists of tensors.
pub(super) fn all_tensors(parts: &[&[Named]]) -> Vec<Named> {
    let of_part = |(place, part): (usize, &&[Named])| {
        let renamed = part.iter().map(|named| Named {
            name: numbered(&named.name, place, parts.len()),
            tensor: named.tensor.shallow_clone(),
        });
        renamed.collect::<Vec<_>>()
    };
    parts.iter().enumerate().flat_map(of_part).collect()
}

/// Merges the states of several optimizers.
pub(super) fn all_states(states: &[OptimizerState]) -> OptimizerState {
    let kinds: Vec<&str> = states.iter().map(|state| state.kind.as_str()).collect();
    let scalars = states.iter().enumerate().flat_map(|(place, state)| {
        let name = move |name: &String| numbered(name, place, states.len());
        state.scalars.iter().map(move |(scalar, value)| (name(scalar), *value))
    });
    let tensors: Vec<&[Named]> = states.iter().map(|state| &state.tensors[..]).collect();
    OptimizerState {
        kind: kinds.join(&AND.to_string()),
        scalars: scalars.collect(),
        tensors: all_tensors(&tensors),
    }
}

/// Splits a merged state into the states of `num` optimizers.
pub(super) fn states_of(all: &OptimizerState, num: usize) -> Result<Vec<OptimizerState>, Cause> {
    let kinds: Vec<&str> = all.kind.split(AND).filter(|kind| !kind.is_empty()).collect();
    if kinds.len() != num {
        return Err(format!(
            "it has the state of {} optimizers, and {num} are prepared; try those that it was saved with",
            kinds.len()
        )
        .into());
    }
    if num == 1 {
        return Ok(vec![all.clone()]);
    }
    let of_one = |(place, kind): (usize, &&str)| {
        let begin = format!("{place}.");
        let own = |name: &String| name.strip_prefix(&begin).map(str::to_owned);
        let scalars = all.scalars.iter().filter_map(|(name, value)| Some((own(name)?, *value)));
        let tensors = all.tensors.iter().filter_map(|named| {
            Some(Named { name: own(&named.name)?, tensor: named.tensor.shallow_clone() })
        });
        OptimizerState { kind: kind.to_string(), scalars: scalars.collect(), tensors: tensors.collect() }
    };
    Ok(kinds.iter().enumerate().map(of_one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    fn state(kind: &str, lr: f64) -> OptimizerState {
        let tensor = Named { name: "weight.step".into(), tensor: Tensor::from(lr) };
        OptimizerState { kind: kind.into(), scalars: [("lr".into(), lr)].into(), tensors: vec![tensor] }
    }

    #[test]
    fn merged_states_are_split_again() {
        for num in 0..3 {
            let states: Vec<_> = [state("sgd", 0.1), state("adam", 0.2)].into_iter().take(num).collect();
            let all = all_states(&states);
            let again = states_of(&all, num).unwrap();
            assert_eq!(format!("{again:?}"), format!("{states:?}"));
            let message = states_of(&all, num + 1).unwrap_err().to_string();
            assert!(
                message.contains(&format!("of {num} optimizers, and {} are prepared", num + 1)),
                "{message}"
            );
        }
        assert_eq!(
            all_states(&[state("sgd", 0.1)]).tensors[0].name,
            "weight.step",
            "a single optimizer keeps its names"
        );
    }
}
