//! `drumline keys`: this process becomes `drumline-train keys`.

use std::ffi::{OsStr, OsString};

use clap::builder::{PossibleValue, TypedValueParser};

use crate::train::become_trainer;

const EXAMPLES: &str = "\
Examples:
  drumline keys                                     the keys of a configuration for images, with their defaults
  drumline keys gpt                                 those for a GPT
  drumline keys config/bert-small.yaml              those for this configuration
  drumline keys text --schema > text.schema.json    for an editor, which completes keys and describes them

The files in config/ name their schema in the first line, which editors with a YAML language server read:
  # yaml-language-server: $schema=schema/images.json";

/// List the keys of a configuration with their defaults, or print their JSON schema
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeysArgs {
    /// What the configuration is for, or a configuration file
    #[arg(value_name = "KIND|FILE", default_value = "images", value_parser = KindOrFile)]
    kind: OsString,
    /// Print a JSON schema, with which editors complete keys
    #[arg(long)]
    schema: bool,
}

/// Kinds, which help shows and shells complete. `drumline-train` parses the value: it knows other names and reads files.
#[derive(Debug, Clone, Copy)]
struct KindOrFile;

impl TypedValueParser for KindOrFile {
    type Value = OsString;

    fn parse_ref(
        &self,
        _: &clap::Command,
        _: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<OsString, clap::Error> {
        Ok(value.to_owned())
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(["images", "translation", "text", "gpt", "mlm"].map(PossibleValue::new).into_iter()))
    }
}

/// Becomes `drumline-train keys …`.
pub(crate) fn keys(args: KeysArgs) -> anyhow::Result<()> {
    let schema = args.schema.then(|| "--schema".into());
    become_trainer("keys", [args.kind].into_iter().chain(schema).collect())
}
