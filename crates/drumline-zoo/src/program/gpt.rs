//! Models that continue text: `drumline-train train` and `test` with a configuration that has a section `GPT`, `generate`, `export`, and what makes files of tokens.

mod export;
mod found;
mod generate;
mod parts;
mod test;
mod tokens;
mod train;

pub(super) use export::{ExportArgs, export};
pub(super) use generate::{GenerateArgs, generate};
pub(super) use test::{check_test, test};
pub(super) use tokens::{BpeArgs, StoryArgs, TokensArgs};
pub(super) use train::{check_training, train};
