//! Checkpoints: exact, whole whatever happens, on any number of ranks.

mod best;
mod cut_net;
mod damage;
mod exact;
mod format_1;
mod from_deepspeed;
mod full_disk;
mod killed;
mod killed_through;
mod meshes;
mod not_finite;
mod python;
mod ranks;
mod torch_dcp;
mod torch_fsdp;
mod unreadable;

use std::collections::BTreeMap;
use std::path::Path;

use drumline::ProcessGroup;
use drumline::checkpoint::{CheckpointError, Checkpoints, Loaded, Mark, OptimizerState, RunState};
use drumline::comm::LocalGroup;
use drumline_torch::Named;
use tch::{Device, Kind, Tensor};

/// A state whose every value tells its step.
fn state_of(step: u64, len: i64) -> RunState {
    tch::set_num_threads(1);
    let filled = |name: &str| {
        let tensor = Tensor::full([len], step as f64, (Kind::Float, Device::Cpu));
        Named { name: name.into(), tensor }
    };
    let mut state = RunState::new(vec![filled("fc.weight"), filled("fc.bias")]).unwrap();
    state.optimizer = OptimizerState {
        kind: "sgd".into(),
        scalars: BTreeMap::from([("lr".into(), step as f64)]),
        tensors: vec![filled("fc.weight.momentum_buffer")],
    };
    (state.step, state.epoch) = (step, step);
    state.sampler = serde_json::json!({ "epoch": step });
    state
}

/// Panics unless all of it is of one step; says which.
fn whole_step(loaded: &Loaded) -> u64 {
    let (state, step) = (&loaded.state, loaded.state.step);
    let tensors: Vec<_> = state.model.iter().chain(&state.optimizer.tensors).collect();
    assert_eq!(tensors.len(), 3);
    for named in tensors {
        assert!(named.tensor.numel() > 0);
        assert_eq!(named.tensor.min().double_value(&[]), step as f64, "{}", named.name);
        assert_eq!(named.tensor.max().double_value(&[]), step as f64, "{}", named.name);
    }
    assert_eq!(state.optimizer.scalars["lr"], step as f64);
    assert_eq!(state.sampler, serde_json::json!({ "epoch": step }));
    assert_eq!(loaded.path.file_name().unwrap().to_str().unwrap()[..13], format!("step-{step:08}"));
    step
}

/// Runs `body` as the only rank of a group.
fn alone<R: Send>(body: impl Fn(&ProcessGroup) -> R + Sync) -> R {
    LocalGroup::run(1, |group| Ok(body(&group))).unwrap().remove(0)
}

fn save(dir: &Path, step: u64) -> Result<(), CheckpointError> {
    alone(|group| Checkpoints::new(dir).save(&state_of(step, 1000), Mark::Latest, group).map(drop))
}

fn load(dir: &Path) -> Result<Option<Loaded>, CheckpointError> {
    alone(|group| Checkpoints::new(dir).load_latest(group))
}

/// What is in the folder, sorted.
fn listing(dir: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}
