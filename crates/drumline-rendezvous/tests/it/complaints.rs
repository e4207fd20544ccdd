//! What users see of a program whose `main` returns the error: one line that says what, where, and what to try.

use drumline_rendezvous::from_env;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "DRUMLINE_TEST_COMPLAINT";

/// Not a test itself: a program that joins, in the environment that the tests below set.
#[test]
fn joining_process() {
    if std::env::var(CHILD).is_err() {
        return;
    }
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    if let Err(error) = from_env() {
        eprintln!("Error: {error:?}");
    }
}

/// The output of a program that joins with these variables (`NAME=value` each), and how long it took.
fn complaint(variables: &str) -> (String, Duration) {
    let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let began = Instant::now();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "complaints::joining_process", "--nocapture"])
        .env_clear()
        .env(CHILD, "1")
        .envs(pairs)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    child.wait().unwrap();
    (text, began.elapsed())
}

fn free_port() -> u16 {
    drumline_rendezvous::free_port().unwrap()
}

#[test]
fn the_timeout_variable_limits_the_rendezvous_and_a_long_wait_is_reported() {
    let place = format!("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={}", free_port());
    let (text, took) = complaint(&format!("{place} DRUMLINE_TIMEOUT=300ms"));
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(text.contains("Error: no store at 127.0.0.1:"), "{text}");
    assert!(!text.contains("still waiting"), "control: too early to report it: {text}");

    let (text, took) = complaint(&format!("{place} DRUMLINE_TIMEOUT=6s"));
    assert!((6..20).contains(&took.as_secs()), "{took:?}");
    let line = text.lines().find(|line| line.contains("still waiting")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("WARN") && line.contains("rank 1 ("), "{line}");
    assert!(line.contains("the store at 127.0.0.1:"), "{line}");
    assert!(line.contains("refused (no server listens there)"), "{line}");
    assert_eq!(text.matches("still waiting").count(), 1, "{text}");
}

#[test]
fn an_unknown_name_is_given_up_early() {
    for rank in [0, 1] {
        let place = format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=no.such.host.invalid MASTER_PORT=29500");
        let (text, took) = complaint(&format!("{place} DRUMLINE_TIMEOUT=60s"));
        assert!((4..25).contains(&took.as_secs()), "rank {rank}: {took:?}");
        let start =
            "Error: MASTER_ADDR=no.such.host.invalid: the name `no.such.host.invalid` cannot be resolved";
        assert!(text.contains(start), "rank {rank}: {text}");
    }
}

#[test]
fn causes_are_not_lost() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let host = format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}");
    let holder = format!("; pid {} (", std::process::id());
    let cases = [
        (host.clone(), &*holder),
        ("RANK= WORLD_SIZE=2".into(), "Error: RANK is empty, expected an integer; try"),
        (
            format!("{host} DRUMLINE_JOB_KEY_FILE=/nope"),
            "Error: cannot read the job key from DRUMLINE_JOB_KEY_FILE=/nope: No such file or directory",
        ),
        (format!("{host} DRUMLINE_JOB_KEY_FD=77"), "with 32 key bytes: No such file or directory"),
    ];
    for (variables, part) in cases {
        let (text, _) = complaint(&variables);
        assert!(text.contains(part), "{variables}: {text}");
    }
}
