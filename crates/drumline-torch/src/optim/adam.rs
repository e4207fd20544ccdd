//! Adam and AdamW, optionally with AMSGrad, as `torch.optim.Adam` and `torch.optim.AdamW`.
//!
//! They differ in one thing: Adam adds the weight decay to the gradient, AdamW subtracts it from the parameter.

use tch::Kind;

use super::groups::ParameterGroups;
use super::moments::Moments;
use super::state::{Layout, Like, OptimizerState, STEP, Slot};
use super::trained::{CopyStep, Parameter, Ready, Trained, grads, methods_of_trained, not_negative};
use super::work::{self, Begun, OnGpu, Slices, Work, by_rate, gpu_rates};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::{FusedAdam, StepTensors, WeightDecay};
use crate::kernels::floats::elements_mut;
use crate::kernels::{
    AdamSlices, AdamStep, Codes, Draw, GpuAdam, JOB, MomentSlices, Rule, adam_on_gpu, on_threads,
};
use crate::named::Named;

/// Adam: the weight decay is added to the gradient.
pub type Adam = AdamFamily<false>;

/// AdamW: the weight decay is subtracted from the parameter.
pub type AdamW = AdamFamily<true>;

/// Settings of [`Adam`] and [`AdamW`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of the squared gradient.
    pub betas: (f64, f64),
    /// Epsilon, which is added to the divisor.
    pub eps: f64,
    /// Weight decay; `None` means PyTorch's default: 0 for Adam, 0.01 for AdamW.
    pub weight_decay: Option<f64>,
    /// Whether to use AMSGrad.
    pub amsgrad: bool,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
    /// How the running means are kept.
    pub moments: Moments,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: None,
            amsgrad: false,
            maximize: false,
            moments: Moments::F32,
        }
    }
}

impl AdamOptions {
    fn check(&self) -> Result<(), TorchError> {
        not_negative("eps", self.eps)?;
        work::check_betas(self.betas.0, self.betas.1)?;
        if self.amsgrad && self.moments != Moments::F32 {
            return Err(TorchError::value("amsgrad", true, "false, as the moments are not in f32"));
        }
        Ok(())
    }
}

/// Adam (`DECOUPLED` is false) or AdamW (true) on the fused kernels; see [`Adam`] and [`AdamW`].
#[derive(Debug)]
pub struct AdamFamily<const DECOUPLED: bool> {
    trained: Trained,
    options: AdamOptions,
}

impl<const DECOUPLED: bool> AdamFamily<DECOUPLED> {
    const KIND: &str = if DECOUPLED { "adamw" } else { "adam" };
    const DECAY: WeightDecay = if DECOUPLED { WeightDecay::Decoupled } else { WeightDecay::L2 };
    const DEFAULT_WEIGHT_DECAY: f64 = if DECOUPLED { 1e-2 } else { 0.0 };

    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: AdamOptions) -> Result<Self, TorchError> {
        options.check()?;
        let weight_decay = options.weight_decay.unwrap_or(Self::DEFAULT_WEIGHT_DECAY);
        let trained = Trained::new(parameters.into(), options.lr, weight_decay)?;
        Ok(Self { trained, options })
    }

    /// The state of a parameter.
    fn slots(&self) -> impl Fn(&Parameter) -> &'static [Slot] + use<DECOUPLED> {
        const AMSGRAD: &[Slot] = &[
            STEP,
            Slot::new("exp_avg", Like::Parameter),
            Slot::new("exp_avg_sq", Like::Parameter),
            Slot::new("max_exp_avg_sq", Like::Parameter),
        ];
        let (AdamOptions { moments, amsgrad, .. }, is_split) = (&self.options, self.trained.are_split);
        let (moments, amsgrad) = (*moments, *amsgrad);
        move |parameter| if amsgrad { AMSGRAD } else { moments.slots(parameter, is_split) }
    }

    /// Whether libtorch's kernels step parameters that have no copies.
    fn is_libtorchs(&self) -> bool {
        self.options.moments == Moments::F32 && !self.trained.are_split
    }

    /// One step by our kernels.
    fn step_work(&self, work: Vec<Work>, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let Begun { on_gpu, mut host, .. } =
            work::begin(&self.trained, work, tensors, OnGpu::Kernels, |_| true)?;
        self.step_on_gpu(&on_gpu, tensors)?;
        self.step_on_host(&mut host)?;
        host.iter().chain(&on_gpu).try_for_each(Work::mark_written)
    }

    fn step_on_gpu(&self, work: &[Work], tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let AdamOptions { betas, eps, maximize, .. } = self.options;
        let rule = GpuAdam { betas, eps, decay: Self::DECAY, seed: self.seed() };
        for group in by_rate(work) {
            let rates = gpu_rates(&group, work::grad_factor(maximize), tensors.found_inf);
            let key = |work: &Work| Draw::of_name(rule.seed, &work.name);
            let all: Vec<_> = group.iter().map(|work| work.gpu_elements(key(work))).collect();
            adam_on_gpu(&all, &rates, &rule)?;
        }
        Ok(())
    }

    /// On as many threads as libtorch has.
    fn step_on_host(&self, host: &mut [Work]) -> Result<(), TorchError> {
        let mut jobs = Vec::new();
        for work in host {
            let with = self.step_of(work)?;
            let draw = Draw::new(self.seed(), &work.name, with.step, work.first_element);
            let mut slices = slices(work, draw)?;
            slices.check()?;
            let unit = if let MomentSlices::EightBit { row_len, .. } = slices.moments { row_len } else { 1 };
            let most = JOB.next_multiple_of(unit.max(1));
            while slices.len() > most {
                let (job, rest) = slices.split_at(most);
                jobs.push(AdamJob { slices: job, with });
                slices = rest;
            }
            jobs.push(AdamJob { slices, with });
        }
        on_threads(jobs, |mut job| job.slices.run(&job.with));
        Ok(())
    }

    /// Counts a parameter's step.
    fn step_of(&self, work: &mut Work) -> Result<AdamStep, TorchError> {
        let AdamOptions { betas, eps, maximize, .. } = self.options;
        Ok(AdamStep {
            lr: work.lr,
            betas,
            eps,
            weight_decay: work.weight_decay,
            decay: Self::DECAY,
            step: work.count_step()?,
            grad_factor: work::grad_factor(maximize),
        })
    }

    /// The seed of random bits.
    fn seed(&self) -> u64 {
        if let Moments::Bf16 { seed } = self.options.moments { seed } else { 0 }
    }

    fn step_batch(
        &mut self,
        batch: usize,
        ready: &[Ready],
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        let slots = self.slots();
        self.trained.make_slots(&slots, batch, ready.iter().map(|ready| ready.place))?;
        let batch = &self.trained.batches[batch];
        let max_exp_avg_sqs = self.options.amsgrad.then(|| batch.kept(ready, 3));
        FusedAdam {
            params: &batch.tensors(ready),
            grads: &grads(ready),
            exp_avgs: &batch.kept(ready, 1),
            exp_avg_sqs: &batch.kept(ready, 2),
            max_exp_avg_sqs: max_exp_avg_sqs.as_deref(),
            steps: &batch.kept(ready, 0),
            lr: self.trained.lr_of(batch),
            betas: self.options.betas,
            eps: self.options.eps,
            weight_decay: batch.weight_decay,
            decay: Self::DECAY,
            maximize: self.options.maximize,
            tensors,
        }
        .run()
    }
}

impl<const DECOUPLED: bool> Optimizer for AdamFamily<DECOUPLED> {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        if !self.is_libtorchs() {
            let work = self.trained.work(&[], &self.slots())?.unwrap_or_default();
            return match work.iter().find(|work| !work.has_kernel()) {
                None => self.step_work(work, tensors),
                Some(work) => Err(without_kernel(work)),
            };
        }
        for (batch, ready) in self.trained.ready()?.into_iter().enumerate() {
            self.step_batch(batch, &ready, tensors)?;
        }
        Ok(())
    }

    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        let is_libtorchs = self.is_libtorchs();
        let must_cast = is_libtorchs && tensors.grad_scale.is_some() || work::must_cast(copies, tensors);
        if self.options.amsgrad || must_cast {
            return Ok(false);
        }
        let slots = self.slots();
        let is_on_host = copies.iter().all(|copied| copied.parameter.device() == tch::Device::Cpu);
        if is_on_host || !is_libtorchs {
            let work = self.trained.work(copies, &slots)?;
            let work = work.filter(|work| !work.is_empty() && work.iter().all(Work::has_kernel));
            return work.map_or(Ok(false), |work| self.step_work(work, tensors).map(|()| true));
        }
        let AdamOptions { betas, eps, maximize, .. } = self.options;
        let rule = Rule::Adam { betas, eps, decoupled: DECOUPLED };
        let step = CopyStep { slots: &slots, rule, maximize, found_inf: tensors.found_inf };
        let rest = self.trained.step_copies(copies, step)?;
        let Some(rest) = rest else { return Ok(false) };
        let mut rest = rest.into_iter().enumerate();
        rest.try_for_each(|(batch, ready)| self.step_batch(batch, &ready, tensors))?;
        Ok(true)
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        if self.options.amsgrad {
            return Err(TorchError::value("amsgrad", true, "false, for split master weights"));
        }
        self.trained.are_split = true;
        Ok(())
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        if !self.is_libtorchs() {
            work::check_recordable(&self.trained)?;
        }
        self.trained.keep_lr_on_device()
    }

    methods_of_trained!();

    fn set_betas(&mut self, beta1: f64, beta2: f64) -> Result<bool, TorchError> {
        work::check_betas(beta1, beta2)?;
        self.options.betas = (beta1, beta2);
        Ok(true)
    }

    fn state(&self) -> OptimizerState {
        let AdamOptions { betas, eps, weight_decay, amsgrad, maximize, .. } = self.options;
        let scalars = [
            ("beta1", betas.0),
            ("beta2", betas.1),
            ("eps", eps),
            ("weight_decay", weight_decay.unwrap_or(Self::DEFAULT_WEIGHT_DECAY)),
            ("amsgrad", f64::from(u8::from(amsgrad))),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        Layout { kind: Self::KIND, slots: &self.slots() }.save(&self.trained, &scalars)
    }

    fn needs_whole_tensors(&self) -> Option<&'static str> {
        (self.options.moments == Moments::EightBit)
            .then_some("Adam's moments in 8 bits, which are scaled by blocks of a tensor,")
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.load_state_of(state, &|_| true)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        let slots = self.slots();
        Layout { kind: Self::KIND, slots: &slots }.load(&mut self.trained, state, wanted)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        let slots = self.slots();
        Layout { kind: Self::KIND, slots: &slots }.state_bytes(&self.trained, parameter)
    }
}

/// Elements that a thread steps together.
struct AdamJob<'a> {
    slices: AdamSlices<'a>,
    with: AdamStep,
}

/// The memory of a parameter's tensors, with the moments as their kind says.
fn slices(work: &mut Work, draw: Draw) -> Result<AdamSlices<'_>, TorchError> {
    let rows = work.weights.size().first().map_or(1, |rows| (*rows).max(1));
    let row_len = work.weights.numel() / rows as usize;
    let Slices { elements, kept } = work.slices()?;
    let is_bf16 = kept.get(1).is_some_and(|avg| avg.kind() == Kind::BFloat16);
    let moments = match (kept, is_bf16) {
        ([_, avg, sq], true) => {
            MomentSlices::Bf16 { exp_avg: elements_mut(avg)?, exp_avg_sq: elements_mut(sq)?, draw }
        }
        ([_, avg, sq], false) => {
            MomentSlices::F32 { exp_avg: elements_mut(avg)?, exp_avg_sq: elements_mut(sq)? }
        }
        ([_, avg, avg_absmax, sq, sq_absmax], _) => MomentSlices::EightBit {
            exp_avg: Codes { codes: elements_mut(avg)?, absmax: elements_mut(avg_absmax)? },
            exp_avg_sq: Codes { codes: elements_mut(sq)?, absmax: elements_mut(sq_absmax)? },
            row_len,
        },
        _ => return Err(TorchError::Internal { what: "Adam keeps another number of tensors" }),
    };
    Ok(AdamSlices { weights: elements.weights, grads: elements.grads, moments })
}

/// Why our kernels do not step a parameter.
fn without_kernel(work: &Work) -> TorchError {
    TorchError::Parameter {
        name: work.name.clone(),
        cause: Box::new(TorchError::Unsupported {
            operation: "keep Adam's moments in 16 or 8 bits",
            reason: "our kernels step f32 parameters, and 16-bit ones with master weights; try moments in f32",
        }),
    }
}
