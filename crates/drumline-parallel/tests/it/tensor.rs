//! Tensor and sequence parallelism against one rank and against PyTorch (`bench/oracle/tensor.py`).

use anyhow::{Context, Result};
use drumline_comm::{CommError, GroupOptions, LocalGroup, Mesh, ProcessGroup};
use drumline_parallel::tensor::{
    AttentionShape, ColumnLinear, LinearShape, SelfAttention, TensorParallel, VocabEmbedding,
};
use drumline_parallel::{EngineOptions, EngineSetup, ModelParallel};
use drumline_torch::{Named, parameters};
use rank_test::ranks_test;
use serde_json::Value;
use std::time::{Duration, Instant};
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor};

use super::tensor_model::{Between, Model, Trained, batch, distance, fill, trained};

/// Runs ranks as threads. An error that is not the group's becomes one.
pub(crate) fn on_ranks<R: Send>(ranks: usize, body: impl Fn(ProcessGroup) -> Result<R> + Sync) -> Vec<R> {
    let options = GroupOptions { timeout: Duration::from_secs(60), ..Default::default() };
    let body = |group| body(group).map_err(|error| as_comm(format!("{error:#}")));
    LocalGroup::run_with(ranks, &options, body).unwrap()
}

/// Where a test of faults ends, which would take the whole timeout of its group if a rank waited for another.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
pub(crate) const WELL_BEFORE: Duration = Duration::from_secs(100);

/// An error of a rank as one of its group.
pub(crate) fn as_comm(cause: impl Into<String>) -> CommError {
    CommError::Init { cause: cause.into() }
}

fn check(one: &Trained, other: &Trained, most: f64) {
    for (step, (one, other)) in one.losses.iter().zip(&other.losses).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "loss of step {step}: {one} and {other}");
    }
    for (step, (one, other)) in one.norms.iter().zip(&other.norms).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "norm of step {step}: {one} and {other}");
    }
    assert_eq!(one.parameters.len(), other.parameters.len());
    for (one, other) in one.parameters.iter().zip(&other.parameters) {
        let distance = distance(&one.tensor, &other.tensor);
        assert!(one.name == other.name && distance <= most, "`{}` is {distance:e} away", other.name);
    }
}

/// Trains on 2 to 4 ranks in both ways, and compares with one rank.
fn equals_one_rank(kind: Kind, most: f64) {
    let one = on_ranks(1, |group| trained(&group, kind, Between::Whole)).remove(0);
    assert!(one.losses[9] < one.losses[0], "it learns: {:?}", one.losses);
    for between in [Between::Whole, Between::Sequence] {
        for ranks in [2, 3, 4] {
            let all = on_ranks(ranks, |group| trained(&group, kind, between));
            all.iter().for_each(|rank| check(&one, rank, most));
            for (rank, first) in all.iter().flat_map(|rank| rank.parameters.iter().zip(&all[0].parameters)) {
                assert_eq!(rank.tensor, first.tensor, "`{}` has the same bits on all ranks", rank.name);
            }
        }
    }
}

#[test]
fn ten_steps_in_f64_equal_those_of_one_rank() {
    equals_one_rank(Kind::Double, 1e-12);
}

#[test]
fn ten_steps_in_f32_equal_those_of_one_rank() {
    equals_one_rank(Kind::Float, 1e-6);
}

#[test]
fn ten_steps_equal_those_of_pytorch() -> Result<()> {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/tensor.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden)?)?;
    let numbers = |value: &Value| -> Result<Vec<f64>> {
        value.as_array().context("a list")?.iter().map(|value| value.as_f64().context("a number")).collect()
    };
    for (ranks, between) in [(1, Between::Whole), (2, Between::Sequence), (3, Between::Whole)] {
        let ours = on_ranks(ranks, |group| trained(&group, Kind::Double, between)).remove(0);
        for (ours, theirs) in [(&ours.losses, "losses"), (&ours.norms, "norms")] {
            for (ours, theirs) in ours.iter().zip(numbers(&golden[theirs])?) {
                assert!((ours - theirs).abs() < 1e-11 * theirs.abs(), "{ours} and {theirs}");
            }
        }
        for Named { name, tensor } in &ours.parameters {
            let theirs = Tensor::from_slice(&numbers(&golden["parameters"][name])?).view_as(tensor);
            assert!(distance(&theirs, tensor) < 1e-11, "`{name}`");
        }
    }
    Ok(())
}

ranks_test!(parts_that_processes_draw_are_those_of_the_whole_model, 3, {
    let group = ProcessGroup::from_env()?;
    let draw = |tp: &TensorParallel| -> Result<VarStore> {
        let store = VarStore::new(Device::Cpu);
        tch::manual_seed(5);
        Model::new(&store, tp)?;
        Ok(store)
    };
    let tp = TensorParallel::new(&group);
    let (own, whole) = (draw(&tp)?, draw(&TensorParallel::alone())?);
    let (own_next, whole_next) = {
        let place = (Kind::Float, Device::Cpu);
        draw(&tp)?;
        let own = Tensor::rand([3], place);
        draw(&TensorParallel::alone())?;
        (own, Tensor::rand([3], place))
    };
    assert_eq!(own_next, whole_next, "the generator is where it would be");
    let whole = whole.variables();
    let mut num_cut = 0;
    for Named { name, tensor } in parameters(&own) {
        let parts = tp.parts();
        let part = parts.iter().find(|part| part.whole.name == name);
        let expected = match part {
            Some(part) => part.of(&whole[&name], &tensor.size())?,
            None => whole[&name].shallow_clone(),
        };
        num_cut += usize::from(part.is_some());
        assert_eq!(tensor, expected, "`{name}`");
        assert!(tensor.is_leaf() && tensor.requires_grad());
    }
    assert_eq!(num_cut, 1 + 2 * (3 + 3), "the table, and of each block qkv, proj.weight, fc and back.weight");
    let trained = trained(&group, Kind::Double, Between::Sequence)?;
    assert!(trained.losses[9] < trained.losses[0]);
});

#[test]
fn heads_that_ranks_do_not_divide_are_an_error() {
    let errors = on_ranks(3, |group| {
        let store = VarStore::new(Device::Cpu);
        let shape = AttentionShape { features: 16, heads: 4, causal: true };
        let init = Init::Const(0.0);
        let made = SelfAttention::new(&TensorParallel::new(&group), &store.root(), shape, init);
        Ok(made.unwrap_err().to_string())
    });
    let expected =
        "the number of attention heads is 4; expected a number that tp 3 divides; try tp as a divisor of 4";
    assert_eq!(errors, [expected; 3]);
}

#[test]
fn nothing_of_something_is_an_error_and_not_a_panic() {
    for ranks in [1, 2] {
        on_ranks(ranks, |group| {
            let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
            for heads in [0, -2] {
                let shape = AttentionShape { features: 16, heads, causal: true };
                let made = SelfAttention::new(&tp, &store.root(), shape, Init::Const(0.0));
                let expected = format!("the number of attention heads is {heads}; expected 1 or more; try 1");
                assert_eq!(made.unwrap_err().to_string(), expected);
            }
            let shape = LinearShape { stacked: 0, ..LinearShape::new(8, 8) };
            let error = ColumnLinear::new(&tp, &store.root(), shape).unwrap_err().to_string();
            assert_eq!(error, "the number of stacked tensors of `weight` is 0; expected 1 or more; try 1");
            Ok(())
        });
    }
}

#[test]
fn a_token_that_no_rank_has_is_an_error_on_all_ranks() {
    for ranks in [1, 3] {
        on_ranks(ranks, |group| {
            let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
            let table = VocabEmbedding::new(&tp, &store.root(), [10, 4], Init::Const(1.0))?;
            for token in [10, -1] {
                let error =
                    table.forward(&Tensor::from_slice(&[3i64, token])).map(drop).unwrap_err().to_string();
                let expected = format!("a token is {token}; expected 0 to 9; try texts of the vocabulary");
                assert!(error.starts_with(&expected), "{error}");
            }
            assert!(table.forward(&Tensor::from_slice(&[0i64, 9])).is_ok(), "control");
            Ok(())
        });
    }
}

#[test]
fn the_row_of_padding_has_a_value_and_no_gradient() {
    for (ranks, padding) in [(1, 0), (3, 0), (3, 4), (3, 9)] {
        on_ranks(ranks, |group| {
            let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
            let table = VocabEmbedding::new(&tp, &store.root(), [10, 4], Init::Const(1.0))?;
            let tokens = Tensor::from_slice(&[3i64, padding, 7, padding]);
            let rows = table.with_padding_idx(padding).forward(&tokens)?.sum()?.into_tensor();
            assert_eq!(rows, Tensor::ones([4, 4], (Kind::Float, Device::Cpu)));
            rows.sum(Kind::Float).backward();
            let own = tp.cut(10).range(tp.rank());
            let expected: Vec<_> = own.map(|row| if [3, 7].contains(&row) { 4f32 } else { 0.0 }).collect();
            let grad = store.variables()["weight"].grad().sum_dim_intlist(1, false, Kind::Float);
            assert_eq!(grad, Tensor::from_slice(&expected), "{ranks} ranks, padding {padding}");
            Ok(())
        });
    }
}

#[test]
fn ranks_with_different_texts_get_the_error_of_a_mismatch() {
    let options = GroupOptions { timeout: Duration::from_secs(60), ..Default::default() };
    let run = |places: [i64; 2]| {
        LocalGroup::outcomes(2, &options, |group| {
            let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
            let model = Model::new(&store, &tp).unwrap();
            let (tokens, targets) = batch(0);
            let (tokens, targets) =
                (tokens.narrow(0, 0, places[group.rank()]), targets.narrow(0, 0, places[group.rank()]));
            Ok(model.loss(&tokens, &targets, Between::Whole).map(drop).map_err(|error| error.to_string()))
        })
    };
    for outcome in run([3, 2]) {
        let error = outcome.unwrap().unwrap_err();
        assert!(error.contains("all_reduce") && error.contains("tensor_model.rs"), "{error}");
        assert!(error.contains("504") && error.contains("336"), "both counts: {error}");
    }
    assert!(run([3, 3]).into_iter().all(|outcome| outcome.unwrap().is_ok()), "control");
}

#[test]
fn a_rank_that_leaves_before_backward_is_named_by_the_others() {
    let options = GroupOptions { timeout: TIMEOUT, ..Default::default() };
    let run = |leaves: bool| {
        LocalGroup::outcomes(3, &options, |group| {
            let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
            let model = Model::new(&store, &tp).unwrap();
            let (tokens, targets) = batch(0);
            let loss = model.loss(&tokens, &targets, Between::Sequence).unwrap();
            if leaves && group.rank() == 1 {
                return Err(as_comm("this rank gives up"));
            }
            loss.f_backward().map_err(|error| as_comm(error.to_string()))
        })
    };
    let started = Instant::now();
    let errors: Vec<_> = run(true).into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(started.elapsed() < WELL_BEFORE, "nobody waits for the timeout: {errors:?}");
    for error in [&errors[0], &errors[2]] {
        assert!(error.contains("backward failed") && error.contains("rank 1"), "{errors:?}");
    }
    assert!(run(false).into_iter().all(|outcome| outcome.is_ok()), "control");
}

#[test]
fn a_part_that_is_not_declared_is_an_error_on_all_ranks() {
    let errors = on_ranks(2, |group| {
        let mesh = Mesh::new(&group, ModelParallel { tp: 2, ..Default::default() }.mesh_shape(2)?)?;
        let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
        Model::new(&store, &tp)?;
        fill(&store, &tp.parts());
        let parts = tp.parts().into_iter().filter(|part| !part.whole.name.starts_with("h.1.fc")).collect();
        let options = Box::new(ModelParallel { tp: 2, parts, ..Default::default() });
        let error = options.engine(EngineSetup::new(&store, &mesh)).map(drop).unwrap_err();
        Ok(error.to_string())
    });
    // Both ranks seem to have all of it, and only the values show that they have halves.
    for error in errors {
        assert!(
            error.contains("`h.1.fc.weight` on two ranks") && error.contains("try the same seed"),
            "{error}"
        );
    }
}
