//! Checkpoints that DeepSpeed wrote (`bench/oracle/deepspeed_checkpoints.py`), converted: the same weights as those of
//! its own zero_to_fp32, and the same moments as it gathers itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use drumline::checkpoint::deepspeed::DeepSpeedCheckpoint;
use drumline::checkpoint::{Checkpoints, safetensors};
use drumline::comm::LocalGroup;
use drumline_pickle::TorchFile;
use tch::{Kind, Tensor};

/// Each case with its stage.
const CASES: [(&str, u64); 10] = [
    ("stage1_fp32", 1),
    ("stage1_bf16", 1),
    ("stage2_bf16", 2),
    ("stage2_groups", 2),
    ("stage1_fp16", 1),
    ("stage2_fp16", 2),
    ("stage3_fp16", 3),
    ("stage3_groups", 3),
    ("stage3_fp32", 3),
    ("stage3_bf16", 3),
];

const STEPS: u64 = 3;

/// Parameters that were trained.
const TRAINED: usize = 5;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/deepspeed")
}

/// What DeepSpeed says, weights and moments.
fn expected(case: &str) -> BTreeMap<String, Tensor> {
    safetensors::read(&golden().join(format!("{case}.safetensors"))).unwrap()
}

/// A copy of a case's folder.
fn copied(case: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let tag = copy.path().join(case);
    std::fs::create_dir(&tag).unwrap();
    std::fs::write(copy.path().join("latest"), case).unwrap();
    for entry in std::fs::read_dir(golden().join(case).join(case)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, tag.join(path.file_name().unwrap())).unwrap();
    }
    copy
}

fn refused(folder: &Path) -> String {
    let opened = DeepSpeedCheckpoint::open(folder, None);
    opened.and_then(|found| found.export(&folder.join("out.safetensors"))).unwrap_err().to_string()
}

#[test]
fn weights_are_those_of_deepspeeds_own_converter() {
    let out = tempfile::tempdir().unwrap();
    for (case, stage) in CASES {
        let found = DeepSpeedCheckpoint::open(&golden().join(case), None).unwrap();
        assert_eq!((found.stage(), found.num_ranks(), found.tag()), (stage, 2, case));
        let file = out.path().join("model.safetensors");
        found.export(&file).unwrap();
        let (expected, written) = (expected(case), safetensors::read(&file).unwrap());
        let weights = expected.iter().filter(|(name, _)| !name.contains(".exp_avg"));
        assert_eq!(weights.clone().count(), written.len(), "{case}: {:?}", written.keys());
        for (name, weight) in weights {
            let found = &written[name];
            assert_eq!(found.size(), weight.size(), "{case}: {name}");
            assert_eq!(&found.to_kind(Kind::Float), weight, "{case}: {name}");
        }
        assert_eq!(written["count"], Tensor::from(STEPS as i64), "{case}: a count stays one");
        assert!(written["head.weight"].equal(&written["embedding.weight"]), "{case}: both names are there");
    }
}

#[test]
fn without_zero_weights_are_those_that_were_saved() {
    let out = tempfile::tempdir().unwrap();
    for case in ["stage0_fp32", "stage0_fp16"] {
        let found = DeepSpeedCheckpoint::open(&golden().join(case), None).unwrap();
        assert_eq!((found.stage(), found.num_ranks()), (0, 1));
        let file = out.path().join("model.safetensors");
        found.export(&file).unwrap();
        let (expected, written) = (expected(case), safetensors::read(&file).unwrap());
        assert!(expected.keys().eq(written.keys()), "{case}: {:?}", written.keys());
        for (name, weight) in &expected {
            assert_eq!(&written[name].to_kind(Kind::Float), weight, "{case}: {name}");
        }
        assert_eq!(written["hidden.weight"].kind(), Kind::Float, "{case}");
        let refused = found.import(out.path()).unwrap_err().to_string();
        assert!(refused.contains("without ZeRO there are no files of optimizers"), "{refused}");
    }
}

#[test]
fn moments_and_steps_become_a_checkpoint_of_ours() {
    let out = tempfile::tempdir().unwrap();
    for (case, _) in CASES {
        let found = DeepSpeedCheckpoint::open(&golden().join(case), None).unwrap();
        found.import(out.path()).unwrap();
        assert_eq!(std::fs::read_to_string(out.path().join("latest")).unwrap(), case);
        let loaded = LocalGroup::run(1, |group| {
            Ok(Checkpoints::new(out.path().join(case)).load_latest(&group).unwrap().unwrap().state)
        });
        let state = loaded.unwrap().remove(0);
        assert_eq!((state.step, state.optimizer.kind.as_str()), (STEPS, "adamw"), "{case}");
        assert_eq!(state.optimizer.scalars["beta1"], 0.8);
        let names: Vec<_> = state.model.iter().map(|named| named.name.as_str()).collect();
        assert!(names.contains(&"embedding.weight") && !names.contains(&"head.weight"), "{case}: {names:?}");
        let expected = expected(case);
        assert_eq!(state.optimizer.tensors.len(), 3 * TRAINED, "{case}");
        let mut compared = 0;
        for named in &state.optimizer.tensors {
            if named.name.ends_with(".step") {
                assert_eq!(named.tensor, Tensor::from(STEPS as f32), "{case}: {}", named.name);
            } else if let Some(moment) = expected.get(&named.name) {
                assert_eq!(&named.tensor.view([-1]), moment, "{case}: {}", named.name);
                compared += 1;
            }
            assert!(named.tensor.abs().max().double_value(&[]) > 0.0, "{case}: {}", named.name);
        }
        // With two groups in stage 2, DeepSpeed finds those of the first group only.
        let has_lost = ["stage2_groups", "stage2_fp16"].contains(&case);
        assert_eq!(compared, if has_lost { 4 } else { 2 * TRAINED }, "{case}");
    }
}

/// The first byte of the f32 weights in a file with these bytes.
fn first_weight(file: &Path, whole: &[u8]) -> usize {
    std::fs::write(file, whole).unwrap();
    let opened = TorchFile::open(file).unwrap();
    let state = opened.root().get("optimizer_state_dict").unwrap();
    let groups = state.get("single_partition_of_fp32_groups").or(state.get("fp32_flat_groups")).unwrap();
    let flat = groups.items().unwrap().next().unwrap().tensor().unwrap();
    opened.bytes_of(flat).unwrap().start as usize
}

#[test]
fn a_file_that_is_missing_or_damaged_is_named() {
    for case in ["stage2_bf16", "stage3_fp32"] {
        let copy = copied(case);
        let tag = copy.path().join(case);
        let file = std::fs::read_dir(&tag).unwrap().map(|entry| entry.unwrap().path());
        let file = file.filter(|path| path.to_str().unwrap().contains("rank_1_mp")).max().unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(name.ends_with("_optim_states.pt"), "{name}");
        let whole = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let message = refused(copy.path());
        assert!(message.contains("has the files of 1 ranks, expected 2"), "{message}");
        std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        let message = refused(copy.path());
        assert!(message.contains(name) && message.contains("cut short"), "{message}");
        let mut changed = whole.clone();
        changed[first_weight(&file, &whole)] ^= 1;
        std::fs::write(&file, &changed).unwrap();
        let message = refused(copy.path());
        assert!(message.contains(name) && message.contains("is damaged in it: its checksum"), "{message}");
        assert!(!copy.path().join("out.safetensors").exists(), "nothing is written");
        // The control.
        std::fs::write(&file, &whole).unwrap();
        DeepSpeedCheckpoint::open(copy.path(), None)
            .unwrap()
            .export(&copy.path().join("out.safetensors"))
            .unwrap();
    }
}

#[test]
fn files_of_different_saves_do_not_fit() {
    let copy = copied("stage2_bf16");
    let (from, to) = (golden().join("stage2_groups/stage2_groups"), copy.path().join("stage2_bf16"));
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        if name.contains("rank_1_mp") {
            std::fs::copy(&entry, to.join(format!("bf16_{name}"))).unwrap();
        }
    }
    let message = refused(copy.path());
    assert!(
        message.contains("rank 1 has saved 2 groups of parameters, expected 1; try copying"),
        "{message}"
    );
}

#[test]
fn a_pickle_of_something_else_is_refused() {
    let copy = copied("stage2_bf16");
    let tag = copy.path().join("stage2_bf16");
    std::fs::copy(
        tag.join("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        tag.join("mp_rank_00_model_states.pt"),
    )
    .unwrap();
    let message = refused(copy.path());
    assert!(message.contains("mp_rank_00_model_states.pt: `param_shapes` is missing, expected"), "{message}");
}
