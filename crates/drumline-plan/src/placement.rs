//! Which states of a training are replicated and which are divided among the ranks of an axis. The stages of ZeRO are
//! values of one type, from which reduction, memory and traffic are derived.

use std::fmt;
use std::str::FromStr;

/// How a state lies on the ranks of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Each rank has all of it.
    Replicated,
    /// Each rank has a part of it.
    Sharded,
}

/// How parameters, their gradients and the optimizer's state lie on the ranks of an axis, between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placements {
    /// The parameters. Sharded ones are gathered where a layer uses them.
    pub parameters: Placement,
    /// The gradients after backward.
    pub gradients: Placement,
    /// The optimizer's state. Where it is sharded, each rank steps its part of the parameters.
    pub optimizer: Placement,
}

/// A stage of ZeRO, as DeepSpeed numbers them: how much of the training's state is divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Stage {
    /// Nothing is divided, as with DDP.
    #[default]
    Zero0,
    /// The optimizer's state is divided.
    Zero1,
    /// So are the gradients.
    Zero2,
    /// So are the parameters, as with FSDP.
    Zero3,
}

impl Stage {
    /// All stages.
    pub const ALL: [Self; 4] = [Self::Zero0, Self::Zero1, Self::Zero2, Self::Zero3];

    /// What is divided among the ranks of the `shard` axis.
    pub fn placements(self) -> Placements {
        let from = |first: Self| if self >= first { Placement::Sharded } else { Placement::Replicated };
        Placements {
            parameters: from(Self::Zero3),
            gradients: from(Self::Zero2),
            optimizer: from(Self::Zero1),
        }
    }

    /// Its number.
    pub fn number(self) -> u8 {
        match self {
            Self::Zero0 => 0,
            Self::Zero1 => 1,
            Self::Zero2 => 2,
            Self::Zero3 => 3,
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ZeRO-{}", self.number())
    }
}

/// A number that is no stage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no stage of ZeRO; try 0, 1, 2 or 3")]
pub struct NoSuchStage(String);

impl FromStr for Stage {
    type Err = NoSuchStage;

    fn from_str(text: &str) -> Result<Self, NoSuchStage> {
        let stage = Self::ALL.into_iter().find(|stage| stage.number().to_string() == text);
        stage.ok_or_else(|| NoSuchStage(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_divides_one_state_more() {
        let divided = |stage: Stage| {
            let Placements { parameters, gradients, optimizer } = stage.placements();
            [optimizer, gradients, parameters].map(|placement| placement == Placement::Sharded)
        };
        assert_eq!(divided(Stage::Zero0), [false, false, false]);
        assert_eq!(divided(Stage::Zero1), [true, false, false]);
        assert_eq!(divided(Stage::Zero2), [true, true, false]);
        assert_eq!(divided(Stage::Zero3), [true, true, true]);
    }

    #[test]
    fn stages_are_read_by_their_number() {
        for stage in Stage::ALL {
            assert_eq!(stage.number().to_string().parse(), Ok(stage));
        }
        let error = "4".parse::<Stage>().unwrap_err();
        assert_eq!(error.to_string(), "`4` is no stage of ZeRO; try 0, 1, 2 or 3");
    }
}
