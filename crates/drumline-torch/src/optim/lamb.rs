//! LAMB (You and others, "Large Batch Optimization for Deep Learning"): Adam's direction, scaled for each parameter so
//! that its length is that of the parameter.
//!
//! ```text
//!   r = m ÷ (√v + ε) + λw      w −= lr · clamp(‖w‖ ÷ ‖r‖, 0.01, 10) · r
//! ```
//! If ranks divide a parameter, the two norms are those of all its rows: one collective a step for all parameters.

use tch::{Kind, Tensor, no_grad};

use super::groups::ParameterGroups;
use super::state::{Layout, Like, OptimizerState, STEP, Slot};
use super::trained::{Trained, methods_of_trained, not_negative};
use super::work::{self, Begun, OnGpu, Slices, Work, by_rate, gpu_rates};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::kernels::floats::elements_mut;
use crate::kernels::lamb::{LambMeans, LambStep, lamb_means, lamb_weights};
use crate::kernels::{Elements, GpuLamb, JOB, lamb_means_on_gpu, lamb_weights_on_gpu, on_threads};

/// Where LAMB makes up for running means that begin at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BiasCorrection {
    /// In the running means, as in the paper and in Adam.
    #[default]
    Means,
    /// In the length of the step, as in DeepSpeed and apex.
    StepSize,
    /// Nowhere.
    None,
}

/// Settings of [`Lamb`]. The defaults are the paper's, with DeepSpeed's bounds for the scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LambOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of the squared gradient.
    pub betas: (f64, f64),
    /// Epsilon, which is added to the divisor.
    pub eps: f64,
    /// Weight decay, which is added to the direction.
    pub weight_decay: f64,
    /// The least scale of a direction.
    pub min_coeff: f64,
    /// The greatest scale of a direction.
    pub max_coeff: f64,
    /// Where the bias is corrected.
    pub bias_correction: BiasCorrection,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl Default for LambOptions {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            min_coeff: 0.01,
            max_coeff: 10.0,
            bias_correction: BiasCorrection::Means,
            maximize: false,
        }
    }
}

impl LambOptions {
    /// DeepSpeed's rule and defaults.
    pub fn deepspeed() -> Self {
        Self { bias_correction: BiasCorrection::StepSize, ..Self::default() }
    }

    fn check(&self) -> Result<(), TorchError> {
        work::check_betas(self.betas.0, self.betas.1)?;
        not_negative("eps", self.eps)?;
        not_negative("min_coeff", self.min_coeff)?;
        if self.max_coeff >= self.min_coeff {
            return Ok(());
        }
        Err(TorchError::value("max_coeff", self.max_coeff, "at least min_coeff"))
    }

    /// What the running means are divided by, and what the learning rate is multiplied by.
    fn corrections(&self, step: u64) -> Corrections {
        let [first, second] = [self.betas.0, self.betas.1].map(|beta| 1.0 - beta.powf(step as f64));
        match self.bias_correction {
            BiasCorrection::Means => Corrections { means: (first, second), lr: 1.0 },
            BiasCorrection::StepSize => Corrections { means: (1.0, 1.0), lr: second.sqrt() / first },
            BiasCorrection::None => Corrections { means: (1.0, 1.0), lr: 1.0 },
        }
    }
}

impl LambOptions {
    /// The learning rate times the scale that follows from the sums of squares of all parameters.
    fn step_size(&self, of: LambOf, squares: &[f64]) -> f64 {
        let [weights, direction] = [0, 1].map(|which| squares[2 * of.index + which].sqrt());
        let Self { min_coeff, max_coeff, .. } = *self;
        // A NaN stays one.
        let coeff = if weights == 0.0 || direction == 0.0 {
            1.0
        } else {
            (weights / direction).clamp(min_coeff, max_coeff)
        };
        of.lr * coeff
    }
}

struct Corrections {
    means: (f64, f64),
    lr: f64,
}

const KIND: &str = "lamb";
const SLOTS: &[Slot] = &[
    STEP,
    Slot::new("exp_avg", Like::Elements(Kind::Float)),
    Slot::new("exp_avg_sq", Like::Elements(Kind::Float)),
];

/// LAMB: two passes over memory for f32 weights and master weights, operations of libtorch for others.
#[derive(Debug)]
pub struct Lamb {
    trained: Trained,
    options: LambOptions,
}

/// The step of one parameter.
#[derive(Clone, Copy)]
struct LambOf {
    index: usize,
    with: LambStep,
    /// The learning rate, corrected.
    lr: f64,
}

struct Job<'a> {
    of: LambOf,
    elements: Elements<'a>,
    means: LambMeans<'a>,
    /// Of weights and direction.
    squares: [f64; 2],
}

/// A parameter that operations of libtorch step.
struct Directed {
    of: LambOf,
    direction: Tensor,
}

impl Lamb {
    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: LambOptions) -> Result<Self, TorchError> {
        options.check()?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    /// Counts a parameter's step.
    fn step_of(&self, work: &mut Work) -> Result<LambOf, TorchError> {
        let LambOptions { betas, eps, maximize, .. } = self.options;
        let corrections = self.options.corrections(work.count_step()?);
        let with = LambStep {
            betas,
            eps,
            weight_decay: work.weight_decay,
            grad_factor: work::grad_factor(maximize),
            corrections: corrections.means,
        };
        Ok(LambOf { index: work.index, with, lr: work.lr * corrections.lr })
    }

    fn step_work(&mut self, work: Vec<Work>, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let Begun { on_gpu, host, rest, is_skipped, is_on_gpu } =
            work::begin(&self.trained, work, tensors, OnGpu::Kernels, Work::is_on_host)?;
        self.step_on_gpu(&on_gpu, tensors)?;
        if !is_skipped && !is_on_gpu {
            self.step_on_host(host, rest)?;
        }
        Ok(())
    }

    /// Parameters that our kernels step on a GPU. The host does not wait for the norms.
    fn step_on_gpu(&self, work: &[Work], tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let Some(gpu) = self.trained.gpu() else { return Ok(()) };
        let LambOptions { betas, eps, min_coeff, max_coeff, bias_correction, maximize, .. } = self.options;
        let correction = match bias_correction {
            BiasCorrection::Means => 0,
            BiasCorrection::StepSize => 1,
            BiasCorrection::None => 2,
        };
        let rule = GpuLamb { betas, eps, correction, coeffs: (min_coeff, max_coeff) };
        let num = 2 * self.trained.shapes().len() as i64;
        let mut squares = Tensor::f_zeros([num], (Kind::Double, gpu))?;
        let groups = by_rate(work);
        let groups = groups.iter().map(|group| {
            let rates = gpu_rates(group, work::grad_factor(maximize), tensors.found_inf);
            let all: Vec<_> = group.iter().map(|work| work.gpu_elements(work.index as u32)).collect();
            (rates, all)
        });
        let groups: Vec<_> = groups.collect();
        for (rates, all) in &groups {
            lamb_means_on_gpu(all, rates, &rule, &squares)?;
        }
        self.trained.sum_over_ranks_on_gpu(&mut squares)?;
        for (rates, all) in &groups {
            lamb_weights_on_gpu(all, rates, &rule, &squares)?;
        }
        work.iter().try_for_each(Work::mark_written)
    }

    fn step_on_host(&self, mut host: Vec<Work>, mut rest: Vec<Work>) -> Result<(), TorchError> {
        let mut squares = vec![0.0; 2 * self.trained.shapes().len()];
        let mut add = |of: LambOf, found: [f64; 2]| {
            (0..2).for_each(|which| squares[2 * of.index + which] += found[which]);
        };
        let mut jobs = Vec::new();
        for work in &mut host {
            jobs.extend(jobs_of(self.step_of(work)?, work.slices()?)?);
        }
        on_threads(jobs.iter_mut().collect(), |job: &mut Job<'_>| {
            job.squares = lamb_means(&job.elements, &mut job.means, job.of.with);
        });
        jobs.iter().for_each(|job| add(job.of, job.squares));
        let mut directions = Vec::new();
        for work in &mut rest {
            let of = self.step_of(work)?;
            let direction = no_grad(|| direction(work, of.with))?;
            add(of, [work::sum_of_squares(&work.weights)?, work::sum_of_squares(&direction)?]);
            directions.push(Directed { of, direction });
        }
        self.trained.sum_over_ranks(&mut squares)?;
        let options = &self.options;
        on_threads(jobs, |mut job| {
            let step_size = options.step_size(job.of, &squares) as f32;
            lamb_weights(&mut job.elements, &job.means, job.of.with, step_size);
        });
        for (work, Directed { of, direction }) in rest.iter().zip(directions) {
            let change =
                direction.f_mul_scalar(options.step_size(of, &squares))?.f_to_kind(work.weights.kind())?;
            let _ = no_grad(|| work.weights.f_detach()?.f_sub_(&change))?;
        }
        host.iter().try_for_each(Work::mark_written)
    }
}

/// Cuts a parameter into jobs.
fn jobs_of<'a>(of: LambOf, slices: Slices<'a>) -> Result<Vec<Job<'a>>, TorchError> {
    let Slices { mut elements, kept } = slices;
    let [_, exp_avg, exp_avg_sq] = kept else {
        return Err(TorchError::Internal { what: "LAMB keeps another number of tensors" });
    };
    let mut means = LambMeans { exp_avg: elements_mut(exp_avg)?, exp_avg_sq: elements_mut(exp_avg_sq)? };
    let mut jobs = Vec::new();
    while elements.len() > JOB {
        let (own, others) = elements.split_at(JOB);
        let (exp_avg, other_avgs) = means.exp_avg.split_at_mut(JOB);
        let (exp_avg_sq, other_squares) = means.exp_avg_sq.split_at_mut(JOB);
        jobs.push(Job { of, elements: own, means: LambMeans { exp_avg, exp_avg_sq }, squares: [0.0; 2] });
        (elements, means) = (others, LambMeans { exp_avg: other_avgs, exp_avg_sq: other_squares });
    }
    jobs.push(Job { of, elements, means, squares: [0.0; 2] });
    Ok(jobs)
}

/// Updates the running means by operations of libtorch, for any kind and device. Returns the direction.
fn direction(work: &Work, with: LambStep) -> Result<Tensor, TorchError> {
    let LambStep { betas: (beta1, beta2), eps, weight_decay, grad_factor, corrections } = with;
    let grad = work.grad.f_to_kind(Kind::Float)?.f_mul_scalar(f64::from(grad_factor))?;
    let [mut mean, mut square] = [1, 2].map(|slot: usize| work.kept[slot].shallow_clone());
    let _ = mean.f_mul_scalar_(beta1)?.f_add_(&grad.f_mul_scalar(1.0 - beta1)?)?;
    let _ = square.f_mul_scalar_(beta2)?.f_add_(&grad.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
    let divisor = square.f_div_scalar(corrections.1)?.f_sqrt()?.f_add_scalar(eps)?;
    let adam = mean.f_div_scalar(corrections.0)?.f_div(&divisor)?;
    let weights = work.weights.f_detach()?.f_to_kind(Kind::Float)?;
    Ok(adam.f_add(&weights.f_mul_scalar(weight_decay)?)?)
}

impl Optimizer for Lamb {
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
        let LambOptions { betas, eps, weight_decay, min_coeff, max_coeff, maximize, .. } = self.options;
        let scalars = [
            ("beta1", betas.0),
            ("beta2", betas.1),
            ("eps", eps),
            ("weight_decay", weight_decay),
            ("min_coeff", min_coeff),
            ("max_coeff", max_coeff),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        Layout { kind: KIND, slots: &|_| SLOTS }.save(&self.trained, &scalars)
    }

    fn needs_whole_tensors(&self) -> Option<&'static str> {
        Some("Lamb's trust ratio")
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
}
