//! Running one contender: its two outputs kept apart, a deadline on all it starts.

use crate::family::kill_with_descendants;
use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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

/// `None`: it ran past `end` and was killed, with all its descendants, so that the pipes close. Its end is seen at once.
fn wait(child: &mut Child, end: Instant) -> anyhow::Result<Option<ExitStatus>> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process without a number")?;
    let ends = pidfd_open(pid, PidfdFlags::empty()).context("cannot watch the program")?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            kill_with_descendants(child.id());
            child.wait()?;
            return Ok(None);
        }
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // An interruption is no end: the loop looks again.
        let _ = poll(&mut [PollFd::new(&ends, PollFlags::IN)], Some(&left));
    }
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
