//! Which layers each stage has: consecutive ones, so that the stage that takes longest takes as little time as possible.
//!
//! ```text
//!   layers   embed h0 h1 h2 h3 h4 h5 head        3 stages: [embed h0 h1 h2] [h3 h4 h5] [head]
//!   costs        1  2  2  2  2  2  2    6                          7             6       6
//! ```
//! Each layer is in exactly one stage, and no stage is empty. Among equal cuts the earlier stages have more layers.

use std::ops::Range;

/// Layers that cannot be cut into stages.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// More stages than layers, or none.
    #[error("{layers} layers cannot be cut into {stages} stages of at least one; try {} or fewer stages", (*layers).max(1))]
    Stages {
        /// The layers of the model.
        layers: usize,
        /// The stages.
        stages: usize,
    },
    /// A cost that is no time.
    #[error("the cost of layer {layer} is {cost}; try a number that is not negative")]
    Cost {
        /// The layer.
        layer: usize,
        /// Its cost.
        cost: f64,
    },
}

/// The layers of each stage, for layers that cost this much.
///
/// ```
/// use drumline_plan::pipeline::partition;
///
/// let stages = partition(&[1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 6.0], 3)?;
/// assert_eq!(stages, [0..4, 4..7, 7..8]);
/// # Ok::<(), drumline_plan::pipeline::PartitionError>(())
/// ```
pub fn partition(costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>, PartitionError> {
    let layers = costs.len();
    if stages == 0 || stages > layers {
        return Err(PartitionError::Stages { layers, stages });
    }
    if let Some(layer) = costs.iter().position(|cost| !(cost.is_finite() && *cost >= 0.0)) {
        return Err(PartitionError::Cost { layer, cost: costs[layer] });
    }
    // The cost of all layers before each one.
    let before: Vec<f64> = std::iter::once(0.0)
        .chain(costs.iter().scan(0.0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }))
        .collect();
    let cost = |range: Range<usize>| before[range.end] - before[range.start];
    // The longest stage if the layers from `first` are cut into as many stages as the round has, and where the second one begins.
    let mut longest: Vec<f64> = (0..layers).map(|first| cost(first..layers)).collect();
    let mut cuts = vec![vec![layers; layers]];
    for count in 2..=stages {
        let mut better = vec![f64::INFINITY; layers];
        let mut cut = vec![layers; layers];
        for first in 0..=layers - count {
            let seconds = longest.iter().enumerate().take(layers + 2 - count).skip(first + 1);
            for (second, rest) in seconds {
                let with = cost(first..second).max(*rest);
                if with <= better[first] {
                    (better[first], cut[first]) = (with, second);
                }
            }
        }
        longest = better;
        cuts.push(cut);
    }
    let mut first = 0;
    let range = |cut: &Vec<usize>| {
        let range = first..cut[first];
        first = range.end;
        range
    };
    Ok(cuts.iter().rev().map(range).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The longest stage of the best cut, by trying all of them.
    fn best(costs: &[f64], stages: usize) -> f64 {
        let whole = costs.iter().sum();
        if stages == 1 {
            return whole;
        }
        let cuts = (1..=costs.len() - (stages - 1)).map(|cut| {
            let first: f64 = costs[..cut].iter().sum();
            first.max(best(&costs[cut..], stages - 1))
        });
        cuts.fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn each_layer_is_in_one_stage_and_the_longest_stage_is_short(
            costs in prop::collection::vec(0u32..50, 1..11),
            stages in 1usize..11,
        ) {
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let Ok(cut) = partition(&costs, stages) else {
                prop_assert!(stages > costs.len());
                return Ok(());
            };
            prop_assert_eq!(cut.len(), stages);
            prop_assert!(cut.iter().all(|stage| !stage.is_empty()));
            prop_assert!(cut.into_iter().flatten().eq(0..costs.len()));
            let cut = partition(&costs, stages).unwrap();
            let longest = cut.into_iter().map(|stage| costs[stage].iter().sum::<f64>()).fold(0.0, f64::max);
            prop_assert_eq!(longest, best(&costs, stages));
        }
    }

    #[test]
    fn equal_layers_are_cut_equally() {
        assert_eq!(partition(&[1.0; 30], 4).unwrap().iter().map(Range::len).max(), Some(8));
        assert_eq!(partition(&[1.0; 8], 4).unwrap(), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(partition(&[0.0; 3], 3).unwrap(), [0..1, 1..2, 2..3]);
    }

    #[test]
    fn what_cannot_be_cut_is_an_error() {
        let error = |costs: &[f64], stages| partition(costs, stages).unwrap_err().to_string();
        let expected = "3 layers cannot be cut into 4 stages of at least one; try 3 or fewer stages";
        assert_eq!(error(&[1.0; 3], 4), expected);
        assert!(error(&[1.0; 3], 0).starts_with("3 layers cannot be cut into 0 stages"));
        assert_eq!(
            error(&[1.0, f64::NAN], 1),
            "the cost of layer 1 is NaN; try a number that is not negative"
        );
    }
}
