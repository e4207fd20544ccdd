//! A launcher in a process of its own, so that its stdout, its environment and its memory are its own too.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use drumline_launch::{Bars, LineFilters, LocalJob, LogFolder, LogPlan, Output};

const SCRIPT: &str = "DRUMLINE_LAUNCH_TEST_SCRIPT";

/// Longer than any of these tests takes, even on a busy machine.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// What a launcher should run; every value is passed in a variable of the same name.
pub(super) struct Launch<'a> {
    pub(super) nproc: usize,
    pub(super) script: &'a str,
    pub(super) dir: &'a Path,
    pub(super) redirects: &'a str,
    pub(super) tee: &'a str,
    pub(super) filter: &'a str,
    pub(super) quiet: &'a str,
    pub(super) prefix: &'a str,
    /// The filter texts for lines of stdout.
    pub(super) duplicates: &'a str,
}

/// Everything on the console.
pub(super) fn on_console(nproc: usize, script: &str) -> Launch<'_> {
    let dir = Path::new("/dev/null");
    Launch { nproc, script, dir, redirects: "0", tee: "0", filter: "", quiet: "", prefix: "", duplicates: "" }
}

impl Launch<'_> {
    /// The launcher, to be started with a stdout and stderr.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = |field: &str| format!("{SCRIPT}_{field}");
        command
            .args(["--exact", "it::launched::launcher", "--nocapture", "--quiet"])
            .env(SCRIPT, self.script)
            .env(name("NPROC"), self.nproc.to_string())
            .env(name("DIR"), self.dir)
            .env(name("REDIRECTS"), self.redirects)
            .env(name("TEE"), self.tee)
            .env(name("FILTER"), self.filter)
            .env(name("QUIET"), self.quiet)
            .env(name("PREFIX"), self.prefix)
            .env(name("DUPLICATES"), self.duplicates)
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .stdin(Stdio::null());
        command
    }

    /// Runs it to its end and returns its stdout and stderr.
    pub(super) fn run(&self) -> (String, String) {
        let output = self.command().output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    }
}

/// Whether a launcher succeeds within [`LONG`]; it is killed if it does not end.
pub(super) fn succeeds(mut launcher: Child) -> bool {
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        if let Some(status) = launcher.try_wait().unwrap() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    launcher.kill().and_then(|()| launcher.wait()).map(|_| false).unwrap()
}

fn peak_memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Run in a process of its own by the tests; elsewhere it does nothing. It fails if a worker does, or if it takes
/// more than 16 MiB.
#[test]
fn launcher() {
    let Ok(script) = std::env::var(SCRIPT) else { return };
    let value = |field: &str| std::env::var(format!("{SCRIPT}_{field}")).unwrap();
    let filter = value("FILTER");
    let texts = value("DUPLICATES").split_terminator(',').map(str::to_string).collect();
    let plan = LogPlan {
        dir: Some(value("DIR").into()),
        redirects: value("REDIRECTS").parse().unwrap(),
        tee: value("TEE").parse().unwrap(),
        duplicates: LineFilters { stdout: texts, stderr: Vec::new() },
        filter: (!filter.is_empty()).then(|| filter.split(',').map(|rank| rank.parse().unwrap()).collect()),
        quiet_ranks: !value("QUIET").is_empty(),
        prefix: Some(value("PREFIX")).filter(|prefix| !prefix.is_empty()),
        bars: Bars::Redrawn,
    };
    let (nproc, before) = (value("NPROC").parse().unwrap(), peak_memory());
    let folder = LogFolder::create(plan, "test", "trainer").unwrap();
    let output = Output::Logged(folder.attempt(0, nproc).unwrap());
    let job = LocalJob::new(nproc, "sh", ["-c", &script]).output(output).deadline(LONG);
    let report = job.start().unwrap().wait();
    let grown = peak_memory() - before;
    assert!(report.is_success(), "{report}");
    assert!(nproc > 10 || grown <= 16 << 20, "the launcher grew by {grown} bytes");
}
