//! Flags of the `deepspeed` command beyond those that choose hosts. Each works, is reported to have no effect, or is an error
//! that says what to use instead.

use std::path::PathBuf;

use drumline_launch::Starter;

use super::args::Launcher;
use super::error::PlanError;

const HOSTS: &str = "Starting on other hosts (as deepspeed)";
const ACCEPTED: &str = "Accepted from deepspeed's command lines";

/// The flags as typed.
#[derive(Debug, clap::Args)]
pub(super) struct DeepspeedArgs {
    /// Arguments for ssh, srun or mpirun, with spaces between them
    #[arg(long, value_name = "ARGS", default_value = "", hide_default_value = true, help_heading = HOSTS,
          allow_hyphen_values = true)]
    pub(super) launcher_args: String,
    /// Port of the other hosts' sshd [default: ssh's own]
    #[arg(long, value_name = "PORT", help_heading = HOSTS)]
    pub(super) ssh_port: Option<u16>,
    /// Start this host's ranks only: every host is started by hand, with its --node-rank
    #[arg(long, help_heading = HOSTS)]
    pub(super) no_ssh: bool,
    /// Use --launcher even for a single host
    #[arg(long, help_heading = HOSTS)]
    pub(super) force_multi: bool,
    /// Slurm's account
    #[arg(long, value_name = "NAME", help_heading = HOSTS)]
    pub(super) account: Option<String>,
    /// Slurm's comment
    #[arg(long, value_name = "TEXT", help_heading = HOSTS)]
    pub(super) comment: Option<String>,
    /// Each rank's output into files in this folder: the same as --log-dir FOLDER --redirects 3
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["log_dir", "redirects"], help_heading = HOSTS)]
    pub(super) enable_each_rank_log: Option<PathBuf>,

    /// No effect: run passes no --local_rank; drumline launch does
    #[arg(long, help_heading = ACCEPTED)]
    no_local_rank: bool,
    /// No effect: a host that cannot be reached is reported when it is started
    #[arg(long, help_heading = ACCEPTED)]
    no_ssh_check: bool,
    /// No effect: the ranks end with their launcher
    #[arg(long, help_heading = ACCEPTED)]
    save_pid: bool,
    /// No effect: ranks are bound to cores where each can have its own
    #[arg(long, help_heading = ACCEPTED)]
    bind_cores_to_rank: bool,
    /// Not supported: try --numa-binding
    #[arg(long, value_name = "LIST", help_heading = ACCEPTED)]
    bind_core_list: Option<String>,
    /// Not supported: try --rdzv-backend c10d
    #[arg(long, help_heading = ACCEPTED)]
    elastic_training: bool,
    /// Not supported: try --nnodes MIN:MAX
    #[arg(long, value_name = "N", help_heading = ACCEPTED)]
    min_elastic_nodes: Option<i64>,
    /// Not supported: try --nnodes MIN:MAX
    #[arg(long, value_name = "N", help_heading = ACCEPTED)]
    max_elastic_nodes: Option<i64>,
    /// Not supported: deepspeed's own
    #[arg(long, value_name = "HOW", help_heading = ACCEPTED)]
    autotuning: Option<String>,
}

impl DeepspeedArgs {
    /// An error for a flag that is not supported.
    pub(super) fn refused(&self) -> Result<(), PlanError> {
        let elastic = "--nnodes MIN:MAX --rdzv-backend c10d --rdzv-endpoint HOST:PORT on each host";
        // DeepSpeed's own default is -1.
        let given = |nodes: Option<i64>| nodes.is_some_and(|nodes| nodes >= 0);
        for (flag, given, instead) in [
            ("--bind-core-list", self.bind_core_list.is_some(), "--numa-binding, or taskset before drumline"),
            ("--elastic-training", self.elastic_training, elastic),
            ("--min-elastic-nodes", given(self.min_elastic_nodes), elastic),
            ("--max-elastic-nodes", given(self.max_elastic_nodes), elastic),
            ("--autotuning", self.autotuning.is_some(), "the deepspeed command for that"),
        ] {
            if given {
                return Err(PlanError::Refused { flag, instead });
            }
        }
        Ok(())
    }

    /// Flags that were given and have no effect, and why.
    pub(super) fn unused(&self) -> Vec<(&'static str, &'static str)> {
        let flags = [
            (self.no_local_rank, "--no-local-rank", "run passes no --local_rank; drumline launch does"),
            (self.save_pid, "--save-pid", "to end the ranks, end their launcher"),
            (
                self.bind_cores_to_rank,
                "--bind-cores-to-rank",
                "ranks are bound to cores where each can have its own",
            ),
        ];
        flags.into_iter().filter(|(given, ..)| *given).map(|(_, flag, why)| (flag, why)).collect()
    }

    /// Extra arguments for the starter.
    pub(super) fn starter_args(&self, starter: Starter) -> Vec<String> {
        let slurm = [("account", &self.account), ("comment", &self.comment)];
        let slurm = slurm.into_iter().filter(|_| starter == Starter::Slurm);
        let slurm = slurm.filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?)));
        slurm.chain(self.launcher_args.split_whitespace().map(str::to_string)).collect()
    }
}

/// The starter with this name, if it is supported.
pub(super) fn starter(launcher: Option<Launcher>) -> Result<Starter, PlanError> {
    match launcher {
        None | Some(Launcher::Ssh) => Ok(Starter::Ssh),
        Some(Launcher::Slurm) => Ok(Starter::Slurm),
        Some(Launcher::Openmpi) => Ok(Starter::OpenMpi),
        Some(Launcher::Mvapich | Launcher::Mpich | Launcher::Impi | Launcher::Jsrun) => {
            Err(PlanError::Refused { flag: "--launcher with this starter", instead: "ssh, slurm or openmpi" })
        }
    }
}
