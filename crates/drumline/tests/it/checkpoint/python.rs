//! Python reads the files, and continues with the same random numbers.

use std::path::Path;
use std::process::Command;

use drumline::checkpoint::{Checkpoints, Mark, RngState, RunState, named};
use rank_test::{python_with_torch, skipped};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use super::alone;

const NO_SAFETENSORS: i32 = 77;

/// What `torch.manual_seed(2026); torch.rand(4, dtype=torch.float64)` gives in PyTorch 2.11.
const AFTER_SEED_2026: [f64; 4] =
    [0.21984947519733633, 0.8480353170340242, 0.14945123809301608, 0.06519971229302124];

const SCRIPT: &str = r#"
import json, sys
try:
    from safetensors.torch import load_file
except ImportError:
    sys.exit(77)
import torch
dir = sys.argv[1] + "/latest/"
manifest = json.load(open(dir + "manifest.json"))
model = load_file(dir + "model.safetensors")
layer = torch.nn.Sequential()
layer.add_module("conv1", torch.nn.Conv2d(3, 8, 3))
layer.add_module("bn1", torch.nn.BatchNorm2d(8))
missing = layer.load_state_dict(model, strict=False)
assert missing.missing_keys in ([], ["bn1.num_batches_tracked"]), missing
assert missing.unexpected_keys == [], missing
image = torch.arange(75, dtype=torch.float32).reshape(1, 3, 5, 5) / 75
print(json.dumps(layer.eval()(image).sum().item()))
torch.set_rng_state(load_file(dir + "rng.safetensors")["0.cpu"])
print(json.dumps(torch.rand(4, dtype=torch.float64).tolist()))
print(manifest["step"])
"#;

/// What Python printed, by line.
fn python(dir: &Path) -> Option<Vec<String>> {
    let output =
        Command::new(python_with_torch()?).args(["-W", "ignore", "-c", SCRIPT]).arg(dir).output().unwrap();
    if output.status.code() == Some(NO_SAFETENSORS) {
        skipped("the Python with torch has no safetensors; try that of `cargo xtask python`");
        return None;
    }
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    Some(printed.lines().map(str::to_owned).collect())
}

#[test]
fn python_loads_weights_and_random_numbers() {
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let store = VarStore::new(Device::Cpu);
    let conv = nn::conv2d(store.root() / "conv1", 3, 8, 3, Default::default());
    let norm = nn::batch_norm2d(store.root() / "bn1", 8, Default::default());
    let image = Tensor::arange(75, (Kind::Float, Device::Cpu)).reshape([1, 3, 5, 5]) / 75;
    let sum = tch::no_grad(|| image.apply(&conv).apply_t(&norm, false).sum(Kind::Float).double_value(&[]));
    let mut state = RunState::new(named(&store)).unwrap();
    // A generator of this test's own: others draw from the process's.
    (state.step, state.rng) = (12, RngState::seeded(2026).unwrap());
    let state = std::sync::Mutex::new(state);
    alone(|group| {
        Checkpoints::new(dir.path()).save(&state.lock().unwrap(), Mark::Latest, group).unwrap();
    });
    let Some(printed) = python(dir.path()) else { return };
    let [theirs, numbers, step] = &printed[..] else { panic!("{printed:?}") };
    assert!((theirs.parse::<f64>().unwrap() - sum).abs() < 1e-5, "{theirs} {sum}");
    assert_eq!(step, "12");
    let numbers: Vec<f64> = serde_json::from_str(numbers).unwrap();
    assert_eq!(numbers, AFTER_SEED_2026);
}
