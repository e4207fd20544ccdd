//! The memory of a training's states on each rank, derived from a layout and its placements.

use crate::placement::{Placement, Placements, Stage};
use crate::unit::UnitLayout;

/// Bytes of an element of each state. For Adam in f32: 4, 4 and 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSizes {
    /// A parameter.
    pub parameter: usize,
    /// Its gradient.
    pub gradient: usize,
    /// The optimizer's state, with an f32 copy of the parameter if there is one.
    pub optimizer: usize,
}

/// Bytes that a rank holds between steps, without activations and without what is gathered for a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateBytes {
    /// Of parameters.
    pub parameters: usize,
    /// Of gradients.
    pub gradients: usize,
    /// Of the optimizer.
    pub optimizer: usize,
}

impl StateBytes {
    /// The bytes of a unit on each rank.
    pub fn of(unit: &UnitLayout, stage: Stage, sizes: StateSizes) -> Self {
        let held = |placement: Placement, size: usize| match placement {
            Placement::Replicated => unit.flat_len() * size,
            Placement::Sharded => unit.shard_len() * size,
        };
        let Placements { parameters, gradients, optimizer } = stage.placements();
        Self {
            parameters: held(parameters, sizes.parameter),
            gradients: held(gradients, sizes.gradient),
            optimizer: held(optimizer, sizes.optimizer),
        }
    }

    /// All of them.
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer
    }
}

impl std::iter::Sum for StateBytes {
    fn sum<I: Iterator<Item = Self>>(units: I) -> Self {
        units.fold(Self::default(), |all, unit| Self {
            parameters: all.parameters + unit.parameters,
            gradients: all.gradients + unit.gradients,
            optimizer: all.optimizer + unit.optimizer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Parameter;

    #[test]
    fn stages_hold_what_the_formulas_of_zero_say() {
        let adam = StateSizes { parameter: 4, gradient: 4, optimizer: 8 };
        let unit = UnitLayout::new(vec![Parameter::new("w", &[1024, 256])], 4);
        let elements = unit.num_elements();
        assert_eq!(unit.flat_len(), elements, "no padding");
        let bytes = |stage| StateBytes::of(&unit, stage, adam).total();
        assert_eq!(bytes(Stage::Zero0), 16 * elements);
        assert_eq!(bytes(Stage::Zero1), 8 * elements + 8 * elements / 4);
        assert_eq!(bytes(Stage::Zero2), 4 * elements + 12 * elements / 4);
        assert_eq!(bytes(Stage::Zero3), 16 * elements / 4);
        let two: StateBytes =
            [&unit, &unit].map(|unit| StateBytes::of(unit, Stage::Zero3, adam)).into_iter().sum();
        assert_eq!(two.total(), 2 * bytes(Stage::Zero3));
    }
}
