//! A cable that is pulled for a while during a job over two hosts: short outages are survived, long ones are not.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::job::Job;
use super::two_hosts::{Net, SHORT};

const LONG: Duration = Duration::from_secs(60);

/// Prints its rank, and counts until SIGUSR1.
const COUNTS: &str = "trap 'echo complete; exit 0' USR1; trap 'echo stopped; exit 0' TERM; i=0; \
                      echo rank $RANK of $WORLD_SIZE in round $DRUMLINE_ROUND is $$; \
                      while :; do i=$((i+1)); echo count $i; sleep 0.1; done";

/// A job of two hosts in its first round.
fn running(net: &Net, flags: impl Fn(usize) -> String) -> [Job; 2] {
    let jobs = [0, 1].map(|node| {
        let job = net.run(node, &flags(node), COUNTS);
        std::thread::sleep(Duration::from_millis(150));
        job
    });
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 1", 1));
    jobs.iter().for_each(|job| job.wait_for("count", 3));
    jobs
}

/// The numbers that a node's ranks have counted.
fn counts(text: &str) -> Vec<usize> {
    let number = |line: &str| line.split_once("count ")?.1.trim().parse().ok();
    text.lines().filter_map(number).collect()
}

#[test]
fn an_outage_of_five_seconds_changes_nothing() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |node| net.fixed(node));
    net.hosts.outage(1, Duration::from_secs(5)).unwrap();
    for (job, peer) in jobs.iter().zip(["host1", "the first node"]) {
        job.wait_for(&format!("no message from {peer} for 3"), 1);
        job.wait_for(&format!("{peer} is back after"), 1);
        job.signal(Signal::USR1);
    }
    for job in &mut jobs {
        let (code, text) = job.end(LONG);
        assert_eq!((code, text.matches(" in round ").count()), (0, 1), "the same process: {text}");
        assert!(!text.contains("stopped") && text.contains("complete"), "{text}");
        let counts = counts(&text);
        assert!(counts.len() > 20 && counts.iter().copied().eq(1..=counts.len()), "{text}");
    }
}

/// The control: with a shorter host timeout the outage ends the job.
#[test]
fn an_outage_beyond_the_host_timeout_ends_the_job_and_names_the_host() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |node| format!("{} {SHORT}", net.fixed(node)));
    let begin = Instant::now();
    net.hosts.outage(1, Duration::from_secs(8)).unwrap();
    for (job, cause) in jobs
        .iter_mut()
        .zip(["lost the agent on host1: its host was silent for 6", "no contact with the store's host for"])
    {
        // `end` also checks that nothing is left.
        let (code, text) = job.end(LONG);
        assert!(code == 1 && text.contains(cause) && !text.contains("round 2"), "{text}");
        assert!(text.contains("stopped"), "each rank has its SIGTERM: {text}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn a_restart_after_an_outage_is_counted_and_both_nodes_print_the_cause() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |node| format!("{} {SHORT} --max-restarts 1", net.fixed(node)));
    net.hosts.outage(1, Duration::from_secs(8)).unwrap();
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 2", 1));
    jobs.iter().for_each(|job| job.signal(Signal::USR1));
    for job in &mut jobs {
        let (code, text) = job.end(LONG);
        let expected = "round 2 begins (1 of 1 restarts used): 2 ranks on 2 nodes; the one before ended: lost the agent on host1";
        assert!(code == 0 && text.contains(expected), "{text}");
        assert_eq!(text.matches("stopped").count(), 1, "{text}");
    }
}

#[test]
fn an_elastic_job_continues_without_a_node_and_accepts_it_again() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |_| format!("{} {SHORT}", net.elastic("1:2")));
    net.hosts.cut(1).unwrap();
    jobs[0].wait_for("rank 0 of 1 in round 2", 1);
    jobs[1].wait_for("stopping this node's ranks", 1);
    // Longer than an agent waits in a job that cannot accept the node again.
    std::thread::sleep(Duration::from_secs(4));
    net.hosts.restore(1).unwrap();
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 3", 1));
    jobs.iter().for_each(|job| job.signal(Signal::USR1));
    for (job, rounds) in jobs.iter_mut().zip([3, 2]) {
        let (code, text) = job.end(LONG);
        assert_eq!((code, text.matches(" in round ").count()), (0, rounds), "{text}");
        assert!(!text.contains("restarts used"), "a change of nodes is no restart: {text}");
    }
}
