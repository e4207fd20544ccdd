//! A data set that changed under a run is an error with both, unless it is accepted.

use drumline::ProcessGroup;
use drumline::checkpoint::Checkpoints;
use drumline::data::{Dataset, Sample, SampleError};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use rank_test::ranks_test;
use tch::Device;
use tch::nn::VarStore;

use super::resuming::StopAt;
use super::{Net, Pair, data, sgd, shared_folder};

/// A data set with a fingerprint.
struct Printed<D>(D, u32);

impl<D: Dataset<Batch = Pair>> Dataset for Printed<D> {
    type Batch = Pair;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<Pair, SampleError> {
        self.0.batch(samples)
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(self.1)
    }
}

fn train(
    group: &ProcessGroup,
    path: &str,
    (len, print): (usize, u32),
    set: impl Fn(DistTrainer<'_, Net, Pair>) -> DistTrainer<'_, Net, Pair>,
) -> anyhow::Result<Result<u64, String>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = DistTrainer::new(group, &net, &store, Printed(data(len), print));
    let trainer = trainer.loss(CrossEntropy::default()).optimizer(sgd(&store)?).print_every(0);
    let trainer = set(trainer.batch_size_per_gpu(2).n_epochs(2).save_path(path).resume_from(path));
    Ok(trainer.train(LoadBestModel::No).map(|outcome| outcome.steps).map_err(|error| error.to_string()))
}

ranks_test!(it_is_refused_with_both_unless_it_is_accepted, 2, {
    let group = ProcessGroup::from_env()?;
    // In the middle of the first epoch of 4 steps, and at its end.
    for stop in [2, 4] {
        let (_temp, path) = shared_folder(&group)?;
        let first = train(&group, &path, (16, 7), |trainer| trainer.callback(StopAt(stop)))?;
        assert_eq!(first, Ok(stop));
        for (other, message) in [
            ((12, 7), "but this one has 12 samples with fingerprint 00000007"),
            ((16, 8), "but this one has 16 samples with fingerprint 00000008"),
        ] {
            let told_all = train(&group, &path, other, |trainer| trainer)?.unwrap_err();
            assert!(told_all.contains("of a data set of 16 samples with fingerprint 00000007"), "{told_all}");
            assert!(told_all.contains(message) && told_all.contains("; try the data "), "{told_all}");
        }
        group.barrier()?;
        assert_eq!(Checkpoints::new(&path).load_latest(&group)?.unwrap().state.step, stop, "nothing is lost");
        let accepted = train(&group, &path, (12, 8), |trainer| trainer.accept_new_data(true))?;
        // 3 steps an epoch: what is left of the first, and the second.
        assert_eq!(accepted, Ok(if stop == 2 { 6 } else { 7 }));
        group.barrier()?;
    }
});

ranks_test!(the_same_data_and_old_checkpoints_are_resumed, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    train(&group, &path, (16, 7), |trainer| trainer.callback(StopAt(2)))?.unwrap();
    // As one that was saved before positions knew their data.
    let checkpoints = Checkpoints::new(&path);
    let mut state = checkpoints.load_latest(&group)?.unwrap().state;
    assert!(state.sampler["data"].take().is_object());
    state.sampler.as_object_mut().unwrap().remove("data");
    checkpoints.save(&state, drumline::checkpoint::Mark::Latest, &group)?;
    assert_eq!(train(&group, &path, (16, 8), |trainer| trainer.callback(StopAt(3)))?, Ok(3));
    assert_eq!(train(&group, &path, (16, 8), |trainer| trainer)?, Ok(8), "control");
    group.barrier()?;
});
