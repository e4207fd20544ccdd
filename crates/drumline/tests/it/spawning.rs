//! What a spawn call does and returns: in the parent, in the ranks, under a launcher.

use std::time::Duration;

use drumline::launch::{Output, Spawn, is_spawned};
use drumline::{CommError, ReduceOp, SpawnError, Worker, spawn};
use drumline_launch::{JobReport, LocalJob};

use super::program::{CASE, Ended, Program, arguments, case};

const PROGRAM: &str = "it::spawning::program";

/// The program that the tests below start.
#[test]
fn program() {
    let Some(case) = case() else { return };
    // libtest has begun a line.
    println!();
    let outcome = match case.as_str() {
        "sum" => spawn(4, |worker| sum(&worker)),
        "three calls" => three_calls(),
        "a failure is handled" => a_failure_is_handled(),
        "passes by its call" if is_spawned() => return,
        "passes by its call" => spawn(2, |_| ()),
        "fails before its call" if is_spawned() => std::process::exit(3),
        "fails before its call" => spawn(2, |_| ()),
        "no ranks" => spawn(0, |_| ()),
        "two meetings" => spawn(2, |worker| sum(&worker)).and_then(|()| spawn(2, |worker| sum(&worker))),
        "nested" => spawn(2, |worker| match spawn(2, |_| ()) {
            Err(error) => println!("nested {}: {error}", worker.rank),
            Ok(()) => unreachable!("a rank must not spawn"),
        }),
        "too long" => Spawn::new(2).timeout(Duration::from_millis(300)).run(|_| sleep()),
        "captured" => Spawn::new(2).output(Output::Capture).run(|worker| {
            eprintln!("last words of {}", worker.rank);
            if worker.rank == 1 { std::process::exit(3) } else { sleep() }
        }),
        "variables" => Spawn::new(1)
            .env("COLOUR", "red")
            .run(|_| println!("colour {}", std::env::var("COLOUR").unwrap())),
        _ => spawn(3, |worker| fails(&case, &worker)),
    };
    match outcome {
        Ok(()) => println!("parent: well"),
        Err(error) => println!("parent: {}", error.to_string().replace('\n', " | ")),
    }
}

fn sum(worker: &Worker) -> Result<(), CommError> {
    let group = worker.group()?;
    let mut x = [worker.rank as f32];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    println!(
        "rank {} of {}: {} {:?}",
        worker.rank,
        worker.world_size,
        x[0],
        std::env::args().nth(2).unwrap()
    );
    Ok(())
}

fn three_calls() -> Result<(), SpawnError> {
    if !is_spawned() {
        println!("once");
    }
    for turn in 0..2 {
        spawn(2, |worker| println!("loop {turn} rank {}", worker.rank))?;
    }
    spawn(1, |worker| println!("behind it rank {}", worker.rank))
}

fn a_failure_is_handled() -> Result<(), SpawnError> {
    let error = spawn(2, |_| Err::<(), _>("on purpose")).unwrap_err();
    println!("saw {}", error.to_string().contains("on purpose"));
    spawn(2, |worker| println!("second {}", worker.rank))
}

/// Rank 1 fails in this way; the others would continue for long.
fn fails(case: &str, worker: &Worker) -> Result<(), String> {
    match (worker.rank, case) {
        (1, "error") => return Err("the data set is gone".to_owned()),
        (1, "panic") => panic!("boom"),
        (1, "killed") => {
            rustix::process::kill_process(rustix::process::getpid(), drumline::launch::Signal::KILL).unwrap()
        }
        (1, "peer") => {
            let _group = worker.group().map_err(|error| error.to_string())?;
            std::process::exit(7)
        }
        (1, "lets go") => {
            let _group = worker.group().map_err(|error| error.to_string())?;
            return Err("the disk is full".to_owned());
        }
        (_, "peer" | "lets go") => {
            let group = worker.group().map_err(|error| error.to_string())?;
            return group.barrier().map_err(|error| error.to_string());
        }
        _ => sleep(),
    }
    Ok(())
}

fn sleep() {
    std::thread::sleep(Duration::from_secs(60));
}

fn run(case: &str) -> Ended {
    Program::start(PROGRAM, case).end()
}

/// What the parent says of a case that fails.
fn error_of(case: &str) -> String {
    run(case).line("parent: ").to_owned()
}

#[test]
fn ranks_meet_and_only_the_parent_continues() {
    let ended = run("sum");
    let expected: Vec<_> = (0..4).map(|rank| format!("{rank} of 4: 6 {PROGRAM:?}")).collect();
    assert_eq!(ended.lines("rank "), expected);
    assert_eq!(ended.line("parent: "), "well");
    assert!(ended.success);
}

#[test]
fn several_calls_are_distinguished() {
    let ended = run("three calls");
    assert_eq!(ended.lines("loop "), ["0 rank 0", "0 rank 1", "1 rank 0", "1 rank 1"]);
    assert_eq!(ended.line("behind it rank "), "0");
    assert_eq!((ended.line("once"), ended.line("parent: ")), ("", "well"));
}

#[test]
fn ranks_of_a_later_call_see_the_same_earlier_failure() {
    let ended = run("a failure is handled");
    assert_eq!(ended.lines("saw "), ["true"; 3], "the parent and the two ranks of the second call");
    assert_eq!(ended.lines("second "), ["0", "1"]);
}

#[test]
fn the_first_failure_is_the_parents_error() {
    let error = error_of("error");
    assert!(
        error.starts_with("rank 1 on host ") && error.contains("failed first: exit code 1 after "),
        "{error}"
    );
    assert!(error.ends_with(": the data set is gone"), "{error}");
    let panic = error_of("panic");
    assert!(
        panic.contains("exit code 101") && panic.contains("panicked at ") && panic.ends_with(": boom"),
        "{panic}"
    );
    assert!(panic.contains("spawning.rs:"), "{panic}");
    let killed = error_of("killed");
    assert!(killed.starts_with("rank 1 ") && killed.contains("killed by SIGKILL"), "{killed}");
    let peer = error_of("peer");
    assert!(peer.starts_with("rank 1 ") && peer.contains("exit code 7"), "{peer}");
}

/// It leaves its group before it can say why, and the others fail for want of it.
#[test]
fn the_rank_at_fault_is_named_though_others_may_end_before_it() {
    for _ in 0..10 {
        let output = error_of("lets go");
        assert!(output.starts_with("rank 1 ") && output.ends_with("the disk is full"), "{output}");
    }
}

#[test]
fn captured_last_lines_are_in_the_error() {
    let output = error_of("captured");
    assert!(
        output.contains("exit code 3") && output.ends_with("its last lines on stderr: |   last words of 1"),
        "{output}"
    );
}

#[test]
fn a_rank_that_does_not_come_to_the_call_is_named() {
    let output = error_of("passes by its call");
    assert!(
        output.starts_with("rank 0 ended without coming to the spawn call at crates/drumline/tests/"),
        "{output}"
    );
    let output = error_of("fails before its call");
    assert!(
        output.contains("exit code 3") && output.contains("; it had not come to the spawn call at "),
        "{output}"
    );
}

#[test]
fn odd_requests_get_clear_answers() {
    assert!(error_of("no ranks").contains("at least one process"));
    assert!(error_of("too long").contains("still ran after 300ms"));
    let nested = run("nested");
    assert_eq!(nested.line("nested 1: "), nested.line("nested 0: ").replace("rank 0", "rank 1"));
    assert!(nested.line("nested 0: ").starts_with("rank 0 cannot spawn ranks of its own"));
    assert_eq!(run("variables").line("colour "), "red");
}

/// The program under a launcher.
fn launched(nproc: usize, case: &str) -> JobReport {
    let job = LocalJob::this_program(nproc, arguments(PROGRAM)).unwrap().env(CASE, case);
    job.output(Output::Capture).deadline(Duration::from_secs(60)).start().unwrap().wait()
}

#[test]
fn under_a_launcher_its_ranks_are_taken() {
    let report = launched(4, "sum");
    assert!(report.is_success(), "{report}");
    for rank in &report.ranks {
        let output = rank.stdout_text();
        assert!(
            output.contains(&format!("rank {} of 4: 6", rank.rank)) && output.contains("parent: well"),
            "{output}"
        );
    }
    let twice = launched(2, "two meetings");
    assert!(twice.is_success(), "{twice}");
    let output = launched(2, "sum").ranks[0].stdout_text().into_owned();
    assert!(output.contains("try `--nproc-per-node 4`") && !output.contains("of 4: 6"), "{output}");
}
