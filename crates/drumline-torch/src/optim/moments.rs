//! How Adam keeps its running means.

use tch::Kind;

use super::state::{Like, STEP, Slot};
use super::trained::Parameter;

/// Parameters with fewer elements keep their running means in f32: there is little to save, and they need the precision.
const FEWEST: i64 = 4096;

/// How Adam and AdamW keep the running means of the gradient and of the squared gradient.
///
/// Bytes for each element of a parameter: 8, 4, or 2 and a little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Moments {
    /// In the kind of the parameters, which is f32 for master weights.
    #[default]
    F32,
    /// In bf16. Numbers are rounded up or down by chance, so that small changes add up; the bits depend on this seed, the
    /// parameter's name, its number of steps and an element's index, and not on the number of ranks.
    Bf16 {
        /// The seed of the random bits.
        seed: u64,
    },
    /// In 8 bits, with an f32 scale for up to 256 elements of a row, as in bitsandbytes. Parameters of fewer than two
    /// dims or of fewer than 4096 elements have them in f32.
    EightBit,
}

/// In the kind of the parameter.
const OF_PARAMETER: &[Slot] =
    &[STEP, Slot::new("exp_avg", Like::Parameter), Slot::new("exp_avg_sq", Like::Parameter)];
const F32: &[Slot] = &[
    STEP,
    Slot::new("exp_avg", Like::Elements(Kind::Float)),
    Slot::new("exp_avg_sq", Like::Elements(Kind::Float)),
];
const BF16: &[Slot] = &[
    STEP,
    Slot::new("exp_avg", Like::Elements(Kind::BFloat16)),
    Slot::new("exp_avg_sq", Like::Elements(Kind::BFloat16)),
];
const EIGHT_BIT: &[Slot] = &[
    STEP,
    Slot::new("exp_avg", Like::Elements(Kind::Uint8)),
    Slot::new("exp_avg_absmax", Like::Blocks),
    Slot::new("exp_avg_sq", Like::Elements(Kind::Uint8)),
    Slot::new("exp_avg_sq_absmax", Like::Blocks),
];

impl Moments {
    /// The state of a parameter. Split master weights are in 16 bits themselves, and their means are not.
    pub(super) fn slots(self, parameter: &Parameter, is_split: bool) -> &'static [Slot] {
        let is_large = parameter.whole.len() >= 2 && parameter.whole.iter().product::<i64>() >= FEWEST;
        match self {
            Self::F32 if is_split => F32,
            Self::F32 => OF_PARAMETER,
            Self::Bf16 { .. } => BF16,
            Self::EightBit if is_large => EIGHT_BIT,
            Self::EightBit => F32,
        }
    }
}
