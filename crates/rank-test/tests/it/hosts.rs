//! Two hosts in network namespaces, and the cable between them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use rank_test::netns::Hosts;
use rank_test::ranks_test;

const SOON: Duration = Duration::from_secs(10);

fn env(name: &str) -> String {
    std::env::var(name).unwrap()
}

ranks_test!(
    ranks_meet_across_hosts_until_the_cable_is_cut,
    2,
    {
        let (host, port) = (env("MASTER_ADDR"), env("MASTER_PORT").parse()?);
        println!("I am on {}", std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim());
        if env("RANK") == "0" {
            let (mut peer, _) = TcpListener::bind((host.as_str(), port))?.accept()?;
            std::io::copy(&mut peer.try_clone()?, &mut peer)?;
        } else {
            let mut peer = connect(&host, port)?;
            peer.set_read_timeout(Some(Duration::from_millis(500)))?;
            for step in 0.. {
                peer.write_all(b"x")?;
                match peer.read_exact(&mut [0]) {
                    Ok(()) => println!("echo {step}"),
                    Err(_) => break,
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            println!("silence");
            peer.set_read_timeout(Some(SOON))?;
            peer.read_exact(&mut [0])?;
            println!("back again");
        }
    },
    |ranks| {
        let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
        let running = ranks.on_hosts(&hosts, &[&[0], &[1]]).start()?;
        running.wait_for_line(0, "I am on host0", SOON)?;
        running.wait_for_line(1, "I am on host1", SOON)?;
        running.wait_for_line(1, "echo 5", SOON)?;
        assert!(!running.printed(1).contains("silence"), "control: an uncut cable carries");
        hosts.cut(1)?;
        running.wait_for_line(1, "silence", SOON)?;
        hosts.restore(1)?;
        running.wait_for_line(1, "back again", SOON)?;
        let report = running.wait_all(SOON)?;
        assert!(report.is_success(), "{report}");
    }
);

fn connect(host: &str, port: u16) -> std::io::Result<TcpStream> {
    for _ in 0..500 {
        match TcpStream::connect((host, port)) {
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
            connected => return connected,
        }
    }
    TcpStream::connect((host, port))
}

ranks_test!(
    four_ranks_on_two_hosts_know_their_places,
    4,
    {
        let rank: usize = env("RANK").parse()?;
        assert_eq!(env("WORLD_SIZE"), "4");
        assert_eq!(env("LOCAL_RANK"), (rank % 2).to_string());
        assert_eq!(env("LOCAL_WORLD_SIZE"), "2");
        assert_eq!(env("GROUP_RANK"), (rank / 2).to_string());
        assert_eq!(env("MASTER_ADDR"), "10.77.0.1");
        assert!(std::env::var("DRUMLINE_STORE").is_err());
        assert!(drumline_rendezvous::JobKey::from_env()?.is_secret());
    },
    |ranks| {
        let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
        ranks.on_hosts(&hosts, &[&[0, 1], &[2, 3]]).pass()?;
    }
);

#[test]
fn hosts_are_removed_even_when_a_test_panics() {
    let names = || {
        let listed = Command::new("ip").args(["netns", "list"]).output().unwrap();
        let ours = format!("rank-test-{}-", std::process::id());
        let text = String::from_utf8(listed.stdout).unwrap();
        text.lines().filter(|line| line.contains(&ours)).map(str::to_string).collect::<Vec<_>>()
    };
    let Some(hosts) = Hosts::new(3).unwrap() else { return };
    let base = hosts.prefix(2)[3].to_str().unwrap().strip_suffix("-2").unwrap().to_string();
    let ours = || names().iter().filter(|name| name.starts_with(&base)).count();
    assert_eq!(ours(), 4, "three hosts and the switch");
    let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _hosts = hosts;
        panic!("on purpose");
    }));
    assert!(held.is_err());
    assert_eq!(ours(), 0);
}
