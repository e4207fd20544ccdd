//! The GPT on meshes against one rank, and what cannot be cut.

use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline::ProcessGroup;
use drumline::comm::{Axis, CommError, LocalGroup, Mesh, MeshShape};
use drumline::engine::Stage;
use drumline::engine::pipeline::Schedule;
use drumline_zoo::gpt::weights;
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use drumline_zoo::models::{Checkpointing, ModelRanks};
use drumline_zoo::weights::Holding;
use rank_test::anyhow::{self, Result};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use super::gpt_on_mesh::{ALONE, Tried, equal_one_rank, on_ranks, options};

#[test]
fn layers_and_texts_that_are_cut_train_as_on_one_rank() {
    let meshes = [
        Tried { tp: 2, ..ALONE },
        Tried { tp: 8, ..ALONE },
        Tried { cp: 3, ..ALONE },
        Tried { cp: 2, tp: 2, ..ALONE },
        Tried { dp: 2, tp: 2, ..ALONE },
        Tried { shard: 2, cp: 2, tp: 2, stage: Stage::Zero1, ..ALONE },
        Tried { pp: 2, dp: 2, schedule: Schedule::ZeroBubbleV, ..ALONE },
    ];
    equal_one_rank(&meshes, &options(), Kind::Double, 1e-12);
    equal_one_rank(&meshes[..4], &options(), Kind::Float, 1e-6);
}

#[test]
fn any_mesh_of_eight_ranks_trains_as_one() {
    let mut next = 20u64;
    let mut below = |limit: usize| {
        next = next.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (next >> 33) as usize % limit
    };
    let stages = [Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let mut meshes: Vec<Tried> = Vec::new();
    while meshes.len() < 12 {
        // Each factor of 2 goes to a random axis.
        let mut sizes = [1; 5];
        (0..3).for_each(|_| sizes[below(5)] *= 2);
        let [pp, dp, shard, cp, tp] = sizes;
        // There are four layers, and ranks keep all parameters of their stages.
        let stages = if pp > 1 { &stages[..2] } else { &stages[..] };
        let stage = if shard > 1 { stages[below(stages.len())] } else { Stage::Zero0 };
        let schedule = [Schedule::OneFOneB, Schedule::ZeroBubble1P, Schedule::GPipe][below(3)];
        let tried = Tried { pp, dp, shard, cp, tp, stage, schedule };
        let is_known = |other: &Tried| other.shape() == tried.shape();
        if pp <= 4 && !meshes.iter().any(is_known) {
            meshes.push(tried);
        }
    }
    let with = |is: fn(&Tried) -> bool| meshes.iter().filter(|tried| is(tried)).count();
    assert!(with(|tried| tried.pp > 1) >= 4 && with(|tried| tried.pp > 1 && tried.tp > 1) >= 2, "{meshes:?}");
    equal_one_rank(&meshes, &options(), Kind::Double, 1e-12);
}

#[test]
fn dropout_draws_the_same_masks_on_every_mesh() {
    let dropped = GptOptions { dropout: 0.3, ..options() };
    let meshes = [
        Tried { tp: 2, ..ALONE },
        Tried { tp: 4, dp: 2, ..ALONE },
        Tried { shard: 2, tp: 2, stage: Stage::Zero3, ..ALONE },
        Tried { pp: 2, dp: 2, tp: 2, ..ALONE },
    ];
    equal_one_rank(&meshes, &dropped, Kind::Double, 1e-12);
    let [plain, dropped] =
        [&options(), &dropped].map(|options| on_ranks(ALONE, options, Kind::Double).remove(0));
    assert!((plain.losses[0] - dropped.losses[0]).abs() > 1e-3, "control");
}

#[test]
fn blocks_are_computed_again_and_losses_come_in_chunks() {
    for checkpoint in [Checkpointing::Full, Checkpointing::Selective, Checkpointing::Every(2)] {
        let options = GptOptions { checkpoint, loss_chunks: 3, dropout: 0.2, ..options() };
        equal_one_rank(&[Tried { tp: 2, dp: 2, ..ALONE }], &options, Kind::Double, 1e-12);
    }
    let texts = GptOptions { checkpoint: Checkpointing::Full, loss_chunks: 2, ..options() };
    equal_one_rank(&[Tried { cp: 2, tp: 2, ..ALONE }], &texts, Kind::Double, 1e-12);
    equal_one_rank(&[Tried { cp: 2, ..ALONE }], &texts, Kind::Float, 5e-6);
}

ranks_test!(parts_that_ranks_draw_and_load_are_those_of_the_whole_model, 4, {
    let group = ProcessGroup::from_env()?;
    let padded = GptOptions { vocab_multiple: 5, ..options() };
    let mesh = Mesh::new(&group, MeshShape::default().with(Axis::Cp, 2).with(Axis::Tp, 2))?;
    let ranks = ModelRanks::on(&mesh);
    let drawn = |ranks: &ModelRanks| -> Result<VarStore> {
        let store = VarStore::new(Device::Cpu);
        tch::manual_seed(5);
        Gpt::on(ranks, &store.root(), &padded)?;
        Ok(store)
    };
    let (own, whole) = (drawn(&ranks)?, drawn(&ModelRanks::default())?);
    let same = |own: &VarStore, whole: &VarStore, rows_of_padding: bool| -> Result<()> {
        for (name, value) in whole.variables() {
            let (part, own) = (ranks.tp.parts(), &own.variables()[&name]);
            let part = part.iter().find(|part| part.whole.name == name);
            let mut expected =
                part.map_or_else(|| Ok(value.shallow_clone()), |part| part.of(&value, &own.size()))?;
            let mut own = own.detach();
            if name == "wte.weight" && !rows_of_padding {
                let rows = 14;
                (own, expected) = (own.narrow(0, 0, rows), expected.narrow(0, 0, rows));
            }
            anyhow::ensure!(own == expected, "`{name}`");
        }
        Ok(())
    };
    same(&own, &whole, true)?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    // Values that no draw has, in a file without padding rows.
    for (_, mut value) in whole.variables() {
        no_grad(|| value.copy_(&(&value * 3.0 + 0.25)));
    }
    weights::save(&whole, &padded, &file)?;
    weights::load_parts(&own, &padded, &held_by(&ranks), &file)?;
    same(&own, &whole, false)?;
    let other = GptOptions { n_embd: 48, ..padded.clone() };
    let store = VarStore::new(Device::Cpu);
    let others = ModelRanks::on(&mesh);
    Gpt::on(&others, &store.root(), &other)?;
    let refused = weights::load_parts(&store, &other, &held_by(&others), &file).unwrap_err().to_string();
    anyhow::ensure!(
        refused.contains("h.0.attn.c_attn.weight is [32, 96], the model's [48, 144]"),
        "{refused}"
    );
});

#[test]
fn what_cannot_be_cut_is_one_error() {
    let refused = |shape: MeshShape, options: GptOptions| {
        let said = LocalGroup::run(3, |group| {
            let mesh = Mesh::new(&group, shape)?;
            let store = VarStore::new(Device::Cpu);
            Ok(Gpt::on(&ModelRanks::on(&mesh), &store.root(), &options).unwrap_err().to_string())
        });
        said.unwrap().remove(0)
    };
    let tp = refused(MeshShape::default().with(Axis::Tp, 3), options());
    assert!(
        tp.contains("the number of attention heads is 8") && tp.contains("try tp as a divisor of 8"),
        "{tp}"
    );
    let cp = refused(MeshShape::default().with(Axis::Cp, 3), GptOptions { dropout: 0.1, ..options() });
    assert_eq!(cp, "dropout is 0.1, which ring attention among ranks of cp has not; try 0");
}

#[test]
fn a_model_that_is_cut_gives_no_logits() {
    for (axis, name) in [(Axis::Tp, "tp"), (Axis::Cp, "cp")] {
        let said = LocalGroup::run(2, |group| {
            let mesh = Mesh::along(&group, axis)?;
            let store = VarStore::new(Device::Cpu);
            let model = Gpt::on(&ModelRanks::on(&mesh), &store.root(), &options())
                .map_err(|error| CommError::Init { cause: error.to_string() })?;
            let whole = Gpt::new(&VarStore::new(Device::Cpu).root(), &options())
                .map_err(|error| CommError::Init { cause: error.to_string() })?;
            let tokens = Tensor::zeros([1, 4], (Kind::Int64, Device::Cpu));
            let said = |call: &dyn Fn()| {
                let panic =
                    catch_unwind(AssertUnwindSafe(call)).err().and_then(|panic| panic.downcast().ok());
                panic.map(|words: Box<String>| *words)
            };
            Ok([
                said(&|| drop(model.logits(&tokens))),
                said(&|| drop(model.cache())),
                said(&|| drop(model.next(&tokens, &mut whole.cache()))),
            ])
        });
        let expected = format!("this model is cut along {name}; try Gpt::new with the weights of all parts");
        assert!(said.unwrap().iter().flatten().all(|said| said.as_ref() == Some(&expected)));
    }
}

/// What a rank has of a model whose layers are cut.
fn held_by(ranks: &ModelRanks) -> Holding {
    Holding { parts: ranks.tp.parts(), ..Holding::default() }
}
