//! Checkpoints of models that are cut: saved on one mesh and loaded on another, parameters and Adam's moments keep their
//! bits. Also of weights that are stacked, of which a rank has several boxes.

use std::collections::BTreeMap;
use std::path::Path;

use drumline::checkpoint::{Checkpoints, Mark, RunState, Section, ShardReader, StateLayout, restore};
use drumline::comm::{Axis, LocalGroup, Mesh, MeshShape, ProcessGroup};
use drumline::engine::tensor::{
    AttentionShape, ColumnLinear, LayerNorm, LinearShape, RowLinear, SelfAttention, TensorParallel, TpTensor,
    VocabEmbedding, VocabLabels, vocab_cross_entropy,
};
use drumline::engine::{Engine, EngineOptions, EngineSetup, GradSync, ModelParallel, ShardOptions, Stage};
use drumline_torch::{Adam, AdamOptions, Lamb, LambOptions, Named, Optimizer, bytes, parameters};
use rank_test::anyhow::Result;
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

const VOCAB: i64 = 19;
const SIZE: i64 = 16;
const INNER: i64 = 27;
/// Meshes that are tried: with the first, 30.
const MESHES: usize = 29;

/// The sizes of a mesh, and what ranks along `shard` divide.
#[derive(Debug, Clone, Copy)]
struct Tried {
    dp: usize,
    shard: usize,
    cp: usize,
    tp: usize,
    stage: Stage,
}

impl Tried {
    const ALONE: Self = Self { dp: 1, shard: 1, cp: 1, tp: 1, stage: Stage::Zero0 };

    fn num_ranks(self) -> usize {
        self.dp * self.shard * self.cp * self.tp
    }

    /// Some of all meshes with up to 8 ranks, in an order in which neighbours differ.
    fn some(count: usize) -> Vec<Self> {
        let sizes = [1, 2, 4, 8];
        let mut all = Vec::new();
        for (dp, shard, cp, tp) in sizes.into_iter().flat_map(|dp| {
            sizes.into_iter().flat_map(move |shard| {
                sizes.into_iter().flat_map(move |cp| sizes.into_iter().map(move |tp| (dp, shard, cp, tp)))
            })
        }) {
            let stage = [Stage::Zero1, Stage::Zero3, Stage::Zero2][all.len() % 3];
            let tried = Self { dp, shard, cp, tp, stage: if shard > 1 { stage } else { Stage::Zero0 } };
            if tried.num_ranks() <= 8 {
                all.push(tried);
            }
        }
        // A step that shares no factor with the length reaches each once.
        let step = (all.len() / 3..).find(|step| gcd(*step, all.len()) == 1).unwrap();
        (0..count).map(|nth| all[(nth + 1) * step % all.len()]).collect()
    }

    fn options(self, tp: &TensorParallel) -> ModelParallel {
        let within: Box<dyn EngineOptions> = match self.stage {
            Stage::Zero0 => Default::default(),
            stage => {
                ShardOptions { shard: Some(self.shard), keep_gathered: 20, ..ShardOptions::new(stage) }.into()
            }
        };
        ModelParallel { cp: self.cp, tp: self.tp, parts: tp.parts(), within, ..Default::default() }
    }

    fn shape(self) -> MeshShape {
        let axes = [(Axis::Dp, self.dp), (Axis::Shard, self.shard), (Axis::Cp, self.cp), (Axis::Tp, self.tp)];
        axes.into_iter().fold(MeshShape::default(), |shape, (axis, size)| shape.with(axis, size))
    }
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

struct Net {
    embedding: VocabEmbedding,
    norm: LayerNorm,
    attention: SelfAttention,
    fc: ColumnLinear,
    back: RowLinear,
}

impl Net {
    fn new(store: &VarStore, tp: &TensorParallel) -> Result<Self> {
        let (root, init) = (store.root(), Init::Const(0.1));
        let shape = AttentionShape { features: SIZE, heads: 8, causal: true };
        let net = Self {
            embedding: VocabEmbedding::new(tp, &(&root / "wte"), [VOCAB, SIZE], init)?,
            norm: LayerNorm::new(tp, &(&root / "norm"), SIZE)?,
            attention: SelfAttention::new(tp, &(&root / "attn"), shape, init)?,
            fc: ColumnLinear::new(
                tp,
                &(&root / "fc"),
                LinearShape { init, ..LinearShape::new(SIZE, INNER) },
            )?,
            back: RowLinear::new(
                tp,
                &(&root / "back"),
                LinearShape { init, ..LinearShape::new(INNER, SIZE) },
            )?,
        };
        // Values that differ from element to element, whatever part a rank has.
        for (nth, Named { name, mut tensor }) in parameters(store).into_iter().enumerate() {
            let part = tp.parts().into_iter().find(|part| part.whole.name == name);
            let size = part.as_ref().map_or_else(|| tensor.size(), |part| part.whole.size.clone());
            let numel = size.iter().product::<i64>();
            let whole =
                (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 0.37 + nth as f64).sin().view(&size[..]);
            let own =
                part.map_or_else(|| Ok(whole.shallow_clone()), |part| part.of(&whole, &tensor.size()))?;
            no_grad(|| tensor.copy_(&own));
        }
        Ok(net)
    }

    fn loss(&self, tp: &TensorParallel) -> Result<Tensor> {
        let tokens = (Tensor::arange(10, (Kind::Int64, Device::Cpu)).view([2, 5]) * 7).remainder(VOCAB);
        let xs = self.embedding.forward(&tokens)?.sum()?;
        let xs = xs.plus(&self.attention.forward(&self.norm.forward_invariant(&xs)?.replicate()?)?)?;
        let hidden = self.fc.forward(&xs.replicate()?)?.map(|hidden| hidden.f_gelu("none"))?;
        let xs: TpTensor<_> = xs.plus(&self.back.forward(&hidden)?)?;
        let logits = self.embedding.logits(&xs.replicate()?)?.map(|logits| logits.f_flatten(0, 1))?;
        let classes = tokens.view([-1]);
        let labels = VocabLabels { classes: &classes, num_classes: None, ignored: None, smoothing: 0.1 };
        assert_eq!(tp.size(), logits.ranks().size());
        Ok(vocab_cross_entropy(&logits, labels)?.into_tensor())
    }
}

/// Loads the latest checkpoint, if there is one, and trains otherwise. Then saves.
fn loaded_and_saved(tried: Tried, from: Option<&Path>, into: &Path, group: &ProcessGroup) -> Result<()> {
    tch::set_num_threads(1);
    let mesh = Mesh::new(group, tried.shape())?;
    let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
    let net = Net::new(&store, &tp)?;
    let engine = Box::new(tried.options(&tp)).engine(EngineSetup::new(&store, &mesh))?;
    let mut optimizer = Adam::new(parameters(&store), AdamOptions { lr: 0.01, ..Default::default() })?;
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
        None => (0..3).try_for_each(|_| step(&*engine, &net, &tp, &mut optimizer))?,
    }
    let mut state = RunState::new(held())?;
    (state.optimizer, state.layout, state.mesh) = (optimizer.state(), Some(layout), Some(tried.shape()));
    Checkpoints::new(into).save(&state, Mark::Latest, group)?;
    Ok(())
}

fn step(engine: &dyn Engine, net: &Net, tp: &TensorParallel, optimizer: &mut dyn Optimizer) -> Result<()> {
    let loss = engine.forward_with(GradSync::Reduce, || net.loss(tp))??;
    engine.backward(&loss, GradSync::Reduce)?;
    engine.step(optimizer)?;
    Ok(optimizer.zero_grad()?)
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
    assert_eq!(first.len(), 4 * 11, "11 parameters, each with two moments and a number of steps");
    let all = Tried::some(MESHES);
    assert!(all.iter().filter(|tried| tried.tp > 1).count() > MESHES / 3, "{all:?}");
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
fn optimizers_that_need_whole_matrices_are_refused() {
    let refused = LocalGroup::run(2, |group| {
        let made = || -> Result<String> {
            let tried = Tried { tp: 2, ..Tried::ALONE };
            let mesh = Mesh::new(&group, tried.shape())?;
            let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
            let _net = Net::new(&store, &tp)?;
            let engine = Box::new(tried.options(&tp)).engine(EngineSetup::new(&store, &mesh))?;
            let mut lamb = Lamb::new(parameters(&store), LambOptions::default())?;
            Ok(engine.adopt(&mut lamb).unwrap_err().to_string())
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
