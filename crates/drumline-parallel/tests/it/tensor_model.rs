//! A small language model by the layers of `tensor`, with and without sequence parallelism, and its training by the engine.
//! `bench/oracle/tensor.py` has the same in PyTorch.

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::tensor::{
    AttentionShape, ColumnLinear, Features, Invariant, Keeps, LayerNorm, LinearShape, RowLinear,
    SelfAttention, Sequence, Sharded, TensorParallel, TpTensor, Variable, VocabEmbedding, VocabLabels,
    vocab_cross_entropy,
};
use drumline_parallel::{Clip, EngineOptions, EngineSetup, GradSync, ModelParallel, Part};
use drumline_torch::{Named, Optimizer, Sgd, SgdOptions, parameters};
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

pub(crate) const VOCAB: i64 = 13;
pub(crate) const SIZE: i64 = 24;
pub(crate) const HEADS: i64 = 12;
pub(crate) const INNER: i64 = 50;
pub(crate) const PLACES: i64 = 7;
pub(crate) const IGNORED: i64 = -100;
pub(crate) const STEPS: i64 = 10;

/// How activations are kept between the regions where layers are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Between {
    /// All on all ranks.
    Whole,
    /// A part of the sequence on each rank.
    Sequence,
}

#[derive(Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: SelfAttention,
    ln_2: LayerNorm,
    fc: ColumnLinear,
    back: RowLinear,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tp: TensorParallel,
    wte: VocabEmbedding,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln: LayerNorm,
}

type Parallel<T> = Result<T, drumline_parallel::ParallelError>;

impl Model {
    pub(crate) fn new(store: &VarStore, tp: &TensorParallel) -> Parallel<Self> {
        let (root, init) = (store.root(), Init::Randn { mean: 0.0, stdev: 0.3 });
        let wte = VocabEmbedding::new(tp, &(&root / "wte"), [VOCAB, SIZE], init)?;
        let wpe = Variable { name: "weight", size: &[PLACES, SIZE], keeps: Keeps::Whole };
        let wpe = tp.variable(&(&root / "wpe"), wpe, init)?;
        let block = |nth: i64| {
            let path = &root / "h" / nth;
            let shape = AttentionShape { features: SIZE, heads: HEADS, causal: true };
            Parallel::Ok(Block {
                ln_1: LayerNorm::new(tp, &(&path / "ln_1"), SIZE)?,
                attn: SelfAttention::new(tp, &(&path / "attn"), shape, init)?,
                ln_2: LayerNorm::new(tp, &(&path / "ln_2"), SIZE)?,
                fc: ColumnLinear::new(tp, &(&path / "fc"), LinearShape::new(SIZE, INNER))?,
                back: RowLinear::new(tp, &(&path / "back"), LinearShape::new(INNER, SIZE))?,
            })
        };
        let blocks = (0..2).map(block).collect::<Parallel<_>>()?;
        Ok(Self { tp: tp.clone(), wte, wpe, blocks, ln: LayerNorm::new(tp, &(&root / "ln"), SIZE)? })
    }

    pub(crate) fn loss(&self, tokens: &Tensor, targets: &Tensor, between: Between) -> Parallel<Tensor> {
        let logits = match between {
            Between::Whole => self.logits_of_whole(tokens)?,
            Between::Sequence => self.logits_of_sequence(tokens)?,
        };
        let rows = logits.map(|logits| logits.f_flatten(0, 1))?;
        let classes = targets.flatten(0, 1);
        let labels =
            VocabLabels { classes: &classes, num_classes: None, ignored: Some(IGNORED), smoothing: 0.1 };
        Ok(vocab_cross_entropy(&rows, labels)?.into_tensor())
    }

    fn logits_of_whole(&self, tokens: &Tensor) -> Parallel<TpTensor<Sharded<Features>>> {
        let mut xs: TpTensor<Invariant> = self.wte.forward(tokens)?.sum()?;
        xs = xs.map(|xs| xs.f_add(&self.wpe))?;
        for Block { ln_1, attn, ln_2, fc, back } in &self.blocks {
            let normed = ln_1.forward_invariant(&xs)?.replicate()?;
            xs = xs.plus(&attn.forward(&normed)?)?;
            let normed = ln_2.forward_invariant(&xs)?.replicate()?;
            let hidden = fc.forward(&normed)?.map(|hidden| hidden.f_gelu("tanh"))?;
            xs = xs.plus(&back.forward(&hidden)?)?;
        }
        self.wte.logits(&self.ln.forward_invariant(&xs)?.replicate()?)
    }

    fn logits_of_sequence(&self, tokens: &Tensor) -> Parallel<TpTensor<Sharded<Features>>> {
        let mut xs: TpTensor<Sharded<Sequence>> = self.wte.forward(tokens)?.scatter()?;
        let [places] = self.tp.replicate_all([&self.wpe])?;
        let first = xs.first();
        xs = xs.map(|xs| xs.f_add(&places.local().f_narrow(0, first, xs.size()[1])?))?;
        for Block { ln_1, attn, ln_2, fc, back } in &self.blocks {
            let normed = ln_1.forward(&xs)?.gather()?;
            xs = xs.plus(&attn.forward_scattered(&normed)?)?;
            let normed = ln_2.forward(&xs)?.gather()?;
            let hidden = fc.forward(&normed)?.map(|hidden| hidden.f_gelu("tanh"))?;
            xs = xs.plus(&back.forward_scattered(&hidden)?)?;
        }
        self.wte.logits(&self.ln.forward(&xs)?.gather()?)
    }
}

/// Gives all variables the values of the oracle, whatever part of them this rank has.
pub(crate) fn fill(store: &VarStore, parts: &[Part]) {
    for Named { name, mut tensor } in parameters(store) {
        let part = parts.iter().find(|part| part.whole.name == name);
        let size = part.map_or_else(|| tensor.size(), |part| part.whole.size.clone());
        let values = values_of(&name, &size);
        let own =
            part.map_or_else(|| values.shallow_clone(), |part| part.of(&values, &tensor.size()).unwrap());
        no_grad(|| tensor.copy_(&own));
    }
}

/// The values of a parameter, of its name and size.
fn values_of(name: &str, size: &[i64]) -> Tensor {
    let numel: i64 = size.iter().product();
    let shift = name.bytes().map(f64::from).sum::<f64>();
    let wave = ((Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.7 + shift).sin() * 0.3).view(size);
    if name.contains("ln") && name.ends_with("weight") { wave + 1.0 } else { wave }
}

/// Texts and their next tokens, of which some are ignored.
pub(crate) fn batch(step: i64) -> (Tensor, Tensor) {
    let all = Tensor::arange(3 * (PLACES + 1), (Kind::Int64, Device::Cpu)).view([3, PLACES + 1]);
    let all = (&all * &all * 5 + &all * 3 + step * 7).remainder(VOCAB);
    let targets = all.narrow(1, 1, PLACES).contiguous();
    let _ = targets.get(1).narrow(0, 2, 2).fill_(IGNORED);
    (all.narrow(1, 0, PLACES).contiguous(), targets)
}

/// What a training leaves: the losses and the norms of gradients of all steps, and all parameters as wholes.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) parameters: Vec<Named>,
}

/// Trains on all ranks of a group, which are those along `tp`.
pub(crate) fn trained(group: &ProcessGroup, kind: Kind, between: Between) -> Result<Trained> {
    trained_on(Device::Cpu, group, kind, between)
}

pub(crate) fn trained_on(
    device: Device,
    group: &ProcessGroup,
    kind: Kind,
    between: Between,
) -> Result<Trained> {
    tch::set_num_threads(1);
    let options = ModelParallel { tp: group.size(), ..Default::default() };
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let (tp, mut store) = (TensorParallel::on(&mesh), VarStore::new(device));
    let model = Model::new(&store, &tp)?;
    if kind == Kind::Double {
        store.double();
    }
    fill(&store, &tp.parts());
    let options = Box::new(ModelParallel { parts: tp.parts(), ..options });
    let engine = options.engine(EngineSetup::new(&store, &mesh))?;
    let mut optimizer =
        Sgd::new(engine.parameters(), SgdOptions { lr: 0.05, momentum: 0.9, ..Default::default() })?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let (tokens, targets) = batch(step);
        let (tokens, targets) = (tokens.to_device(device), targets.to_device(device));
        let loss = engine.forward_with(GradSync::Reduce, || model.loss(&tokens, &targets, between))??;
        let loss = loss / targets.ne(IGNORED).sum(Kind::Float).double_value(&[]);
        engine.backward(&loss, GradSync::Reduce)?;
        losses.push(loss.double_value(&[]));
        norms.extend(engine.clip(Clip::Norm(1.0), &engine.parameters())?);
        engine.step(&mut optimizer)?;
        optimizer.zero_grad()?;
    }
    let whole = |Named { name, .. }| -> Result<Named> {
        let tensor = engine.full(&name)?;
        Ok(Named { name, tensor })
    };
    Ok(Trained {
        losses,
        norms,
        parameters: parameters(&store).into_iter().map(whole).collect::<Result<_>>()?,
    })
}

/// The largest difference of two tensors, relative to the largest element.
pub(crate) fn distance(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let most = one.abs().max().double_value(&[]).max(1e-3);
    (one - other).abs().max().double_value(&[]) / most
}
