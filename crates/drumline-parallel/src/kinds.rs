//! Types of tensors as text, for messages between ranks.

use tch::Kind;

use crate::error::ParallelError;

const KINDS: [Kind; 8] =
    [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int, Kind::Uint8, Kind::Bool];

pub(crate) fn kind_name(kind: Kind) -> String {
    format!("{kind:?}")
}

pub(crate) fn kind_of(name: &str) -> Result<Kind, ParallelError> {
    let found = KINDS.into_iter().find(|kind| kind_name(*kind) == name);
    found.ok_or_else(|| ParallelError::value("the type of a tensor", name, format!("one of {KINDS:?}")))
}

/// The number of a type in messages; `None` for one that does not travel.
pub(crate) fn kind_number(kind: Kind) -> Option<u8> {
    KINDS.into_iter().position(|other| other == kind).map(|place| place as u8)
}

/// The type with this number.
pub(crate) fn kind_numbered(number: u8) -> Option<Kind> {
    KINDS.get(usize::from(number)).copied()
}
