//! The parameters of an optimizer, in batches for one fused call each, with their state tensors.

mod parameter;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use drumline_comm::{ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use super::CopiedParameter;
use super::division::{Division, OwnRows};
use super::groups::{ParameterGroup, ParameterGroups};
use super::state::Slot;
use super::work::{Rate, Work};
use crate::collectives::TensorCollectives;
use crate::error::TorchError;
use crate::fused::{Lr, grad_with_layout, is_dense};
use crate::grad::set_grad;
use crate::kernels::{CheckedStep, MasterStep, Rounded, Rule, gpu_steps};
use crate::named::Named;

pub(super) use parameter::Parameter;

/// The parameters of an optimizer, and its learning rate.
#[derive(Debug)]
pub(super) struct Trained {
    lr: f64,
    pub(super) batches: Vec<Batch>,
    /// The shapes of all whole parameters, also of those of which this rank steps nothing.
    shapes: Vec<Vec<i64>>,
    /// Where they are, and of which kind.
    places: Vec<(Device, Kind)>,
    /// Whether parameters in bf16 are the high halves of master weights.
    pub(super) are_split: bool,
    /// The ranks that have the other rows of the parameters.
    group: Option<Arc<ProcessGroup>>,
    /// The parameters in whose place others are stepped: backward may still leave gradients there.
    replaced: Vec<Tensor>,
    /// Whether steps look at twins alone.
    only_twins: bool,
}

/// Parameters of one learning rate, weight decay, device and kind.
#[derive(Debug)]
pub(super) struct Batch {
    lr_factor: f64,
    /// Their learning rate, if it is kept on their device: in f32 for libtorch's kernels, in f64 for ours.
    lr_tensors: Option<[Tensor; 2]>,
    pub(super) weight_decay: f64,
    pub(super) parameters: Vec<Parameter>,
}

/// The slots that an optimizer keeps for a parameter.
pub(super) type SlotsOf<'a> = &'a dyn Fn(&Parameter) -> &'static [Slot];

/// A parameter that has a gradient in this step: its index in the batch, and the gradient with the parameter's layout.
pub(super) struct Ready {
    pub(super) place: usize,
    pub(super) grad: Tensor,
}

/// A step of f32 copies.
#[derive(Clone, Copy)]
pub(super) struct CopyStep<'a> {
    pub(super) slots: SlotsOf<'a>,
    pub(super) rule: Rule,
    /// Whether to maximize instead of minimize.
    pub(super) maximize: bool,
    pub(super) found_inf: Option<&'a Tensor>,
}

/// The methods of `Optimizer` that are the same for all optimizers with a field `trained`.
macro_rules! methods_of_trained {
    () => {
        fn zero_grad(&mut self) -> Result<(), TorchError> {
            self.trained.zero_grad()
        }

        fn lr(&self) -> f64 {
            self.trained.lr()
        }

        fn set_lr(&mut self, lr: f64) {
            self.trained.set_lr(lr);
        }

        fn parameters(&self) -> Vec<$crate::named::Named> {
            self.trained.named()
        }

        fn replace_parameters(
            &mut self,
            replaced: &mut dyn FnMut(&$crate::named::Named) -> Option<tch::Tensor>,
        ) -> Result<(), TorchError> {
            self.trained.replace_parameters(replaced)
        }

        fn divide(&mut self, division: &$crate::optim::Division<'_>) -> Result<(), TorchError> {
            self.trained.divide(division)
        }

        fn step_twins(
            &mut self,
            twins: &mut dyn FnMut(&$crate::named::Named) -> Option<tch::Tensor>,
        ) -> Result<(), TorchError> {
            self.trained.step_twins(twins)
        }

        fn limit_to_twins(&mut self, is_on: bool) -> Result<(), TorchError> {
            self.trained.limit_to_twins(is_on);
            Ok(())
        }
    };
}
pub(super) use methods_of_trained;

/// The work of a step in one batch: parameters that are stepped directly, and f32 copies.
struct Split<'a> {
    ready: Vec<Ready>,
    /// Indices of copies in the batch, each with the parameter that it is a copy of.
    copies: Vec<(usize, &'a CopiedParameter<'a>)>,
}

impl Trained {
    pub(super) fn new(groups: ParameterGroups, lr: f64, weight_decay: f64) -> Result<Self, TorchError> {
        not_negative("the learning rate", lr)?;
        let mut trained = Self {
            lr,
            batches: Vec::new(),
            shapes: Vec::new(),
            places: Vec::new(),
            are_split: false,
            group: None,
            replaced: Vec::new(),
            only_twins: false,
        };
        for group in groups.0 {
            let weight_decay = group.weight_decay.unwrap_or(weight_decay);
            not_negative("the weight decay", weight_decay)?;
            not_negative("the factor of the learning rate", group.lr_factor)?;
            trained.add(group, weight_decay)?;
        }
        trained.check_distinct()?;
        Ok(trained)
    }

    fn add(&mut self, group: ParameterGroup, weight_decay: f64) -> Result<(), TorchError> {
        let first = self.batches.len();
        for named in group.parameters {
            check_trainable(&named)?;
            let (index, whole) = (self.shapes.len(), named.tensor.size());
            self.shapes.push(whole.clone());
            self.places.push((named.tensor.device(), named.tensor.kind()));
            let parameter = Parameter { named, kept: Vec::new(), index, whole, first_row: 0, of_twin: None };
            match self.batches[first..].iter_mut().find(|batch| batch.takes(&parameter)) {
                Some(batch) => batch.parameters.push(parameter),
                None => self.batches.push(Batch {
                    lr_factor: group.lr_factor,
                    lr_tensors: None,
                    weight_decay,
                    parameters: vec![parameter],
                }),
            }
        }
        Ok(())
    }

    /// A parameter that occurs twice would make two steps in one.
    fn check_distinct(&self) -> Result<(), TorchError> {
        let (mut names, mut places) = (HashSet::new(), HashSet::new());
        for Named { name, tensor } in self.parameters().map(|parameter| &parameter.named) {
            let is_new_place = tensor.numel() == 0 || places.insert(tensor.data_ptr());
            if !names.insert(name) || !is_new_place {
                return Err(TorchError::DuplicateParameter { name: name.clone() });
            }
        }
        Ok(())
    }

    pub(super) fn lr(&self) -> f64 {
        self.lr
    }

    pub(super) fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
        for batch in &mut self.batches {
            for tensor in batch.lr_tensors.iter_mut().flatten() {
                // If the device fails here, the next step fails as well, and returns the error.
                let _ = tensor.f_fill_(lr * batch.lr_factor);
            }
        }
    }

    /// Keeps the learning rates on the device from now on.
    pub(super) fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        for batch in &mut self.batches {
            let Some(first) = batch.parameters.first() else { continue };
            let (lr, device) = (self.lr * batch.lr_factor, first.named.tensor.device());
            let [single, double] =
                [Kind::Float, Kind::Double].map(|kind| Tensor::f_full([], lr, (kind, device)));
            batch.lr_tensors = Some([single?, double?]);
        }
        Ok(())
    }

    /// The learning rate of a batch for the kernel.
    pub(super) fn lr_of<'a>(&self, batch: &'a Batch) -> Lr<'a> {
        match &batch.lr_tensors {
            Some([single, _]) => Lr::Tensor(single),
            None => Lr::Value(self.lr * batch.lr_factor),
        }
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.batches.iter().flat_map(|batch| &batch.parameters)
    }

    pub(super) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter> {
        self.batches.iter_mut().flat_map(|batch| &mut batch.parameters)
    }

    /// For each batch the parameters that have a gradient. All gradients are checked before the first step, so that an
    /// error does not leave half a step behind.
    pub(super) fn ready(&self) -> Result<Vec<Vec<Ready>>, TorchError> {
        self.batches.iter().map(|batch| batch.ready(self.only_twins)).collect()
    }

    /// Creates the state of parameters that make their first step.
    pub(super) fn make_slots(
        &mut self,
        slots: SlotsOf<'_>,
        batch: usize,
        places: impl Iterator<Item = usize>,
    ) -> Result<(), TorchError> {
        for place in places {
            let parameter = &mut self.batches[batch].parameters[place];
            let slots = slots(parameter);
            if parameter.kept.len() < slots.len() {
                parameter.check_first_step()?;
                parameter.kept = slots.iter().map(|slot| slot.empty(&parameter.named.tensor)).collect();
            }
        }
        Ok(())
    }

    /// The parameters that make a step, with their state: copies with the gradients of what they are copies of, and
    /// others that have a gradient. `None` if a copy is not trained here.
    pub(super) fn work(
        &mut self,
        copies: &[CopiedParameter<'_>],
        slots: SlotsOf<'_>,
    ) -> Result<Option<Vec<Work>>, TorchError> {
        let Some(all) = self.split(copies)? else { return Ok(None) };
        for (batch, split) in all.iter().enumerate() {
            let (copied, ready) = (split.copies.iter(), split.ready.iter());
            let places = copied.map(|(place, _)| *place).chain(ready.map(|ready| ready.place));
            self.make_slots(slots, batch, places)?;
        }
        let mut work = Vec::new();
        for (batch, Split { ready, copies }) in self.batches.iter().zip(all) {
            let rate = Rate {
                lr: self.lr * batch.lr_factor,
                lr_at: batch.lr_tensors.as_ref().map(|[_, double]| double),
                weight_decay: batch.weight_decay,
            };
            let of = |place: usize, grad: Tensor| Work::new(&batch.parameters[place], grad, rate);
            work.extend(ready.into_iter().map(|ready| of(ready.place, ready.grad)));
            let copied = copies
                .into_iter()
                .map(|(place, copied)| of(place, copied.grad.shallow_clone()).with_twin(copied));
            work.extend(copied);
        }
        Ok(Some(work))
    }

    /// Of each batch the parameters that make a step. `None` if a copy is not trained here.
    fn split<'a>(&self, copies: &'a [CopiedParameter<'a>]) -> Result<Option<Vec<Split<'a>>>, TorchError> {
        let by_name: HashMap<_, _> = copies.iter().map(|copied| (copied.name, copied)).collect();
        let all: Result<Vec<_>, _> =
            self.batches.iter().map(|batch| batch.split(&by_name, self.only_twins)).collect();
        let all = all?;
        let num_found = all.iter().map(|split| split.copies.len()).sum::<usize>();
        Ok((num_found == copies.len()).then_some(all))
    }

    /// The shapes of all whole parameters, also of those of which this rank steps nothing.
    pub(super) fn shapes(&self) -> &[Vec<i64>] {
        &self.shapes
    }

    /// Adds up numbers of all ranks that have rows of the parameters. All of them call it in each step.
    pub(super) fn sum_over_ranks(&self, numbers: &mut [f64]) -> Result<(), TorchError> {
        match &self.group {
            Some(group) if group.size() > 1 => Ok(group.all_reduce(numbers, ReduceOp::Sum)?),
            _ => Ok(()),
        }
    }

    /// The same for numbers on a GPU, for which the host does not wait if the ranks have NCCL.
    pub(super) fn sum_over_ranks_on_gpu(&self, numbers: &mut Tensor) -> Result<(), TorchError> {
        match &self.group {
            Some(group) if group.size() > 1 => group.all_reduce_tensor(numbers, ReduceOp::Sum),
            _ => Ok(()),
        }
    }

    /// The GPU of the parameters; `None` if there is none on a GPU.
    pub(super) fn gpu(&self) -> Option<Device> {
        self.places.iter().map(|(device, _)| *device).find(|device| device.is_cuda())
    }

    /// Whether all parameters are on a GPU, also those of which this rank steps nothing.
    pub(super) fn are_on_gpu(&self) -> bool {
        self.places.iter().all(|(device, _)| device.is_cuda())
    }

    /// The first parameter on a GPU that our kernels do not step.
    pub(super) fn without_kernel(&self) -> Option<usize> {
        let has_kernel = |(device, kind): (Device, Kind)| {
            let is_supported = kind == Kind::Float || kind == Kind::BFloat16 && self.are_split;
            is_supported && gpu_steps(kind, device)
        };
        self.places.iter().position(|place| place.0.is_cuda() && !has_kernel(*place))
    }

    /// Steps the copies of all batches, and rounds them into their 16-bit parameters. Returns the remaining parameters
    /// of each batch. Returns `None`, without a change, if our kernels do not support the tensors, or a copy is not
    /// trained here.
    pub(super) fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        step: CopyStep<'_>,
    ) -> Result<Option<Vec<Vec<Ready>>>, TorchError> {
        let CopyStep { slots, rule, maximize, found_inf } = step;
        if copies.iter().any(|copied| !copied.parameter.device().is_cuda()) {
            return Ok(None);
        }
        let Some(all) = self.split(copies)? else { return Ok(None) };
        for (batch, split) in all.iter().enumerate() {
            self.make_slots(slots, batch, split.copies.iter().map(|(place, _)| *place))?;
        }
        let with_copies = self.batches.iter().zip(&all).filter(|(_, split)| !split.copies.is_empty());
        let steps = with_copies.map(|(batch, split)| {
            let step = MasterStep {
                tensors: split.copies.iter().map(|(place, copied)| batch.rounded(*place, copied)).collect(),
                rule,
                lr: self.lr_of(batch),
                weight_decay: batch.weight_decay,
                maximize,
                found_inf,
            };
            step.checked()
        });
        let Some(steps) = steps.collect::<Option<Vec<_>>>() else { return Ok(None) };
        steps.iter().try_for_each(CheckedStep::run)?;
        Ok(Some(all.into_iter().map(|split| split.ready).collect()))
    }

    /// Steps other tensors from now on, or none in the place of a parameter.
    pub(super) fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.replace(&mut |named| {
            let tensor = replaced(named)?;
            Some(OwnRows { whole: tensor.size(), tensor, first: 0 })
        })
    }

    /// Steps this rank's rows from now on.
    pub(super) fn divide(&mut self, division: &Division<'_>) -> Result<(), TorchError> {
        self.replace(&mut |named| (division.rows)(named))?;
        self.group = Some(Arc::clone(&division.group));
        Ok(())
    }

    /// Steps tensors elsewhere in the place of some parameters from now on.
    pub(super) fn step_twins(
        &mut self,
        twins: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.check_has_not_stepped()?;
        for parameter in self.parameters_mut() {
            if let Some(twin) = twins(&parameter.named) {
                parameter.of_twin = Some(std::mem::replace(&mut parameter.named.tensor, twin));
            }
        }
        Ok(())
    }

    pub(super) fn limit_to_twins(&mut self, is_on: bool) {
        self.only_twins = is_on;
    }

    fn check_has_not_stepped(&self) -> Result<(), TorchError> {
        if self.parameters().all(|parameter| parameter.kept.is_empty()) {
            return Ok(());
        }
        Err(TorchError::Unsupported {
            operation: "replace an optimizer's parameters",
            reason: "it has made a step; try a new optimizer",
        })
    }

    fn replace(&mut self, rows: &mut dyn FnMut(&Named) -> Option<OwnRows>) -> Result<(), TorchError> {
        self.check_has_not_stepped()?;
        self.replaced = self.parameters().map(|parameter| parameter.named.tensor.shallow_clone()).collect();
        for batch in &mut self.batches {
            batch.parameters.retain_mut(|parameter| match rows(&parameter.named) {
                Some(OwnRows { tensor, first, whole }) => {
                    (parameter.named.tensor, parameter.first_row, parameter.whole) = (tensor, first, whole);
                    true
                }
                None => false,
            });
        }
        let mut parameters = self.parameters();
        parameters.try_for_each(|parameter| check_trainable(&parameter.named))
    }

    pub(super) fn named(&self) -> Vec<Named> {
        self.parameters().map(Parameter::of_program).collect()
    }

    pub(super) fn zero_grad(&self) -> Result<(), TorchError> {
        let of_twins = self.parameters().filter_map(|parameter| parameter.of_twin.as_ref());
        let stepped = self.parameters().map(|parameter| &parameter.named.tensor).chain(of_twins);
        stepped.chain(&self.replaced).try_for_each(|tensor| set_grad(tensor, None))
    }
}

impl Batch {
    fn takes(&self, new: &Parameter) -> bool {
        let place = |parameter: &Parameter| (parameter.named.tensor.device(), parameter.named.tensor.kind());
        self.parameters.first().is_some_and(|first| place(first) == place(new))
    }

    /// The parameters that steps look at.
    fn seen(&self, only_twins: bool) -> impl Iterator<Item = (usize, &Parameter)> {
        let is_seen = move |parameter: &Parameter| !only_twins || parameter.of_twin.is_some();
        self.parameters.iter().enumerate().filter(move |(_, parameter)| is_seen(parameter))
    }

    fn ready(&self, only_twins: bool) -> Result<Vec<Ready>, TorchError> {
        let ready = self.seen(only_twins).map(|(place, parameter)| parameter.ready(place));
        ready.filter_map(Result::transpose).collect()
    }

    fn split<'a>(
        &self,
        by_name: &HashMap<&str, &'a CopiedParameter<'a>>,
        only_twins: bool,
    ) -> Result<Split<'a>, TorchError> {
        let (mut ready, mut copies) = (Vec::new(), Vec::new());
        for (place, parameter) in self.seen(only_twins) {
            match by_name.get(parameter.named.name.as_str()) {
                Some(copied) => copies.push((place, *copied)),
                None => ready.extend(parameter.ready(place)?),
            }
        }
        Ok(Split { ready, copies })
    }

    fn rounded<'a>(&'a self, place: usize, copied: &'a CopiedParameter<'_>) -> Rounded<'a> {
        let Parameter { named, kept, .. } = &self.parameters[place];
        Rounded { parameter: copied.parameter, grad: &copied.grad, master: &named.tensor, kept }
    }

    /// The parameters that are ready.
    pub(super) fn tensors(&self, ready: &[Ready]) -> Vec<&Tensor> {
        ready.iter().map(|ready| &self.parameters[ready.place].named.tensor).collect()
    }

    /// The state tensors in `slot` of the parameters that are ready.
    pub(super) fn kept(&self, ready: &[Ready], slot: usize) -> Vec<&Tensor> {
        ready.iter().map(|ready| &self.parameters[ready.place].kept[slot]).collect()
    }
}

/// A parameter's gradient with the parameter's memory layout.
pub(super) fn gradient_of(Named { name, tensor }: &Named) -> Result<Option<Tensor>, TorchError> {
    let named = |cause| TorchError::Parameter { name: name.clone(), cause: Box::new(cause) };
    grad_with_layout(tensor).map_err(named)
}

pub(super) fn grads(ready: &[Ready]) -> Vec<&Tensor> {
    ready.iter().map(|ready| &ready.grad).collect()
}

fn check_trainable(Named { name, tensor }: &Named) -> Result<(), TorchError> {
    let kind = tensor.kind();
    if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Err(TorchError::Kind {
            what: format!("parameter `{name}`"),
            expected: "Float, Double, Half or BFloat16".to_owned(),
            got: format!("{kind:?}"),
        });
    }
    if !is_dense(tensor)? {
        return Err(TorchError::Strides {
            what: format!("parameter `{name}`"),
            problem: "gaps or overlaps",
            shape: tensor.size(),
            strides: tensor.stride(),
            hint: "a contiguous copy",
        });
    }
    Ok(())
}

pub(super) fn not_negative(what: &str, value: f64) -> Result<(), TorchError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(TorchError::value(what, value, "a number that is not negative"))
}
