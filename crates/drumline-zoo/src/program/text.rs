//! Classification and tagging: `drumline-train train` and `test` with a configuration that has a section `TEXT`.

mod parts;
mod sets;
mod test;
mod train;

pub(super) use test::{check_test, test};
pub(super) use train::{check_training, train};
