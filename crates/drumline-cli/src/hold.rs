//! `drumline hold -- PROGRAM ARGS`: takes the place of a rank that waits for a debugger (`run --debug-rank`).
//!
//! ```text
//!   prints how to attach ─▶ stops itself (SIGSTOP) ─▶ continued by a debugger or `kill -CONT` ─▶ exec PROGRAM, same pid
//! ```
//!
//! So a debugger can attach before the program's first instruction, and the launcher sees one and the same process.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use drumline_rendezvous::worker_env;
use rustix::process::{Signal, getpid, kill_process};

const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// Stop before PROGRAM begins, until continued
#[derive(Debug, clap::Args)]
pub(crate) struct HoldArgs {
    /// The program, and its own arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_names = ["PROGRAM", "ARGS"])]
    command: Vec<OsString>,
}

/// Returns only if the program cannot be executed.
pub(crate) fn hold(args: &HoldArgs) -> anyhow::Result<()> {
    let Some((program, rest)) = args.command.split_first() else { bail!("no program to hold") };
    let held = Held {
        rank: std::env::var(worker_env::RANK).ok(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        pid: std::process::id(),
        program,
        ptrace_scope: fs::read_to_string(PTRACE_SCOPE).ok().and_then(|scope| scope.trim().parse().ok()),
    };
    eprint!("{}", held.advice());
    kill_process(getpid(), Signal::STOP).context("cannot stop to wait for a debugger")?;
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot start `{}`", program.display()))
}

/// The process that is held.
struct Held<'a> {
    rank: Option<String>,
    host: String,
    pid: u32,
    program: &'a OsStr,
    ptrace_scope: Option<u32>,
}

impl Held<'_> {
    /// What to do, one possibility per line.
    fn advice(&self) -> String {
        let (pid, host) = (self.pid, &self.host);
        let rank =
            self.rank.as_deref().map_or_else(|| "this process".to_string(), |rank| format!("rank {rank}"));
        let mut text = format!("{rank} waits for a debugger: pid {pid} on host {host}\n");
        let _ = writeln!(text, "  to let it run:  kill -CONT {pid}");
        text += &if self.is_python() { self.python_commands() } else { self.native_commands() };
        text + self.ptrace_hint()
    }

    fn native_commands(&self) -> String {
        let name =
            Path::new(self.program).file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
        let plain = name.chars().all(|c| c.is_alphanumeric() || c == '_');
        let main = if plain { format!("{name}::main") } else { "main".to_string() };
        let (c, rust) = (self.gdb_to_exec("gdb"), self.gdb_to_exec("rust-gdb"));
        let stop_at = |main: &str| format!("-ex 'tbreak {main}' -ex continue");
        format!("  C and C++:      {c} {}\n  Rust:           {rust} {}\n", stop_at("main"), stop_at(&main))
    }

    /// A debugger that attaches before the program is executed, and stops once it is, with its symbols. It also ends our own stop,
    /// which would return when the debugger detaches.
    fn gdb_to_exec(&self, gdb: &str) -> String {
        let pid = self.pid;
        format!(
            "{gdb} -p {pid} -ex 'handle SIGSTOP SIGCONT nostop noprint nopass' -ex 'shell kill -CONT {pid}' \
             -ex 'catch exec' -ex continue"
        )
    }

    fn python_commands(&self) -> String {
        let (python, pid) = (self.program.display(), self.pid);
        format!(
            "  its own lines:  with `import debugpy; debugpy.listen(5678); debugpy.wait_for_client()` at its start, let \
             it run and attach an editor to port 5678 (it has no terminal, which `pdb` alone would need)\n  \
             while it runs:  {python} -m pdb -p {pid} (Python 3.14 and later), or py-spy dump --pid {pid}\n  \
             C below it:     {}\n",
            self.gdb_to_exec("gdb")
        )
    }

    fn is_python(&self) -> bool {
        let name = Path::new(self.program).file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("python") || name.starts_with("pypy")
    }

    fn ptrace_hint(&self) -> &'static str {
        match self.ptrace_scope {
            None | Some(0) => "",
            Some(1 | 2) => {
                "  not permitted?  only root may attach here (kernel.yama.ptrace_scope); try sudo, or \
                 `sudo sysctl kernel.yama.ptrace_scope=0`\n"
            }
            Some(_) => {
                "  note: nobody may attach on this machine until it is rebooted (kernel.yama.ptrace_scope=3)\n"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(program: &str, ptrace_scope: Option<u32>) -> String {
        let (rank, host) = (Some("3".to_string()), "node0".to_string());
        Held { rank, host, pid: 77, program: program.as_ref(), ptrace_scope }.advice()
    }

    #[test]
    fn each_kind_of_program_has_its_commands() {
        let native = advice("./my-train", None);
        assert!(native.starts_with("rank 3 waits for a debugger: pid 77 on host node0\n"), "{native}");
        let gdb = "gdb -p 77 -ex 'handle SIGSTOP SIGCONT nostop noprint nopass' -ex 'shell kill -CONT 77' \
                   -ex 'catch exec' -ex continue -ex 'tbreak ";
        let main =
            |native: &str, gdb: &str, main: &str| native.contains(&format!("{gdb}{main}' -ex continue\n"));
        assert!(native.contains("kill -CONT 77\n") && main(&native, gdb, "main"), "{native}");
        assert!(
            main(&native, &format!("rust-{gdb}"), "my_train::main") && !native.contains("pdb"),
            "{native}"
        );
        assert!(main(&advice("/x/a.out", None), &format!("rust-{gdb}"), "main"));
        let python = advice("/usr/bin/python3.13", None);
        assert!(python.contains("debugpy.listen") && python.contains("python3.13 -m pdb -p 77"), "{python}");
        assert!(!python.contains("tbreak"), "{python}");
    }

    #[test]
    fn a_rule_against_attaching_is_reported() {
        for (scope, expected) in
            [(None, ""), (Some(0), ""), (Some(1), "try sudo"), (Some(2), "try sudo"), (Some(3), "rebooted")]
        {
            let text = advice("a", scope);
            assert_eq!(text.contains("ptrace_scope"), !expected.is_empty(), "{scope:?}: {text}");
            assert!(text.contains(expected), "{scope:?}: {text}");
        }
    }
}
