//! Checkpoints of models that are cut: saved on one mesh and loaded on another, parameters and Adam's moments keep their
//! bits. Also of weights that are stacked, of which a rank has several boxes, and of tied ones, which two stages have.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use drumline::checkpoint::{Checkpoints, Mark, RunState, Section, ShardReader, StateLayout, restore};
use drumline::comm::{Axis, LocalGroup, Mesh, MeshShape, ProcessGroup};
use drumline::engine::pipeline::{Order, Pipeline, PipelineOptions, Scale, Schedule, Stages};
use drumline::engine::tensor::TensorParallel;
use drumline::engine::{Engine, EngineOptions, EngineSetup, ModelParallel, ShardOptions, Stage};
use drumline_torch::{Adam, AdamOptions, Lamb, LambOptions, Named, Optimizer, bytes, parameters};
use rank_test::anyhow::Result;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::cut_net::{NUM_PARAMETERS, TIED, batch, fill, layers};

/// Stages have at least one layer.
const NUM_LAYERS: usize = 4;

/// The sizes of a mesh, and what ranks along `shard` divide.
#[derive(Debug, Clone, Copy)]
struct Tried {
    pp: usize,
    dp: usize,
    shard: usize,
    cp: usize,
    tp: usize,
    stage: Stage,
}

impl Tried {
    const ALONE: Self = Self { pp: 1, dp: 1, shard: 1, cp: 1, tp: 1, stage: Stage::Zero0 };

    fn num_ranks(self) -> usize {
        self.pp * self.dp * self.shard * self.cp * self.tp
    }

    /// Of all meshes with up to 8 ranks those with stages, and every fourth of the others, in an order in which neighbours
    /// differ: 29.
    fn some() -> Vec<Self> {
        let axes = [0, 1, 2, 3, 4];
        let sizes = (0..4usize.pow(5)).map(|nth| axes.map(|axis| 1 << (nth / 4usize.pow(axis) % 4)));
        let all = sizes.filter(|sizes: &[usize; 5]| sizes.iter().product::<usize>() <= 8);
        let all = all.filter(|[pp, ..]| *pp <= NUM_LAYERS).enumerate();
        let all: Vec<_> = all.map(|(nth, sizes)| Self::of(sizes, nth)).collect();
        // A step that shares no factor with the length reaches each once.
        let step = (all.len() / 3..).find(|step| gcd(*step, all.len()) == 1).unwrap();
        let mut num_without = 0;
        let all = (1..=all.len()).map(|nth| all[nth * step % all.len()]);
        all.filter(|tried| {
            num_without += usize::from(tried.pp == 1);
            tried.pp > 1 || num_without % 4 == 1
        })
        .collect()
    }

    /// Ranks with stages keep all of their parameters.
    fn of([pp, dp, shard, cp, tp]: [usize; 5], nth: usize) -> Self {
        let stage = match (shard, pp) {
            (1, _) => Stage::Zero0,
            (_, 1) => [Stage::Zero1, Stage::Zero3, Stage::Zero2][nth % 3],
            _ => [Stage::Zero1, Stage::Zero2][nth % 2],
        };
        Self { pp, dp, shard, cp, tp, stage }
    }

    fn options(self, tp: &TensorParallel) -> ModelParallel {
        let within: Box<dyn EngineOptions> = match self.stage {
            Stage::Zero0 => Default::default(),
            stage => {
                ShardOptions { shard: Some(self.shard), keep_gathered: 20, ..ShardOptions::new(stage) }.into()
            }
        };
        ModelParallel { pp: self.pp, cp: self.cp, tp: self.tp, parts: tp.parts(), within }
    }

    fn shape(self) -> MeshShape {
        let axes = [
            (Axis::Pp, self.pp),
            (Axis::Dp, self.dp),
            (Axis::Shard, self.shard),
            (Axis::Cp, self.cp),
            (Axis::Tp, self.tp),
        ];
        axes.into_iter().fold(MeshShape::default(), |shape, (axis, size)| shape.with(axis, size))
    }
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// A rank's stages with their engine.
struct Cut {
    store: VarStore,
    stages: Rc<Stages>,
    engine: Rc<dyn Engine>,
}

impl Cut {
    fn new(tried: Tried, group: &ProcessGroup) -> Result<Self> {
        tch::set_num_threads(1);
        let mesh = Mesh::new(group, tried.shape())?;
        let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
        let options = PipelineOptions { order: Order::from(Schedule::OneFOneB), ..Default::default() };
        let stages = Stages::build(&layers(&tp), &store, &mesh, &options)?.into();
        fill(&store, &tp)?;
        let engine = Box::new(tried.options(&tp)).engine(EngineSetup::new(&store, &mesh))?.into();
        Ok(Self { store, stages, engine })
    }

    fn train(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        let pipeline = Pipeline::on(self.stages.clone(), self.engine.clone())?;
        for _ in 0..3 {
            let (batch, agreed) = batch(self.engine.mesh())?;
            pipeline.step(&agreed, &[batch], Scale::No, |outputs, _| Ok(outputs[0].shallow_clone()))?;
            self.engine.step(optimizer)?;
            optimizer.zero_grad()?;
        }
        Ok(())
    }
}

/// Loads the latest checkpoint, if there is one, and trains otherwise. Then saves.
fn loaded_and_saved(tried: Tried, from: Option<&Path>, into: &Path, group: &ProcessGroup) -> Result<()> {
    let cut = Cut::new(tried, group)?;
    let engine = &*cut.engine;
    let mut optimizer = Adam::new(parameters(&cut.store), AdamOptions { lr: 0.01, ..Default::default() })?;
    engine.adopt(&mut optimizer)?;
    let layout = StateLayout::new(&engine.tensors(), &engine.state())?;
    let held = || -> Vec<Named> {
        let placed = engine.state().into_iter();
        placed.map(|placed| Named { name: placed.name, tensor: placed.tensor }).collect()
    };
    match from {
        Some(from) => {
            let mut found = Checkpoints::new(from).read_only().find_latest(group)?.expect("it was saved");
            found.read_parts(Some(&layout), group)?;
            let mut restored = Ok(());
            engine.change_parameters(&mut || restored = restore(&held(), &found.state.model))?;
            restored?;
            optimizer.load_state(&found.state.optimizer)?;
        }
        None => cut.train(&mut optimizer)?,
    }
    let mut state = RunState::new(held())?;
    (state.optimizer, state.layout, state.mesh) = (optimizer.state(), Some(layout), Some(tried.shape()));
    Checkpoints::new(into).save(&state, Mark::Latest, group)?;
    Ok(())
}

fn run(tried: Tried, from: Option<&Path>, into: &Path) {
    let ran = LocalGroup::run(tried.num_ranks(), |group| {
        let ran = loaded_and_saved(tried, from, into, &group);
        ran.unwrap_or_else(|error| panic!("{tried:?}: {error:?}"));
        Ok(())
    });
    ran.unwrap();
}

/// The bytes of all tensors of parameters and optimizer, which the files together must have completely.
fn wholes(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let folder = dir.join("latest").canonicalize().unwrap();
    let sections = [Section::Model, Section::Optimizer];
    let read = |section| {
        let reader = ShardReader::open_section(&folder, section).unwrap();
        let names: Vec<_> = reader.names().map(str::to_owned).collect();
        names.into_iter().map(move |name| {
            let tensor = reader.read_whole(&name).unwrap();
            (name, bytes(&tensor).unwrap().to_vec())
        })
    };
    sections.into_iter().flat_map(read).collect()
}

#[test]
fn thirty_meshes_load_what_another_has_saved_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let of = |nth: usize| dir.path().join(nth.to_string());
    run(Tried::ALONE, None, &of(0));
    let first = wholes(&of(0));
    assert_eq!(first.len(), 4 * NUM_PARAMETERS, "each with two moments and a number of steps");
    let all = Tried::some();
    assert_eq!(all.len() + 1, 30, "{all:?}");
    let axes: [fn(&Tried) -> usize; 5] =
        [|tried| tried.pp, |tried| tried.dp, |tried| tried.shard, |tried| tried.cp, |tried| tried.tp];
    for size in axes {
        let with_stages = |tried: &Tried| tried.pp > 1 && size(tried) > 1;
        assert!(all.iter().any(with_stages), "{all:?}");
    }
    for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        assert!(all.iter().any(|tried| tried.stage == stage), "{stage} of {all:?}");
    }
    for (nth, tried) in all.into_iter().enumerate() {
        run(tried, Some(&of(nth)), &of(nth + 1));
        let now = wholes(&of(nth + 1));
        assert_eq!(now.keys().collect::<Vec<_>>(), first.keys().collect::<Vec<_>>(), "{tried:?}");
        for (name, bytes) in now {
            assert!(bytes == first[&name], "`{name}` on {tried:?}");
        }
    }
}

#[test]
fn stacked_weights_are_in_as_many_files_as_they_have_boxes() {
    let dir = tempfile::tempdir().unwrap();
    run(Tried { tp: 2, ..Tried::ALONE }, None, dir.path());
    let folder = dir.path().join("latest").canonicalize().unwrap();
    let names: Vec<_> =
        (1..=3).map(|nth| format!("shard-00002-model-{nth:05}-of-00003.safetensors")).collect();
    assert!(names.iter().all(|name| folder.join(name).is_file()), "{folder:?}");
    let reader = ShardReader::open(&folder).unwrap();
    assert_eq!(reader.shape("attn.qkv.weight").unwrap(), [48, 16]);
    assert_eq!(
        bytes(&reader.read_whole("attn.qkv.weight").unwrap()).unwrap(),
        wholes(dir.path())["attn.qkv.weight"]
    );
}

#[test]
fn a_tied_variable_of_two_stages_is_saved_once_and_loaded_by_both() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    run(Tried::ALONE, None, &of("one"));
    let num_saved = |name: &str| {
        let folder = of(name).join("latest").canonicalize().unwrap();
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let files = files.filter(|file| file.to_string_lossy().contains("-model-"));
        let tensors = files.flat_map(|file| Tensor::read_safetensors(file).unwrap());
        tensors.filter(|(name, _)| name == TIED).count()
    };
    // Trained by four stages, and loaded by as many.
    for (name, from) in [("trained", None), ("loaded", Some(of("one")))] {
        run(Tried { pp: 4, ..Tried::ALONE }, from.as_deref(), &of(name));
        assert_eq!(num_saved(name), 1, "{name}");
        assert!(wholes(&of(name)) == wholes(&of("one")), "{name}");
    }
}

#[test]
fn optimizers_that_need_whole_matrices_are_refused() {
    let refused = LocalGroup::run(2, |group| {
        let made = || -> Result<String> {
            let tried = Tried { tp: 2, ..Tried::ALONE };
            let cut = Cut::new(tried, &group)?;
            let mut lamb = Lamb::new(parameters(&cut.store), LambOptions::default())?;
            Ok(cut.engine.adopt(&mut lamb).unwrap_err().to_string())
        };
        Ok(made().unwrap())
    });
    for said in refused.unwrap() {
        assert!(
            said.starts_with("Lamb's trust ratio needs whole parameters") && said.contains("try Adam"),
            "{said}"
        );
    }
}
