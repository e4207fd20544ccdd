//! Tests `init` from end to end. Ranks are threads here, so everything is given by options and method.

use crate::after;
use crate::liveness::start_at;
use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{InitError, InitOptions, JobKey, Member, Store, StoreError, init};
use std::time::{Duration, Instant};

fn options(rank: usize, world_size: usize) -> InitOptions {
    let timeout = Some(Duration::from_secs(10));
    InitOptions { rank: Some(rank), world_size: Some(world_size), timeout, key: Some(JobKey::open()) }
}

/// All ranks join by `method`, exchange something, and end.
fn all_meet(method: &str, world_size: usize) {
    std::thread::scope(|scope| {
        for rank in 0..world_size {
            scope.spawn(move || {
                let member = init(method, options(rank, world_size)).unwrap();
                assert_eq!((member.rank, member.world_size), (rank, world_size));
                exchange(&member);
            });
        }
    });
}

fn exchange(member: &Member) {
    let keys: Vec<String> = (0..member.world_size).map(|rank| format!("rank/{rank}")).collect();
    let refs: Vec<&str> = keys.iter().map(String::as_str).collect();
    member.store.set(refs[member.rank], b"here").unwrap();
    member.store.wait(&refs, after(10_000)).unwrap();
    // All must have read before rank 0 ends, and the store with it: within one process, the host does not wait.
    member.store.add("done", 1).unwrap();
    while member.store.add("done", 0).unwrap() < member.world_size as i64 {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20 * u64::from(member.rank == 0)));
}

fn free_port() -> u16 {
    drumline_rendezvous::free_port().unwrap()
}

#[test]
fn by_tcp() {
    for world_size in [1, 2, 5] {
        all_meet(&format!("tcp://127.0.0.1:{}", free_port()), world_size);
        all_meet(&format!("tcp://localhost:{}", free_port()), world_size);
    }
}

#[test]
fn by_file_which_is_removed_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meeting");
    for world_size in [1, 3] {
        all_meet(&format!("file://{}", path.display()), world_size);
        assert!(!path.exists());
    }
}

#[test]
fn a_stale_meeting_file_is_noticed_by_every_rank_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meeting");
    let method = format!("file://{}", path.display());
    let old = init(&method, options(0, 2)).unwrap();
    let content = std::fs::read(&path).unwrap();
    drop(old);
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    for rank in [0, 1] {
        let began = Instant::now();
        let error = init(&method, options(rank, 2)).unwrap_err();
        assert!(matches!(&error, InitError::Store(StoreError::StaleFile { .. })), "rank {rank}: {error}");
        assert!(began.elapsed() < Duration::from_secs(1), "rank {rank}");
    }
    assert!(path.exists(), "it is kept for the user to inspect");
}

#[test]
fn a_missing_rank_zero_is_reported() {
    let began = Instant::now();
    let options = InitOptions { timeout: Some(Duration::from_millis(300)), ..options(1, 2) };
    let error = init(&format!("tcp://127.0.0.1:{}", free_port()), options).unwrap_err().to_string();
    assert!(error.contains("refused (no server listens there)") && error.contains("MASTER_PORT"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(2));
}

#[test]
fn world_sizes_that_differ() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let _zero = init(&method, options(0, 2)).unwrap();
    let error = init(&method, options(1, 3)).unwrap_err().to_string();
    assert!(error.contains("world size differs: 2 according to the store, 3 according to rank 1"), "{error}");
}

#[test]
fn the_host_waits_for_the_others_unless_the_job_has_failed() {
    for abandoned in [false, true] {
        let port = free_port();
        let key = JobKey::random();
        let options = InitOptions { key: Some(key.clone()), ..options(0, 2) };
        let zero = init(&format!("tcp://127.0.0.1:{port}"), options).unwrap();
        let mut one = start_at(&format!("127.0.0.1:{port}"), &key, "wait");
        if abandoned {
            zero.abandon();
        }
        let host = std::thread::spawn(move || drop(zero));
        std::thread::sleep(Duration::from_millis(1000));
        assert_eq!(host.is_finished(), abandoned);
        one.kill().unwrap();
        let killed = Instant::now();
        host.join().unwrap();
        assert!(killed.elapsed() < Duration::from_secs(1), "the last one is lost");
        one.wait().unwrap();
    }
}

#[test]
fn events_of_an_earlier_meeting_do_not_reach_the_next_one() {
    let method = format!("tcp://127.0.0.1:{}", free_port());
    let zero = init(&method, options(0, 3)).unwrap();
    let one = init(&method, options(1, 3)).unwrap();
    assert_eq!((zero.incarnation, one.incarnation), (1, 1));
    events::post_in(&one.store, 1, &Event::Call { group: "g".into(), rank: 1, text: "x".into() }).unwrap();
    drop(one);

    let one = init(&method, options(1, 3)).unwrap();
    let two = init(&method, options(2, 3)).unwrap();
    assert_eq!((one.incarnation, two.incarnation), (2, 2), "rank 2 joins the newest meeting");
    let first = events::follow_in(&zero.store, 1).next_batch(after(5000)).unwrap();
    assert!(matches!(first[..], [Event::Call { .. }, Event::Left { rank: 1 }]), "{first:?}");
    let mut second = events::follow_in(&two.store, 2);
    assert!(second.next_batch(after(100)).unwrap().is_empty());
    let lost = Event::Lost { rank: 0, host: "n1".into(), pid: 7 };
    events::post(&zero.store, &lost).unwrap();
    assert_eq!(second.next_batch(after(5000)).unwrap(), [lost], "what holds for the round reaches all");
    drop((one, two));
}

#[test]
fn the_open_key_stays_on_loopback() {
    let error = init("tcp://0.0.0.0:29400", options(0, 2)).unwrap_err();
    assert!(matches!(error, InitError::Store(StoreError::NeedsSecret { .. })), "{error}");
}
