//! Checkpoints of format 1 are read, resumed from to the bit, and stand beside those of format 2 in one folder.
//!
//! The folders under `tests/data/format-1` were written by the last program that wrote format 1, with the functions
//! here.

use std::path::{Path, PathBuf};
use std::process::Command;

use drumline::checkpoint::{Checkpoints, Mark, Region, RngState, RunState, Score, Section, ShardReader};
use drumline::comm::LocalGroup;
use drumline::metrics::TopK;
use drumline::optim::{Adam, parameters};
use drumline::trainer::{CrossEntropy, DistTrainer, EarlyStop, LoadBestModel};
use drumline::{Accelerator, DdpOptions, ProcessGroup};
use drumline_torch::{Named, bytes};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::super::trainer::{
    FOLDER, Net, Pair, collate, data, difference, folder, same_on_all_ranks, sample, sgd, shared_folder,
    weights,
};
use super::{alone, listing};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/format-1").join(name)
}

fn filled(name: &str, shape: &[i64], kind: Kind, from: u64) -> Named {
    let len: i64 = shape.iter().product();
    let values = Tensor::arange(len, (Kind::Double, Device::Cpu)) * 0.37 + from as f64;
    Named { name: name.into(), tensor: values.to_kind(kind).view(shape) }
}

/// What a rank has saved by a step.
fn state_of(step: u64, rank: usize) -> RunState {
    let model = vec![
        filled("fc.weight", &[3, 4], Kind::Float, step),
        filled("fc.bias", &[3], Kind::BFloat16, step + 1),
        filled("bn.num_batches_tracked", &[], Kind::Int64, step),
        filled("nothing", &[0, 2], Kind::Half, step),
    ];
    let mut state = RunState::new(model).unwrap();
    state.trained = vec![filled("fc.weight", &[3, 4], Kind::Float, step + 2)];
    state.optimizer.kind = "adamw".into();
    state.optimizer.scalars = [("lr".to_owned(), 0.1 + 0.2), ("eps".to_owned(), f64::INFINITY)].into();
    state.optimizer.tensors = vec![
        filled("fc.weight.exp_avg", &[3, 4], Kind::Float, step + 3),
        filled("fc.weight.step", &[], Kind::Float, step),
    ];
    (state.step, state.epoch) = (step, step + 10);
    state.sampler = serde_json::json!({ "epoch": step + 10, "samples_seen": 24, "seed": 7 });
    state.schedule = serde_json::json!({ "factor": 0.1 + 0.7 });
    state.scaler = serde_json::json!({ "scale": 65536.0 });
    state.config = serde_json::json!({ "MODEL": { "ARCH": "resnet18" } });
    (state.best, state.loss) = (Some(0.9), Some(0.1 * step as f64));
    state.score = Some(Score { value: 1.0 - 0.1 * step as f64, smaller_is_better: false });
    state.rng = RngState::seeded(rank as u64 + 1).unwrap();
    state
}

/// What format 1 did not name is where it was, and under its name.
#[track_caller]
fn assert_same(found: &RunState, expected: &RunState) {
    let lists =
        |state: &RunState| [state.model.clone(), state.trained.clone(), state.optimizer.tensors.clone()];
    for (found, expected) in lists(found).iter().zip(lists(expected)) {
        assert_eq!(found.len(), expected.len());
        for Named { name, tensor } in &expected {
            let found = &found.iter().find(|found| found.name == *name).unwrap().tensor;
            assert_eq!((found.kind(), found.size()), (tensor.kind(), tensor.size()), "{name}");
            assert_eq!(bytes(found).unwrap(), bytes(tensor).unwrap(), "{name}");
        }
    }
    assert_eq!(
        (found.step, found.epoch, found.best, found.score),
        (expected.step, expected.epoch, expected.best, expected.score)
    );
    assert_eq!(
        (found.loss, &found.rng, &found.optimizer.kind),
        (expected.loss, &expected.rng, &expected.optimizer.kind)
    );
    assert_eq!(found.optimizer.scalars, expected.optimizer.scalars);
    assert_eq!(
        (&found.sampler, &found.scaler, &found.config),
        (&expected.sampler, &expected.scaler, &expected.config)
    );
    assert_eq!((&found.schedule, &found.trainer), (&expected.schedule, &expected.schedule));
}

/// A folder to change.
fn copied(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-a").arg(golden(name).join(".")).arg(dir.path()).status().unwrap();
    assert!(copied.success());
    dir
}

#[test]
fn all_of_it_comes_back_to_the_bit_on_any_number_of_ranks() {
    for num_ranks in 1..4 {
        LocalGroup::run(num_ranks, |group| {
            let checkpoints = Checkpoints::new(golden("state")).read_only();
            let latest = checkpoints.load_latest(&group).unwrap().unwrap();
            assert_eq!((latest.world_size, latest.has_new_rng), (2, group.rank() > 1));
            if group.rank() < 2 {
                assert_same(&latest.state, &state_of(2, group.rank()));
            }
            let best = checkpoints.load_best(&group).unwrap().unwrap();
            assert_eq!(best.state.step, 1);
            Ok(())
        })
        .unwrap();
    }
    let file = Checkpoints::new(golden("state")).read_only().model_file().unwrap().unwrap();
    assert!(file.ends_with("step-00000001/model.safetensors"), "{}", file.display());
}

#[test]
fn regions_of_its_tensors_are_read() {
    let reader = ShardReader::open_section(&golden("state").join("latest"), Section::Model).unwrap();
    let found = reader.read("fc.weight", &Region::new(&[1, 0], &[1, 4], &[3, 4]).unwrap()).unwrap();
    assert_eq!(found, filled("fc.weight", &[3, 4], Kind::Float, 2).tensor.narrow(0, 1, 1));
    assert_eq!(reader.num_bytes_read(), 16);
}

#[test]
fn both_formats_are_in_one_folder() {
    let dir = copied("state");
    let checkpoints = Checkpoints::new(dir.path());
    alone(|group| {
        let mut state = state_of(3, 0);
        state.trainer = state.schedule.clone();
        checkpoints.save(&state, Mark::Latest, group).unwrap();
        let latest = checkpoints.load_latest(group).unwrap().unwrap();
        assert_same(&latest.state, &state);
        assert_eq!(checkpoints.load_best(group).unwrap().unwrap().state.step, 1);
    });
    let version = |step: &str| {
        let text = std::fs::read(dir.path().join(step).join("manifest.json")).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap()["format_version"].clone()
    };
    assert_eq!([version("step-00000001"), version("step-00000002"), version("step-00000003")], [1, 1, 2]);
    // If the new one is damaged, the old one is used, and the next save is in the new format.
    std::fs::write(dir.path().join("step-00000003/model.safetensors"), "").unwrap();
    alone(|group| {
        let found = checkpoints.load_latest(group).unwrap().unwrap();
        assert_eq!((found.state.step, found.refused.len()), (2, 1));
        checkpoints.save(&state_of(3, 0), Mark::Latest, group).unwrap();
        assert_eq!(checkpoints.load_latest(group).unwrap().unwrap().state.step, 3);
    });
    let kept = ["bad-step-00000003", "best", "latest", "step-00000001", "step-00000002", "step-00000003"];
    assert_eq!(listing(dir.path()), kept);
}

#[test]
fn a_changed_byte_anywhere_in_it_is_noticed() {
    for file in ["manifest.json", "model.safetensors", "trained.safetensors", "optimizer.safetensors"] {
        let dir = copied("state");
        let path = dir.path().join("step-00000002").join(file);
        let bytes = std::fs::read(&path).unwrap();
        alone(|group| {
            for place in (0..bytes.len()).step_by(7) {
                let mut changed = bytes.clone();
                changed[place] ^= 4;
                std::fs::write(&path, changed).unwrap();
                let found = Checkpoints::new(dir.path()).read_only().load_latest(group).unwrap().unwrap();
                assert_eq!(found.state.step, 1, "byte {place} of {file}");
            }
        });
    }
}

/// Trains three epochs of four steps.
fn trainer<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let trainer = DistTrainer::new(group, net, store, data(30)).dev_data(data(7)).metric("acc", TopK::new(1));
    let trainer = trainer.loss(CrossEntropy::default()).optimizer(sgd(store)?).print_every(0);
    Ok(trainer.batch_size_per_gpu(2).update_every(2).n_epochs(3).callback(EarlyStop::patience(9)))
}

/// Trains to the end, from what a folder has, and with the weights then.
fn trained(group: &ProcessGroup, from: Option<&Path>) -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(group, &net, &store)?;
    let outcome = match from {
        Some(from) => trainer.resume_from(from).train(LoadBestModel::No)?,
        None => trainer.train(LoadBestModel::No)?,
    };
    assert_eq!(outcome.steps, 12);
    same_on_all_ranks(group, &store)?;
    Ok(weights(&store))
}

ranks_test!(a_training_resumes_with_the_bits_that_format_2_gives, 2, {
    let group = ProcessGroup::from_env()?;
    let old = golden("trainer");
    let found = Checkpoints::new(&old).read_only().load_latest(&group)?.unwrap();
    assert_eq!((found.state.step, found.state.epoch), (6, 1));
    let (_temp, new) = shared_folder(&group)?;
    Checkpoints::new(&new).save(&found.state, Mark::Latest, &group)?;
    let resumed = trained(&group, Some(&old))?;
    assert_eq!(difference(&resumed, &trained(&group, Some(Path::new(&new)))?), 0.0);
    // The folder's weights are of another machine, whose last bits may differ.
    assert!(difference(&resumed, &trained(&group, None)?) < 1e-6);
    group.barrier()?;
});

/// Two models with an optimizer each, trained for so many steps from what is saved, if anything is; their weights then.
fn two_models(group: &ProcessGroup, dir: &Path, steps: usize) -> anyhow::Result<Vec<Tensor>> {
    let accelerator = Accelerator::builder().group(group).cpu().build()?;
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let model = |store| accelerator.prepare_model(Net::new(store), store, DdpOptions::default());
    let models = [model(&stores[0])?, model(&stores[1])?];
    let adam = Adam::new(parameters(&stores[1]), Default::default())?;
    let (mut sgd, mut adam) =
        (accelerator.prepare_optimizer(sgd(&stores[0])?), accelerator.prepare_optimizer(adam));
    let done = accelerator.load_state(dir)?.map_or(0, |from| from.step);
    assert_eq!((sgd.steps(), adam.steps()), (done, done));
    for index in done as usize..done as usize + steps {
        let (x, y) = collate(vec![sample(index * 2 + group.rank())]).unwrap();
        for model in &models {
            model.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        }
        sgd.step()?;
        adam.step()?;
        sgd.zero_grad()?;
        adam.zero_grad()?;
    }
    accelerator.save_state(dir)?;
    Ok(stores.iter().flat_map(weights).collect())
}

ranks_test!(
    a_loop_resumes_with_the_bits_that_format_2_gives,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let (old, new) = (folder()?.join("old"), folder()?.join("new"));
        let found = Checkpoints::new(&old).read_only().load_latest(&group)?.unwrap();
        assert_eq!((found.state.step, found.state.optimizer.kind.as_str()), (3, "sgd+adam"));
        Checkpoints::new(&new).save(&found.state, Mark::Latest, &group)?;
        let resumed = two_models(&group, &old, 3)?;
        assert_eq!(difference(&resumed, &two_models(&group, &new, 3)?), 0.0);
        let straight = two_models(&group, &folder()?.join("straight"), 6)?;
        assert!(difference(&resumed, &straight) < 1e-6);
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        std::fs::rename(copied("accelerator").keep(), folder.path().join("old"))?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);
