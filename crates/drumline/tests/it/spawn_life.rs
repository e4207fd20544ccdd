//! What becomes of the ranks when the process that spawned them dies or is asked to stop.

use std::time::Duration;

use drumline::launch::{Signal, Spawn};
use drumline::{StopRequest, Worker, spawn};

use super::program::{Program, case};

const PROGRAM: &str = "it::spawn_life::program";

/// The program that the tests below start.
#[test]
fn program() {
    let Some(case) = case() else { return };
    println!();
    if case == "left alone" {
        spawn(2, |worker| stand_still(&worker)).unwrap();
    } else {
        train(case == "handed on");
    }
}

fn stand_still(worker: &Worker) {
    println!("ready {}", worker.rank);
    std::thread::sleep(Duration::from_secs(60));
}

fn train(forward_stop: bool) {
    let stop = StopRequest::listen().unwrap();
    let with = if forward_stop { Spawn::new(2).forward_stop(&stop) } else { Spawn::new(2) };
    let outcome = with.timeout(Duration::from_secs(2)).run(|worker| {
        let group = worker.group()?;
        println!("ready {}", worker.rank);
        for step in 0.. {
            std::thread::sleep(Duration::from_millis(2));
            if stop.agreed(&group)? {
                println!("checkpoint {step}");
                break;
            }
        }
        Ok::<(), drumline::CommError>(())
    });
    println!("asked: {}, then {outcome:?}", stop.is_requested());
}

fn ready(case: &str) -> Program {
    let mut program = Program::start(PROGRAM, case);
    (0..2).for_each(|_| drop(program.wait_for("ready ")));
    program
}

#[test]
fn the_death_of_the_parent_is_the_death_of_its_ranks() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let program = ready("left alone");
        program.signal(signal);
        assert!(!program.end().success, "and nothing is left, which the end looks for");
    }
}

#[test]
fn a_stop_request_to_the_parent_is_handed_on() {
    for signal in [Signal::TERM, Signal::USR1, Signal::INT] {
        let program = ready("handed on");
        program.signal(signal);
        let ended = program.end();
        let steps = ended.lines("checkpoint ");
        assert!(ended.success && steps.len() == 2 && steps[0] == steps[1], "{}", ended.stdout);
        assert_eq!(ended.line("asked: "), "true, then Ok(())");
    }
}

#[test]
fn without_handing_on_the_ranks_hear_nothing() {
    let program = ready("kept");
    program.signal(Signal::TERM);
    let ended = program.end();
    assert!(
        ended.line("asked: ").starts_with("true, then Err(the ranks were stopped as they still ran after 2s")
    );
}
