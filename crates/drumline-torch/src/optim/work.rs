//! The tensors of one parameter in a step, for kernels of our own and for operations of libtorch.

use tch::{Device, Kind, Tensor, no_grad};

use super::CopiedParameter;
use super::trained::{Parameter, Trained};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::grad::mark_written;
use crate::kernels::floats::{elements, elements_mut};
use crate::kernels::{Elements, GradSlices, WeightSlices};
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

/// The memory of a parameter's tensors.
pub(super) struct Slices<'a> {
    pub(super) elements: Elements<'a>,
    pub(super) kept: &'a mut [Tensor],
}

impl Work {
    pub(super) fn new(parameter: &Parameter, grad: Tensor, lr: f64, weight_decay: f64) -> Self {
        Self {
            name: parameter.named.name.clone(),
            index: parameter.index,
            whole: parameter.whole.clone(),
            first_element: parameter.first_element(),
            lr,
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

/// The work of a step: parameters that our kernels step, and others. `None` if the step is skipped.
pub(super) fn begin(
    work: Vec<Work>,
    tensors: StepTensors<'_>,
    has_kernel: impl Fn(&Work) -> bool,
) -> Result<Option<[Vec<Work>; 2]>, TorchError> {
    if let Some(found_inf) = tensors.found_inf
        && found_inf.f_double_value(&[])? != 0.0
    {
        return Ok(None);
    }
    if let Some(scale) = tensors.grad_scale {
        for Work { grad, .. } in &work {
            let scale = scale.f_to_device(grad.device())?;
            let _ = no_grad(|| grad.shallow_clone().f_div_(&scale))?;
        }
    }
    let (ours, others) = work.into_iter().partition(has_kernel);
    Ok(Some([ours, others]))
}

/// 1, or −1 to maximize.
pub(super) fn grad_factor(maximize: bool) -> f32 {
    if maximize { -1.0 } else { 1.0 }
}

/// Whether our kernels step all copies of 16-bit parameters.
pub(super) fn has_copies_on_host(work: &[Work]) -> bool {
    work.iter().any(|work| !matches!(work.twin, Twin::None))
        && work.iter().all(|work| matches!(work.twin, Twin::None) || work.is_on_host())
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

/// The methods of `Optimizer` that are the same for all optimizers whose host counts steps.
macro_rules! eager_methods {
    () => {
        fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
            $crate::optim::work::check_eager(&self.trained)
        }

        fn split_master_weights(&mut self) -> Result<(), TorchError> {
            Ok(())
        }
    };
}
pub(super) use eager_methods;

/// An error if there are parameters on a GPU: the step depends on numbers of the host, so that a CUDA graph cannot
/// have it.
pub(super) fn check_eager(trained: &Trained) -> Result<(), TorchError> {
    let on_gpu = trained.parameters().find(|parameter| parameter.named.tensor.device().is_cuda());
    on_gpu.map_or(Ok(()), |parameter| {
        let parameter = parameter.named.name.clone();
        Err(NotRecordable::HostSteps { parameter }.into())
    })
}
