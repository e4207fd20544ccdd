//! Memory of a launcher while its ranks sleep: its own processes, each page shared with others counted in part (PSS).

use super::line;
use crate::family::{family, kill_with_descendants};
use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(20);

/// Bytes held by the launcher that `command` starts, all its processes but those of `program`, once `world` ranks of
/// that run.
pub(crate) fn beside(mut command: Command, world: usize, program: &Path) -> anyhow::Result<u64> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut launcher = command.spawn().context("cannot start the launcher")?;
    let measured = measure(&mut launcher, world, program);
    end(launcher);
    measured
}

fn measure(launcher: &mut Child, world: usize, program: &Path) -> anyhow::Result<u64> {
    let output = follow(launcher);
    let begin = Instant::now();
    while line::all_begun(&line::parse(&output.lock().unwrap_or_else(|e| e.into_inner())), 0, world).is_err()
    {
        ensure!(launcher.try_wait()?.is_none(), "the launcher ended before its {world} ranks ran");
        ensure!(begin.elapsed() < PATIENCE, "not all of {world} ranks ran within {PATIENCE:?}");
        std::thread::sleep(TICK);
    }
    let (ranks, own): (Vec<u32>, Vec<u32>) =
        family(launcher.id()).into_iter().partition(|pid| runs(*pid, program));
    ensure!(ranks.len() == world, "expected {world} ranks, found {} of {}", ranks.len(), program.display());
    own.into_iter().map(pss).sum()
}

/// What the launcher prints, as it comes. The thread ends with the pipe.
fn follow(launcher: &mut Child) -> Arc<Mutex<String>> {
    let text = Arc::new(Mutex::new(String::new()));
    let (theirs, pipe) = (Arc::clone(&text), launcher.stdout.take());
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        let Some(mut pipe) = pipe else { return };
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            let mut text = theirs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            text.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    });
    text
}

fn runs(pid: u32, program: &Path) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program)
}

fn pss(pid: u32) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .with_context(|| format!("cannot read the memory of process {pid}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    match line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()) {
        Some(kibibytes) => Ok(kibibytes * 1024),
        None => bail!("no Pss in /proc/{pid}/smaps_rollup"),
    }
}

/// Asks it to end, and ends it with all it started when it does not.
fn end(mut launcher: Child) {
    if let Some(pid) = i32::try_from(launcher.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(pid, Signal::TERM);
    }
    let begin = Instant::now();
    while matches!(launcher.try_wait(), Ok(None)) {
        if begin.elapsed() > PATIENCE {
            kill_with_descendants(launcher.id());
            break;
        }
        std::thread::sleep(TICK);
    }
    let _ = launcher.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_memory_can_be_read_and_our_program_is_known() {
        let this = std::env::current_exe().unwrap();
        assert!(pss(std::process::id()).unwrap() > 100_000);
        assert!(runs(std::process::id(), &this) && !runs(std::process::id(), Path::new("/bin/sh")));
    }

    #[test]
    fn a_launcher_without_ranks_is_an_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 0"]);
        let error = beside(command, 1, Path::new("/bin/sh")).unwrap_err().to_string();
        assert!(error.contains("ended before its 1 ranks ran"), "{error}");
    }
}
