//! The result of a body that returns, fails, panics or takes too long.

use std::time::{Duration, Instant};

use rank_test::{Exit, ranks_test};

/// This rank, from its environment.
fn rank() -> usize {
    std::env::var("RANK").unwrap().parse().unwrap()
}

ranks_test!(every_rank_has_its_place, 4, {
    assert!(rank() < 4);
    assert_eq!(std::env::var("WORLD_SIZE")?, "4");
    assert_eq!(std::env::var("LOCAL_RANK")?, std::env::var("RANK")?);
});

ranks_test!(options_reach_the_ranks, 1, timeout = Duration::from_secs(20), env = [("COLOUR", "green")], {
    assert_eq!(std::env::var("COLOUR")?, "green");
});

ranks_test!(
    kinds_of_failure_are_distinguished,
    4,
    {
        match rank() {
            0 => println!("rank 0 is fine"),
            1 => rank_test::anyhow::bail!("rank 1 returns an error"),
            2 => panic!("rank 2 panics"),
            _ => std::process::exit(7),
        }
    },
    |ranks| {
        let report = ranks.start()?.wait_all(Duration::from_secs(20))?;
        let exits: Vec<_> = report.ranks.iter().map(|rank| rank.exit).collect();
        assert_eq!(exits, [Exit::Code(0), Exit::Code(1), Exit::Code(101), Exit::Code(7)]);
        assert_eq!(report.ranks[0].stdout, b"rank 0 is fine\n");
        assert_eq!(report.ranks[0].stderr, b"");
        assert!(report.ranks[1].stderr_text().contains("rank 1 returns an error"));
        assert!(report.ranks[2].stderr_text().contains("rank 2 panics"));
    }
);

ranks_test!(
    a_failure_is_shown_once_with_the_command_to_repeat_it,
    3,
    {
        if rank() == 1 {
            panic!("seven is not eight");
        }
        std::thread::sleep(Duration::from_secs(30));
    },
    |ranks| {
        let start = Instant::now();
        let message = ranks.pass().unwrap_err().to_string();
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "the others were not stopped: {:?}",
            start.elapsed()
        );
        assert_eq!(message.matches("seven is not eight").count(), 1, "{message}");
        assert!(message.contains("rank 1 failed first; 1 of 3 ranks failed, 2 were stopped"), "{message}");
        let again = "cargo test -p rank-test -- --exact it::bodies::a_failure_is_shown_once_with_the_command_to_repeat_it";
        assert!(message.contains(again), "{message}");
    }
);

ranks_test!(
    a_body_that_takes_too_long_is_stopped,
    2,
    timeout = Duration::from_millis(700),
    {
        println!("rank {} hangs", rank());
        std::thread::sleep(Duration::from_secs(30));
    },
    |ranks| {
        let start = Instant::now();
        let message = ranks.pass().unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(message.contains("did not pass in 700ms"), "{message}");
        assert!(message.contains("rank 0 hangs") && message.contains("rank 1 hangs"), "{message}");
    }
);
