//! A port that is given by number belongs to one job.

use super::job::free_port;
use super::started::{Ended, Started};

fn run(port: &str) -> Ended {
    Started::new(&["run", "--master-port", port, "sh", "-c", "echo started on $MASTER_PORT"]).end()
}

#[test]
fn the_second_job_on_a_port_is_refused_before_its_ranks_start() {
    let (port, other) = (free_port().to_string(), free_port().to_string());
    let first = Started::new(&["run", "--master-port", &port, "sh", "-c", "echo here; sleep 60"]);
    first.line_of_stdout("here");
    let second = run(&port);
    assert_eq!((second.code, second.stdout.as_str()), (Some(1), ""), "{}", second.stderr);
    let expected = format!("pid {} (", first.pid());
    assert!(second.stderr.contains(&expected) && second.stderr.contains("try another"), "{}", second.stderr);
    let elsewhere = run(&other);
    assert_eq!(elsewhere.code, Some(0), "control: another port: {}", elsewhere.stderr);
    drop(first);
    let after = run(&port);
    assert_eq!(after.stdout, format!("[rank 0]: started on {port}\n"), "control: {}", after.stderr);
}
