//! What comes back is what was saved, to the bit; what is kept and what goes.

use drumline::checkpoint::{Checkpoints, Mark, RunState};
use drumline_torch::{Named, bytes, bytes_mut};
use tch::{Device, Kind, Tensor};

use super::{alone, listing, load, save, state_of, whole_step};

/// Any bits, NaNs included.
fn noise(kind: Kind, shape: &[i64]) -> Tensor {
    let mut tensor = Tensor::empty(shape, (kind, Device::Cpu));
    let mut next = 12345u32;
    for byte in bytes_mut(&mut tensor).unwrap() {
        next = next.wrapping_mul(1664525).wrapping_add(1013904223);
        *byte = if kind == Kind::Bool { (next >> 31) as u8 } else { (next >> 24) as u8 };
    }
    tensor
}

fn tensors() -> Vec<Named> {
    let kinds = [
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
        Kind::Int64,
        Kind::Int,
        Kind::Int16,
        Kind::Int8,
        Kind::Uint8,
        Kind::Bool,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2,
    ];
    let mut tensors = Vec::new();
    for kind in kinds {
        for shape in [vec![], vec![0], vec![1], vec![3, 0, 2], vec![7, 5]] {
            tensors.push((format!("{kind:?}.{shape:?}"), noise(kind, &shape)));
        }
        tensors.push((format!("{kind:?}.turned"), noise(kind, &[4, 6]).transpose(0, 1)));
        tensors.push((format!("{kind:?}.every_other"), noise(kind, &[4, 6]).slice(1, 1, 6, 2)));
        tensors.push((format!("{kind:?}.repeated"), noise(kind, &[1, 3]).expand([4, 3], false)));
        tensors.push((format!("{kind:?}.part"), noise(kind, &[9]).slice(0, 2, 7, 1)));
    }
    tensors.push(("trained".into(), noise(Kind::Float, &[2, 2]).set_requires_grad(true)));
    // More than is written in one go.
    tensors.push(("large".into(), noise(Kind::Float, &[700_001])));
    tensors.into_iter().map(|(name, tensor)| Named { name, tensor }).collect()
}

#[test]
fn every_type_and_layout_comes_back_to_the_bit() {
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let saved = alone(|group| {
        let mut state = RunState::new(tensors()).unwrap();
        state.optimizer.tensors = tensors();
        let numbers = [("lr", 0.1 + 0.2), ("big", f64::INFINITY), ("tiny", 5e-324), ("minus", -0.0)];
        state.optimizer.scalars = numbers.map(|(name, number)| (name.to_owned(), number)).into();
        state.optimizer.kind = "adamw".into();
        state.best = Some(f64::NEG_INFINITY);
        state.schedule = serde_json::json!({ "factor": 0.1 + 0.7, "list": [1, "two", null] });
        state.scaler = serde_json::json!({ "scale": 65536.0 });
        state.trainer = serde_json::json!({ "evaluated_at": 7, "callbacks": {} });
        state.accelerator = serde_json::json!({ "steps": [3, 4] });
        state.config = serde_json::json!({ "MODEL": { "ARCH": "resnet18" } });
        Checkpoints::new(dir.path()).save(&state, Mark::Latest, group).unwrap();
        state
    });
    let loaded = load(dir.path()).unwrap().unwrap().state;
    for (saved, loaded) in
        [(&saved.model, &loaded.model), (&saved.optimizer.tensors, &loaded.optimizer.tensors)]
    {
        assert_eq!(saved.len(), loaded.len());
        for saved in saved {
            let loaded = loaded.iter().find(|loaded| loaded.name == saved.name).unwrap();
            assert_eq!(
                (loaded.tensor.kind(), loaded.tensor.size()),
                (saved.tensor.kind(), saved.tensor.size())
            );
            let expected = saved.tensor.contiguous();
            assert!(bytes(&loaded.tensor).unwrap() == bytes(&expected).unwrap(), "{}", saved.name);
        }
    }
    let bits =
        |state: &RunState| state.optimizer.scalars.values().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&loaded), bits(&saved));
    assert_eq!(loaded.optimizer.kind, "adamw");
    assert_eq!(loaded.best, saved.best);
    assert_eq!([&loaded.schedule, &loaded.scaler], [&saved.schedule, &saved.scaler]);
    assert_eq!([&loaded.trainer, &loaded.accelerator], [&saved.trainer, &saved.accelerator]);
    assert_eq!((loaded.config, loaded.rng), (saved.config, saved.rng));
}

#[test]
fn the_last_two_and_the_best_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let best = alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        assert!(checkpoints.load_latest(group).unwrap().is_none());
        assert!(checkpoints.load_best(group).unwrap().is_none());
        let mut deleted = Vec::new();
        for step in 1..=5 {
            let mark = if step == 2 { Mark::Best } else { Mark::Latest };
            let saved = checkpoints.save(&state_of(step, 10), mark, group).unwrap();
            assert_eq!(saved.path, dir.path().join(format!("step-{step:08}")));
            deleted.extend(saved.deleted);
        }
        assert_eq!(deleted, ["step-00000001", "step-00000003"]);
        checkpoints.load_best(group).unwrap().unwrap()
    });
    assert_eq!(listing(dir.path()), ["best", "latest", "step-00000002", "step-00000004", "step-00000005"]);
    assert_eq!(whole_step(&best), 2);
    assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), 5);
    let files = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"];
    assert_eq!(listing(&dir.path().join("latest")), files);
}

#[test]
fn a_step_that_comes_again_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        save(dir.path(), 7).unwrap();
    }
    assert_eq!(listing(dir.path()), ["latest", "step-00000007-2", "step-00000007-3"]);
    assert_eq!(load(dir.path()).unwrap().unwrap().path, dir.path().join("step-00000007-3"));
}

#[test]
fn a_run_that_starts_over_in_an_old_folder_keeps_its_own() {
    let dir = tempfile::tempdir().unwrap();
    for step in [490, 500, 10, 20, 30] {
        save(dir.path(), step).unwrap();
        assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), step);
    }
    let kept = ["latest", "step-00000020", "step-00000030", "step-00000490", "step-00000500"];
    assert_eq!(listing(dir.path()), kept);
}

#[test]
fn what_cannot_be_saved_is_named_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    let number = |name: &str| Named { name: name.into(), tensor: Tensor::from(1f32) };
    let complex = Named { name: "c".into(), tensor: Tensor::zeros([1], (Kind::ComplexFloat, Device::Cpu)) };
    let undefined = Named { name: "u".into(), tensor: Tensor::new() };
    let cases = [
        (vec![number("w"), number("w")], "cannot save tensor `w`: there are two of that name"),
        (vec![complex], "cannot save tensor `c`: safetensors has no type for ComplexFloat"),
        (vec![undefined], "cannot save tensor `u`: it is undefined"),
    ];
    for (model, expected) in cases {
        let model: Vec<_> = model.iter().map(Named::clone).collect();
        let states = std::sync::Mutex::new(RunState::new(model).unwrap());
        let error = alone(|group| {
            Checkpoints::new(dir.path()).save(&states.lock().unwrap(), Mark::Latest, group).unwrap_err()
        });
        assert_eq!(error.to_string(), expected);
        assert_eq!(listing(dir.path()), ["latest", "step-00000001"]);
    }
}
