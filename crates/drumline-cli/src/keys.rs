//! `drumline keys`: this process becomes `drumline-train keys`.

use crate::train::become_trainer;

const EXAMPLES: &str = "\
Examples:
  drumline keys                                     the keys of a configuration for images, with their defaults
  drumline keys gpt                                 those for a GPT
  drumline keys text --schema > text.schema.json    for an editor, which completes keys and describes them

The files in config/ name their schema in the first line, which editors with a YAML language server read:
  # yaml-language-server: $schema=schema/images.json";

/// List the keys of a configuration with their defaults, or print their JSON schema
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeysArgs {
    /// What the configuration is for
    #[arg(value_name = "KIND", default_value = "images", value_parser = ["images", "translation", "text", "gpt", "mlm"])]
    kind: String,
    /// Print a JSON schema, with which editors complete keys
    #[arg(long)]
    schema: bool,
}

/// Becomes `drumline-train keys …`.
pub(crate) fn keys(args: KeysArgs) -> anyhow::Result<()> {
    let schema = args.schema.then(|| "--schema".into());
    become_trainer("keys", [args.kind.into()].into_iter().chain(schema).collect())
}
