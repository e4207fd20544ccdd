//! ZeRO 3 beside PyTorch's FSDP2: its `HuggingFaceStorageReader` loads, on 1 to 3 ranks, what 1 to 3 ranks here have
//! saved, and ZeRO 3 on 1 to 3 ranks loads what FSDP2 has written, each rank its own rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use drumline::ProcessGroup;
use drumline::checkpoint::{Checkpoints, Region, ShardReader, restore, safetensors};
use drumline::comm::{LocalGroup, Mesh};
use drumline::engine::{Engine, EngineOptions, EngineSetup, ShardOptions, Stage};
use drumline::optim::{AdamOptions, AdamW, Named, parameters};
use drumline::trainer::{Checkpoint, CrossEntropy, DistTrainer, Every, LoadBestModel};
use rank_test::{python_with_torch, ranks_test, skipped};
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

use super::super::trainer::{FOLDER, Net, data, folder};

const SCRIPT: &str = include_str!("fsdp.py");
const NOT_INSTALLED: i32 = 77;
const STEPS: u64 = 3;
/// A folder of FSDP2's, and a file with the values that it must have.
const FROM: &str = "DRUMLINE_TEST_FROM";
const EXPECTED: &str = "DRUMLINE_TEST_EXPECTED";

/// Trains with ZeRO 3, and saves.
fn train() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let optimizer = AdamW::new(parameters(&store), AdamOptions { lr: 0.02, ..Default::default() })?;
    DistTrainer::new(&group, &net, &store, data(60))
        .loss(CrossEntropy::default())
        .optimizer(optimizer)
        .print_every(0)
        .batch_size_per_gpu(2)
        .shard(Stage::Zero3)
        .max_steps(STEPS)
        .callback(Checkpoint::every(Every::Steps(STEPS)))
        .save_path(folder()?)
        .train(LoadBestModel::No)?;
    Ok(())
}

/// Loads what FSDP2 has written into a model whose parameters the ranks divide.
fn load(from: &Path) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let _net = Net::new(&store);
    let options = ShardOptions::new(Stage::Zero3);
    let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
    let engine: Box<dyn Engine> = Box::new(options).engine(EngineSetup::new(&store, &mesh))?;
    let reader = ShardReader::open(from)?;
    let (mut held, mut read, mut needed) = (Vec::new(), Vec::new(), 0);
    for placed in engine.state() {
        let [offsets, shape, whole] = [&placed.offsets, &placed.tensor.size(), &placed.whole]
            .map(|sizes| sizes.iter().map(|size| *size as usize).collect::<Vec<_>>());
        let tensor = reader.read(&placed.name, &Region::new(&offsets, &shape, &whole)?)?;
        needed += 4 * tensor.numel() as u64;
        read.push(Named { name: placed.name.clone(), tensor });
        held.push(Named { name: placed.name, tensor: placed.tensor });
    }
    assert_eq!(reader.num_bytes_read(), needed, "each rank reads its own rows");
    let mut restored = Ok(());
    engine.change_parameters(&mut || restored = restore(&held, &read))?;
    restored?;
    let expected = safetensors::read(Path::new(&std::env::var(EXPECTED)?))?;
    for Named { name, tensor } in parameters(&store) {
        assert!(tensor.detach().equal(&expected[&name].neg()), "{name}");
    }
    Ok(group.barrier()?)
}

/// All tensors of a checkpoint.
fn saved(folder: &Path) -> BTreeMap<String, tch::Tensor> {
    let tensors = LocalGroup::run(1, |group| {
        let state = Checkpoints::new(folder).read_only().load_latest(&group).unwrap().unwrap().state;
        let all = state.model.into_iter().chain(state.optimizer.tensors);
        Ok(all.map(|named| (named.name, named.tensor)).collect::<BTreeMap<_, _>>())
    });
    tensors.unwrap().remove(0)
}

struct Plan<'a> {
    num_ranks: usize,
    expected: &'a Path,
    read: &'a [PathBuf],
    write: &'a Path,
}

/// Runs the ranks of PyTorch; false if the Python lacks a module.
fn run_torch(python: &Path, plan: &Plan<'_>) -> bool {
    let Plan { num_ranks, expected, read, write } = plan;
    let store = write.with_extension("store");
    let words =
        json!({ "ranks": num_ranks, "store": store, "expected": expected, "read": read, "write": write });
    let rank = |rank: usize| {
        let mut command = Command::new(python);
        command.args(["-W", "ignore", "-c", SCRIPT, &words.to_string(), &rank.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..*num_ranks).map(rank).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    if outputs.iter().any(|output| output.status.code() == Some(NOT_INSTALLED)) {
        skipped("the Python with torch lacks safetensors or sympy; try that of `cargo xtask python`");
        return false;
    }
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    true
}

ranks_test!(
    fsdp2_and_zero_3_load_what_the_other_wrote_on_any_number_of_ranks,
    1,
    {
        match std::env::var_os(FROM) {
            Some(from) => load(Path::new(&from))?,
            None => train()?,
        }
    },
    |ranks| {
        let temp = tempfile::tempdir()?;
        let path = |name: &str, number: usize| temp.path().join(format!("{name}-{number}"));
        let Some(python) = python_with_torch() else { return Ok(()) };
        for saving in 1..4 {
            let (run, expected) = (path("run", saving), path("expected", saving));
            ranks.clone().nproc(saving).env([(FOLDER, run.to_str().unwrap())]).pass()?;
            let tensors: Vec<_> =
                saved(&run).into_iter().map(|(name, tensor)| Named { name, tensor }).collect();
            safetensors::write(&expected, &tensors)?;
            // Each number of ranks saves, and each of PyTorch's loads, once.
            let loading = saving % 3 + 1;
            let (read, write) = ([run.join("latest")], path("fsdp", saving));
            let plan = Plan { num_ranks: loading, expected: &expected, read: &read, write: &write };
            if !run_torch(&python, &plan) {
                return Ok(());
            }
            let env = [(FROM, write.to_str().unwrap()), (EXPECTED, expected.to_str().unwrap())];
            ranks.clone().nproc(saving % 3 + 1).env(env).pass()?;
        }
    }
);
