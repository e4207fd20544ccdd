//! ZeRO in the trainer: the losses and weights of replicas, and checkpoints that any other number of ranks and any other
//! stage resumes from.

use std::path::Path;

use drumline::checkpoint::{Checkpoints, RunState};
use drumline::comm::LocalGroup;
use drumline::engine::{Accumulation, DdpOptions, EngineOptions, ShardOptions, Stage};
use drumline::metrics::TopK;
use drumline::optim::{
    Adafactor, AdamOptions, AdamW, DynamicScale, Lamb, Lion, Moments, Named, ScalePolicy, parameters,
};
use drumline::trainer::{
    Checkpoint, CrossEntropy, DistTrainer, Every, LoadBestModel, MovingAverage, Precision,
};
use drumline::{ProcessGroup, trainer::TrainOutcome};
use rank_test::{Ranks, ranks_test};
use tch::Device;
use tch::nn::VarStore;

use super::{FOLDER, Net, Pair, data, difference, folder, same_on_all_ranks, shared_folder, weights};

/// How a training is divided; `None` for replicas.
type Sharding = Option<ShardOptions>;

fn stage(stage: Stage) -> Sharding {
    Some(ShardOptions::new(stage))
}

fn hybrid(stage: Stage) -> Sharding {
    Some(ShardOptions { shard: Some(2), ..ShardOptions::new(stage) })
}

fn options(sharding: Sharding) -> Box<dyn EngineOptions> {
    sharding.map_or_else(|| DdpOptions::default().into(), Into::into)
}

fn adam<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let trainer = DistTrainer::new(group, net, store, data(31));
    let (all, adam) = (parameters(store), AdamOptions { lr: 0.02, ..Default::default() });
    let trainer = match std::env::var(OPTIMIZER).as_deref() {
        Ok("adafactor") => trainer.optimizer(Adafactor::new(all, Default::default())?),
        Ok("lamb") => trainer.optimizer(Lamb::new(all, Default::default())?),
        Ok("lion") => trainer.optimizer(Lion::new(all, Default::default())?),
        Ok("bf16") => {
            let moments = Moments::Bf16 { seed: 1 };
            trainer.optimizer(AdamW::new(all, AdamOptions { moments, ..adam })?)
        }
        Ok("8bit") => trainer.optimizer(AdamW::new(all, AdamOptions { moments: Moments::EightBit, ..adam })?),
        _ => trainer.optimizer(AdamW::new(all, adam)?),
    };
    Ok(trainer
        .loss(CrossEntropy::default())
        .print_every(0)
        .batch_size_per_gpu(2)
        .dev_data(data(9))
        .metric("acc", TopK::new(1))
        .n_epochs(2))
}

type Change = for<'a> fn(DistTrainer<'a, Net, Pair>) -> DistTrainer<'a, Net, Pair>;

fn trained(
    group: &ProcessGroup,
    sharding: Sharding,
    change: Change,
) -> anyhow::Result<(TrainOutcome, VarStore)> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let outcome = change(adam(group, &net, &store)?).engine(options(sharding)).train(LoadBestModel::Yes)?;
    same_on_all_ranks(group, &store)?;
    Ok((outcome, store))
}

const CHANGES: [(&str, Change); 4] = [
    ("plain", |trainer| trainer),
    ("clipped windows", |trainer| trainer.update_every(2).clip_norm(0.1)),
    ("an average", |trainer| trainer.callback(MovingAverage::ema(0.9))),
    ("uneven, all", |trainer| trainer.batch_size_per_gpu(3).update_every(3)),
];

fn stages_train_as_replicas() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    for (name, change) in CHANGES {
        let (expected, replicas) = trained(&group, None, change)?;
        for sharding in [stage(Stage::Zero1), stage(Stage::Zero2), stage(Stage::Zero3)] {
            let what = format!("{name}: {sharding:?}");
            let (outcome, store) = trained(&group, sharding, change)?;
            let difference = difference(&weights(&store), &weights(&replicas));
            assert!(difference <= 1e-6, "{what}: {difference}");
            assert_eq!((outcome.steps, outcome.best_step), (expected.steps, expected.best_step), "{what}");
        }
    }
    let all = ShardOptions { accumulation: Some(Accumulation::All), ..ShardOptions::new(Stage::Zero3) };
    let (_, replicas) = trained(&group, None, CHANGES[1].1)?;
    let (_, store) = trained(&group, Some(all), CHANGES[1].1)?;
    assert!(difference(&weights(&store), &weights(&replicas)) <= 1e-6);
    Ok(())
}

ranks_test!(stages_train_as_replicas_on_two_ranks, 2, { stages_train_as_replicas()? });
ranks_test!(stages_train_as_replicas_on_three_ranks, 3, { stages_train_as_replicas()? });

const FROM: &str = "DRUMLINE_TEST_FROM";
const HOW: &str = "DRUMLINE_TEST_HOW";
const STEPS: &str = "DRUMLINE_TEST_STEPS";
const OPTIMIZER: &str = "DRUMLINE_TEST_OPTIMIZER";
const IN_FP16: &str = "DRUMLINE_TEST_FP16";

/// A scale at which the first steps overflow.
const HIGH: ScalePolicy = ScalePolicy::Dynamic(DynamicScale {
    init_scale: 4_194_304.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 3,
});

/// Resumes from a folder, makes steps up to a number, and saves to another folder.
fn one_part() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let sharding = match std::env::var(HOW)?.as_str() {
        "ddp" => None,
        "hybrid" => hybrid(Stage::Zero3),
        number => stage(number.parse()?),
    };
    let store = VarStore::new(Device::Cpu);
    let is_large = std::env::var(OPTIMIZER).as_deref() == Ok("8bit");
    let net = if is_large { Net::with_large(&store) } else { Net::new(&store) };
    // Other random numbers in each part and on each rank, unless it resumes.
    tch::manual_seed((group.size() * 10 + group.rank()) as i64);
    let trainer =
        adam(&group, &net, &store)?.engine(options(sharding)).max_steps(std::env::var(STEPS)?.parse()?);
    let is_in_fp16 = std::env::var_os(IN_FP16).is_some();
    let trainer = if is_in_fp16 { trainer.precision(Precision::Fp16).loss_scale(HIGH) } else { trainer };
    let trainer = trainer.callback(Checkpoint::every(Every::Steps(2))).save_path(folder()?).n_epochs(9);
    trainer.resume_from(std::env::var(FROM)?).train(LoadBestModel::No)?;
    same_on_all_ranks(&group, &store)
}

/// Runs one part, and returns all that was saved of the model and the optimizer.
fn run(ranks: &Ranks, part: Part<'_>) -> anyhow::Result<Vec<(String, Vec<f32>)>> {
    let Part { how, num_ranks, from, to, steps } = part;
    let steps = steps.to_string();
    let pairs = [(FROM, from.to_str().unwrap()), (FOLDER, to.to_str().unwrap()), (HOW, how), (STEPS, &steps)];
    ranks.clone().nproc(num_ranks).env(pairs).pass()?;
    Ok(saved(to))
}

#[derive(Clone, Copy)]
struct Part<'a> {
    how: &'a str,
    num_ranks: usize,
    from: &'a Path,
    to: &'a Path,
    steps: u64,
}

/// The latest checkpoint, as a single rank loads it.
fn latest(folder: &Path) -> RunState {
    let loaded = LocalGroup::run(1, |group| {
        let found = Checkpoints::new(folder).read_only().load_latest(&group);
        Ok(found.unwrap().expect("a checkpoint was saved").state)
    });
    loaded.unwrap().remove(0)
}

/// The tensors of the latest checkpoint.
fn saved(folder: &Path) -> Vec<(String, Vec<f32>)> {
    let state = latest(folder);
    let tensors = state.model.iter().chain(&state.optimizer.tensors);
    let values = |named: &Named| {
        let tensor = named.tensor.to_kind(tch::Kind::Float).flatten(0, -1);
        (named.name.clone(), Vec::try_from(tensor).unwrap())
    };
    let mut tensors: Vec<_> = tensors.map(values).collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors
}

ranks_test!(checkpoints_are_the_same_bits_in_any_stage_on_any_ranks, 1, { one_part()? }, |ranks| {
    let temp = tempfile::tempdir()?;
    let folder = |number: usize| temp.path().join(number.to_string());
    let (first, begin) = (folder(0), folder(99));
    let part = Part { how: "ddp", num_ranks: 2, from: &begin, to: &first, steps: 3 };
    let expected = run(&ranks, part)?;
    assert!(expected.iter().any(|(name, _)| name == "first.weight.exp_avg_sq"), "Adam's moments are saved");
    let chain = [("1", 3), ("3", 2), ("hybrid", 4), ("2", 1), ("3", 3), ("ddp", 3), ("2", 4), ("ddp", 1)];
    for (index, (how, num_ranks)) in chain.into_iter().enumerate() {
        let (from, to) = (folder(index), folder(index + 1));
        // No step is left, so that it saves what it has loaded.
        let converted = run(&ranks, Part { how, num_ranks, from: &from, to: &to, steps: 3 })?;
        assert!(converted == expected, "{how} on {num_ranks} ranks");
        let shards = std::fs::read_dir(to.join("latest"))?.count();
        assert_eq!(
            shards > 4,
            !["ddp"].contains(&how) && num_ranks > 1,
            "each rank writes its own files: {how}"
        );
    }
    // The control: one more step, in which all tensors change, and which all make alike.
    let one_more = |how, num_ranks, number| {
        run(&ranks, Part { how, num_ranks, from: &first, to: &folder(number), steps: 4 })
    };
    let expected_next = one_more("ddp", 2, 50)?;
    assert!(expected_next != expected);
    for (number, how) in ["1", "2", "3"].into_iter().enumerate() {
        for ((name, ours), (_, theirs)) in one_more(how, 2, 60 + number)?.iter().zip(&expected_next) {
            let furthest = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-6, "{how}: {name} differs by {furthest}");
        }
    }
});

ranks_test!(states_of_all_optimizers_are_the_same_bits_on_any_ranks, 1, { one_part()? }, |ranks| {
    for (optimizer, slot) in [
        ("adafactor", "first.weight.col_var"),
        ("8bit", "large.exp_avg_sq_absmax"),
        ("bf16", "first.weight.exp_avg"),
        ("lamb", "first.weight.exp_avg"),
        ("lion", "first.weight.exp_avg"),
    ] {
        let ranks = ranks.clone().env([(OPTIMIZER, optimizer)]);
        let temp = tempfile::tempdir()?;
        let folder = |number: usize| temp.path().join(number.to_string());
        let (first, begin) = (folder(0), folder(99));
        let part = Part { how: "2", num_ranks: 3, from: &begin, to: &first, steps: 3 };
        let expected = run(&ranks, part)?;
        assert!(expected.iter().any(|(name, _)| name == slot), "{optimizer}: {slot} is saved");
        for (index, (how, num_ranks)) in [("3", 2), ("ddp", 1), ("1", 4)].into_iter().enumerate() {
            let (from, to) = (folder(index), folder(index + 1));
            let converted = run(&ranks, Part { how, num_ranks, from: &from, to: &to, steps: 3 })?;
            assert!(converted == expected, "{optimizer}: stage {how} on {num_ranks} ranks");
        }
        // The control: one more step changes the state.
        let next = run(&ranks, Part { how: "2", num_ranks: 3, from: &first, to: &folder(50), steps: 4 })?;
        assert!(next != expected, "{optimizer}");
    }
});

/// What a checkpoint has beside tensors: the scaler, the position in the data, and rank 0's random numbers.
fn beside_tensors(folder: &Path) -> [String; 3] {
    let RunState { scaler, sampler, rng, .. } = latest(folder);
    [scaler.to_string(), sampler.to_string(), format!("{:?}", rng.cpu)]
}

ranks_test!(scaler_position_and_random_numbers_go_through_any_stage_and_ranks, 1, { one_part()? }, |ranks| {
    let (temp, ranks) = (tempfile::tempdir()?, ranks.env([(IN_FP16, "1")]));
    let folder = |name: &str| temp.path().join(name);
    let part = |how: &str, num_ranks: usize, from: &str, to: &str, steps: u64| {
        run(&ranks, Part { how, num_ranks, from: &folder(from), to: &folder(to), steps })
    };
    let uninterrupted = part("ddp", 2, "nothing", "whole", 6)?;
    let first = part("ddp", 2, "nothing", "first", 3)?;
    let [first_scaler, ..] = beside_tensors(&folder("first"));
    assert!(first_scaler != beside_tensors(&folder("whole"))[0], "the control: {first_scaler}");
    assert!(!first_scaler.contains("4194304"), "some steps have overflowed: {first_scaler}");
    // No step is left, so that each saves what it has loaded.
    for (how, num_ranks, from, to) in [("3", 3, "first", "second"), ("ddp", 1, "second", "third")] {
        assert!(part(how, num_ranks, from, to, 3)? == first, "{how} on {num_ranks} ranks");
        assert_eq!(
            beside_tensors(&folder(to)),
            beside_tensors(&folder("first")),
            "{how} on {num_ranks} ranks"
        );
    }
    assert!(part("ddp", 2, "third", "resumed", 6)? == uninterrupted, "the same bits as without a stop");
    assert_eq!(beside_tensors(&folder("resumed"))[..2], beside_tensors(&folder("whole"))[..2]);
});

ranks_test!(a_damaged_or_missing_shard_falls_back_to_the_checkpoint_before, 2, { one_part()? }, |ranks| {
    let temp = tempfile::tempdir()?;
    let folder = temp.path().join("run");
    let part = Part { how: "3", num_ranks: 2, from: &folder, to: &folder, steps: 4 };
    run(&ranks, part)?;
    let shard = |step: u64| -> std::path::PathBuf {
        let folder = folder.join(format!("step-{step:08}"));
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut shards: Vec<_> =
            files.filter(|path| path.to_str().unwrap().contains("00002-model")).collect();
        shards.remove(0)
    };
    let step = || {
        LocalGroup::run(1, |group| {
            Ok(Checkpoints::new(&folder).read_only().load_latest(&group).unwrap().unwrap().state.step)
        })
        .unwrap()[0]
    };
    assert_eq!(step(), 4, "the control: nothing is damaged");
    let mut bytes = std::fs::read(shard(4))?;
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(shard(4), bytes)?;
    assert_eq!(step(), 2);
    run(&ranks, Part { steps: 5, ..part })?;
    assert!(folder.join("bad-step-00000004").is_dir());
    assert_eq!(step(), 5);
    std::fs::remove_file(shard(5))?;
    assert!(step() < 5);
});

ranks_test!(a_checkpoint_of_another_model_is_one_error_on_all_ranks_and_is_kept, 3, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let train = |extra: bool, steps: u64| -> anyhow::Result<()> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        if extra {
            let _extra = store.root().zeros("extra", &[2, 2]);
        }
        let trainer = adam(&group, &net, &store)?.shard(Stage::Zero3).max_steps(steps);
        let trainer = trainer.callback(Checkpoint::every(Every::Steps(2))).save_path(&path).n_epochs(9);
        Ok(trainer.resume_from(&path).train(LoadBestModel::No).map(drop)?)
    };
    train(false, 2)?;
    let message = train(true, 4).unwrap_err().to_string();
    assert!(message.contains("the checkpoint is of another model:"), "{message}");
    assert!(message.contains("`extra` is not in the checkpoint"), "{message}");
    let step = || Checkpoints::new(&path).read_only().load_latest(&group).unwrap().unwrap().state.step;
    assert_eq!(step(), 2);
    // The control: the same model resumes.
    train(false, 4)?;
    assert_eq!(step(), 4);
});
