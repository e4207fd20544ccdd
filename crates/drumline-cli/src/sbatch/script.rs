//! The batch script. Pure: everything comes in with the [`Job`].
//!
//! ```text
//!   Slurm ─USR1 (time is nearly up), TERM─▶ this script ─▶ srun ─▶ drumline run on each node ─▶ its ranks
//! ```
//! The script runs `srun` in the background and waits, since a shell runs its traps only between commands. `srun` has its own
//! process group: a signal to the script's group would otherwise reach it twice.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use drumline_launch::shell;

/// What the script is to do.
#[derive(Debug, Clone, Default)]
pub(super) struct Job {
    /// Slurm's options, as `--name` or `--name=value`.
    pub(super) options: Vec<String>,
    /// Cores for each node's agent; `srun` does not inherit them from the job.
    pub(super) cpus_per_task: Option<usize>,
    /// Whether Slurm warns the script before the time is up.
    pub(super) warned: bool,
    /// Whether the job returns to the queue after the warning.
    pub(super) requeue: bool,
    /// `drumline run`, its flags, the program and its arguments.
    pub(super) command: Vec<OsString>,
}

const KEY: &str = r#"
# The nodes prove to each other that they belong to this job with a key. Only its owner may read it, in a folder
# that all nodes see. A job that was killed and runs again makes another key.
private="$SLURM_SUBMIT_DIR/.drumline-$SLURM_JOB_ID"
rm -rf -- "$private"
mkdir -m 700 -- "$private" || exit 1
trap 'rm -rf -- "$private"' EXIT
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$private/key") || exit 1
export DRUMLINE_JOB_KEY_FILE="$private/key"
"#;

const PASS_ON: &str = r#"
# Passes a signal on to srun. A signal that comes before srun is ready is kept for it. Slurm gives this script the
# variables of the user who submitted it, so these are reset here.
srun=
early=
pass_on() {
    again=1
    if [ -n "$srun" ]; then
        kill -s "$1" "$srun" 2>/dev/null
    else
        early="$early $1"
    fi
}
"#;

const TERM: &str = r#"
# When Slurm ends the whole job it signals the ranks itself; a second SIGTERM would cut their time short.
on_term() {
    again=1
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        pass_on TERM
    fi
}
trap on_term TERM
"#;

const WARNING: &str = r#"
# Time is nearly up: the ranks get SIGUSR1, the request to save a checkpoint.
trap 'pass_on USR1' USR1
"#;

/// The same for a job that runs again.
const WARNING_REQUEUED: &str = r#"
# Time is nearly up: the ranks get SIGUSR1, the request to save a checkpoint and end, and the job will run again.
requeue=
warned() {
    requeue=1
    pass_on USR1
}
trap warned USR1
"#;

const WAIT: &str = r#"started=$!
set +m

# A process that has just started would lose a signal, or be killed by it.
sleep 1
srun=$started
for signal in $early; do
    kill -s "$signal" "$srun" 2>/dev/null
done

# A trap ends the wait early.
again=1
while [ -n "$again" ]; do
    again=
    wait "$srun"
    code=$?
done
"#;

const REQUEUE: &str = r#"
# Back to the queue. The next run sees SLURM_RESTART_COUNT, the number of runs before it.
if [ -n "$requeue" ]; then
    rm -rf -- "$private"
    scontrol requeue "$SLURM_JOB_ID"
fi
"#;

impl Job {
    pub(super) fn script(&self) -> Vec<u8> {
        let mut script = b"#!/bin/bash\n".to_vec();
        for option in &self.options {
            script.extend(b"#SBATCH ");
            script.extend(shell::quoted(option.as_ref()).into_vec());
            script.push(b'\n');
        }
        script.extend(KEY.bytes());
        script.extend(PASS_ON.bytes());
        script.extend(TERM.bytes());
        script.extend(self.warning().bytes());
        script.extend(b"\nset -m\n");
        script.extend(shell::line(self.srun().iter().map(OsString::as_os_str)).into_vec());
        script.extend(b" &\n");
        script.extend(WAIT.bytes());
        script.extend((if self.requeue { REQUEUE } else { "" }).bytes());
        script.extend(b"exit \"$code\"\n");
        script
    }

    fn warning(&self) -> &'static str {
        match (self.warned, self.requeue) {
            (false, _) => "",
            (true, false) => WARNING,
            (true, true) => WARNING_REQUEUED,
        }
    }

    fn srun(&self) -> Vec<OsString> {
        let cpus = self.cpus_per_task.map(|cpus| format!("--cpus-per-task={cpus}").into());
        let srun = ["srun", "--ntasks-per-node=1"].map(OsString::from);
        srun.into_iter().chain(cpus).chain(self.command.iter().cloned()).collect()
    }
}
