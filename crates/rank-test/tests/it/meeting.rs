//! Ranks that join through the launcher's store, or across hosts through that of rank 0, and the report of an exit
//! there.

use std::time::{Duration, Instant};

use drumline_rendezvous::Store;
use drumline_rendezvous::events::{Event, follow};
use rank_test::anyhow::{Result, bail};
use rank_test::netns::Hosts;
use rank_test::{Exit, ranks_test};

const SOON: Duration = Duration::from_secs(10);

fn soon() -> Instant {
    Instant::now() + SOON
}

/// Every rank writes its number and waits for those of all others.
fn greet_all(store: &dyn Store, rank: usize, world_size: usize) -> Result<()> {
    store.set(&format!("greeting/{rank}"), rank.to_string().as_bytes())?;
    for peer in 0..world_size {
        assert_eq!(store.get(&format!("greeting/{peer}"), soon())?, peer.to_string().as_bytes());
    }
    Ok(())
}

ranks_test!(ranks_meet_in_the_launchers_store, 4, {
    let member = drumline_rendezvous::from_env()?;
    assert!(member.key.is_secret());
    greet_all(&*member.store, member.rank, member.world_size)?;
});

ranks_test!(
    ranks_meet_across_hosts,
    4,
    {
        let member = drumline_rendezvous::from_env()?;
        println!("rank {} on {}", member.rank, member.host);
        greet_all(&*member.store, member.rank, member.world_size)?;
    },
    |ranks| {
        let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
        let report = ranks.on_hosts(&hosts, &[&[0, 1], &[2, 3]]).pass()?;
        assert_eq!(report.ranks[3].stdout_text(), "rank 3 on host1\n");
    }
);

/// What the launcher reports about rank 1.
fn exit_of_rank_1(store: &dyn Store) -> Result<(Option<i32>, Option<i32>)> {
    let mut log = follow(store);
    let deadline = soon();
    while Instant::now() < deadline {
        for event in log.next_batch(deadline)? {
            if let Event::Exit { rank: 1, code, signal, .. } = event {
                return Ok((code, signal));
            }
        }
    }
    bail!("no event about rank 1")
}

ranks_test!(
    the_exit_of_a_rank_is_reported_to_the_others,
    2,
    {
        let member = drumline_rendezvous::from_env()?;
        greet_all(&*member.store, member.rank, member.world_size)?;
        println!("ready");
        if member.rank == 0 {
            println!("rank 1: {:?}", exit_of_rank_1(&*member.store)?);
        } else {
            rank_test::fault::point(0);
            std::thread::sleep(SOON);
        }
    },
    |ranks| {
        let running = ranks.start()?;
        running.wait_for_line(0, "ready", SOON)?;
        running.wait_for_line(1, "ready", SOON)?;
        let start = Instant::now();
        running.kill(1)?;
        running.wait_for_line(0, "rank 1: (None, Some(9))", SOON)?;
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert_eq!(running.wait_all(SOON)?.ranks[0].exit, Exit::Code(0));

        let running = ranks.fault("rank=1,step=0,exit=3").start()?;
        running.wait_for_line(0, "rank 1: (Some(3), None)", SOON)?;
    }
);
