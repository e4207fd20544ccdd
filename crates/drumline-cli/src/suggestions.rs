//! Suggestions for flags of other launchers and of training scripts, and for mistyped commands.

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

/// Flags of training scripts, and what has the same meaning in a configuration for images.
const KEYS: [(&[&str], &str); 15] = [
    (&["--lr", "--learning-rate", "--base-lr"], "OPTIM.BASE_LR 0.1"),
    (
        &["--epochs", "--num-epochs", "--max-epochs", "--num-train-epochs", "--max-epoch"],
        "OPTIM.MAX_EPOCH 10",
    ),
    (&["--steps", "--max-steps", "--num-steps"], "TRAIN.MAX_STEPS 100"),
    (&["-b", "--batch", "--batch-size", "--bs", "--per-device-train-batch-size"], "TRAIN.BATCH_SIZE 32"),
    (&["-j", "--workers", "--num-workers"], "TRAIN.WORKERS 4"),
    (&["-o", "--out", "--out-dir", "--output", "--output-dir", "--save-dir", "--exp-dir"], "OUT_DIR exp/a"),
    (&["-a", "--arch", "--model"], "MODEL.ARCH resnet50"),
    (&["--data", "--dataset", "--data-dir", "--data-path"], "TRAIN.DATASET data/cifar"),
    (&["--weights", "--pretrained", "--checkpoint"], "MODEL.WEIGHTS best.safetensors"),
    (&["--wd", "--weight-decay"], "OPTIM.WEIGHT_DECAY 5e-5"),
    (&["--momentum"], "OPTIM.MOMENTUM 0.9"),
    (&["--clip", "--grad-clip", "--clip-grad", "--max-grad-norm"], "OPTIM.GRAD_CLIP 1.0"),
    (&["--seed"], "RNG_SEED 7"),
    (&["--bf16", "--amp", "--precision", "--mixed-precision"], "PRECISION bf16"),
    (&["--fp16"], "PRECISION fp16"),
];

/// Words that people type for our commands.
const COMMANDS: [(&[&str], &str); 10] = [
    (&["ls", "list", "ps", "status", "jobs"], "runs"),
    (&["eval", "evaluate", "validate", "val"], "test"),
    (&["torchrun", "exec", "start", "mpirun", "python", "python3"], "run"),
    (&["fit", "finetune", "resume", "pretrain"], "train"),
    (&["config", "configs", "options"], "keys"),
    (&["dashboard", "ui", "serve", "tensorboard", "monitor"], "watch"),
    (&["sample", "chat", "complete"], "generate"),
    (&["check", "diagnose", "info", "env"], "doctor"),
    (&["profile", "prof"], "trace"),
    (&["version"], "--version"),
];

/// Commands that start ranks.
const STARTING: [&str; 6] = ["run", "launch", "sbatch", "train", "test", "translate"];

/// Commands with a configuration.
const CONFIGURED: [&str; 2] = ["train", "test"];

/// The most typing errors for which a command is suggested.
const MAX_TYPING_ERRORS: usize = 2;

/// A flag that is less similar to the typed one is not suggested; 1 is equal.
const SIMILAR: f64 = 0.6;

/// The same error, with a suggestion that is right for this command. `args` are the words after `drumline`.
///
/// The parser's own suggestions are to pass an unknown flag as a value, which would make it the program, or the flag that looks
/// most like it, whatever that means.
pub(crate) fn with_suggestion(mut error: clap::Error, args: &[String]) -> clap::Error {
    let command = args.first().map_or("", String::as_str);
    match error.kind() {
        ErrorKind::UnknownArgument => suggest_flag(&mut error, command),
        ErrorKind::InvalidSubcommand => suggest_command(&mut error, args),
        ErrorKind::MissingRequiredArgument if CONFIGURED.contains(&command) => {
            let file = args.iter().skip(1).find(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
            let file = file.map_or("config/cifar-resnet18.yaml", String::as_str);
            set_tip(&mut error, format!("try drumline {command} --cfg {file}"));
        }
        _ => {}
    }
    error
}

fn suggest_flag(error: &mut clap::Error, command: &str) {
    error.remove(ContextKind::Suggested);
    let Some(typed) = text(error, ContextKind::InvalidArg) else { return };
    let key = CONFIGURED.contains(&command).then(|| of_training(&typed)).flatten();
    let meant = key.or_else(|| of_others(&typed).filter(|_| STARTING.contains(&command)).map(Into::into));
    let near = text(error, ContextKind::SuggestedArg).is_some_and(|near| is_near(&typed, &near));
    if let Some(meant) = meant {
        set_tip(error, format!("try {meant}"));
    } else if !near && CONFIGURED.contains(&command) {
        let what = "keys of the configuration follow the flags, without dashes; drumline keys lists them";
        set_tip(error, format!("try KEY VALUE: {what}"));
    } else if !near && error.remove(ContextKind::SuggestedArg).is_some() {
        error.remove(ContextKind::Usage);
    }
}

fn suggest_command(error: &mut clap::Error, args: &[String]) {
    error.remove(ContextKind::Suggested);
    error.remove(ContextKind::SuggestedSubcommand);
    let Some(typed) = text(error, ContextKind::InvalidSubcommand) else { return };
    let known = COMMANDS.iter().find(|(words, _)| words.contains(&typed.as_str()));
    let is_program = typed.ends_with(".py") || typed.contains('/');
    if is_program {
        set_tip(error, format!("try drumline run {}", args.join(" ")));
    } else if let Some((_, command)) = known {
        set_tip(error, format!("try drumline {command}"));
    } else {
        let near = nearest(&typed);
        if !near.is_empty() {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(near));
        }
    }
}

fn text(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    }
}

/// Makes this the only tip. The usage would be that of the flag that only looks like the typed one.
fn set_tip(error: &mut clap::Error, tip: String) {
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::Usage);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
}

fn of_others(typed: &str) -> Option<&'static str> {
    let typed = dashed(typed);
    FLAGS.iter().find(|(flag, _)| *flag == typed).map(|(_, ours)| *ours)
}

/// What a flag of a training script is called here: a key, or a flag of ours.
pub(crate) fn of_training(typed: &str) -> Option<String> {
    let flag = dashed(typed);
    let name = typed.split('=').next().unwrap_or(typed).trim_start_matches('-');
    if ["-c", "-f", "--cfg-file", "--yaml"].contains(&flag.as_str()) {
        return Some("--cfg FILE".to_owned());
    }
    if ["--resume", "--auto-resume"].contains(&flag.as_str()) {
        return Some("it without: a run resumes from its last checkpoint in OUT_DIR".to_owned());
    }
    let of_key = |key: &str| format!("{key} after the flags: keys of the configuration have no dashes");
    let is_key = name.len() > 1 && name.chars().all(|c| c.is_ascii_uppercase() || "._".contains(c));
    if is_key {
        return Some(of_key(&format!("{name} VALUE")));
    }
    KEYS.iter().find(|(flags, _)| flags.contains(&flag.as_str())).map(|(_, key)| of_key(key))
}

/// A flag without its value, with dashes.
fn dashed(typed: &str) -> String {
    typed.split('=').next().unwrap_or(typed).replace('_', "-")
}

/// Whether a flag is a typing error of another, or its beginning.
fn is_near(typed: &str, flag: &str) -> bool {
    let [typed, flag] = [typed, flag].map(|text| dashed(text).trim_start_matches('-').to_owned());
    typed.len() > 1
        && (flag.starts_with(&typed) || strsim::normalized_damerau_levenshtein(&typed, &flag) >= SIMILAR)
}

/// The commands that are nearest to what was typed, if any is near enough: the one with the fewest typing errors, and those that
/// share as many letters in the same order.
fn nearest(typed: &str) -> Vec<String> {
    use clap::CommandFactory;
    let command = crate::Cli::command();
    let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
    let names: Vec<_> = visible.map(clap::Command::get_name).collect();
    let num_errors = |name: &str| strsim::damerau_levenshtein(typed, name);
    let is_possible = |name: &&str| num_errors(name) <= MAX_TYPING_ERRORS && num_errors(name) < typed.len();
    let mut near: Vec<_> = names.into_iter().filter(is_possible).collect();
    near.sort_by_key(|name| (num_errors(name), name.len()));
    let best = near.first().map_or(1.0, |name| strsim::jaro(typed, name));
    near.into_iter().filter(|name| strsim::jaro(typed, name) >= best).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_command_is_suggested() {
        for (typed, meant) in [
            ("rn", &["run"][..]),
            ("rum", &["run"]),
            ("trian", &["train"]),
            ("trane", &["trace", "train"]),
            ("bnech", &["bench"]),
            ("xyzzy", &[]),
            ("q", &[]),
        ] {
            assert_eq!(nearest(typed), meant, "{typed}");
        }
    }

    #[test]
    fn flags_of_others_are_known_in_both_spellings() {
        assert_eq!(of_others("-n"), Some("--nproc-per-node N"));
        assert_eq!(of_others("--num_machines"), of_others("--num-machines"));
        assert_eq!(of_others("--gpu_ids=0,1"), Some("CUDA_VISIBLE_DEVICES=0,1 before drumline"));
        assert_eq!(of_others("--lr"), None);
    }
    #[test]
    fn flags_of_training_scripts_are_keys() {
        let no_dashes = " after the flags: keys of the configuration have no dashes";
        for (typed, key) in [
            ("--lr", "OPTIM.BASE_LR 0.1"),
            ("--learning_rate=0.1", "OPTIM.BASE_LR 0.1"),
            ("--OUT_DIR", "OUT_DIR VALUE"),
            ("--OPTIM.BASE_LR=0.1", "OPTIM.BASE_LR VALUE"),
        ] {
            assert_eq!(of_training(typed), Some(format!("{key}{no_dashes}")), "{typed}");
        }
        assert_eq!(of_training("-c").as_deref(), Some("--cfg FILE"));
        assert_eq!((of_training("-N"), of_training("--nnodez")), (None, None), "controls");
    }

    #[test]
    fn only_a_flag_that_is_near_is_suggested() {
        assert!(
            is_near("--nproc-per-nose", "--nproc-per-node") && is_near("--max-restart", "--max-restarts")
        );
        assert!(!is_near("--lr", "--local_ranks_filter") && !is_near("-c", "--cfg"));
    }
}
