//! Two thousand members on one server: the quick form of `examples/meet.rs`.

use crate::Job;
use drumline_rendezvous::Store;
use std::time::{Duration, Instant};

#[test]
fn two_thousand_members_meet() {
    // Both ends of each connection are in this process.
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let world = 2000;
    let job = Job::start();
    let began = Instant::now();
    let members: Vec<_> = (0..world).map(|rank| job.member(rank, world)).collect();
    for (rank, member) in members.iter().enumerate() {
        member.set(&format!("rank/{rank}"), rank.to_string().as_bytes()).unwrap();
    }
    for (rank, member) in members.iter().enumerate() {
        let other = (rank + 1) % world;
        let value = member.get(&format!("rank/{other}"), crate::after(5000)).unwrap();
        assert_eq!(value, other.to_string().as_bytes());
        member.add("barrier", 1).unwrap();
    }
    assert_eq!(members[0].add("barrier", 0).unwrap(), world as i64);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}
