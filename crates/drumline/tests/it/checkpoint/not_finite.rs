//! Whatever a run saves after it has gone to NaN, the last checkpoint that was finite stays.

use drumline::checkpoint::{Checkpoints, Mark, RunState};
use tch::Tensor;

use super::{alone, listing, load, state_of};

fn with_nan_weights(step: u64) -> RunState {
    let mut state = state_of(step, 10);
    state.model[0].tensor = Tensor::from_slice(&[1.0f32, f32::NAN]);
    state
}

fn with_nan_loss(step: u64) -> RunState {
    RunState { loss: Some(f64::NAN), ..state_of(step, 10) }
}

#[test]
fn the_last_finite_one_stays() {
    for broken in [with_nan_loss, with_nan_weights] {
        let dir = tempfile::tempdir().unwrap();
        let steps = || {
            let steps =
                listing(dir.path()).into_iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok());
            steps.collect::<Vec<u64>>()
        };
        alone(|group| {
            let save =
                |state: &RunState| Checkpoints::new(dir.path()).save(state, Mark::Latest, group).unwrap();
            save(&state_of(1, 10));
            save(&state_of(2, 10));
            (3..7).for_each(|step| drop(save(&broken(step))));
            assert_eq!(steps(), [2, 5, 6]);
            // The control: a run that is well again needs it no longer.
            (7..9).for_each(|step| drop(save(&state_of(step, 10))));
            assert_eq!(steps(), [7, 8]);
        });
    }
}

#[test]
fn one_that_is_not_finite_is_loaded_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let log = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        checkpoints.save(&RunState { loss: Some(0.5), ..state_of(1, 10) }, Mark::Latest, group).unwrap();
        checkpoints.save(&with_nan_loss(2), Mark::Latest, group).unwrap();
        let log = log.clone();
        let checkpoints = checkpoints.on_warning(move |line| log.lock().unwrap().push_str(line));
        assert_eq!(checkpoints.load_latest(group).unwrap().unwrap().state.step, 2);
    });
    let log = log.lock().unwrap();
    assert!(log.contains("step-00000002 was saved with a loss or weights that are NaN or infinite"), "{log}");
    assert!(log.contains("try step-00000001, the last with finite ones"), "{log}");
    std::fs::remove_dir_all(dir.path().join("step-00000002")).unwrap();
    assert_eq!(load(dir.path()).unwrap().unwrap().state.loss, Some(0.5));
}
