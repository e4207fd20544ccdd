//! Lion (Chen and others, "Symbolic Discovery of Optimization Algorithms"): the sign of a running mean, and one state
//! tensor instead of Adam's two.

use tch::{Kind, no_grad};

use super::groups::ParameterGroups;
use super::state::{Layout, Like, OptimizerState, Slot};
use super::trained::{Trained, methods_of_trained};
use super::work::{self, Begun, OnGpu, Slices, Work, by_rate, gpu_rates};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::kernels::floats::elements_mut;
use crate::kernels::lion::{LionStep, lion};
use crate::kernels::{Elements, JOB, lion_on_gpu, on_threads};
use crate::named::Named;

/// Settings of [`Lion`]; the defaults are the paper's. Its learning rate is 3 to 10 times smaller than AdamW's, its
/// weight decay as much larger.
#[derive(Debug, Clone, PartialEq)]
pub struct LionOptions {
    /// Learning rate.
    pub lr: f64,
    /// How much of the running mean is in the sign, and in the next running mean.
    pub betas: (f64, f64),
    /// Weight decay, which is subtracted from the parameter.
    pub weight_decay: f64,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0, maximize: false }
    }
}

const KIND: &str = "lion";
const SLOTS: &[Slot] = &[Slot::new("exp_avg", Like::Elements(Kind::Float))];

/// Lion: one pass over memory for f32 weights and master weights, operations of libtorch for others.
#[derive(Debug)]
pub struct Lion {
    trained: Trained,
    options: LionOptions,
}

struct Job<'a> {
    elements: Elements<'a>,
    exp_avg: &'a mut [f32],
    with: LionStep,
}

impl Lion {
    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: LionOptions) -> Result<Self, TorchError> {
        work::check_betas(options.betas.0, options.betas.1)?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    fn step_of(&self, work: &Work) -> LionStep {
        let LionOptions { betas, maximize, .. } = self.options;
        let (lr, weight_decay) = (work.lr, work.weight_decay);
        LionStep { lr, betas, weight_decay, grad_factor: work::grad_factor(maximize) }
    }

    fn step_work(&mut self, work: Vec<Work>, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let Begun { on_gpu, mut host, rest, .. } =
            work::begin(&self.trained, work, tensors, OnGpu::Kernels, Work::is_on_host)?;
        let LionOptions { betas, maximize, .. } = self.options;
        for group in by_rate(&on_gpu) {
            let rates = gpu_rates(&group, work::grad_factor(maximize), tensors.found_inf);
            let all: Vec<_> = group.iter().map(|work| work.gpu_elements(0)).collect();
            lion_on_gpu(&all, &rates, [betas.0, betas.1])?;
        }
        let mut jobs = Vec::new();
        for work in &mut host {
            let with = self.step_of(work);
            let Slices { mut elements, kept } = work.slices()?;
            let mut exp_avg = elements_mut(&mut kept[0])?;
            while elements.len() > JOB {
                let (job, others) = elements.split_at(JOB);
                let (means, other_means) = exp_avg.split_at_mut(JOB);
                jobs.push(Job { elements: job, exp_avg: means, with });
                (elements, exp_avg) = (others, other_means);
            }
            jobs.push(Job { elements, exp_avg, with });
        }
        on_threads(jobs, |Job { mut elements, exp_avg, with }| lion(&mut elements, exp_avg, with));
        rest.iter().try_for_each(|work| no_grad(|| step_by_operations(work, self.step_of(work))))?;
        host.iter().chain(&on_gpu).try_for_each(Work::mark_written)
    }
}

/// The same step by operations of libtorch, for any kind and device.
fn step_by_operations(work: &Work, with: LionStep) -> Result<(), TorchError> {
    let LionStep { lr, betas: (beta1, beta2), weight_decay, grad_factor } = with;
    let grad = work.grad.f_to_kind(Kind::Float)?.f_mul_scalar(f64::from(grad_factor))?;
    let (mut mean, mut weights) = (work.kept[0].shallow_clone(), work.weights.f_detach()?);
    let between = mean.f_mul_scalar(beta1)?.f_add(&grad.f_mul_scalar(1.0 - beta1)?)?;
    let change = between.f_sign()?.f_mul_scalar(lr)?.f_to_kind(weights.kind())?;
    let _ = weights.f_mul_scalar_(1.0 - lr * weight_decay)?.f_sub_(&change)?;
    let _ = mean.f_mul_scalar_(beta2)?.f_add_(&grad.f_mul_scalar(1.0 - beta2)?)?;
    Ok(())
}

impl Optimizer for Lion {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let work = self.trained.work(&[], &|_| SLOTS)?.unwrap_or_default();
        self.step_work(work, tensors)
    }

    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        if work::must_cast(copies, tensors) {
            return Ok(false);
        }
        let work = self.trained.work(copies, &|_| SLOTS)?;
        let work = work.filter(|work| work::has_copies(work, Work::has_kernel));
        work.map_or(Ok(false), |work| self.step_work(work, tensors).map(|()| true))
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        work::check_recordable(&self.trained)?;
        self.trained.keep_lr_on_device()
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        self.trained.are_split = true;
        Ok(())
    }

    methods_of_trained!();

    fn set_betas(&mut self, beta1: f64, beta2: f64) -> Result<bool, TorchError> {
        work::check_betas(beta1, beta2)?;
        self.options.betas = (beta1, beta2);
        Ok(true)
    }

    fn state(&self) -> OptimizerState {
        let LionOptions { betas, weight_decay, maximize, .. } = self.options;
        let scalars = [
            ("beta1", betas.0),
            ("beta2", betas.1),
            ("weight_decay", weight_decay),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        Layout { kind: KIND, slots: &|_| SLOTS }.save(&self.trained, &scalars)
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.load_state_of(state, &|_| true)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        Layout { kind: KIND, slots: &|_| SLOTS }.load(&mut self.trained, state, wanted)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        Layout { kind: KIND, slots: &|_| SLOTS }.state_bytes(&self.trained, parameter)
    }
}
