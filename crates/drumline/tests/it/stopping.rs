//! A stop request that reaches one rank only.

use std::time::Duration;

use drumline::launch::Signal;
use drumline::{ProcessGroup, ReduceOp, StopRequest};
use rank_test::{Exit, JobReport, ranks_test};

const PROMPT: Duration = Duration::from_secs(20);
const FOLDER: &str = "DRUMLINE_TEST_FOLDER";

fn step(group: &ProcessGroup, step: u64) -> anyhow::Result<()> {
    group.all_reduce(&mut [1.0_f32; 64], ReduceOp::Sum)?;
    std::thread::sleep(Duration::from_millis(1));
    if step == 3 {
        println!("training");
    }
    Ok(())
}

fn checkpoint(group: &ProcessGroup, step: u64) -> anyhow::Result<()> {
    let folder = std::env::var(FOLDER)?;
    std::fs::write(format!("{folder}/{}", group.rank()), step.to_string())?;
    println!("stopped at {step}");
    Ok(())
}

/// Where each rank stopped, by its own words.
fn stops(report: &JobReport) -> Vec<Option<String>> {
    let stop = |text: &str| text.lines().find_map(|line| line.strip_prefix("stopped at ").map(str::to_owned));
    report.ranks.iter().map(|rank| stop(&rank.stdout_text())).collect()
}

ranks_test!(
    all_ranks_stop_at_the_same_step,
    3,
    {
        let (group, stop) = (ProcessGroup::from_env()?, StopRequest::listen()?);
        for now in 0.. {
            step(&group, now)?;
            if stop.agreed(&group)? {
                checkpoint(&group, now)?;
                break;
            }
        }
    },
    |ranks| {
        for (asked, signal) in [(0, Signal::TERM), (1, Signal::USR1), (2, Signal::INT)] {
            let folder = tempfile::tempdir()?;
            let running = ranks.clone().env([(FOLDER, folder.path().to_str().unwrap())]).start()?;
            running.wait_for_line(asked, "training", PROMPT)?;
            running.signal(asked, signal)?;
            let report = running.wait_all(PROMPT)?;
            assert!(report.is_success(), "{report}");
            let stops = stops(&report);
            assert!(stops[0].is_some() && stops.iter().all(|stop| *stop == stops[0]), "{stops:?}");
            let written = |rank: &usize| std::fs::read_to_string(folder.path().join(rank.to_string())).ok();
            assert_eq!((0..3).map(|rank| written(&rank)).collect::<Vec<_>>(), stops);
        }
    }
);

// The control: each rank looks at its own flag only.
ranks_test!(
    without_agreement_the_others_are_left_behind,
    3,
    {
        let (group, stop) = (ProcessGroup::from_env()?, StopRequest::listen()?);
        for now in 0.. {
            step(&group, now)?;
            if stop.is_requested() {
                checkpoint(&group, now)?;
                break;
            }
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let running = ranks.env([(FOLDER, folder.path().to_str().unwrap())]).start()?;
        running.wait_for_line(1, "training", PROMPT)?;
        running.signal(1, Signal::TERM)?;
        let report = running.wait_all(PROMPT)?;
        let stops = stops(&report);
        assert!(stops[1].is_some() && stops[0].is_none() && stops[2].is_none(), "{stops:?}");
        let output = report.ranks[0].stderr_text();
        assert!(output.contains("rank 1 has left group"), "{output}");
    }
);

ranks_test!(
    a_second_sigint_ends_at_once,
    1,
    {
        let stop = StopRequest::listen()?;
        println!("listening");
        while !stop.is_requested() {
            std::thread::sleep(Duration::from_millis(1));
        }
        println!("asked by {:?}", stop.signal());
        std::thread::sleep(PROMPT);
    },
    |ranks| {
        let running = ranks.start()?;
        running.wait_for_line(0, "listening", PROMPT)?;
        running.signal(0, Signal::INT)?;
        running.wait_for_line(0, "asked by", PROMPT)?;
        running.signal(0, Signal::INT)?;
        assert_eq!(running.wait_rank(0, PROMPT)?, Exit::Signal(2));
    }
);

ranks_test!(
    only_the_listed_signals_are_heard,
    1,
    {
        let _stop = StopRequest::listen_for(&[Signal::USR2])?;
        println!("listening");
        std::thread::sleep(PROMPT);
    },
    |ranks| {
        let running = ranks.start()?;
        running.wait_for_line(0, "listening", PROMPT)?;
        running.signal(0, Signal::USR2)?;
        running.signal(0, Signal::TERM)?;
        assert_eq!(running.wait_rank(0, PROMPT)?, Exit::Signal(15));
    }
);

#[test]
fn what_cannot_be_a_request_is_refused() {
    for signal in [Signal::KILL, Signal::STOP, Signal::SEGV] {
        let error = StopRequest::listen_for(&[Signal::USR2, signal]).unwrap_err().to_string();
        assert!(error.contains("try SIGTERM"), "{error}");
    }
}
