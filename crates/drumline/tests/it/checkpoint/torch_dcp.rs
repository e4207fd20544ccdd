//! PyTorch's distributed checkpoints in Hugging Face files, both ways: its `HuggingFaceStorageReader` loads what 1 to 3
//! ranks write here, and what 1 to 3 ranks write there is read here, whole or by 1 to 3 ranks, each only the bytes that
//! it needs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use drumline::checkpoint::{
    Checkpoints, Mark, Region, RunState, Section, ShardReader, ShardWriter, TensorPart,
};
use drumline::comm::LocalGroup;
use drumline_torch::{Named, bytes};
use rank_test::{python_with_torch, skipped};
use serde_json::json;
use tch::{Device, Kind, Tensor};

const SCRIPT: &str = include_str!("dcp.py");
const NOT_INSTALLED: i32 = 77;

/// A tensor of the tests. Its values are `first`, and a quarter more each.
struct Spec {
    name: &'static str,
    shape: &'static [usize],
    kind: Kind,
    /// In PyTorch.
    dtype: &'static str,
    first: usize,
    /// Along which ranks here cut it; those there cut all along their first dim.
    cut: Option<usize>,
}

const SPECS: [Spec; 8] = [
    Spec { name: "rows", shape: &[5, 3], kind: Kind::Float, dtype: "float32", first: 1, cut: Some(0) },
    Spec { name: "columns", shape: &[4, 5], kind: Kind::Float, dtype: "float32", first: 2, cut: Some(1) },
    Spec { name: "cube", shape: &[3, 4, 2], kind: Kind::BFloat16, dtype: "bfloat16", first: 3, cut: Some(1) },
    Spec { name: "few", shape: &[1, 2], kind: Kind::Float, dtype: "float32", first: 4, cut: Some(0) },
    Spec { name: "half", shape: &[7], kind: Kind::Half, dtype: "float16", first: 5, cut: Some(0) },
    Spec { name: "double", shape: &[2, 3], kind: Kind::Double, dtype: "float64", first: 6, cut: None },
    Spec { name: "number", shape: &[], kind: Kind::Int64, dtype: "int64", first: 7, cut: None },
    Spec { name: "nothing", shape: &[0, 3], kind: Kind::Float, dtype: "float32", first: 8, cut: None },
];

impl Spec {
    fn tensor(&self) -> Tensor {
        filled(self.shape, self.first, self.kind)
    }
}

fn filled(shape: &[usize], first: usize, kind: Kind) -> Tensor {
    let size: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu)) * 0.25;
    (numbers + first as f64).to_kind(kind).view(&size[..])
}

/// A rank's share of so many elements; those of later ranks may be empty.
fn share(len: usize, rank: usize, num_ranks: usize) -> (usize, usize) {
    let each = len.div_ceil(num_ranks);
    let start = (rank * each).min(len);
    (start, each.min(len - start))
}

/// The part of a global tensor that a rank has, along one dim.
fn part(shape: &[usize], dim: usize, rank: usize, num_ranks: usize) -> Region {
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    (offsets[dim], sizes[dim]) = share(shape[dim], rank, num_ranks);
    Region::new(&offsets, &sizes, shape).unwrap()
}

fn narrowed(tensor: &Tensor, region: &Region) -> Tensor {
    let dims = region.offsets().iter().zip(region.shape()).enumerate();
    dims.fold(tensor.shallow_clone(), |tensor, (dim, (offset, size))| {
        tensor.narrow(dim as i64, *offset as i64, *size as i64)
    })
}

/// A folder as so many ranks write it; a rank without a part of a tensor writes none of it.
fn write_shards(folder: &Path, num_ranks: usize) {
    std::fs::create_dir(folder).unwrap();
    for rank in 0..num_ranks {
        let mut writer = ShardWriter::new(Section::Model);
        for (place, spec) in SPECS.iter().enumerate() {
            let region = match spec.cut {
                Some(dim) => part(spec.shape, dim, rank, num_ranks),
                None if place % num_ranks == rank => Region::whole(spec.shape),
                None => continue,
            };
            if region.num_elements() == 0 && spec.cut.is_some() {
                continue;
            }
            let (offsets, tensor) = (region.offsets().to_vec(), narrowed(&spec.tensor(), &region));
            let global_shape = spec.shape.to_vec();
            writer.add(TensorPart { name: spec.name.into(), global_shape, offsets, tensor }).unwrap();
        }
        writer.write(folder, &Section::Model.shard_file(rank)).unwrap();
    }
}

/// A checkpoint of a run on so many ranks, with all that a checkpoint can have.
fn write_checkpoint(folder: &Path, num_ranks: usize) -> PathBuf {
    let saved = LocalGroup::run(num_ranks, |group| {
        let named = |spec: &Spec| Named { name: spec.name.into(), tensor: spec.tensor() };
        let mut state = RunState::new(SPECS.iter().map(named).collect()).unwrap();
        state.trained = vec![Named { name: "rows".into(), tensor: filled(&[5, 3], 100, Kind::Float) }];
        state.optimizer.tensors =
            vec![Named { name: "rows.exp_avg".into(), tensor: filled(&[5, 3], 200, Kind::Float) }];
        Ok(Checkpoints::new(folder).save(&state, Mark::Latest, &group).unwrap().path)
    });
    saved.unwrap().remove(0)
}

/// Starts the ranks of PyTorch that load `read` and write `write`.
fn start(python: &Path, num_ranks: usize, (read, write): (&[PathBuf], &Path)) -> Vec<Child> {
    let tensor = |spec: &Spec| {
        let dim = (!spec.shape.is_empty() && spec.shape[0] > 0).then_some(0);
        json!({ "name": spec.name, "shape": spec.shape, "first": spec.first, "dtype": spec.dtype, "dim": dim })
    };
    let tensors: Vec<_> = SPECS.iter().map(tensor).collect();
    let store = write.with_extension("store");
    let plan =
        json!({ "ranks": num_ranks, "store": store, "tensors": tensors, "read": read, "write": write });
    let rank = |rank: usize| {
        let mut command = Command::new(python);
        command.args(["-W", "ignore", "-c", SCRIPT, &plan.to_string(), &rank.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..num_ranks).map(rank).collect()
}

/// Whether all ended well; not where the Python lacks a module.
fn ended_well(ranks: Vec<Child>) -> bool {
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

#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor, words: &str) {
    assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{words}");
    assert_eq!(bytes(found).unwrap(), bytes(&expected.contiguous()).unwrap(), "{words}");
}

/// Reads all tensors, and each as so many ranks would, along each dim.
fn assert_reads(folder: &Path) {
    let reader = ShardReader::open(folder).unwrap();
    let mut names: Vec<_> = SPECS.iter().map(|spec| spec.name).collect();
    names.sort();
    assert_eq!(reader.names().collect::<Vec<_>>(), names);
    for spec in &SPECS {
        assert_eq!(reader.shape(spec.name).unwrap(), spec.shape);
        assert_same(&reader.read_whole(spec.name).unwrap(), &spec.tensor(), spec.name);
        for dim in 0..spec.shape.len() {
            for (num_ranks, rank) in (1..4).flat_map(|num| (0..num).map(move |rank| (num, rank))) {
                let region = part(spec.shape, dim, rank, num_ranks);
                let before = reader.num_bytes_read();
                let found = reader.read(spec.name, &region).unwrap();
                assert_same(&found, &narrowed(&spec.tensor(), &region), &format!("{} {region:?}", spec.name));
                let needed = region.num_elements() * spec.kind.elt_size_in_bytes();
                assert_eq!(reader.num_bytes_read() - before, needed as u64);
            }
        }
    }
}

/// What FSDP2 wrote of two layers.
fn assert_reads_fsdp(folder: &Path) {
    let reader = ShardReader::open(folder).unwrap();
    let shapes: [(&str, &[usize]); 4] =
        [("0.weight", &[3, 5]), ("0.bias", &[3]), ("1.weight", &[7, 3]), ("1.bias", &[7])];
    for (first, (name, shape)) in shapes.into_iter().enumerate() {
        assert_same(&reader.read_whole(name).unwrap(), &filled(shape, first, Kind::Float), name);
    }
}

#[test]
fn each_loads_what_the_other_wrote_on_any_number_of_ranks() {
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let mut read = vec![write_checkpoint(&dir.path().join("run"), 2)];
    for num_ranks in 1..4 {
        let folder = dir.path().join(format!("ours-{num_ranks}"));
        write_shards(&folder, num_ranks);
        assert_reads(&folder);
        read.push(folder);
    }
    let Some(python) = python_with_torch() else { return };
    for num_ranks in 1..4 {
        let write = dir.path().join(format!("theirs-{num_ranks}"));
        if !ended_well(start(&python, num_ranks, (&read, &write))) {
            return;
        }
        assert_reads(&write);
        assert_reads_fsdp(&dir.path().join(format!("theirs-{num_ranks}-fsdp")));
    }
}
