//! Gradients are reduced in the optimizer's `step`, as in Horovod and NJUNMT: after any number of backwards, and with a
//! divisor that is known only then.
//!
//! ```text
//!   backward, backward, … (each rank for itself) ─▶ step(Divide): gradients into one memory ─▶ sum over ranks ÷ divisor ─▶ optimizer
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use drumline_comm::{ProcessGroup, ReduceOp, call_site, on_behalf_of};
use drumline_torch::{Named, Optimizer, OptimizerState, TensorCollectives, set_grad};
use tch::{Device, Tensor};

use crate::arena::Arena;
use crate::error::ParallelError;
use crate::kinds::{kind_name, kind_of};
use crate::layout::Caps;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The divisor of the sum of all ranks' gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Divide {
    /// The number of ranks: for losses that are means over a rank's samples.
    Ranks,
    /// The sum of all ranks' counts; the value is this rank's count. For losses that are sums over samples or tokens.
    /// It is exact for any distribution of samples over ranks.
    Count(f64),
}

/// An optimizer that reduces gradients over ranks before it steps.
///
/// ```no_run
/// use drumline_comm::ProcessGroup;
/// use drumline_parallel::{DistributedOptimizer, Divide};
/// use drumline_torch::{Sgd, SgdOptions, parameters};
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 10, 1, Default::default());
/// let mut optimizer = DistributedOptimizer::new(Sgd::new(parameters(&vs), SgdOptions::default())?, &group)?;
/// for _update_cycle in 0..4 {
///     let x = Tensor::rand([32, 10], (Kind::Float, Device::Cpu));
///     model.forward(&x).square().sum(Kind::Float).backward(); // a sum, not a mean
/// }
/// optimizer.step(Divide::Count(4.0 * 32.0))?; // the mean over all samples of all ranks
/// optimizer.zero_grad()?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct DistributedOptimizer<O> {
    optimizer: O,
    group: Arc<ProcessGroup>,
    arena: Arena,
}

impl<O: Optimizer> DistributedOptimizer<O> {
    /// All ranks of the group call it, and get the parameters of rank 0.
    #[track_caller]
    pub fn new(optimizer: O, group: &ProcessGroup) -> Result<Self> {
        on_behalf_of(call_site(), || Self::make(optimizer, group))
    }

    fn make(optimizer: O, group: &ProcessGroup) -> Result<Self> {
        let params = optimizer.parameters();
        crate::same_model::check(group, &params)?;
        let group = Arc::new(crate::own_group(group)?);
        let order: Vec<usize> = (0..params.len()).collect();
        let arena = Arena::new(&group, params, &order, Caps::NONE)?;
        arena.broadcast_tensors(&group, 0)?;
        Ok(Self { optimizer, group, arena })
    }

    /// Reduces the gradients of all backwards since `zero_grad`, and steps. All ranks call it, also those that had no
    /// batch: their gradients are zero.
    #[track_caller]
    pub fn step(&mut self, divide: Divide) -> Result {
        self.reduce(divide)?;
        Ok(self.optimizer.step()?)
    }

    /// The first half of [`step`](Self::step), to clip gradients before [`inner`](Self::inner) steps.
    #[track_caller]
    pub fn reduce(&mut self, divide: Divide) -> Result {
        on_behalf_of(call_site(), || self.reduce_all(divide))
    }

    fn reduce_all(&mut self, divide: Divide) -> Result {
        let mut used = Vec::new();
        for index in 0..self.arena.tensors.len() {
            used.push(u8::from(self.arena.collect_grad(index)?));
        }
        let here = used.clone();
        self.group.all_reduce(&mut used, ReduceOp::Max)?;
        let (op, divisor) = self.divisor(divide)?;
        for (flat, place) in self.arena.flats.iter().zip(&self.arena.layout.flats) {
            flat.all_reduce(&self.group, 0..place.len, op)?;
            if let Some(divisor) = divisor {
                let _ = flat.tensor().shallow_clone().f_div_scalar_(divisor)?;
            }
        }
        // Sets the gradients of parameters that only other ranks used. If no rank used one, it has no gradient.
        for index in (0..used.len()).filter(|index| here[*index] == 0 && used[*index] == 1) {
            set_grad(&self.arena.tensors[index].tensor, Some(&self.arena.places[index]))?;
        }
        Ok(())
    }

    fn divisor(&self, divide: Divide) -> Result<(ReduceOp, Option<f64>)> {
        let Divide::Count(count) = divide else { return Ok((ReduceOp::Avg, None)) };
        let mut total = [count];
        self.group.all_reduce(&mut total, ReduceOp::Sum)?;
        if !(total[0].is_finite() && total[0] > 0.0) {
            let expected = "a positive number to divide gradients by; try skipping the step";
            return Err(ParallelError::value("the count of all ranks", total[0], expected));
        }
        Ok((ReduceOp::Sum, Some(total[0])))
    }

    /// Makes the gradients undefined.
    pub fn zero_grad(&mut self) -> Result {
        Ok(self.optimizer.zero_grad()?)
    }

    /// The wrapped optimizer.
    pub fn inner(&mut self) -> &mut O {
        &mut self.optimizer
    }
}

/// Broadcasts the optimizer state of `root`, such as after only one rank has loaded a checkpoint.
#[track_caller]
pub fn broadcast_optimizer_state(optimizer: &mut dyn Optimizer, group: &ProcessGroup, root: usize) -> Result {
    let own = optimizer.state();
    let shape = |named: &Named| (named.name.clone(), kind_name(named.tensor.kind()), named.tensor.size());
    let outline = (own.kind.clone(), own.scalars.clone(), own.tensors.iter().map(shape).collect::<Vec<_>>());
    type Outline = (String, BTreeMap<String, f64>, Vec<(String, String, Vec<i64>)>);
    let (kind, scalars, shapes): Outline = group.broadcast_object(Some(&outline), root)?;
    let is_root = group.rank() == root;
    let mut tensors = Vec::new();
    for (index, (name, kind, size)) in shapes.into_iter().enumerate() {
        let mut tensor = if is_root {
            own.tensors[index].tensor.to_device(Device::Cpu).copy()
        } else {
            Tensor::zeros(size, (kind_of(&kind)?, Device::Cpu))
        };
        group.broadcast_tensor(&mut tensor, root)?;
        tensors.push(Named { name, tensor });
    }
    if is_root { Ok(()) } else { Ok(optimizer.load_state(&OptimizerState { kind, scalars, tensors })?) }
}
