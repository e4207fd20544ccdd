//! A failure is reported once, with advice, and sets the exit code.

use rustix::process::{Pid, Signal, kill_process};

use super::started::Started;

fn refused(args: &[&str]) -> String {
    let ended = Started::new(&[&["bench"], args].concat()).end();
    assert_ne!(ended.code, Some(0), "{args:?}");
    assert_eq!(ended.stdout, "", "{args:?}");
    ended.stderr
}

#[test]
fn bad_arguments_are_refused_with_advice() {
    for (args, advice) in [
        (&["all-reduce", "--sizes", "1.5M"][..], "try 16, 4K, 1M or 1GiB"),
        (&["all-gather", "--sizes", "16", "--nproc-per-node", "3"], "try --sizes 24"),
        (&["all-reduce", "--dtype", "f31"], "try one of f64, f32"),
        (&["all-reduce", "--transport", "pigeon"], "try auto, shm or tcp"),
        (&["all-reduce", "--seconds-per-size", "soon"], "try 0.4"),
        (
            &["all-reduce", "--seconds-per-size", "-1"],
            "`-1` is no number of seconds from 0 to 86400; try 0.4",
        ),
        (&["all-reduce", "--nproc-per-node", "x"], "`x` is not a number of ranks between 1 and 65535; try 2"),
        (&["all-reduce", "--sizes", "0"], "nothing to measure; try --sizes 4 or more"),
        (&["send-recv", "--nproc-per-node", "1"], "try --nproc-per-node 2"),
        (&["all-reduce", "--hot", "--cold"], "cannot be used with"),
    ] {
        let stderr = refused(args);
        assert!(stderr.starts_with("error: ") && stderr.contains(advice), "{args:?}: {stderr}");
    }
}

#[test]
fn a_killed_rank_is_named_once() {
    let job = Started::new(&["bench", "all-reduce", "--sizes", "4K", "--seconds-per-size", "60"]);
    let pid = job.pid_of(1);
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let ended = job.end();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    let expected =
        format!("error: rank 1 (pid {pid}) was killed by signal 9 (SIGKILL) and left no message; ");
    assert!(ended.stderr.starts_with(&expected) && ended.stderr.contains("dmesg"), "{}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
}
