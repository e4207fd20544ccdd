//! Files and console get the output of real workers as the plan says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::launched::{Launch, on_console};

const BOTH: &str = "echo out $RANK; echo err $RANK >&2";

/// The attempt folder of the only run in `dir`.
fn attempt(dir: &Path) -> PathBuf {
    let runs: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1);
    assert!(runs[0].file_name().unwrap().to_str().unwrap().starts_with("test_"));
    runs[0].join("attempt_0")
}

/// The workers' lines without those of the test harness, sorted.
fn shown(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> =
        text.lines().filter(|line| line.contains("out") || line.contains("err")).collect();
    lines.retain(|line| !line.starts_with("test result"));
    lines.sort_unstable();
    lines
}

#[test]
fn each_stream_goes_where_the_plan_says() {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch { dir: dir.path(), redirects: "0:3,1:2", tee: "2:1", ..on_console(4, BOTH) };
    let (stdout, stderr) = launch.run();
    assert_eq!(shown(&stdout), ["[rank 1]: out 1", "[rank 2]: out 2", "[rank 3]: out 3"]);
    assert_eq!(shown(&stderr), ["[rank 2]: err 2", "[rank 3]: err 3"]);
    let logs = attempt(dir.path());
    for (file, text) in [
        ("0/stdout.log", Some("out 0\n")),
        ("0/stderr.log", Some("err 0\n")),
        ("1/stdout.log", None),
        ("1/stderr.log", Some("err 1\n")),
        ("2/stdout.log", Some("out 2\n")),
        ("2/stderr.log", None),
        ("3/stdout.log", None),
    ] {
        assert_eq!(fs::read_to_string(logs.join(file)).ok().as_deref(), text, "{file}");
    }
    assert!(logs.join("3").is_dir(), "the folder of its error file");
}

#[test]
fn filters_change_only_the_console() {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch { dir: dir.path(), tee: "3", filter: "1,3", ..on_console(4, BOTH) };
    let (stdout, stderr) = launch.run();
    assert_eq!(shown(&stdout), ["[rank 1]: out 1", "[rank 3]: out 3"]);
    assert_eq!(shown(&stderr), ["[rank 1]: err 1", "[rank 3]: err 3"]);
    let files = (0..4).map(|rank| attempt(dir.path()).join(format!("{rank}/stderr.log")));
    assert!(files.into_iter().all(|file| file.exists()));
    let (stdout, _) = Launch { quiet: "yes", ..on_console(3, BOTH) }.run();
    assert_eq!(shown(&stdout), ["[rank 0]: out 0"]);
}

#[test]
fn shown_lines_that_match_a_filter_are_copied_for_all_workers() {
    let script = "echo out $RANK; echo loss $RANK; echo err loss >&2; printf 'last loss'";
    let dir = tempfile::tempdir().unwrap();
    let base = || Launch { dir: dir.path(), redirects: "2:3", tee: "0:3,1:3", ..on_console(4, script) };
    base().run();
    assert!(!attempt(dir.path()).join("filtered_stdout.log").exists(), "control: there is no filter");
    fs::remove_dir_all(attempt(dir.path()).parent().unwrap()).unwrap();
    let (stdout, _) = Launch { duplicates: "loss,none", filter: "0,2,3", ..base() }.run();
    assert_eq!(shown(&stdout), ["[rank 0]: out 0", "[rank 3]: out 3"]);
    let text = fs::read_to_string(attempt(dir.path()).join("filtered_stdout.log")).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let expected = ["[rank 0]: last loss", "[rank 0]: loss 0", "[rank 3]: last loss", "[rank 3]: loss 3"];
    assert_eq!(lines, expected, "2 is only in its file, 1 is filtered out");
    assert!(!attempt(dir.path()).join("filtered_stderr.log").exists());
}

#[test]
fn a_template_makes_the_prefix() {
    let prefix = "[${role_name}${local_rank}]:";
    let (stdout, _) = Launch { prefix, ..on_console(2, BOTH) }.run();
    assert_eq!(shown(&stdout), ["[trainer0]:out 0", "[trainer1]:out 1"]);
}

#[test]
fn files_get_the_exact_bytes_and_the_console_whole_lines() {
    let script = r"printf 'a\r\n\033[2J\377out\0\rb'";
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch { dir: dir.path(), tee: "1", ..on_console(1, script) };
    let output = launch.command().output().unwrap();
    let log = fs::read(attempt(dir.path()).join("0/stdout.log")).unwrap();
    assert_eq!(log, b"a\r\n\x1b[2J\xffout\0\rb");
    let shown = b"[rank 0]: a\n[rank 0]: \x1b[2J\xffout\0\n[rank 0]: b\n";
    assert!(output.stdout.windows(shown.len()).any(|part| part == shown), "{output:?}");
}

#[test]
fn the_output_of_five_hundred_workers_is_shown() {
    let (stdout, stderr) = on_console(500, BOTH).run();
    let lines = |text: &str, word: &str| {
        let mut expected: Vec<_> = (0..500).map(|rank| format!("[rank {rank}]: {word} {rank}")).collect();
        expected.sort_unstable();
        assert_eq!(shown(text), expected);
    };
    lines(&stdout, "out");
    lines(&stderr, "err");
}

#[test]
fn many_workers_need_no_higher_limit_and_do_not_get_one() {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch { dir: dir.path(), tee: "3", ..on_console(60, "echo out $(ulimit -Sn)") };
    let launcher = launch.command();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -Sn 128; exec \"$@\"", "sh"]).arg(launcher.get_program());
    limited.args(launcher.get_args()).envs(launcher.get_envs().filter_map(|(k, v)| Some((k, v?))));
    let output = limited.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert_eq!(shown(&text).len(), 60);
    assert!(shown(&text).iter().all(|line| line.ends_with(": out 128")), "{text}");
}
