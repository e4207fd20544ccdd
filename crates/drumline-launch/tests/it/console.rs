//! Hostile output and bad consoles: nobody is harmed and no worker waits.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Instant;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::launched::{LONG, Launch, ends_well, on_console};

/// Runs it on a terminal with these variables and returns what the terminal was sent.
fn on_terminal(launch: &Launch<'_>, env: &[(&str, &str)]) -> String {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).and_then(|()| unlockpt(&master)).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let end: OwnedFd = rustix::fs::open(ptsname(&master, Vec::new()).unwrap(), flags, Mode::empty()).unwrap();
    let mut command = launch.command();
    command.envs(env.iter().copied()).stdout(end.try_clone().unwrap()).stderr(end);
    let child = command.spawn().unwrap();
    // It holds our copies of the terminal's end, without which reading finds an end when the launcher ends.
    drop(command);
    let (mut text, mut buffer, mut master) = (Vec::new(), [0; 4096], File::from(master));
    while let Ok(len @ 1..) = master.read(&mut buffer) {
        text.extend_from_slice(&buffer[..len]);
    }
    assert!(ends_well(child));
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
fn a_line_of_a_gibibyte_is_cut_and_costs_no_memory() {
    let child = on_console(1, "head -c 1073741824 /dev/zero; echo end").command();
    let mut child = { child }.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut stdout, mut buffer) = (child.stdout.take().unwrap(), vec![0; 1 << 20]);
    let (mut zeros, mut prefixes) = (0, 0);
    while let Ok(len @ 1..) = stdout.read(&mut buffer) {
        zeros += buffer[..len].iter().filter(|byte| **byte == 0).count();
        prefixes += buffer[..len].iter().filter(|byte| **byte == b']').count();
    }
    assert!(ends_well(child));
    assert_eq!((zeros, prefixes), (1 << 30, (1 << 30) / (64 << 10) + 1));
}

/// Prints 20 MB and says in a file that it could.
fn flood(dir: &std::path::Path) -> String {
    format!("yes some words | head -c 20000000; touch {}/$RANK.done", dir.display())
}

#[test]
fn a_console_that_nobody_reads_stops_no_worker() {
    let dir = tempfile::tempdir().unwrap();
    let (script, logs) = (flood(dir.path()), dir.path().join("logs"));
    let start = Instant::now();
    let launch = Launch { dir: &logs, tee: "1", ..on_console(2, &script) };
    let mut child = launch.command().stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // The launcher's own frame prints after the job, so that it cannot end before somebody reads.
    let done = || (0..2).all(|rank| dir.path().join(format!("{rank}.done")).exists());
    while !done() {
        assert!(start.elapsed() < LONG, "the workers wait");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let mut shown = String::new();
    stdout.read_to_string(&mut shown).unwrap();
    assert!(ends_well(child));
    assert!(shown.len() < 20_000_000, "control: not everything was shown: {}", shown.len());
    let run = fs::read_dir(&logs).unwrap().next().unwrap().unwrap().path();
    for rank in 0..2 {
        let log = run.join(format!("attempt_0/{rank}/stdout.log"));
        assert_eq!(fs::metadata(log).unwrap().len(), 20_000_000, "the file has all");
    }
}

#[test]
fn a_closed_console_stops_no_worker() {
    let dir = tempfile::tempdir().unwrap();
    let script = flood(dir.path());
    let mut command = on_console(2, &script).command();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = [0; 1000];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The test's own frame cannot print its result then, so that only the workers' word counts.
    ends_well(child);
    assert!((0..2).all(|rank| dir.path().join(format!("{rank}.done")).exists()));
}
