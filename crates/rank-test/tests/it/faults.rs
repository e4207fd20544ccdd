//! What a test can do to ranks, and what ranks do to themselves; each with a control in which nothing is done.

use std::time::{Duration, Instant};

use rank_test::leftovers::{Leftover, Watch};
use rank_test::{Exit, Signal, fault, ranks_test};
use rustix::process::{Pid, kill_process};

const SOON: Duration = Duration::from_secs(10);

fn work(steps: u64) {
    for step in 0..steps {
        fault::point(step);
        println!("step {step} done");
    }
}

ranks_test!(
    faults_happen_only_at_their_rank_and_step,
    3,
    {
        work(4);
    },
    |ranks| {
        let failed =
            ranks.clone().fault("rank=1,step=2,kill; rank=2,step=0,exit=3").start()?.wait_all(SOON)?;
        let exits: Vec<_> = failed.ranks.iter().map(|rank| rank.exit).collect();
        assert_eq!(exits, [Exit::Code(0), Exit::Signal(9), Exit::Code(3)]);
        assert_eq!(failed.ranks[1].stdout, b"step 0 done\nstep 1 done\n");
        assert_eq!(failed.ranks[2].stdout, b"");
        let control = ranks.pass()?;
        assert!(control.ranks.iter().all(|rank| rank.stdout.ends_with(b"step 3 done\n")));
    }
);

ranks_test!(
    a_stopped_rank_is_frozen_until_it_is_resumed,
    2,
    {
        work(2);
    },
    |ranks| {
        let running = ranks.fault("rank=0,step=1,stop").start()?;
        running.wait_for_line(0, "fault rank=0,step=1,stop", SOON)?;
        running.wait_until_stopped(0, SOON)?;
        assert_eq!(running.wait_rank(1, SOON)?, Exit::Code(0));
        assert!(running.wait_rank(0, Duration::from_millis(100)).is_err());
        running.resume(0)?;
        assert_eq!(running.wait_rank(0, SOON)?, Exit::Code(0));
        assert!(
            running.signal(0, Signal::KILL).unwrap_err().to_string().contains("already ended (exit code 0)")
        );
        assert_eq!(running.printed(0).matches("done").count(), 2);
    }
);

ranks_test!(
    a_sleeping_rank_is_only_late,
    1,
    {
        work(1);
    },
    |ranks| {
        let start = Instant::now();
        ranks.fault("rank=0,step=0,sleep=300ms").pass()?;
        assert!(start.elapsed() >= Duration::from_millis(300));
    }
);

ranks_test!(
    the_end_of_a_rank_is_noticed_at_once,
    2,
    {
        println!("ready");
        std::thread::sleep(Duration::from_secs(30));
    },
    |ranks| {
        let running = ranks.start()?;
        running.wait_for_line(1, "ready", SOON)?;
        let start = Instant::now();
        running.kill(1)?;
        assert_eq!(running.wait_rank(1, SOON)?, Exit::Signal(9));
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        let error = running.wait_all(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("ranks [0] of") && error.contains("ready"), "{error}");
    }
);

ranks_test!(
    a_line_that_never_comes_is_an_error_with_the_output,
    1,
    {
        println!("something else");
    },
    |ranks| {
        let running = ranks.start()?;
        let error = running.wait_for_line(0, "ready", SOON).unwrap_err().to_string();
        assert!(error.contains("before it ended") && error.contains("something else"), "{error}");
    }
);

ranks_test!(
    dropping_ranks_ends_their_processes,
    2,
    {
        std::process::Command::new("sleep").arg("30").spawn()?;
        println!("ready");
        std::thread::sleep(Duration::from_secs(30));
    },
    |ranks| {
        let running = ranks.start()?;
        (0..2).try_for_each(|rank| running.wait_for_line(rank, "ready", SOON).map(drop))?;
        let watch = running.watch();
        assert_eq!(watch.now().len(), 4, "two ranks and a grandchild each: {:?}", watch.now());
        drop(running);
        watch.none_within(Duration::from_secs(1))?;
    }
);

ranks_test!(
    a_process_that_escapes_is_found,
    1,
    {
        // Its own session, so that it is in no group that the launcher knows.
        std::process::Command::new("setsid").args(["sleep", "61"]).spawn()?.wait()?;
    },
    |ranks| {
        let running = ranks.start()?;
        let watch = running.watch();
        let escaped = find(&watch, "sleep 61");
        running.kill(0)?;
        let error = running.wait_all(SOON).unwrap_err().to_string();
        assert!(
            error.contains("left behind") && error.contains(&format!("process {escaped} `sleep 61`")),
            "{error}"
        );
        kill_process(Pid::from_raw(escaped as i32).unwrap(), Signal::KILL)?;
        watch.none_within(SOON)?;
    }
);

/// The pid of the process with this command line, which is about to start.
fn find(watch: &Watch, line: &str) -> u32 {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < SOON, "`{line}` was not started");
        for left in watch.now() {
            match left {
                Leftover::Process { pid, command, .. } if command == line => return pid,
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}
