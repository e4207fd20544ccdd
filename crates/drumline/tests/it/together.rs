//! What programs of many ranks need beside training: lines that are seen once, and a master that prepares for all.

use std::time::{Duration, Instant};

use drumline::{LogOptions, ProcessGroup, init_logging, is_master, main_first};
use rank_test::{Exit, ranks_test};

const PROMPT: Duration = Duration::from_secs(40);
const FOLDER: &str = "DRUMLINE_TEST_FOLDER";
const LATE: &str = "DRUMLINE_TEST_LATE";

/// Whatever the tests' own environment asks for.
const QUIET: [(&str, &str); 2] = [("DRUMLINE_LOG", ""), ("RUST_LOG", "")];

ranks_test!(
    the_master_informs_and_all_warn,
    3,
    env = QUIET,
    {
        init_logging(LogOptions { show_rank: true, ..LogOptions::default() })?;
        tracing::info!("before the group");
        let group = ProcessGroup::from_env()?;
        tracing::info!("news");
        tracing::debug!("chatter");
        if group.rank() == 1 {
            tracing::warn!("trouble");
        }
        let again = init_logging(LogOptions::default()).unwrap_err().to_string();
        assert!(again.contains("logs already; try"), "{again}");
    },
    |ranks| {
        let report = ranks.pass()?;
        let output: Vec<_> = report.ranks.iter().map(|rank| rank.stderr_text().into_owned()).collect();
        for words in ["before the group", "news"] {
            assert_eq!(output.concat().matches(words).count(), 1, "{output:?}");
            assert!(
                output[0].lines().any(|line| line.starts_with("[rank 0] ") && line.ends_with(words)),
                "{output:?}"
            );
        }
        assert_eq!(output.concat().matches("chatter").count(), 0);
        assert!(
            output[1].starts_with("[rank 1] ") && output[1].contains("WARN") && output[1].contains("trouble"),
            "{output:?}"
        );
        assert_eq!(output[2], "");
        // The control: a variable wins, and ours over the other.
        let has_chatter = |set: &[(&str, &str)]| -> anyhow::Result<Vec<bool>> {
            let report = ranks.clone().env(set.iter().copied()).pass()?;
            Ok(report.ranks.iter().map(|rank| rank.stderr_text().contains("chatter")).collect())
        };
        assert_eq!(has_chatter(&[("RUST_LOG", "debug")])?, [true; 3]);
        assert_eq!(has_chatter(&[("DRUMLINE_LOG", "debug")])?, [true; 3]);
        assert_eq!(has_chatter(&[("DRUMLINE_LOG", "info"), ("RUST_LOG", "debug")])?, [false; 3]);
    }
);

ranks_test!(
    what_is_said_while_ranks_meet_is_said_once,
    3,
    env = QUIET,
    {
        if std::env::var_os(LATE).is_none() {
            init_logging(LogOptions { show_rank: true, ..LogOptions::default() })?;
        }
        let file = format!("file://{}/meeting", std::env::var(FOLDER)?);
        let member = drumline::comm::init(&file, drumline::comm::InitOptions::default())?;
        let group = ProcessGroup::new(member, drumline::comm::GroupOptions::from_env()?)?;
        if std::env::var_os(LATE).is_some() {
            init_logging(LogOptions { rank: Some(group.rank()), show_rank: true, ..LogOptions::default() })?;
        }
        group.barrier()?;
        tracing::info!("all are here");
    },
    |ranks| {
        let output = |set: &[(&str, &str)]| -> anyhow::Result<Vec<String>> {
            let temp = tempfile::tempdir()?;
            let report = ranks.clone().env(set.iter().copied()).env([(FOLDER, temp.path())]).pass()?;
            Ok(report.ranks.iter().map(|rank| rank.stderr_text().into_owned()).collect())
        };
        let of_master = |output: &[String], words: &str| {
            let lines =
                output[0].lines().filter(|line| line.starts_with("[rank 0] ") && line.contains(words));
            assert_eq!(output[1..], ["", ""], "{output:?}");
            lines.count()
        };
        let early = output(&[])?;
        assert_eq!(
            (of_master(&early, "store listening"), of_master(&early, "all are here")),
            (1, 1),
            "{early:?}"
        );
        // The control: what comes before `init_logging` is not shown, what comes after is.
        let late = output(&[(LATE, "1")])?;
        assert_eq!(
            (of_master(&late, "store listening"), of_master(&late, "all are here")),
            (0, 1),
            "{late:?}"
        );
    }
);

ranks_test!(
    the_master_prepares_and_the_others_read_past_any_timeout,
    3,
    env = [("DRUMLINE_TIMEOUT", "3")],
    {
        let group = ProcessGroup::from_env()?;
        let cache = std::path::PathBuf::from(std::env::var(FOLDER)?).join("cache");
        group.barrier()?;
        let begin = Instant::now();
        let words = main_first(&group, "preparing the data", || {
            if is_master(&group) {
                assert!(!cache.exists());
                std::thread::sleep(Duration::from_secs(5));
                std::fs::write(&cache, "prepared")?;
            }
            Ok(std::fs::read_to_string(&cache)?)
        })?;
        assert_eq!(words, "prepared");
        assert!(begin.elapsed() >= Duration::from_secs(4), "longer than a call may take");
        group.barrier()?;
    },
    |ranks| {
        let temp = tempfile::tempdir()?;
        ranks.env([(FOLDER, temp.path().to_str().unwrap())]).pass()?;
    }
);

ranks_test!(
    a_master_that_dies_at_its_work_is_reported_at_once,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let work = || {
            println!("working");
            std::thread::sleep(PROMPT);
            Ok(())
        };
        let begin = Instant::now();
        let message = main_first(&group, "preparing the data", work).unwrap_err().to_string();
        println!("after {:?}: {message}", begin.elapsed());
        assert!(message.contains("lost rank 0"), "{message}");
    },
    |ranks| {
        let running = ranks.start()?;
        running.wait_for_line(0, "working", PROMPT)?;
        running.kill(0)?;
        assert_eq!(running.wait_rank(1, Duration::from_secs(20))?, Exit::Code(0));
        running.wait_all(PROMPT)?;
    }
);
