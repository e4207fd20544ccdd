//! `drumline sbatch`: a batch script for Slurm that runs a program with one agent on each node.
//!
//! ```text
//!   flags ─┬─ Slurm's ──────────▶ #SBATCH lines ─┐
//!          └─ drumline run's ──▶ run_line.rs ────┴─ script.rs ─▶ stdout, -o FILE, or sbatch (--submit)
//! ```

mod run_line;
mod script;
#[cfg(test)]
mod script_table;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

pub(crate) use run_line::{RunLine, typed};
use script::Job;

const SLURM: &str = "The job";
const SCRIPT: &str = "The script";

/// The default seconds of warning for a job that is to run again.
const SIGNAL_BEFORE: u16 = 60;
/// The signals with which the agents stop their ranks: the default ones, and that of the warning, which would otherwise only be
/// passed on.
const SIGNALS: &str = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1";

const EXAMPLES: &str = "\
Examples:
  drumline sbatch --nodes 2 --gpus-per-node 8 train.py --lr 0.1      show the script: a rank for each GPU
  drumline sbatch --nodes 2 --nproc-per-node 4 --submit ./train      submit it, and print the job's number
  drumline sbatch --nodes 2 --gpus-per-node 8 --time 4:00:00 --requeue --signal-before 120 --submit train.py

All flags of drumline run can be given too, except those that give the nodes: Slurm does that. With --signal-before the \
ranks get SIGUSR1 that many seconds before the time is up (or up to a minute more). With --requeue they must then end, and are \
killed if they do not; the job returns to the queue, and its next run sees SLURM_RESTART_COUNT.";

/// Write, or submit, a Slurm batch script that runs a program on several nodes
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SbatchArgs {
    /// Number of nodes
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..), help_heading = SLURM)]
    nodes: u32,
    /// GPUs of each node, as Slurm takes it: 8, or a100:8; there is a rank for each unless --nproc-per-node is given
    #[arg(long, value_name = "G", help_heading = SLURM)]
    gpus_per_node: Option<String>,
    /// Cores of each node [default: one for each rank]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = SLURM)]
    cpus_per_task: Option<u32>,
    /// Longest time, such as 4:00:00
    #[arg(long, value_name = "TIME", help_heading = SLURM)]
    time: Option<String>,
    /// Partition
    #[arg(long, value_name = "NAME", help_heading = SLURM)]
    partition: Option<String>,
    /// Name of the job [default: that of the program]
    #[arg(long, value_name = "NAME", help_heading = SLURM)]
    job_name: Option<String>,
    /// File for the job's output, such as %x-%j.out
    #[arg(long, value_name = "FILE", help_heading = SLURM)]
    output: Option<String>,
    /// Run the job again after it was warned that its time is up
    #[arg(long, help_heading = SLURM)]
    requeue: bool,
    /// Warn the ranks this many seconds before the time is up [default: no warning, or 60 with --requeue]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..), help_heading = SLURM)]
    signal_before: Option<u16>,

    /// Submit the script to Slurm, and print the job's number
    #[arg(long, help_heading = SCRIPT)]
    submit: bool,
    /// Write the script to this file
    #[arg(long, value_name = "FILE", help_heading = SCRIPT)]
    script: Option<PathBuf>,

    #[command(flatten)]
    run: RunLine,
}

/// Runs `drumline sbatch`.
pub(crate) fn sbatch(args: &SbatchArgs) -> anyhow::Result<()> {
    let launcher = std::env::current_exe().context("cannot find this program's own path")?;
    let script = args.job(launcher.as_os_str())?.script();
    if let Some(file) = &args.script {
        std::fs::write(file, &script).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let submits = args.submit && !args.run.args.dry_run;
    match (submits, &args.script) {
        (true, _) => println!("{}", submitted(&script)?),
        (false, None) => std::io::stdout().write_all(&script)?,
        (false, Some(_)) => {}
    }
    Ok(())
}

/// Submits the script; returns the number of the job.
fn submitted(script: &[u8]) -> anyhow::Result<String> {
    let mut command = Command::new("sbatch");
    let command = command.arg("--parsable").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut sbatch = command.spawn().context("cannot run sbatch; try without --submit")?;
    let mut input = sbatch.stdin.take().context("sbatch has no stdin")?;
    // If sbatch refuses the job, it may not read everything; it prints why.
    let written = input.write_all(script);
    drop(input);
    let output = sbatch.wait_with_output()?;
    ensure!(output.status.success(), "sbatch refused the job ({}); it says why above", output.status);
    written.context("cannot pass the script to sbatch")?;
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    // With several clusters: NUMBER;CLUSTER.
    Ok(answer.trim().split(';').next().unwrap_or_default().to_string())
}

/// Whether a flag of `run` is for Slurm here, and not for the nodes.
fn is_slurms(flag: &OsStr) -> bool {
    ["--account=", "--comment=", "--dry-run"]
        .iter()
        .any(|name| flag.as_encoded_bytes().starts_with(name.as_bytes()))
}

impl SbatchArgs {
    /// The job to submit. `launcher` is the path of this program on the nodes.
    fn job(&self, launcher: &OsStr) -> anyhow::Result<Job> {
        if self.run.args.give_nodes() {
            bail!(
                "Slurm gives the nodes, but a flag or PET_ variable of drumline run says where they are or how they \
                 meet; try --nodes N alone"
            );
        }
        let warning = self.signal_before.or(self.requeue.then_some(SIGNAL_BEFORE));
        let options = self.options(warning)?;
        let mut command = vec![launcher.to_os_string(), "run".into()];
        command.extend(self.default_ranks());
        command.extend(warning.filter(|_| self.requeue).into_iter().flat_map(|time| self.stopping_in(time)));
        command.extend(self.run.flags.iter().filter(|flag| !is_slurms(flag)).cloned());
        // A program's name may look like a flag.
        command.push("--".into());
        command.extend(self.run.program.iter().cloned());
        let (cpus_per_task, requeue) = (self.cpus(), self.requeue);
        Ok(Job { options, cpus_per_task, warned: warning.is_some(), requeue, command })
    }

    fn options(&self, warning: Option<u16>) -> anyhow::Result<Vec<String>> {
        let name = self.job_name.clone().unwrap_or_else(|| self.program_name());
        let valued = [
            ("job-name", Some(name)),
            ("nodes", Some(self.nodes.to_string())),
            ("ntasks-per-node", Some(1.to_string())),
            ("gpus-per-node", self.gpus_per_node.clone()),
            ("cpus-per-task", self.cpus().map(|cpus| cpus.to_string())),
            ("time", self.time.clone()),
            ("partition", self.partition.clone()),
            ("account", self.run.value("account").map(str::to_string)),
            ("comment", self.run.value("comment").map(str::to_string)),
            ("output", self.output.clone()),
            ("signal", warning.map(|seconds| format!("B:USR1@{seconds}"))),
            // The output of the first run is kept.
            ("open-mode", self.requeue.then(|| "append".to_string())),
        ];
        let mut options = Vec::new();
        for (name, value) in valued {
            let Some(value) = value else { continue };
            let legal = !value.is_empty() && !value.chars().any(char::is_control);
            ensure!(legal, "--{name} cannot be {value:?}; try one line of text");
            options.push(format!("--{name}={value}"));
        }
        options.extend(self.requeue.then(|| "--requeue".to_string()));
        Ok(options)
    }

    fn program_name(&self) -> String {
        let name = self.run.program.first().and_then(|program| Path::new(program).file_name());
        let name = name.unwrap_or_default().to_string_lossy();
        let plain: String = name.chars().filter(|c| !c.is_control()).collect();
        if plain.is_empty() { "drumline".to_string() } else { plain }
    }

    fn gives_ranks(&self) -> bool {
        ["nproc-per-node", "num-gpus"].iter().any(|flag| self.run.value(flag).is_some())
    }

    /// A rank for each GPU.
    fn default_ranks(&self) -> Option<OsString> {
        (self.gpus_per_node.is_some() && !self.gives_ranks()).then(|| "--nproc-per-node=gpu".into())
    }

    /// A job that is to run again must end before its time is up: the ranks get nine tenths of what is left.
    fn stopping_in(&self, seconds: u16) -> impl Iterator<Item = OsString> + use<> {
        let signals = self.run.value("signals-to-handle").is_none().then(|| SIGNALS.to_string());
        let time = self.run.value("shutdown-timeout").is_none();
        let time = time.then(|| format!("--shutdown-timeout={}", f64::from(seconds) * 0.9));
        signals.into_iter().chain(time).map(OsString::from)
    }

    /// Slurm's own default is one core, however many ranks there are.
    fn cpus(&self) -> Option<usize> {
        let gpus = self.gpus_per_node.as_deref().and_then(|gpus| gpus.rsplit(':').next());
        let asked = self.run.value("nproc-per-node").or_else(|| self.run.value("num-gpus"));
        let ranks = asked.and_then(|ranks| ranks.parse().ok());
        let ranks = ranks.or_else(|| gpus?.parse().ok()).filter(|ranks| *ranks > 0);
        self.cpus_per_task.map(|cpus| cpus as usize).or(ranks)
    }
}
