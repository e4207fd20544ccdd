//! Injected faults between ranks that use TCP: broken connections are made again, and no bit is lost.

use std::time::{Duration, Instant};

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_rendezvous::fault::Faults;
use rank_test::{anyhow::Result, ranks_test};

/// All-reduces with the injected faults; prints how long the slowest took.
fn train() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let group = ProcessGroup::from_env()?;
    let mut faults = Faults::from_env()?;
    let mut slowest = Duration::ZERO;
    for step in 0..30 {
        faults.at(step).into_iter().for_each(|link| group.inject(link));
        let begin = Instant::now();
        // Larger than what is on its way at a time.
        let mut values: Vec<f32> = (0..500_000).map(|at| (at * (group.rank() + 1)) as f32).collect();
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        assert!(values.iter().enumerate().all(|(at, value)| *value == (at * 3) as f32), "step {step}");
        slowest = slowest.max(begin.elapsed());
    }
    println!("slowest {}", slowest.as_millis());
    Ok(())
}

fn slowest(printed: &str) -> u64 {
    let line = printed.lines().find_map(|line| line.strip_prefix("slowest "));
    line.and_then(|text| text.parse().ok()).expect("the rank ran to its end")
}

ranks_test!(
    connections_that_are_broken_on_purpose_are_reconnected,
    2,
    {
        train()?;
    },
    |ranks| {
        let ranks = ranks.env([("DRUMLINE_TRANSPORT", "tcp")]);
        let output = |ranks: &rank_test::Ranks| -> Result<String> {
            let report = ranks.pass()?;
            let all = report.ranks.iter().flat_map(|rank| [&rank.stdout[..], &rank.stderr[..]].concat());
            Ok(String::from_utf8_lossy(&all.collect::<Vec<u8>>()).into_owned())
        };
        let text = output(
            &ranks.clone().fault("rank=0,step=5,drop=1; rank=1,step=9,drop=0; rank=1,step=15,drop=0"),
        )?;
        assert_eq!(text.matches("is broken").count(), 3, "{text}");
        assert!(text.matches("reconnected a link").count() >= 3, "{text}");
        let control = output(&ranks)?;
        assert!(!control.contains("is broken") && !control.contains("reconnected"), "{control}");
    }
);

ranks_test!(
    delayed_data_comes_late_and_a_fault_on_a_missing_link_is_reported,
    2,
    {
        train()?;
    },
    |ranks| {
        let fault = "rank=0,step=25,delay=700ms,peer=1";
        let late = ranks.clone().env([("DRUMLINE_TRANSPORT", "tcp")]).fault(fault).pass()?;
        assert!(slowest(&String::from_utf8_lossy(&late.ranks[1].stdout)) >= 700);
        let shared = ranks.fault(fault).pass()?;
        let stderr = String::from_utf8_lossy(&shared.ranks[0].stderr).into_owned();
        assert!(stderr.contains("rank 0 to rank 1: the two ranks share memory"), "{stderr}");
    }
);
