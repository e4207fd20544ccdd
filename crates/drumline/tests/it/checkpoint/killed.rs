//! SIGKILL at a random moment, a hundred times: what was said to be saved is there, and whole.

use std::fs;
use std::path::Path;
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::checkpoint::{Checkpoints, Mark};
use rank_test::{Ranks, ranks_test};

use super::{alone, listing, load, state_of, whole_step};

const FOLDER: &str = "DRUMLINE_TEST_FOLDER";
const PROMPT: Duration = Duration::from_secs(20);
const KILLS: u64 = 100;

/// Values a tensor: a save takes about as long as a rank is let live.
const LEN: i64 = 50_000;

/// Starts the rank, kills it `after` it has begun to save, and answers the last step that it said was saved.
fn kill_one(ranks: &Ranks, dir: &Path, after: Duration) -> anyhow::Result<u64> {
    let running = ranks.clone().env([(FOLDER, dir)]).start()?;
    running.wait_for_line(0, "saving", PROMPT)?;
    std::thread::sleep(after);
    running.kill(0)?;
    let report = running.wait_all(PROMPT)?;
    let output = report.ranks[0].stdout_text();
    assert!(!output.contains("panicked"), "{report}");
    Ok(output.lines().filter_map(|line| line.strip_prefix("saved ")?.parse().ok()).next_back().unwrap_or(0))
}

/// Moments spread evenly over 120 ms, in no order.
fn moments() -> impl Iterator<Item = Duration> {
    (0..KILLS).map(|turn| Duration::from_micros(turn * 61_803 % 120_000))
}

ranks_test!(
    whatever_the_moment_the_old_or_the_new_is_whole,
    1,
    {
        let (group, dir) = (ProcessGroup::from_env()?, std::env::var(FOLDER)?);
        let checkpoints = Checkpoints::new(&dir);
        let mut step = checkpoints.load_latest(&group)?.map_or(0, |loaded| whole_step(&loaded));
        println!("saving");
        loop {
            step += 1;
            checkpoints.save(&state_of(step, LEN), Mark::Latest, &group)?;
            println!("saved {step}");
        }
    },
    |ranks| {
        let dir = tempfile::tempdir()?;
        let (mut last, mut interrupted) = (0, 0);
        for moment in moments() {
            let output = kill_one(&ranks, dir.path(), moment)?.max(last);
            interrupted += usize::from(listing(dir.path()).iter().any(|name| name.starts_with(".tmp-")));
            let loaded = load(dir.path())?;
            let step = loaded.as_ref().map_or(0, whole_step);
            assert!(
                (output..=output + 1).contains(&step),
                "step {output} was said to be saved, {step} is there"
            );
            assert!(loaded.is_none_or(|loaded| loaded.refused.is_empty()), "nothing is left half done");
            last = step;
        }
        println!("{interrupted} of {KILLS} kills fell into a save; {last} saves");
        assert!(interrupted >= 10, "only {interrupted} kills of {KILLS} fell into a save");
    }
);

// The control: the same files, written in place.
ranks_test!(
    in_place_a_kill_does_damage,
    1,
    {
        let dir = std::env::var(FOLDER)?;
        let (beside, place) = (format!("{dir}/beside/latest"), format!("{dir}/in-place/step-00000001"));
        println!("saving");
        loop {
            for file in fs::read_dir(&beside)? {
                let file = file?;
                fs::copy(file.path(), format!("{place}/{}", file.file_name().display()))?;
            }
        }
    },
    |ranks| {
        let dir = tempfile::tempdir()?;
        let place = dir.path().join("in-place");
        for folder in ["beside", "in-place"] {
            let checkpoints = Checkpoints::new(dir.path().join(folder));
            alone(|group| checkpoints.save(&state_of(1, LEN), Mark::Latest, group).map(drop))?;
        }
        for moment in moments() {
            kill_one(&ranks, dir.path(), moment)?;
            if let Err(error) = load(&place) {
                println!("{error}");
                return Ok(());
            }
        }
        panic!("a hundred kills did no damage to a file that was written in place");
    }
);
