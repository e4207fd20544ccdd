//! Running one contender: its two outputs kept apart, a deadline on all it starts.

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(5);

/// What a contender that ended well has printed.
#[derive(Debug)]
pub(crate) struct Printed {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `command` to its end; a bad end or a passed deadline is an error that carries its stderr.
pub(crate) fn run(mut command: Command, deadline: Duration) -> anyhow::Result<Printed> {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    let (stdout, stderr) = (keep(child.stdout.take()), keep(child.stderr.take()));
    let status = wait(&mut child, Instant::now() + deadline)?;
    let printed = Printed { stdout: join(stdout), stderr: join(stderr) };
    match status {
        Some(status) if status.success() => Ok(printed),
        Some(status) => bail!("{program}: {status}\n{}", printed.stderr.trim_end()),
        None => bail!("{program}: stopped after {deadline:?}\n{}", printed.stderr.trim_end()),
    }
}

fn keep(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is kept; the exit status tells the rest.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn join(reader: JoinHandle<String>) -> String {
    reader.join().unwrap_or_default()
}

/// `None`: it ran past `end` and was killed, with all its descendants, so that the pipes close.
fn wait(child: &mut Child, end: Instant) -> anyhow::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > end {
            kill_with_descendants(child.id());
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
}

/// Kills a process and all it started; each is told by its own id.
fn kill_with_descendants(pid: u32) {
    let parents = parents();
    let mut doomed = vec![pid];
    let mut next = 0;
    while let Some(&parent) = doomed.get(next) {
        doomed.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(child, _)| *child));
        next += 1;
    }
    for pid in doomed.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// (process, parent) of all that run.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect()
}

/// The second field after the name, which stands in brackets and may hold anything.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> anyhow::Result<Printed> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, deadline)
    }

    #[test]
    fn outputs_are_kept_apart() {
        let printed = shell("echo data; echo talk >&2", Duration::from_secs(20)).unwrap();
        assert_eq!((printed.stdout.as_str(), printed.stderr.as_str()), ("data\n", "talk\n"));
    }

    #[test]
    fn a_failure_carries_its_stderr() {
        let error = shell("echo why >&2; exit 3", Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
    }

    #[test]
    fn a_deadline_ends_it() {
        let start = Instant::now();
        let error = shell("sleep 60 | sleep 60", Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("stopped after 200ms"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}
