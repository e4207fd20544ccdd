//! Hostile output and bad consoles do no harm, and no worker waits.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::launched::{LONG, Launch, on_console, succeeds};

/// A pseudo-terminal: our side, and the side of the programs.
fn terminal() -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).and_then(|()| unlockpt(&ours)).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(ptsname(&ours, Vec::new()).unwrap(), flags, Mode::empty()).unwrap();
    (ours.into(), theirs)
}

fn pipe() -> (File, OwnedFd) {
    let flags = rustix::pipe::PipeFlags::CLOEXEC;
    let (reader, writer) = rustix::pipe::pipe_with(flags).unwrap();
    (reader.into(), writer)
}

/// Starts it with stdout and stderr on the same console, which no other process holds then.
fn start(mut command: Command, console: OwnedFd) -> Child {
    command.stdout(console.try_clone().unwrap()).stderr(console).spawn().unwrap()
}

/// Reads until every writer is gone; a terminal then returns an error.
fn read_all(mut reader: File) -> Vec<u8> {
    let (mut text, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    while let Ok(len @ 1..) = reader.read(&mut buffer) {
        text.extend_from_slice(&buffer[..len]);
    }
    text
}

/// Runs it on a terminal with these variables and returns what the terminal was sent.
pub(super) fn on_terminal(launch: &Launch<'_>, env: &[(&str, &str)]) -> String {
    let ((ours, theirs), mut command) = (terminal(), launch.command());
    command.envs(env.iter().copied());
    let child = start(command, theirs);
    let text = read_all(ours);
    assert!(succeeds(child));
    String::from_utf8(text).unwrap().replace("\r\n", "\n")
}

#[test]
fn a_terminal_is_shown_colours_and_nothing_else() {
    let script = r"test $RANK = 1 || exit 0; printf '\033[31mred\n\033]0;title\007\033[1A\033[2K\n\377\n'
                   printf 'honest\r[rank 0]: forged\n\r[rank 0]: forged too\n'";
    let text = on_terminal(&on_console(2, script), &[]);
    let prefix = "\x1b[33m[rank 1]: \x1b[0m";
    let lines = [
        "\x1b[31mred\x1b[0m",
        "^[]0;title^G^[[1A^[[2K",
        "\u{fffd}",
        "honest",
        "[rank 0]: forged",
        "[rank 0]: forged too",
    ];
    let expected: String = lines.map(|line| format!("{prefix}{line}\n")).concat();
    assert!(text.contains(&expected), "{text:?}");
    assert!(!text.contains("\n[rank 0]: ") && !text.contains('\r'), "{text:?}");
}

#[test]
fn without_colour_the_prefix_is_plain() {
    let text = on_terminal(&on_console(1, "echo hello; echo there >&2"), &[("NO_COLOR", "1")]);
    assert!(text.contains("[rank 0]: hello\n") && text.contains("[rank 0]: there\n"), "{text:?}");
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn a_line_of_a_gibibyte_is_split_and_needs_no_memory() {
    let child = on_console(1, "head -c 1073741824 /dev/zero; echo end").command();
    let mut child = { child }.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut stdout, mut buffer) = (child.stdout.take().unwrap(), vec![0; 1 << 20]);
    let (mut zeros, mut prefixes) = (0, 0);
    while let Ok(len @ 1..) = stdout.read(&mut buffer) {
        zeros += buffer[..len].iter().filter(|byte| **byte == 0).count();
        prefixes += buffer[..len].iter().filter(|byte| **byte == b']').count();
    }
    assert!(succeeds(child));
    assert_eq!((zeros, prefixes), (1 << 30, (1 << 30) / (64 << 10) + 1));
}

/// Prints 20 MB, and then creates a file.
fn flood(dir: &Path) -> String {
    format!("yes some words | head -c 20000000; touch {}/$RANK.done", dir.display())
}

#[test]
fn a_console_without_a_reader_does_not_stop_a_worker() {
    for (reader, console) in [pipe(), terminal()] {
        let dir = tempfile::tempdir().unwrap();
        let (script, logs) = (flood(dir.path()), dir.path().join("logs"));
        let (begun, launch) = (Instant::now(), Launch { dir: &logs, tee: "1", ..on_console(2, &script) });
        let child = start(launch.command(), console);
        let done = || (0..2).all(|rank| dir.path().join(format!("{rank}.done")).exists());
        while !done() {
            assert!(begun.elapsed() < LONG, "the workers are blocked");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Read now: the test harness prints after the job and would wait forever.
        let shown = read_all(reader);
        assert!(succeeds(child));
        assert!(shown.len() < 20_000_000, "control: not everything was shown: {}", shown.len());
        let run = fs::read_dir(&logs).unwrap().next().unwrap().unwrap().path();
        for rank in 0..2 {
            let log = run.join(format!("attempt_0/{rank}/stdout.log"));
            assert_eq!(fs::metadata(log).unwrap().len(), 20_000_000, "the file has all");
        }
    }
}

#[test]
fn lines_stay_whole_when_both_streams_share_a_slow_console() {
    let script = "yes out out out | head -c 4000000 & yes err err err | head -c 4000000 >&2; wait";
    let (mut reader, console) = pipe();
    let child = start(on_console(3, script).command(), console);
    // Slow at first and with an odd size, so that writes are split at all places and lines wait.
    let (mut text, mut buffer) = (Vec::new(), [0; 1021]);
    for _ in 0..200 {
        reader.read_exact(&mut buffer).unwrap();
        text.extend_from_slice(&buffer);
        std::thread::sleep(Duration::from_millis(1));
    }
    text.extend(read_all(reader));
    assert!(succeeds(child));
    let text = String::from_utf8(text).unwrap();
    let of_workers = |line: &&str| line.contains("out") || line.contains("err");
    let mut lines = text.lines().filter(of_workers).filter(|line| !line.starts_with("test result"));
    let whole = |line: &str| {
        let rest = line.strip_prefix("[rank ").and_then(|rest| rest.split_once("]: "));
        rest.is_some_and(|(rank, rest)| rank.len() == 1 && ["out out out", "err err err"].contains(&rest))
    };
    assert!(lines.clone().count() > 1000);
    // The last line of each stream is cut by `head`.
    let broken: Vec<_> = lines.by_ref().filter(|line| !whole(line)).collect();
    assert!(broken.len() <= 6 && broken.iter().all(|line| line.starts_with("[rank ")), "{broken:?}");
}

#[test]
fn a_closed_console_does_not_stop_a_worker() {
    let dir = tempfile::tempdir().unwrap();
    let script = flood(dir.path());
    let mut command = on_console(2, &script).command();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = [0; 1000];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The test harness cannot print its result then, so only the workers' files count.
    succeeds(child);
    assert!((0..2).all(|rank| dir.path().join(format!("{rank}.done")).exists()));
}
