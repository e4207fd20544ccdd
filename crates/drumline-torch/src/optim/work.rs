//! The tensors of one parameter in a step, for kernels of our own and for operations of libtorch.

use tch::{Device, Kind, Tensor, no_grad};

use super::CopiedParameter;
use super::halves::{join, write_halves};
use super::trained::{Parameter, Trained};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::grad::mark_written;
use crate::kernels::floats::{elements, elements_mut};
use crate::kernels::{Elements, GpuElements, GpuRates, GradSlices, WeightSlices};
use crate::memory_format::has_layout_of;
use crate::recordable::NotRecordable;

/// A parameter that makes a step.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) name: String,
    /// Its index among all parameters, the same on all ranks.
    pub(super) index: usize,
    /// The shape of the whole parameter.
    pub(super) whole: Vec<i64>,
    /// The index of its first element in the whole.
    pub(super) first_element: u64,
    pub(super) lr: f64,
    /// The learning rate on the device, if it is kept there: one f64.
    pub(super) lr_at: Option<Tensor>,
    pub(super) weight_decay: f64,
    pub(super) weights: Tensor,
    twin: Twin,
    pub(super) grad: Tensor,
    /// The state, in the order of the slots.
    pub(super) kept: Vec<Tensor>,
}

/// What belongs to the weights of a step.
#[derive(Debug)]
enum Twin {
    None,
    /// The bf16 parameter that they are rounded into.
    Rounded(Tensor),
    /// Their low halves.
    Low(Tensor),
}

/// The learning rate and the weight decay of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Rate<'a> {
    pub(super) lr: f64,
    pub(super) lr_at: Option<&'a Tensor>,
    pub(super) weight_decay: f64,
}

/// The memory of a parameter's tensors.
pub(super) struct Slices<'a> {
    pub(super) elements: Elements<'a>,
    pub(super) kept: &'a mut [Tensor],
}

impl Work {
    pub(super) fn new(parameter: &Parameter, grad: Tensor, rate: Rate<'_>) -> Self {
        let Rate { lr, lr_at, weight_decay } = rate;
        Self {
            name: parameter.named.name.clone(),
            index: parameter.index,
            whole: parameter.whole.clone(),
            first_element: parameter.first_element(),
            lr,
            lr_at: lr_at.map(Tensor::shallow_clone),
            weight_decay,
            weights: parameter.named.tensor.shallow_clone(),
            twin: Twin::None,
            grad,
            kept: parameter.kept.iter().map(Tensor::shallow_clone).collect(),
        }
    }

    /// The step of a parameter in 16 bits.
    pub(super) fn with_twin(self, copied: &CopiedParameter<'_>) -> Self {
        let twin = match copied.low {
            Some(low) => Twin::Low(low.shallow_clone()),
            None => Twin::Rounded(copied.parameter.shallow_clone()),
        };
        Self { twin, ..self }
    }

    /// Whether our kernels have these tensors: they are in host memory, in f32 or bf16, and have no gaps.
    pub(super) fn is_on_host(&self) -> bool {
        let kinds = (self.weights.kind(), self.grad.kind());
        let fits = match &self.twin {
            Twin::None => kinds == (Kind::Float, Kind::Float),
            Twin::Rounded(rounded) => {
                kinds == (Kind::Float, Kind::BFloat16)
                    && rounded.kind() == Kind::BFloat16
                    && self.is_like(rounded)
            }
            Twin::Low(low) => kinds == (Kind::BFloat16, Kind::BFloat16) && self.is_like(low),
        };
        fits && self.weights.device() == Device::Cpu && self.is_like(&self.grad)
    }

    fn is_like(&self, tensor: &Tensor) -> bool {
        tensor.size() == self.weights.size()
            && tensor.device() == Device::Cpu
            && has_layout_of(tensor, &self.weights)
    }

    /// The memory of the tensors, if they are [on the host](Self::is_on_host).
    pub(super) fn slices(&mut self) -> Result<Slices<'_>, TorchError> {
        let Self { weights, twin, grad, kept, .. } = self;
        let grads = match grad.kind() {
            Kind::BFloat16 => GradSlices::Bf16(elements(grad)?),
            _ => GradSlices::F32(elements(grad)?),
        };
        let weights = match twin {
            Twin::None => WeightSlices::F32(elements_mut(weights)?),
            Twin::Rounded(rounded) => {
                WeightSlices::Rounded { master: elements_mut(weights)?, rounded: elements_mut(rounded)? }
            }
            Twin::Low(low) => WeightSlices::Split { high: elements_mut(weights)?, low: elements_mut(low)? },
        };
        Ok(Slices { elements: Elements { weights, grads }, kept })
    }

    /// The tensors for our kernels of a GPU. `key` is what random bits depend on, or the parameter's index.
    pub(super) fn gpu_elements(&self, key: u32) -> GpuElements<'_> {
        let (step, means, absmax) = match &self.kept[..] {
            [mean] => (None, [Some(mean), None], [None; 2]),
            [step, mean, square] => (Some(step), [Some(mean), Some(square)], [None; 2]),
            [step, mean, mean_scales, square, square_scales] => {
                (Some(step), [Some(mean), Some(square)], [Some(mean_scales), Some(square_scales)])
            }
            _ => (None, [None; 2], [None; 2]),
        };
        let twin = match &self.twin {
            Twin::None => None,
            Twin::Rounded(twin) | Twin::Low(twin) => Some(twin),
        };
        let (weights, grad, first_element) = (&self.weights, &self.grad, self.first_element);
        GpuElements { weights, twin, grad, step, means, absmax, first_element, key }
    }

    /// Whether our kernels have these tensors, which are on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.gpu_elements(0).have_kernel()
    }

    /// Whether our kernels have these tensors.
    pub(super) fn has_kernel(&self) -> bool {
        self.is_on_host() || self.is_on_gpu()
    }

    /// The weights in f32: a new tensor if they are split.
    pub(super) fn whole_weights(&self) -> Result<Tensor, TorchError> {
        match &self.twin {
            Twin::Low(low) => join(&self.weights, low),
            _ => Ok(self.weights.f_detach()?.f_to_kind(Kind::Float)?),
        }
    }

    /// Writes weights, and what they are rounded into.
    pub(super) fn write_weights(&mut self, new: &Tensor) -> Result<(), TorchError> {
        let mut weights = self.weights.f_detach()?;
        if let Twin::Low(low) = &mut self.twin {
            write_halves(new, &mut weights, low)?;
            return mark_written(&self.weights);
        }
        no_grad(|| weights.f_copy_(new))?;
        if let Twin::Rounded(rounded) = &self.twin {
            no_grad(|| rounded.f_detach()?.f_copy_(new))?;
        }
        Ok(())
    }

    /// Counts a step, if the first slot has the number of steps. Returns the number.
    pub(super) fn count_step(&mut self) -> Result<u64, TorchError> {
        let _ = no_grad(|| self.kept[0].f_add_scalar_(1.0))?;
        Ok(self.kept[0].f_double_value(&[])? as u64)
    }

    /// Reports to autograd that weights were written.
    pub(super) fn mark_written(&self) -> Result<(), TorchError> {
        if let Twin::Rounded(rounded) = &self.twin {
            mark_written(rounded)?;
        }
        mark_written(&self.weights)
    }

    /// How many elements the whole parameter has.
    pub(super) fn whole_numel(&self) -> f64 {
        self.whole.iter().product::<i64>() as f64
    }
}

/// The parameters of a step, by who steps them.
#[derive(Default)]
pub(super) struct Begun {
    /// Our kernels for GPUs, which read on the device whether the step is skipped.
    pub(super) on_gpu: Vec<Work>,
    /// Our kernels for CPUs.
    pub(super) host: Vec<Work>,
    /// Operations of libtorch.
    pub(super) rest: Vec<Work>,
    /// Whether the host knows that the step is skipped: there is nothing to do but on GPUs.
    pub(super) is_skipped: bool,
    /// Whether all ranks step all parameters on GPUs.
    pub(super) is_on_gpu: bool,
}

/// What steps the parameters on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnGpu {
    /// Our kernels, as far as they can.
    Kernels,
    /// Operations of libtorch that do not wait for the GPU.
    Operations,
}

impl OnGpu {
    fn steps(self, work: &Work) -> bool {
        match self {
            Self::Kernels => work.is_on_gpu(),
            Self::Operations => work.weights.device().is_cuda(),
        }
    }

    /// Whether all parameters of all ranks are stepped so.
    fn steps_all(self, trained: &Trained) -> bool {
        trained.are_on_gpu() && (self == Self::Operations || trained.without_kernel().is_none())
    }
}

/// Who steps the parameters of a step. Gradients are divided by their scale here.
pub(super) fn begin(
    trained: &Trained,
    work: Vec<Work>,
    tensors: StepTensors<'_>,
    on_gpu: OnGpu,
    has_kernel: impl Fn(&Work) -> bool,
) -> Result<Begun, TorchError> {
    if let Some(scale) = tensors.grad_scale {
        for Work { grad, .. } in &work {
            let scale = scale.f_to_device(grad.device())?;
            let _ = no_grad(|| grad.shallow_clone().f_div_(&scale))?;
        }
    }
    let steps_all = on_gpu.steps_all(trained);
    let (on_gpu, others): (Vec<_>, Vec<_>) = work.into_iter().partition(|work| on_gpu.steps(work));
    if let Some(found_inf) = tensors.found_inf
        && !(steps_all && others.is_empty())
        && found_inf.f_double_value(&[])? != 0.0
    {
        return Ok(Begun { on_gpu, is_skipped: true, ..Begun::default() });
    }
    let (host, rest) = others.into_iter().partition(has_kernel);
    Ok(Begun { on_gpu, host, rest, is_skipped: false, is_on_gpu: steps_all })
}

/// Parameters of equal learning rate and weight decay.
pub(super) fn by_rate(work: &[Work]) -> Vec<Vec<&Work>> {
    let place = |work: &Work| work.lr_at.as_ref().map(Tensor::data_ptr);
    let is_same = |one: &Work, other: &Work| {
        (one.lr, one.weight_decay, place(one)) == (other.lr, other.weight_decay, place(other))
    };
    let mut groups: Vec<Vec<&Work>> = Vec::new();
    for work in work {
        match groups.iter_mut().find(|group| is_same(group[0], work)) {
            Some(group) => group.push(work),
            None => groups.push(vec![work]),
        }
    }
    groups
}

/// What parameters of [equal rates](by_rate) have in common.
pub(super) fn gpu_rates<'a>(
    group: &[&'a Work],
    grad_factor: f32,
    found_inf: Option<&'a Tensor>,
) -> GpuRates<'a> {
    let Work { lr, lr_at, weight_decay, .. } = group[0];
    GpuRates { lr: *lr, lr_at: lr_at.as_ref(), weight_decay: *weight_decay, grad_factor, found_inf }
}

/// 1, or −1 to maximize.
pub(super) fn grad_factor(maximize: bool) -> f32 {
    if maximize { -1.0 } else { 1.0 }
}

/// Whether gradients must be cast to f32 before they are divided by their scale: in f16 small ones would become zero.
pub(super) fn must_cast(copies: &[CopiedParameter<'_>], tensors: StepTensors<'_>) -> bool {
    tensors.grad_scale.is_some() && copies.iter().any(|copied| copied.grad.kind() == Kind::Half)
}

/// Whether there are copies of 16-bit parameters, and all of them can be stepped in one pass.
pub(super) fn has_copies(work: &[Work], can_step: impl Fn(&Work) -> bool) -> bool {
    let is_copy = |work: &&Work| !matches!(work.twin, Twin::None);
    work.iter().any(|work| is_copy(&work)) && work.iter().filter(is_copy).all(can_step)
}

/// The sum of squares of a tensor's elements.
pub(super) fn sum_of_squares(tensor: &Tensor) -> Result<f64, TorchError> {
    Ok(tensor.f_detach()?.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?)
}

/// An error unless both are decay rates.
pub(super) fn check_betas(beta1: f64, beta2: f64) -> Result<(), TorchError> {
    let wrong = [beta1, beta2].into_iter().find(|beta| !(0.0..1.0).contains(beta));
    wrong.map_or(Ok(()), |beta| Err(TorchError::value("a beta", beta, "at least 0 and less than 1")))
}

/// An error if there are parameters on a GPU that our kernels do not step: then the host counts steps, and a CUDA graph
/// cannot have them.
pub(super) fn check_recordable(trained: &Trained) -> Result<(), TorchError> {
    let Some(index) = trained.without_kernel() else { return Ok(()) };
    let parameter = trained.parameters().find(|parameter| parameter.index == index);
    let parameter = parameter.map_or_else(String::new, |parameter| parameter.named.name.clone());
    Err(NotRecordable::HostSteps { parameter }.into())
}
