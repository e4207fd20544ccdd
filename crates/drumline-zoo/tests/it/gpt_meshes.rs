//! The GPT on meshes against one rank: layers cut along `tp`, texts along `cp`, replicas and ZeRO along `dp` and `shard`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::comm::{Axis, CommError, GroupOptions, LocalGroup, Mesh, MeshShape};
use drumline::engine::{Clip, EngineOptions, EngineSetup, GradSync, ModelParallel, ShardOptions, Stage};
use drumline::trainer::Mode;
use drumline_torch::{Adam, AdamOptions, Masks, Named, Optimizer, StepSamples, parameters};
use drumline_zoo::gpt::weights;
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use drumline_zoo::models::{Checkpointing, ModelRanks};
use drumline_zoo::weights::Holding;
use rank_test::anyhow::{self, Result};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

const STEPS: u64 = 10;
/// Texts of a step over all ranks.
const TEXTS: i64 = 8;
const PLACES: i64 = 13;

fn options() -> GptOptions {
    let small =
        GptOptions { n_layer: 2, n_head: 8, n_embd: 32, n_positions: PLACES + 1, ..Default::default() };
    // The vocabulary is uneven.
    GptOptions { vocab_size: 29, ..small }
}

/// The sizes of a mesh, and what ranks along `shard` divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tried {
    dp: usize,
    shard: usize,
    cp: usize,
    tp: usize,
    stage: Stage,
}

const ALONE: Tried = Tried { dp: 1, shard: 1, cp: 1, tp: 1, stage: Stage::Zero0 };

impl Tried {
    fn num_ranks(self) -> usize {
        self.dp * self.shard * self.cp * self.tp
    }

    fn shape(self) -> MeshShape {
        let axes = [(Axis::Dp, self.dp), (Axis::Shard, self.shard), (Axis::Cp, self.cp), (Axis::Tp, self.tp)];
        axes.into_iter().fold(MeshShape::default(), |shape, (axis, size)| shape.with(axis, size))
    }

    fn options(self, ranks: &ModelRanks) -> ModelParallel {
        let within: Box<dyn EngineOptions> = match self.stage {
            Stage::Zero0 => Default::default(),
            stage => {
                ShardOptions { shard: Some(self.shard), keep_gathered: 50, ..ShardOptions::new(stage) }.into()
            }
        };
        ModelParallel { cp: self.cp, tp: self.tp, parts: ranks.tp.parts(), within, ..Default::default() }
    }
}

/// What a training leaves.
#[derive(Debug)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    parameters: Vec<Named>,
}

/// Gives all variables values by a formula, whatever part of them this rank has: threads share a generator.
fn fill(store: &VarStore, ranks: &ModelRanks) -> Result<()> {
    for (place, Named { name, mut tensor }) in parameters(store).into_iter().enumerate() {
        let part = ranks.tp.parts().into_iter().find(|part| part.whole.name == name);
        let size = part.as_ref().map_or_else(|| tensor.size(), |part| part.whole.size.clone());
        let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        let shift = f64::from(name.contains("ln_") && name.ends_with("weight"));
        let whole = (&numbers * 0.7 + &numbers * &numbers * 1e-3 + place as f64).sin() * 0.2 + shift;
        let whole = whole.view(&size[..]);
        let own = part.map_or_else(|| Ok(whole.shallow_clone()), |part| part.of(&whole, &tensor.size()))?;
        no_grad(|| tensor.copy_(&own));
    }
    Ok(())
}

/// This rank's texts of a step, of `TEXTS`: ranks take them in turn.
fn batch(step: u64, rank: usize, stride: usize) -> (Tensor, Tensor) {
    let all = Tensor::arange(TEXTS * (PLACES + 1), (Kind::Int64, Device::Cpu)) + step as i64 * 31;
    let all = (&all * &all * 7 + &all * 3).remainder(29).view([TEXTS, PLACES + 1]);
    let own = all.slice(0, rank as i64, None, stride as i64);
    (own.narrow(1, 0, PLACES).contiguous(), own.narrow(1, 1, PLACES).contiguous())
}

fn trained(group: &ProcessGroup, tried: Tried, options: &GptOptions, kind: Kind) -> Result<Trained> {
    tch::set_num_threads(1);
    let mesh = Mesh::new(group, tried.shape())?;
    let (ranks, mut store) = (ModelRanks::on(&mesh), VarStore::new(Device::Cpu));
    let model = Gpt::on(&ranks, &store.root(), options)?;
    if kind == Kind::Double {
        store.double();
    }
    fill(&store, &ranks)?;
    let engine = Box::new(tried.options(&ranks)).engine(EngineSetup::new(&store, &mesh))?;
    let mut optimizer =
        Adam::new(parameters(&store), AdamOptions { lr: 3e-3, eps: 1e-3, ..Default::default() })?;
    engine.adopt(&mut optimizer)?;
    let masks = Masks::new(3, Device::Cpu)?;
    let (rank, stride) = (mesh.samples().rank(), mesh.samples().size());
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        masks.set_step(step)?;
        let (tokens, targets) = batch(step, rank, stride);
        let samples =
            StepSamples { first: rank as u64, stride: stride as u64, count: tokens.size()[0] as u64 };
        let loss = {
            let _masks = masks.enter(samples);
            engine.forward_with(GradSync::Reduce, || model.loss(&tokens, &targets, Mode::Train))?
        };
        let loss = loss.map_err(|error| anyhow::anyhow!("{error}"))?;
        let mut sum = [loss.double_value(&[])];
        mesh.losses().all_reduce(&mut sum, drumline::ReduceOp::Sum)?;
        losses.push(sum[0]);
        engine
            .backward(&(&loss * (mesh.losses().size() as f64 / (TEXTS * PLACES) as f64)), GradSync::Reduce)?;
        norms.extend(engine.clip(Clip::Norm(1.0), &engine.parameters())?);
        engine.step(&mut optimizer)?;
        optimizer.zero_grad()?;
    }
    let whole = |name: String| -> Result<Named> {
        let tensor = engine.full(&name)?;
        Ok(Named { name, tensor })
    };
    let names = engine.tensors().into_iter().map(|whole| whole.name);
    let mut parameters = names.map(whole).collect::<Result<Vec<_>>>()?;
    parameters.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Trained { losses, norms, parameters })
}

fn on_ranks(tried: Tried, options: &GptOptions, kind: Kind) -> Vec<Trained> {
    let limits = GroupOptions { timeout: Duration::from_secs(120), ..Default::default() };
    let body = |group: ProcessGroup| {
        trained(&group, tried, options, kind).map_err(|error| CommError::Init { cause: format!("{error:#}") })
    };
    LocalGroup::run_with(tried.num_ranks(), &limits, body)
        .unwrap_or_else(|error| panic!("{tried:?}: {error:?}"))
}

/// The largest difference of two tensors, relative to the largest element.
fn distance(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let most = one.abs().max().double_value(&[]).max(1e-2);
    (one - other).abs().max().double_value(&[]) / most
}

fn check(one: &Trained, other: &Trained, most: f64, what: &str) {
    for (step, (one, other)) in one.losses.iter().zip(&other.losses).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "{what}: loss of step {step}: {one} and {other}");
    }
    for (step, (one, other)) in one.norms.iter().zip(&other.norms).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "{what}: norm of step {step}: {one} and {other}");
    }
    assert_eq!(one.parameters.len(), other.parameters.len(), "{what}");
    let both = one.parameters.iter().zip(&other.parameters);
    let distances = both.map(|(one, other)| {
        assert_eq!(one.name, other.name, "{what}");
        (distance(&one.tensor, &other.tensor), &other.name)
    });
    let furthest = distances.max_by(|one, other| one.0.total_cmp(&other.0));
    let (distance, name) = furthest.expect("a model has parameters");
    assert!(distance <= most, "{what}: `{name}` is the furthest, {distance:e} away");
}

/// Trains on meshes, and compares with one rank. All ranks have the same bits.
fn equal_one_rank(meshes: &[Tried], options: &GptOptions, kind: Kind, most: f64) {
    // The loss of one rank is computed in chunks in f32 only, and all of it must be in the kind that is compared.
    let plain = GptOptions { loss_chunks: 1, checkpoint: Checkpointing::None, ..options.clone() };
    let one = on_ranks(ALONE, &plain, kind).remove(0);
    assert!(one.losses[9] < one.losses[0], "it learns: {:?}", one.losses);
    for tried in meshes {
        let all = on_ranks(*tried, options, kind);
        for rank in &all {
            check(&one, rank, most, &format!("{tried:?}"));
            for (rank, first) in rank.parameters.iter().zip(&all[0].parameters) {
                assert_eq!(
                    rank.tensor, first.tensor,
                    "{tried:?}: `{}` has the same bits on all ranks",
                    rank.name
                );
            }
        }
    }
}

#[test]
fn layers_and_texts_that_are_cut_train_as_on_one_rank() {
    let meshes = [
        Tried { tp: 2, ..ALONE },
        Tried { tp: 8, ..ALONE },
        Tried { cp: 3, ..ALONE },
        Tried { cp: 2, tp: 2, ..ALONE },
        Tried { dp: 2, tp: 2, ..ALONE },
        Tried { shard: 2, cp: 2, tp: 2, stage: Stage::Zero1, ..ALONE },
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
    while meshes.len() < 8 {
        // Each factor of 2 goes to a random axis.
        let mut sizes = [1; 4];
        (0..3).for_each(|_| sizes[below(4)] *= 2);
        let [dp, shard, cp, tp] = sizes;
        let stage = if shard > 1 { stages[below(3)] } else { Stage::Zero0 };
        let tried = Tried { dp, shard, cp, tp, stage };
        if !meshes.contains(&tried) {
            meshes.push(tried);
        }
    }
    equal_one_rank(&meshes, &options(), Kind::Double, 1e-12);
}

#[test]
fn dropout_draws_the_same_masks_on_every_mesh() {
    let dropped = GptOptions { dropout: 0.3, ..options() };
    let meshes = [
        Tried { tp: 2, ..ALONE },
        Tried { tp: 4, dp: 2, ..ALONE },
        Tried { shard: 2, tp: 2, stage: Stage::Zero3, ..ALONE },
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
