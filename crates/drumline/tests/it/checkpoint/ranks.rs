//! Saved by two ranks, loaded by one, two and three; errors that all ranks learn of.

use std::path::PathBuf;

use drumline::ProcessGroup;
use drumline::checkpoint::{Checkpoints, Mark, RngState, restore};
use rank_test::ranks_test;
use tch::{Device, Kind, Tensor};

use super::{listing, state_of, whole_step};

const FOLDER: &str = "DRUMLINE_TEST_FOLDER";
const ROLE: &str = "DRUMLINE_TEST_ROLE";

/// Only rank 0 has the folder, as on nodes without a shared disk.
fn folder(group: &ProcessGroup) -> anyhow::Result<PathBuf> {
    match group.rank() {
        0 => Ok(std::env::var(FOLDER)?.into()),
        _ => Ok("/nonexistent/elsewhere".into()),
    }
}

fn draw() -> Vec<f64> {
    Vec::try_from(Tensor::rand([4], (Kind::Double, Device::Cpu))).unwrap()
}

/// Saves, and prints the random numbers that follow.
fn save(group: &ProcessGroup) -> anyhow::Result<()> {
    tch::manual_seed(100 + group.rank() as i64);
    draw();
    let mut state = state_of(5, 1000);
    state.rng = RngState::capture()?;
    // What the other ranks have is not written.
    if group.rank() != 0 {
        let _ = state.model[0].tensor.shallow_clone().fill_(-1.0);
    }
    let saved = Checkpoints::new(folder(group)?).save(&state, Mark::Best, group)?;
    assert!(saved.path.ends_with("step-00000005"));
    println!("next {:?}", draw());
    Ok(())
}

/// Loads, and prints the random numbers that follow.
fn load(group: &ProcessGroup) -> anyhow::Result<()> {
    let checkpoints = Checkpoints::new(folder(group)?);
    let loaded = checkpoints.load_latest(group)?.unwrap();
    assert_eq!((whole_step(&loaded), loaded.world_size), (5, 2));
    assert_eq!(loaded.has_new_rng, group.rank() >= 2);
    let model = state_of(0, 1000).model;
    restore(&model, &loaded.state.model)?;
    assert_eq!(model[0].tensor.mean(Kind::Float).double_value(&[]), 5.0);
    loaded.state.rng.restore()?;
    println!("next {:?}", draw());
    assert_eq!(whole_step(&checkpoints.load_best(group)?.unwrap()), 5);
    Ok(())
}

ranks_test!(
    two_ranks_save_and_any_number_loads,
    2,
    {
        let group = ProcessGroup::from_env()?;
        match std::env::var(ROLE)?.as_str() {
            "save" => save(&group)?,
            _ => load(&group)?,
        }
    },
    |ranks| {
        let dir = tempfile::tempdir()?;
        let ranks = ranks.env([(FOLDER, dir.path())]);
        let next = |nproc: usize, role: &str| -> anyhow::Result<Vec<String>> {
            let report = ranks.clone().nproc(nproc).env([(ROLE, role)]).pass()?;
            let line = |text: &str| text.lines().find(|line| line.starts_with("next ")).map(str::to_owned);
            Ok(report.ranks.iter().filter_map(|rank| line(&rank.stdout_text())).collect())
        };
        let saved = next(2, "save")?;
        assert_ne!(saved[0], saved[1]);
        assert_eq!(next(1, "load")?, saved[..1]);
        assert_eq!(next(2, "load")?, saved);
        let three = next(3, "load")?;
        assert_eq!(three[..2], saved);
        assert!(!saved.contains(&three[2]));
        assert_eq!(next(3, "load")?, three, "new random numbers are the same each time");
    }
);

ranks_test!(a_failed_save_is_reported_on_all_ranks_and_the_job_continues, 2, {
    let group = ProcessGroup::from_env()?;
    let dir = tempfile::tempdir()?;
    let state = state_of(3, 10);
    let bad = Checkpoints::new("/dev/null/below").save(&state, Mark::Latest, &group).unwrap_err().to_string();
    let output = match group.rank() {
        0 => bad.clone(),
        _ => bad.strip_prefix("on rank 0: ").unwrap().to_owned(),
    };
    assert!(output.starts_with("cannot save a checkpoint: /dev/null/below: "), "{bad}");
    Checkpoints::new(dir.path()).save(&state, Mark::Latest, &group)?;
    // Rank 0's folder has it; the other rank's was not touched.
    assert_eq!(listing(dir.path()).is_empty(), group.rank() != 0);
});

ranks_test!(ranks_at_different_steps_are_named, 2, {
    let group = ProcessGroup::from_env()?;
    let dir = tempfile::tempdir()?;
    let state = state_of(group.rank() as u64, 10);
    let error = Checkpoints::new(dir.path()).save(&state, Mark::Latest, &group).unwrap_err().to_string();
    assert!(error.contains("\n  step: 0 on rank 0, 1 on rank 1\n"), "{error}");
    assert!(listing(dir.path()).is_empty());
    group.barrier()?;
});
