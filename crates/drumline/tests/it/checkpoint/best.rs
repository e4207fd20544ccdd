//! The best checkpoint that is whole stays, and `best` names it.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use drumline::ProcessGroup;
use drumline::checkpoint::{BestSaved, Checkpoints, Loaded, Mark, RunState, Score};

use super::{alone, listing, state_of, whole_step};

fn place(place: usize) -> Mark {
    Mark::Place(NonZeroUsize::new(place).unwrap())
}

/// A state whose evaluation gave this accuracy.
fn scored(step: u64, value: f64) -> RunState {
    RunState { score: Some(Score { value, smaller_is_better: false }), ..state_of(step, 10) }
}

fn damage(dir: &Path, step: u64) {
    let file = dir.join(format!("step-{step:08}/model.safetensors"));
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Each link with the step that it names.
fn links(dir: &Path) -> Vec<(String, u64)> {
    let links = listing(dir).into_iter().filter_map(|name| {
        let to = fs::read_link(dir.join(&name)).ok()?;
        Some((name, to.to_str()?.strip_prefix("step-")?.parse().ok()?))
    });
    links.collect()
}

fn named(links: &[(&str, u64)]) -> Vec<(String, u64)> {
    links.iter().map(|(name, step)| ((*name).to_owned(), *step)).collect()
}

fn steps_left(loaded: &Loaded) -> Option<Vec<u64>> {
    loaded.best_left.as_ref().map(|left| left.iter().map(|best| best.step).collect())
}

/// Saves 14 (20.0), 21 (the best, 21.0) and 28 (18.0), of which all are kept.
fn three(dir: &Path, group: &ProcessGroup) -> Checkpoints {
    let checkpoints = Checkpoints::new(dir).keep_last(NonZeroUsize::new(3).unwrap());
    checkpoints.save(&scored(14, 20.0), place(1), group).unwrap();
    checkpoints.save(&scored(21, 21.0), place(1), group).unwrap();
    checkpoints.save(&scored(28, 18.0), Mark::Latest, group).unwrap();
    checkpoints
}

#[test]
fn a_damaged_best_is_replaced_by_the_next_best_which_stays() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        three(dir.path(), group);
        damage(dir.path(), 21);
        let checkpoints = Checkpoints::new(dir.path());
        let loaded = checkpoints.load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), loaded.refused.len()), (28, 0));
        let Some([BestSaved { step: 14, score: Some(score), .. }]) = loaded.best_left.as_deref() else {
            panic!("{:?}", loaded.best_left)
        };
        assert_eq!(score.value, 20.0);
        assert_eq!(links(dir.path()), named(&[("best", 14), ("latest", 28)]));
        for step in [35, 42, 49] {
            checkpoints.save(&scored(step, 1.0), Mark::Latest, group).unwrap();
        }
        assert_eq!(whole_step(&checkpoints.load_best(group).unwrap().unwrap()), 14);
        let kept = ["bad-step-00000021", "best", "latest", "step-00000014", "step-00000042", "step-00000049"];
        assert_eq!(listing(dir.path()), kept);
        // The control: nothing is changed where nothing is damaged.
        let loaded = checkpoints.load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), steps_left(&loaded)), (49, None));
        assert_eq!(listing(dir.path()), kept);
    });
}

#[test]
fn the_latest_that_was_the_best_is_replaced_in_both_places() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        checkpoints.save(&scored(21, 18.0), place(1), group).unwrap();
        checkpoints.save(&scored(28, 21.0), place(1), group).unwrap();
        damage(dir.path(), 28);
        let loaded = Checkpoints::new(dir.path()).load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), steps_left(&loaded)), (21, Some(vec![21])));
        assert_eq!(links(dir.path()), named(&[("best", 21), ("latest", 21)]));
    });
}

#[test]
fn a_smaller_loss_is_the_better_one_and_of_several_the_others_move_up() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path()).keep_best(NonZeroUsize::new(2).unwrap());
        let checkpoints = checkpoints.keep_last(NonZeroUsize::new(5).unwrap());
        let losses = [(1, 0.5, place(1)), (2, 0.3, place(1)), (3, 0.2, place(1)), (4, 0.4, Mark::Latest)];
        for (step, value, mark) in losses {
            let state =
                RunState { score: Some(Score { value, smaller_is_better: true }), ..state_of(step, 10) };
            checkpoints.save(&state, mark, group).unwrap();
        }
        assert_eq!(links(dir.path()), named(&[("best", 3), ("best-2", 2), ("latest", 4)]), "control");
        damage(dir.path(), 3);
        let loaded = Checkpoints::new(dir.path()).load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), steps_left(&loaded)), (4, Some(vec![2, 4])));
        assert_eq!(links(dir.path()), named(&[("best", 2), ("best-2", 4), ("latest", 4)]));
    });
}

#[test]
fn where_none_was_evaluated_there_is_no_best() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        checkpoints.save(&state_of(1, 10), Mark::Best, group).unwrap();
        checkpoints.save(&state_of(2, 10), Mark::Latest, group).unwrap();
        damage(dir.path(), 1);
        let loaded = Checkpoints::new(dir.path()).load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), steps_left(&loaded)), (2, Some(vec![])));
        assert_eq!(links(dir.path()), named(&[("latest", 2)]));
        assert!(checkpoints.load_best(group).unwrap().is_none());
    });
}

#[test]
fn a_save_that_was_cut_short_before_its_link_is_completed() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let checkpoints = three(dir.path(), group);
        checkpoints.save(&scored(35, 22.0), place(1), group).unwrap();
        // As a kill between `latest` and `best` leaves it.
        fs::remove_file(dir.path().join("best")).unwrap();
        std::os::unix::fs::symlink("step-00000021", dir.path().join("best")).unwrap();
        let loaded = Checkpoints::new(dir.path()).load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), steps_left(&loaded)), (35, None));
        assert_eq!(links(dir.path())[0], ("best".to_owned(), 35));
    });
}

#[test]
fn the_file_of_the_best_weights_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(dir.path()).read_only();
    let file = || checkpoints.model_file().map(|file| file.unwrap());
    assert!(checkpoints.model_file().unwrap().is_none());
    let with_best = |step, value, best| RunState { best: Some(best), ..scored(step, value) };
    alone(|group| {
        let owner = Checkpoints::new(dir.path());
        owner.save(&with_best(1, 5.0, 5.0), place(1), group).unwrap();
        owner.save(&with_best(2, 3.0, 5.0), Mark::Latest, group).unwrap();
    });
    assert!(file().unwrap().ends_with("step-00000001/model.safetensors"));
    // That of a run before is not this run's.
    alone(|group| Checkpoints::new(dir.path()).save(&state_of(3, 10), Mark::Latest, group).map(drop))
        .unwrap();
    assert!(file().unwrap().ends_with("step-00000003/model.safetensors"));
    damage(dir.path(), 3);
    let before = listing(dir.path());
    assert!(file().unwrap().ends_with("step-00000001/model.safetensors"), "of the run of step 2");
    damage(dir.path(), 1);
    let message = file().unwrap_err().to_string();
    assert!(message.contains("step-00000001 cannot be used: model.safetensors is damaged"), "{message}");
    assert_eq!(listing(dir.path()), before);
}

#[test]
fn a_best_that_was_lost_at_an_earlier_start_does_not_count_later() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let best = |state: RunState, best| RunState { best: Some(best), ..state };
        let checkpoints = Checkpoints::new(dir.path()).keep_last(NonZeroUsize::new(3).unwrap());
        checkpoints.save(&best(scored(14, 20.0), 20.0), place(1), group).unwrap();
        checkpoints.save(&best(scored(21, 21.0), 21.0), place(1), group).unwrap();
        checkpoints.save(&best(scored(28, 18.0), 21.0), Mark::Latest, group).unwrap();
        let start = || steps_left(&Checkpoints::new(dir.path()).load_latest(group).unwrap().unwrap());
        assert_eq!(start(), None, "the control: nothing is damaged");
        damage(dir.path(), 21);
        assert_eq!(start(), Some(vec![14]));
        // Nothing was saved since, so that the latest checkpoint still names the lost one.
        assert_eq!(start(), Some(vec![14]));
        checkpoints.save(&best(scored(35, 1.0), 20.0), Mark::Latest, group).unwrap();
        assert_eq!(start(), None, "what is saved now is right");
    });
}
