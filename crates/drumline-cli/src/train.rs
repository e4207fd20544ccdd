//! `drumline train` and `drumline test`: they start the program `drumline-train`, as `drumline run` starts any program.
//!
//! ```text
//!   launcher flags, --cfg, KEY VALUE ─┬─ a rank of a job already, or one rank ─▶ this process becomes drumline-train
//!                                     └─ else ─▶ drumline-train --check …, which reports what is wrong, once
//!                                                 ─▶ drumline run FLAGS drumline-train train --cfg FILE KEY VALUE …
//! ```
//!
//! drumline-train interprets the keys; here only the launcher's flags are parsed.

mod program;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use drumline_launch::{shell, short_spins};
use drumline_rendezvous::worker_env;

use crate::errors::{ExitCodeOnly, Mistake};
use crate::job::rank_variable;
use crate::run::{RunArgs, run};
use crate::sbatch::RunLine;
use crate::suggestions;

pub(crate) use program::trainer;

/// Values of `--device`; gpu means cuda.
pub(crate) const DEVICES: [&str; 4] = ["auto", "cpu", "cuda", "gpu"];

const TRAIN_EXAMPLES: &str = "\
Examples:
  drumline train --cfg config/resnet18.yaml                             one rank
  drumline train --nproc-per-node 2 --cfg config/cifar-resnet18.yaml    two ranks on this node
  drumline train --nproc-per-node gpu --cfg config/resnet50.yaml OPTIM.BASE_LR 0.8 OUT_DIR exp/a
  srun -n 8 drumline train --cfg config/resnet50.yaml                   under Slurm, a rank for each task
  drumline train --nproc-per-node 2 --verify-parity=5 --cfg F MODEL.SYNCBN True
  drumline train --device cpu --cfg F                                   on the CPU, even if there is a GPU
  drumline train --dry-run --nproc-per-node 2 --cfg F                   show the plan only
  drumline train --nproc-per-node 2 --cfg F --deepspeed ds_config.json  with DeepSpeed's configuration; --explain shows what it does
  drumline train --nproc-per-node 2 --cfg config/text-classify.yaml     text, after drumline data synth-text --out data/text
  drumline train --nproc-per-node 2 --cfg config/nmt.yaml               translation, after drumline data synth-translation --out data/translation
  drumline train --nproc-per-node 2 --cfg config/gpt-tiny.yaml          a small GPT, after drumline data synth-story and tokens: see the file
  drumline train --nproc-per-node 2 --cfg config/bert-small.yaml        a BERT, after drumline data synth-text --out data/text

Flags come first, then KEY VALUE pairs, which win over the file: types are those of the key, None where a key may be without a \
value, lists as [0,30,60]. drumline keys lists all keys. The launcher's flags are those of drumline run.

When a run is started again, it resumes from its last checkpoint in OUT_DIR; SIGTERM or Ctrl-C writes one and stops.";

const TEST_EXAMPLES: &str = "\
Examples:
  drumline test --cfg config/resnet18.yaml MODEL.WEIGHTS best.safetensors
  drumline test --nproc-per-node 2 --cfg exp/resnet18/config.yaml       the best model of that run
  drumline test --last --cfg exp/resnet18/config.yaml                   its last checkpoint

Flags come first, then KEY VALUE pairs; drumline keys lists all keys. The launcher's flags are those of drumline run.";

/// The environment of the only rank. It is set explicitly, since Slurm's variables may describe tasks that were not started.
const ALONE: [(&str, &str); 5] = [
    (worker_env::DRUMLINE_ALONE, "1"),
    (worker_env::RANK, "0"),
    (worker_env::WORLD_SIZE, "1"),
    (worker_env::LOCAL_RANK, "0"),
    (worker_env::LOCAL_WORLD_SIZE, "1"),
];
/// The exit code of a program whose libraries were not found.
const NOT_LOADED: i32 = 127;

/// With this variable the system's loader lists the libraries of a program instead of starting it, as `ldd` does.
const LIST_LIBRARIES: &str = "LD_TRACE_LOADED_OBJECTS";

/// Flags that change nothing if there is only one rank.
const OF_ONE_RANK: [&str; 4] = ["--nproc-per-node=", "--nnodes=", "--standalone", "--dry-run"];

/// Train a network: one rank, several on this node, or a whole cluster
#[derive(Debug, clap::Args)]
#[command(after_help = TRAIN_EXAMPLES)]
pub(crate) struct TrainArgs {
    /// Compare the first K steps of one rank with those of all ranks, and write nothing; exit code 1 if they differ [default: 5 steps]
    #[arg(long, value_name = "K", num_args = 0..=1, require_equals = true, default_missing_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    verify_parity: Option<u32>,
    #[command(flatten)]
    deepspeed: DeepSpeedArgs,
    #[command(flatten)]
    job: JobArgs,
}

/// The flags of a `ds_config.json`, which drumline-train reads.
#[derive(Debug, clap::Args)]
struct DeepSpeedArgs {
    /// DeepSpeed's configuration, a ds_config.json; its "auto" values are those of --cfg and of the keys
    #[arg(long, aliases = ["deepspeed_config", "deepspeed-config"], value_name = "FILE")]
    deepspeed: Option<OsString>,
    /// Print what each line of --deepspeed does here, and train nothing; exit code 1 if the file cannot be used
    #[arg(long, requires = "deepspeed")]
    explain: bool,
    /// With --explain: as JSON
    #[arg(long, requires = "explain")]
    json: bool,
    /// Keys of --deepspeed that DeepSpeed does not have are errors
    #[arg(long, requires = "deepspeed")]
    strict: bool,
}

impl DeepSpeedArgs {
    /// The same flags for drumline-train.
    fn words(&self) -> Vec<OsString> {
        let file = self.deepspeed.iter().flat_map(|file| [OsString::from("--deepspeed"), file.clone()]);
        let switches = [(self.explain, "--explain"), (self.json, "--json"), (self.strict, "--strict")];
        let switches = switches.into_iter().filter(|(is_on, _)| *is_on).map(|(_, flag)| flag.into());
        file.chain(switches).collect()
    }
}

/// Evaluate a model on the test set: the run's best, its last with --last, or MODEL.WEIGHTS (translation: run_configs.pretrain_path)
#[derive(Debug, clap::Args)]
#[command(after_help = TEST_EXAMPLES)]
pub(crate) struct TestArgs {
    /// Test the run's last checkpoint instead of its best
    #[arg(long)]
    last: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// What both commands have: the configuration, and `drumline run`'s flags.
#[derive(Debug, clap::Args)]
struct JobArgs {
    /// The configuration, a YAML file
    #[arg(long, aliases = ["config_path", "config-path"], value_name = "FILE")]
    cfg: PathBuf,
    /// Where to compute: auto, cpu or cuda; wins over the key DEVICE (translation: run_configs.device)
    #[arg(long, value_name = "DEVICE", value_parser = DEVICES, hide_possible_values = true)]
    device: Option<String>,
    #[command(flatten)]
    run: RunLine,
}

/// Make synthetic data sets, tokens and vocabularies: synth-cifar, synth-story, synth-text, synth-translation, tokens, bpe, vocabulary; drumline data --help
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct DataArgs {
    /// Passed on to drumline-train unchanged
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// `run`'s flags on a command whose program is known: the pairs take the place of the program.
pub(crate) fn with_pairs(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match arg.get_id().as_str() {
        "command" => {
            let help = "Keys of the configuration with their values";
            arg.required(false).value_names(["KEY", "VALUE"]).help(help)
        }
        "module" | "no_python" | "run_path" => arg.hide(true),
        _ => crate::run::hidden_if_without_effect(arg),
    });
    crate::run::as_torchrun(command)
}

/// Runs `drumline train`; an error if a rank failed.
pub(crate) fn train(mut args: TrainArgs) -> anyhow::Result<()> {
    let parity = args.verify_parity.map(|steps| format!("--verify-parity={steps}").into());
    let extra: Vec<_> = parity.into_iter().chain(args.deepspeed.words()).collect();
    let program = configured("train", extra, &mut args.job)?;
    if args.deepspeed.explain {
        return explain(&program, args.job.run);
    }
    start(&program, args.job.run)
}

/// Runs `drumline test`; an error if a rank failed.
pub(crate) fn test(mut args: TestArgs) -> anyhow::Result<()> {
    let extra = args.last.then(|| "--last".into()).into_iter().collect();
    let program = configured("test", extra, &mut args.job)?;
    start(&program, args.job.run)
}

/// Becomes `drumline-train data …`.
pub(crate) fn data(args: DataArgs) -> anyhow::Result<()> {
    become_trainer("data", args.args)
}

/// Becomes one of `drumline-train`'s programs, with these arguments unchanged.
pub(crate) fn become_trainer(name: &str, args: Vec<OsString>) -> anyhow::Result<()> {
    let words = [trainer()?.into(), name.into()].into_iter().chain(args).collect::<Vec<_>>();
    become_program(&words, &[])
}

/// The program of a configuration. It takes the pairs out of the arguments.
fn configured(name: &'static str, extra: Vec<OsString>, job: &mut JobArgs) -> Result<ReadyProgram, Mistake> {
    let JobArgs { cfg, device, run } = job;
    let pairs = std::mem::take(&mut run.program);
    check_pairs(&pairs)?;
    let device = device.as_ref().map(|device| format!("--device={device}").into());
    let flags = [OsString::from("--cfg"), cfg.as_os_str().to_owned()]
        .into_iter()
        .chain(device)
        .chain(extra)
        .collect();
    Ok(ReadyProgram { name, flags, pairs })
}

/// Becomes the program with `--explain`, for the number of ranks that the launcher's flags describe.
fn explain(program: &ReadyProgram, run_line: RunLine) -> anyhow::Result<()> {
    let words = program.words()?;
    let args = run_line.args.of_program(&words);
    let num_ranks = crate::run::extent(&args)?.num_ranks().to_string();
    become_program(&words, &as_rank_0_of(&num_ranks))
}

/// The variables of a rank that does not meet the others, so that nobody listens at the address.
fn as_rank_0_of(num_ranks: &str) -> [(&'static str, &str); 6] {
    [
        (worker_env::RANK, "0"),
        (worker_env::WORLD_SIZE, num_ranks),
        (worker_env::LOCAL_RANK, "0"),
        (worker_env::LOCAL_WORLD_SIZE, num_ranks),
        (worker_env::MASTER_ADDR, "127.0.0.1"),
        (worker_env::MASTER_PORT, "29500"),
    ]
}

/// One of `drumline-train`'s programs.
pub(crate) struct ReadyProgram {
    pub(crate) name: &'static str,
    pub(crate) flags: Vec<OsString>,
    /// Keys with their values.
    pub(crate) pairs: Vec<OsString>,
}

impl ReadyProgram {
    /// The program with its arguments.
    fn words(&self) -> anyhow::Result<Vec<OsString>> {
        let Self { name, flags, pairs } = self;
        let program = [trainer()?.into(), OsString::from(name)];
        Ok(program.into_iter().chain(flags.iter().chain(pairs).cloned()).collect())
    }
}

/// Starts it with the given number of ranks; an error if one failed.
pub(crate) fn start(program: &ReadyProgram, run_line: RunLine) -> anyhow::Result<()> {
    let RunLine { args, flags, .. } = run_line;
    let words = program.words()?;
    let args = args.of_program(&words);
    let place = place(&args, &flags)?;
    match (place, args.dry_run) {
        (Where::InRank, false) => become_program(&words, &[]),
        (Where::Here, false) => {
            let variables = ALONE.into_iter().chain(short_spins()).collect::<Vec<_>>();
            become_program(&words, &variables)
        }
        (Where::Here | Where::InRank, true) => {
            let line = shell::line(words.iter().map(OsString::as_os_str));
            Ok(writeln!(std::io::stdout(), "plan (one rank); this process becomes\n  $ {}", line.display())?)
        }
        (Where::OneNode, false) => {
            check(&words, &args)?;
            run(&args, None)
        }
        _ => run(&args, None),
    }
}

/// Lets the program report errors in its configuration, once, before all its ranks would. Other nodes may have other files, so
/// they check for themselves.
fn check(words: &[OsString], args: &RunArgs) -> anyhow::Result<()> {
    let num_ranks = crate::run::extent(args)?.num_ranks().to_string();
    let (program, args) = words.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.arg0("drumline").arg("--check").args(args).stdin(Stdio::null()).stdout(Stdio::null());
    command.envs(as_rank_0_of(&num_ranks));
    let status = command.status().with_context(|| format!("cannot run {}", program.display()))?;
    match status.code() {
        Some(0) => Ok(()),
        // The loader has printed which library.
        Some(NOT_LOADED) => Err(no_libtorch(program).into()),
        Some(code) => Err(ExitCodeOnly(u8::try_from(code).unwrap_or(1)).into()),
        None => Err(anyhow!(
            "{} was ended by a signal before its ranks were started: {status}",
            program.display()
        )),
    }
}

fn no_libtorch(program: &OsStr) -> Mistake {
    Mistake::new(format!(
        "{} needs libtorch, which is not where it was when the program was built; try LD_LIBRARY_PATH with libtorch's folder lib, or build it again here",
        program.display()
    ))
}

/// Whether the system's loader cannot find one of the program's libraries. The loader is queried; nothing is started.
fn lacks_library(program: &OsStr) -> bool {
    let asked = Command::new(program).env(LIST_LIBRARIES, "1").stdin(Stdio::null()).output();
    let list = asked.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&list).lines().any(|line| line.trim_end().ends_with("=> not found"))
}

/// Where the program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    /// In this process, which is a rank of a job.
    InRank,
    /// In this process, as the only rank.
    Here,
    /// In ranks of this node.
    OneNode,
    /// In ranks of several nodes.
    Nodes,
}

fn place(args: &RunArgs, flags: &[OsString]) -> anyhow::Result<Where> {
    let typed = |flag: &&OsString| {
        let text = flag.to_string_lossy();
        !OF_ONE_RANK.iter().any(|known| text.starts_with(known))
    };
    let rank = rank_variable(|name| std::env::var(name).ok());
    let launches = flags.iter().any(|flag| flag != "--dry-run");
    match rank {
        Some(_) if !launches => return Ok(Where::InRank),
        // A task of Slurm may be the agent of its node; a rank is no launcher.
        Some(name) if name != worker_env::SLURM_PROCID => {
            let flag = flags[0].to_string_lossy().into_owned();
            let what = format!(
                "{name} is set: this is a rank of a job already; try without {flag}, or unset {name}"
            );
            return Err(Mistake::new(what).into());
        }
        _ => {}
    }
    let extent = crate::run::extent(args)?;
    Ok(match (extent.nodes, extent.nproc) {
        (1, 1) if !flags.iter().any(|flag| typed(&flag)) => Where::Here,
        (1, _) => Where::OneNode,
        _ => Where::Nodes,
    })
}

/// A flag after the first key would be read as a key: an error here, in the launcher's terms.
fn check_pairs(pairs: &[OsString]) -> Result<(), Mistake> {
    let keys = pairs.iter().step_by(2);
    match keys.map(|key| key.to_string_lossy()).find(|key| key.starts_with('-')) {
        Some(flag) => Err(Mistake::new(match suggestions::of_training(&flag) {
            Some(meant) => format!("there is no flag {flag}; try {meant}"),
            None => format!("{flag} comes after a KEY VALUE pair; try it before the first key"),
        })),
        None => Ok(()),
    }
}

/// Replaces this process by the program; returns only if that fails. The program's help then shows the typed name, `drumline`.
pub(crate) fn become_program(words: &[OsString], variables: &[(&str, &str)]) -> anyhow::Result<()> {
    let (program, args) = words.split_first().context("no program")?;
    // Checked before: afterwards this process can no longer report it.
    if lacks_library(program) {
        return Err(no_libtorch(program).into());
    }
    let error = Command::new(program).arg0("drumline").args(args).envs(variables.iter().copied()).exec();
    Err(anyhow!(error).context(format!("cannot run {}", program.display())))
}
