//! Adafactor (Shazeer and Stern): of the squared gradients of a matrix only means of rows and columns are kept.
//!
//! ```text
//!   v = row · column ÷ mean of rows      u = g ÷ √v      w −= α ÷ max(1, RMS(u) ÷ d) · u      α = max(ε₂, RMS(w)) · ρ
//! ```
//! As `torch.optim.Adafactor`; `step_size` and `scale_parameter` are the options of the one in `transformers`. If ranks
//! divide a parameter by rows, sums over its columns and elements are those of all ranks: two collectives a step for all
//! parameters.

mod host;
mod on_gpu;

use tch::{Kind, Tensor, no_grad};

use super::groups::ParameterGroups;
use super::state::{Layout, Like, OptimizerState, STEP, Slot};
use super::trained::{Parameter, Trained, methods_of_trained, not_negative};
use super::work::{self, Begun, OnGpu, Work};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::kernels::adafactor::{AdafactorStep, Change};
use host::{columns_of, jobs_of};
use on_gpu::GpuStep;

/// The step size ρ, which the scale of the parameter may multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepSize {
    /// `min(lr, 1/√t)`, as in PyTorch, and in `transformers` with `relative_step` and a learning rate of 1e-2.
    #[default]
    Capped,
    /// `lr`, as in `transformers` without `relative_step`.
    Fixed,
    /// `min(1e-6·t, 1/√t)`, as in `transformers` with `warmup_init`. The learning rate only applies to the weight decay.
    WarmUp,
}

/// Settings of [`Adafactor`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct AdafactorOptions {
    /// Learning rate.
    pub lr: f64,
    /// The step size.
    pub step_size: StepSize,
    /// Whether the step size is multiplied by the RMS of the parameter.
    pub scale_parameter: bool,
    /// The exponent β of 1 − t^β, the decay rate of running means.
    pub beta2_decay: f64,
    /// ε₁, whose square is the least v, and ε₂, the least scale of a parameter. For `transformers`, ε₁ is the square root
    /// of its `eps[0]`.
    pub eps: (f64, f64),
    /// The greatest RMS of a direction.
    pub d: f64,
    /// Weight decay, which is subtracted from the parameter.
    pub weight_decay: f64,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            step_size: StepSize::Capped,
            scale_parameter: true,
            beta2_decay: -0.8,
            eps: (f64::from(f32::EPSILON), 1e-3),
            d: 1.0,
            weight_decay: 0.0,
            maximize: false,
        }
    }
}

impl AdafactorOptions {
    fn check(&self) -> Result<(), TorchError> {
        not_negative("eps", self.eps.0)?;
        not_negative("eps", self.eps.1)?;
        if !(self.d >= 1.0 && self.d.is_finite()) {
            return Err(TorchError::value("d", self.d, "1 or more"));
        }
        if self.beta2_decay <= 0.0 {
            return Ok(());
        }
        Err(TorchError::value("beta2_decay", self.beta2_decay, "0 or less"))
    }
}

const KIND: &str = "adafactor";
const FACTORED: &[Slot] =
    &[STEP, Slot::new("row_var", Like::MatrixRows), Slot::new("col_var", Like::MatrixColumns)];
const ELEMENTS: &[Slot] = &[STEP, Slot::new("variance", Like::Elements(Kind::Float))];

fn slots(parameter: &Parameter) -> &'static [Slot] {
    if parameter.whole.len() >= 2 { FACTORED } else { ELEMENTS }
}

impl AdafactorOptions {
    /// The change of a parameter with these sums of squared weights and directions.
    fn change(&self, of: StepOf, weights: f64, directions: f64) -> Change {
        let Self { step_size, scale_parameter, eps, d, .. } = *self;
        let number = of.number as f64;
        let rho = match step_size {
            StepSize::Capped => of.lr.min(1.0 / number.sqrt()),
            StepSize::Fixed => of.lr,
            StepSize::WarmUp => (1e-6 * number).min(1.0 / number.sqrt()),
        };
        let scale = if scale_parameter { eps.1.max((weights / of.numel).sqrt()) } else { 1.0 };
        let least = 1f64.max((directions / of.numel).sqrt() / d);
        Change { kept: (1.0 - of.lr * of.weight_decay) as f32, factor: (scale * rho / least) as f32 }
    }
}

/// Adafactor: on a CPU three passes over gradients; on a GPU operations of libtorch, for which the host does not wait.
#[derive(Debug)]
pub struct Adafactor {
    trained: Trained,
    options: AdafactorOptions,
}

/// The step of one parameter.
#[derive(Clone, Copy)]
struct StepOf {
    index: usize,
    number: u64,
    lr: f64,
    weight_decay: f64,
    /// Elements of the whole parameter.
    numel: f64,
    /// Rows of the whole parameter.
    num_rows: f64,
    with: AdafactorStep,
}

/// Sums of all ranks, and where those of each parameter begin: of the columns and of the means of rows, if the parameter
/// is one matrix, and of the squared weights.
struct Sums {
    numbers: Vec<f64>,
    begin: Vec<usize>,
}

impl Sums {
    fn zeros(shapes: &[Vec<i64>]) -> Self {
        let (mut begin, mut num) = (Vec::new(), 0);
        for shape in shapes {
            begin.push(num);
            num += columns_of(shape).map_or(0, |columns| columns + 1) + 1;
        }
        Self { numbers: vec![0.0; num], begin: [begin, vec![num]].concat() }
    }

    fn of(&self, index: usize) -> &[f64] {
        &self.numbers[self.begin[index]..self.begin[index + 1]]
    }

    fn of_mut(&mut self, index: usize) -> &mut [f64] {
        &mut self.numbers[self.begin[index]..self.begin[index + 1]]
    }
}

impl Adafactor {
    /// Trains parameters, or parameter groups.
    pub fn new(
        parameters: impl Into<ParameterGroups>,
        options: AdafactorOptions,
    ) -> Result<Self, TorchError> {
        options.check()?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    /// Counts a parameter's step.
    fn step_of(&self, work: &mut Work) -> Result<StepOf, TorchError> {
        let number = work.count_step()?;
        Ok(StepOf {
            index: work.index,
            number,
            lr: work.lr,
            weight_decay: work.weight_decay,
            numel: work.whole_numel(),
            num_rows: work.whole.first().map_or(1.0, |rows| *rows as f64),
            with: AdafactorStep {
                weight: (number as f64).powf(self.options.beta2_decay) as f32,
                least: (self.options.eps.0 * self.options.eps.0) as f32,
                grad_factor: work::grad_factor(self.options.maximize),
            },
        })
    }

    fn step_work(&mut self, work: Vec<Work>, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let has_kernel = |work: &Work| work.is_on_host() && work.weights.is_contiguous();
        let Begun { on_gpu, host, rest, is_skipped, is_on_gpu } =
            work::begin(&self.trained, work, tensors, OnGpu::Operations, has_kernel)?;
        if let Some(gpu) = self.trained.gpu() {
            let step =
                GpuStep { trained: &self.trained, options: &self.options, gpu, found_inf: tensors.found_inf };
            no_grad(|| step.run(on_gpu))?;
        }
        if !is_skipped && !is_on_gpu {
            self.step_on_host(host, rest)?;
        }
        Ok(())
    }

    fn step_on_host(&self, mut host: Vec<Work>, mut rest: Vec<Work>) -> Result<(), TorchError> {
        let mut sums = Sums::zeros(self.trained.shapes());
        let mut all = Vec::new();
        for work in &mut host {
            let of = self.step_of(work)?;
            all.push(jobs_of(of, work)?);
        }
        host::means(&mut all, &mut sums);
        let of_rest: Result<Vec<_>, _> = rest.iter_mut().map(|work| self.step_of(work)).collect();
        let of_rest = of_rest?;
        for (work, of) in rest.iter().zip(&of_rest) {
            no_grad(|| add_means(work, *of, sums.of_mut(of.index)))?;
        }
        self.trained.sum_over_ranks(&mut sums.numbers)?;
        let mut directions = vec![0.0; self.trained.shapes().len()];
        host::directions(&mut all, &sums, self.options.eps.0, &mut directions);
        let found: Result<Vec<_>, _> = rest
            .iter()
            .zip(&of_rest)
            .map(|(work, of)| no_grad(|| self.direction(work, *of, &sums)))
            .collect();
        let found = found?;
        for (of, direction) in of_rest.iter().zip(&found) {
            directions[of.index] += work::sum_of_squares(direction)?;
        }
        self.trained.sum_over_ranks(&mut directions)?;
        let options = &self.options;
        let change = |of: StepOf| {
            let weights = sums.of(of.index).last().copied().unwrap_or(0.0);
            options.change(of, weights, directions[of.index])
        };
        host::change(all, &change);
        for ((work, of), direction) in rest.iter().zip(of_rest).zip(found) {
            let Change { kept, factor } = change(of);
            let mut weights = work.weights.f_detach()?;
            let by = direction.f_mul_scalar(f64::from(factor))?.f_to_kind(weights.kind())?;
            let _ = no_grad(|| weights.f_mul_scalar_(f64::from(kept))?.f_sub_(&by))?;
        }
        host.iter().try_for_each(Work::mark_written)
    }

    /// The direction of a parameter, by operations of libtorch.
    fn direction(&self, work: &Work, of: StepOf, sums: &Sums) -> Result<Tensor, TorchError> {
        let variance = match &work.kept[..] {
            [_, rows, columns] => {
                let least = self.options.eps.0;
                let (columns, mean) = match columns_of(&work.whole) {
                    Some(num) => {
                        let sums = sums.of(of.index);
                        let found = Tensor::from_slice(&sums[..num]).f_to_device(columns.device())?;
                        let means = found.f_div_scalar(of.num_rows)?.f_to_kind(Kind::Float)?;
                        let _ = columns.shallow_clone().f_lerp_(&means, f64::from(of.with.weight))?;
                        let mean = (sums[num] / of.num_rows).max(least);
                        (columns.f_unsqueeze(0)?, Tensor::from(mean as f32).f_to_device(rows.device())?)
                    }
                    None => {
                        let mean = rows.f_mean_dim(&[-2i64][..], true, Kind::Float)?.f_clamp_min(least)?;
                        (columns.shallow_clone(), mean)
                    }
                };
                rows.f_mul(&columns)?.f_div(&mean)?
            }
            kept => kept[1].shallow_clone(),
        };
        let grad = gradient(work, of)?;
        Ok(grad.f_div(&variance.f_clamp_min(f64::from(of.with.least))?.f_sqrt()?)?)
    }
}

fn gradient(work: &Work, of: StepOf) -> Result<Tensor, TorchError> {
    Ok(work.grad.f_to_kind(Kind::Float)?.f_mul_scalar(f64::from(of.with.grad_factor))?)
}

/// Updates the running means of this rank by operations of libtorch, and adds its sums.
fn add_means(work: &Work, of: StepOf, sums: &mut [f64]) -> Result<(), TorchError> {
    let squares = gradient(work, of)?.f_square()?;
    let weight = f64::from(of.with.weight);
    let mean_of = |dim: i64| squares.f_mean_dim(&[dim][..], true, Kind::Float);
    match &work.kept[..] {
        [_, rows, columns] => {
            let _ = rows.shallow_clone().f_lerp_(&mean_of(-1)?, weight)?;
            match columns_of(&work.whole) {
                Some(num) => {
                    let found = squares.f_sum_dim_intlist(&[0i64][..], false, Kind::Double)?;
                    let found = Vec::<f64>::try_from(&found.f_to_device(tch::Device::Cpu)?)?;
                    sums[..num].iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
                    sums[num] += rows.f_sum(Kind::Double)?.f_double_value(&[])?;
                }
                None => {
                    let _ = columns.shallow_clone().f_lerp_(&mean_of(-2)?, weight)?;
                }
            }
        }
        kept => {
            let _ = kept[1].shallow_clone().f_lerp_(&squares, weight)?;
        }
    }
    if let Some(sum) = sums.last_mut() {
        *sum += work::sum_of_squares(&work.weights)?;
    }
    Ok(())
}

impl Optimizer for Adafactor {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let work = self.trained.work(&[], &slots)?.unwrap_or_default();
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
        let work = self.trained.work(copies, &slots)?;
        let can_step = |work: &Work| {
            work.weights.device().is_cuda() || work.is_on_host() && work.weights.is_contiguous()
        };
        let has_kernel = |work: &Vec<Work>| work::has_copies(work, can_step);
        let work = work.filter(has_kernel);
        work.map_or(Ok(false), |work| self.step_work(work, tensors).map(|()| true))
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.trained.keep_lr_on_device()
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        self.trained.are_split = true;
        Ok(())
    }

    methods_of_trained!();

    fn state(&self) -> OptimizerState {
        let AdafactorOptions { beta2_decay, eps, d, weight_decay, maximize, .. } = self.options;
        let scalars = [
            ("beta2_decay", beta2_decay),
            ("eps1", eps.0),
            ("eps2", eps.1),
            ("d", d),
            ("weight_decay", weight_decay),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        Layout { kind: KIND, slots: &slots }.save(&self.trained, &scalars)
    }

    fn needs_whole_tensors(&self) -> Option<&'static str> {
        Some("Adafactor's means of rows and columns")
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.load_state_of(state, &|_| true)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        Layout { kind: KIND, slots: &slots }.load(&mut self.trained, state, wanted)
    }
}
