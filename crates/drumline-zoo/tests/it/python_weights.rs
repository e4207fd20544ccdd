//! Weights are exchanged with Python if one with `safetensors` and `numpy` is available; otherwise the bytes are
//! checked.

use std::process::Command;

use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::weights;
use rank_test::{python_with_torch, skipped};
use tch::Device;
use tch::nn::VarStore;

/// Reads the file, checks what a Python program relies on, and writes it back with every bias increased by one.
const SCRIPT: &str = "
import sys
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
with safe_open(sys.argv[1], 'np') as file:
    assert file.metadata()['format'] == 'pt', file.metadata()
state = load_file(sys.argv[1])
assert state['conv1.weight'].shape == (32, 3, 3, 3) and state['conv1.weight'].dtype == 'float32'
assert state['bn1.num_batches_tracked'].shape == () and state['bn1.num_batches_tracked'].dtype == 'int64'
save_file({k: v + 1 if k.endswith('bias') else v for k, v in state.items()}, sys.argv[2])
";

fn model() -> VarStore {
    let store = VarStore::new(Device::Cpu);
    build("convnet", &store.root(), &ModelOptions { num_classes: 4, ..Default::default() }).unwrap();
    store
}

#[test]
fn the_header_is_as_python_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    weights::save(&model(), &file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    assert_eq!(header["__metadata__"]["format"], "pt");
    assert_eq!(header["bn1.num_batches_tracked"]["dtype"], "I64");
    assert_eq!(header["bn1.num_batches_tracked"]["shape"], serde_json::json!([]));
    assert_eq!(header["conv1.weight"]["dtype"], "F32");
    assert_eq!(header["conv1.weight"]["shape"], serde_json::json!([32, 3, 3, 3]));
    assert_eq!(len % 8, 0, "the data is aligned");
}

#[test]
fn python_reads_and_writes_the_same_file() {
    let Some(python) = python_with_torch() else { return };
    let has = Command::new(&python).args(["-c", "import safetensors.numpy"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        return skipped(
            "the Python with torch has no safetensors; try `python -m pip install safetensors numpy`",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours.safetensors"), folder.path().join("theirs.safetensors"));
    let (first, second) = (model(), model());
    weights::save(&first, &ours).unwrap();
    let output = Command::new(&python).args(["-c", SCRIPT]).arg(&ours).arg(&theirs).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    weights::load(&second, &theirs).unwrap();
    let (first, second) = (first.variables(), second.variables());
    assert_eq!(first["conv3.weight"], second["conv3.weight"]);
    assert_eq!(&first["fc.bias"] + 1.0, second["fc.bias"]);
}
