//! Suggestions for flags of other launchers and for mistyped commands.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Flags of mpirun, srun, accelerate and others, and our flags with the same meaning.
const FLAGS: [(&str, &str); 17] = [
    ("-n", "--nproc-per-node N"),
    ("-N", "--nnodes N"),
    ("-g", "--num-gpus N"),
    ("--np", "--nproc-per-node N"),
    ("--ntasks", "--nproc-per-node N"),
    ("--num-proc", "--nproc-per-node N"),
    ("--num-procs", "--nproc-per-node N"),
    ("--num-workers", "--nproc-per-node N"),
    ("--num-processes", "--nproc-per-node N, the ranks of one node"),
    ("--num-machines", "--nnodes N"),
    ("--machine-rank", "--node-rank N"),
    ("--main-process-ip", "--master-addr HOST"),
    ("--main-process-port", "--master-port PORT"),
    ("--multi-gpu", "--nproc-per-node gpu"),
    ("--gpus", "--num-gpus N"),
    ("--gpu-ids", "CUDA_VISIBLE_DEVICES=0,1 before drumline"),
    ("--mixed-precision", "ACCELERATE_MIXED_PRECISION=bf16 before drumline"),
];

/// Commands that start ranks.
const STARTING: [&str; 6] = ["run", "launch", "sbatch", "train", "test", "translate"];

/// The most typing errors for which a command is suggested.
const MAX_TYPING_ERRORS: usize = 2;

/// The same error, with a suggestion that is right for this command.
///
/// The parser's own suggestions are to pass an unknown flag as a value, which would make it the program, or the flag that looks
/// most like it, whatever that means.
pub(crate) fn with_suggestion(mut error: clap::Error, command: &str) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::UnknownArgument => {
            error.remove(ContextKind::Suggested);
            let typed = text(&error, ContextKind::InvalidArg).filter(|_| STARTING.contains(&command));
            if let Some(meant) = typed.and_then(|typed| of_others(&typed)) {
                error.remove(ContextKind::SuggestedArg);
                // The usage would be that of the flag that only looks like it.
                error.remove(ContextKind::Usage);
                let tip = vec![StyledStr::from(format!("try {meant}"))];
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tip));
            }
        }
        ErrorKind::InvalidSubcommand => {
            if let Some(near) = text(&error, ContextKind::InvalidSubcommand).and_then(|typed| nearest(&typed))
            {
                error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![near]));
            } else {
                error.remove(ContextKind::SuggestedSubcommand);
            }
        }
        _ => {}
    }
    error
}

fn of_others(typed: &str) -> Option<&'static str> {
    let typed = typed.split('=').next().unwrap_or(typed).replace('_', "-");
    FLAGS.iter().find(|(flag, _)| *flag == typed).map(|(_, ours)| *ours)
}

/// The command that is nearest to what was typed, if one is near enough.
fn nearest(typed: &str) -> Option<String> {
    use clap::CommandFactory;
    let command = crate::Cli::command();
    let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
    let scored =
        visible.map(|command| (strsim::damerau_levenshtein(typed, command.get_name()), command.get_name()));
    let best = scored.min_by_key(|(errors, name)| (*errors, name.len()));
    let best = best.filter(|(errors, _)| *errors <= MAX_TYPING_ERRORS && *errors < typed.len());
    best.map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_command_is_suggested() {
        for (typed, meant) in [
            ("rn", Some("run")),
            ("rum", Some("run")),
            ("trian", Some("train")),
            ("bnech", Some("bench")),
            ("xyzzy", None),
            ("q", None),
        ] {
            assert_eq!(nearest(typed).as_deref(), meant, "{typed}");
        }
    }

    #[test]
    fn flags_of_others_are_known_in_both_spellings() {
        assert_eq!(of_others("-n"), Some("--nproc-per-node N"));
        assert_eq!(of_others("--num_machines"), of_others("--num-machines"));
        assert_eq!(of_others("--gpu_ids=0,1"), Some("CUDA_VISIBLE_DEVICES=0,1 before drumline"));
        assert_eq!(of_others("--lr"), None);
    }
}
