//! Optimizer steps on f32 master weights of 16-bit parameters: one pass over memory reads 16-bit gradients, steps the
//! f32 copies and rounds them into the parameters. libtorch's kernels make three passes.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, is_aligned, pointer};
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::fused::{Lr, is_dense};
use crate::grad::mark_written;
use crate::memory_format::has_layout_of;

static SOURCE: Source = Source::new(&[include_str!("master_step.cu")]);

const THREADS: u32 = 256;
/// Elements of a tensor per block.
const PER_BLOCK: i64 = 8192;
/// Tensors per launch: their pointers and sizes fit into a kernel's arguments.
const LISTED: usize = 48;

/// A 16-bit parameter, its gradient and its f32 copy, with the optimizer's state of the copy.
#[derive(Debug)]
pub(crate) struct Rounded<'a> {
    pub(crate) parameter: &'a Tensor,
    pub(crate) grad: &'a Tensor,
    pub(crate) master: &'a Tensor,
    /// The state tensors, in the order of the rule's slots.
    pub(crate) kept: &'a [Tensor],
}

/// The optimizer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    /// Keeps a momentum buffer, unless the momentum is zero.
    Sgd { momentum: f64, nesterov: bool },
    /// Keeps the number of steps, on the device, and the running means of gradients and of their squares.
    Adam { betas: (f64, f64), eps: f64, decoupled: bool },
}

/// A step of parameters by one rule.
#[derive(Debug)]
pub(crate) struct MasterStep<'a> {
    pub(crate) tensors: Vec<Rounded<'a>>,
    pub(crate) rule: Rule,
    pub(crate) lr: Lr<'a>,
    pub(crate) weight_decay: f64,
    pub(crate) maximize: bool,
    /// If it is 1, the step changes nothing.
    pub(crate) found_inf: Option<&'a Tensor>,
}

/// A step that our kernels support.
#[derive(Debug)]
pub(crate) struct CheckedStep<'a> {
    step: MasterStep<'a>,
    device: usize,
    element: Element,
}

/// The layout is that of `Tensors` in the source.
#[repr(C)]
struct Lists {
    pointers: [[u64; LISTED]; 6],
    count: [i64; LISTED],
    begin: [i64; LISTED],
    listed: i64,
}

impl<'a> Rounded<'a> {
    /// The number of steps, and the state tensors with the shape of the copy.
    fn slots(&self, rule: Rule) -> Option<(Option<&'a Tensor>, &'a [Tensor])> {
        match (rule, self.kept) {
            (Rule::Sgd { momentum, .. }, kept) => {
                (kept.len() == usize::from(momentum != 0.0)).then_some((None, kept))
            }
            (Rule::Adam { .. }, [step, means @ ..]) => (means.len() == 2).then_some((Some(step), means)),
            (Rule::Adam { .. }, []) => None,
        }
    }

    /// Whether all tensors have the same size, GPU and memory layout, and are aligned for vector reads.
    fn fits(&self, rule: Rule, kind: Kind, device: Device) -> bool {
        let size = self.parameter.size();
        let is_there = |tensor: &Tensor, kind: Kind| {
            tensor.kind() == kind
                && tensor.device() == device
                && is_dense(tensor).is_ok_and(|dense| dense)
                && tensor.size() == size
                && has_layout_of(tensor, self.parameter)
                && is_aligned(tensor)
        };
        let Some((step, means)) = self.slots(rule) else { return false };
        is_there(self.parameter, kind)
            && is_there(self.grad, kind)
            && is_there(self.master, Kind::Float)
            && means.iter().all(|kept| is_there(kept, Kind::Float))
            && step.is_none_or(|step| is_number(step, device))
    }
}

impl<'a> MasterStep<'a> {
    /// The step, if our kernels support it; otherwise libtorch is the fallback.
    pub(crate) fn checked(self) -> Option<CheckedStep<'a>> {
        let first = self.tensors.first()?.parameter;
        let Device::Cuda(device) = first.device() else { return None };
        let element = Element::on(device, first.kind()).filter(|element| *element != Element::F32)?;
        let lr = if let Lr::Tensor(lr) = self.lr { Some(lr) } else { None };
        let mut numbers = [lr, self.found_inf].into_iter().flatten();
        let fits = numbers.all(|number| is_number(number, first.device()))
            && self.tensors.iter().all(|tensors| tensors.fits(self.rule, first.kind(), first.device()));
        fits.then_some(CheckedStep { step: self, device, element })
    }
}

impl CheckedStep<'_> {
    pub(crate) fn run(&self) -> Result<(), TorchError> {
        let Self {
            step: MasterStep { tensors, rule, lr, weight_decay, maximize, found_inf },
            device,
            element,
        } = self;
        let constants =
            [("THREADS", i64::from(THREADS)), ("PER_BLOCK", PER_BLOCK), ("LISTED", LISTED as i64)];
        let kernels = SOURCE.with(*device, *element, &constants)?;
        let (lr, lr_at) = match lr {
            Lr::Value(lr) => (*lr, None),
            Lr::Tensor(lr) => (0.0, Some(*lr)),
        };
        let (flag, number) =
            (|flag: bool| Argument::from(i32::from(flag)), |number: f64| Argument::from(number as f32));
        let begin = [pointer(lr_at), pointer(*found_inf), number(lr)];
        let (name, rest) = match *rule {
            Rule::Sgd { momentum, nesterov } => {
                ("sgd_step", vec![number(momentum), number(*weight_decay), flag(nesterov)])
            }
            Rule::Adam { betas, eps, decoupled } => {
                let numbers = [betas.0, betas.1, eps, *weight_decay].map(number);
                ("adam_step", [&numbers[..], &[flag(decoupled)]].concat())
            }
        };
        let arguments = [&begin[..], &rest, &[flag(*maximize)]].concat();
        for some in tensors.chunks(LISTED) {
            let (lists, blocks) = Lists::of(some, *rule);
            let launch = |name: &str, blocks: u32, arguments: &[Argument]| {
                let grid = Grid { blocks: (blocks, 1), threads: THREADS, shared: 0 };
                // SAFETY: the arguments are listed as in the source; the tensors of each list were found to be of one
                // size and on this GPU.
                unsafe { kernels.get(name)?.launch_with(*device, grid, &lists, arguments) }
            };
            if blocks > 0 {
                launch(name, blocks, &arguments)?;
            }
            if matches!(rule, Rule::Adam { .. }) {
                launch("count_step", 1, &[pointer(*found_inf)])?;
            }
        }
        tensors.iter().try_for_each(|one| mark_written(one.parameter).and_then(|()| mark_written(one.master)))
    }
}

impl Lists {
    /// The argument of a launch, and the number of its blocks.
    fn of(tensors: &[Rounded<'_>], rule: Rule) -> (Self, u32) {
        let mut lists = Self {
            pointers: [[0; LISTED]; 6],
            count: [0; LISTED],
            begin: [0; LISTED],
            listed: tensors.len() as i64,
        };
        let (place, mut blocks) =
            (|tensor: Option<&Tensor>| tensor.map_or(0, |tensor| tensor.data_ptr() as u64), 0);
        for (index, one) in tensors.iter().enumerate() {
            let (step, means) = one.slots(rule).unwrap_or_default();
            let all =
                [Some(one.master), means.first(), means.get(1), step, Some(one.grad), Some(one.parameter)];
            for (list, tensor) in lists.pointers.iter_mut().zip(all) {
                list[index] = place(tensor);
            }
            (lists.count[index], lists.begin[index]) = (one.parameter.numel() as i64, blocks);
            blocks += (lists.count[index] as u64).div_ceil(PER_BLOCK as u64) as i64;
        }
        (lists, blocks as u32)
    }
}

fn is_number(tensor: &Tensor, device: Device) -> bool {
    (tensor.kind(), tensor.device(), tensor.numel()) == (Kind::Float, device, 1)
}
