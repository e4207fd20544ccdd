//! A cable that is pulled for a while in the middle of a job over two hosts: what is borne, and what is not.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::job::Job;
use super::two_hosts::{Net, SHORT};

const LONG: Duration = Duration::from_secs(60);

/// Says who it is and counts, until it is told to end.
const COUNTS: &str = "trap 'echo complete; exit 0' USR1; trap 'echo stopped; exit 0' TERM; i=0; \
                      echo rank $RANK of $WORLD_SIZE in round $DRUMLINE_ROUND is $$; \
                      while :; do i=$((i+1)); echo count $i; sleep 0.1; done";

/// A job of two hosts in its first round.
fn running(net: &Net, words: impl Fn(usize) -> String) -> [Job; 2] {
    let jobs = [0, 1].map(|node| {
        let job = net.run(node, &words(node), COUNTS);
        std::thread::sleep(Duration::from_millis(150));
        job
    });
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 1", 1));
    jobs.iter().for_each(|job| job.wait_for("count", 3));
    jobs
}

/// All that each node's ranks counted is there, from 1 on and without a gap.
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
        job.wait_for(&format!("nothing heard from {peer} for 3"), 1);
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

/// The same outage, and the control: with less patience it ends the job.
#[test]
fn beyond_the_host_timeout_the_host_is_named_and_all_ends() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |node| format!("{} {SHORT}", net.fixed(node)));
    let begin = Instant::now();
    net.hosts.outage(1, Duration::from_secs(8)).unwrap();
    for (job, cause) in jobs
        .iter_mut()
        .zip(["lost the agent on host1: its host was silent for 6", "no contact with the store's host for"])
    {
        // That nothing is left is seen to by the end itself.
        let (code, text) = job.end(LONG);
        assert!(code == 1 && text.contains(cause) && !text.contains("round 2"), "{text}");
        assert!(text.contains("stopped"), "each rank has its SIGTERM: {text}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn a_restart_after_an_outage_counts_as_one_and_both_nodes_say_why() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |node| format!("{} {SHORT} --max-restarts 1", net.fixed(node)));
    net.hosts.outage(1, Duration::from_secs(8)).unwrap();
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 2", 1));
    jobs.iter().for_each(|job| job.signal(Signal::USR1));
    for job in &mut jobs {
        let (code, text) = job.end(LONG);
        let said = "round 2 begins (1 of 1 restarts used): 2 ranks on 2 nodes; the one before ended: lost the agent on host1";
        assert!(code == 0 && text.contains(said), "{text}");
        assert_eq!(text.matches("stopped").count(), 1, "{text}");
    }
}

#[test]
fn an_elastic_job_goes_on_alone_and_takes_the_node_back() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = running(&net, |_| format!("{} {SHORT}", net.elastic("1:2")));
    net.hosts.cut(1).unwrap();
    jobs[0].wait_for("rank 0 of 1 in round 2", 1);
    jobs[1].wait_for("stopping this node's ranks", 1);
    // For longer than the agent of a job that could not take it back would wait.
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
