//! Steps of optimizers on GPUs, with the numbers of our CPU kernels: Adam with means in 32, 16 or 8 bits, Lion and LAMB, on
//! f32 weights, on f32 master weights of 16-bit parameters, and on split ones.
//!
//! ```text
//!   parameters ─▶ groups of one `Variant` ─▶ lists of up to 40 ─▶ one launch each, and one that counts the step
//! ```
//! Operations round as on a CPU, so that results have the same bits. What can differ: a NaN; the last bit of a bias
//! correction, because CUDA has another `pow`; and LAMB's norms, which are sums in another order.
//!
//! Steps are counted on the device, so that a CUDA graph can have them. Not here: SGD, and Adam with means in f32 on
//! copied master weights (`master_step`), which have libtorch's numbers.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, pointer};
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::fused::{WeightDecay, is_dense};
use crate::kernels::code_map::{BLOCK, CodeMap, HIGHEST, LOWEST};
use crate::memory_format::has_layout_of;

static SOURCE: Source = Source::ieee(&[
    include_str!("optimizer_step/elements.cu"),
    include_str!("optimizer_step/adam.cu"),
    include_str!("optimizer_step/lion.cu"),
    include_str!("optimizer_step/lamb.cu"),
]);

const THREADS: u32 = 256;
/// Spans of up to 256 elements per block of threads.
const SPANS: i64 = 32;
/// Tensors per launch: their pointers and sizes fit into a kernel's arguments.
const LISTED: usize = 40;

/// A parameter on a GPU, with its gradient and its state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuElements<'a> {
    /// In f32, or the high halves of split weights.
    pub(crate) weights: &'a Tensor,
    /// The 16-bit parameter that they are rounded into, or their low halves.
    pub(crate) twin: Option<&'a Tensor>,
    pub(crate) grad: &'a Tensor,
    /// The number of steps.
    pub(crate) step: Option<&'a Tensor>,
    /// The running means of gradients and of their squares.
    pub(crate) means: [Option<&'a Tensor>; 2],
    /// Their scales, if they are in 8 bits.
    pub(crate) absmax: [Option<&'a Tensor>; 2],
    /// The index of its first element in the whole parameter.
    pub(crate) first_element: u64,
    /// What random bits depend on besides step and element; for LAMB the index of the parameter.
    pub(crate) key: u32,
}

/// The kinds that a kernel is compiled for, and the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    device: usize,
    grad: Element,
    /// As `WEIGHTS` in the source.
    weights: i64,
    /// As `MEANS` in the source.
    means: i64,
}

/// What parameters of a step have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuRates<'a> {
    pub(crate) lr: f64,
    /// If there is one, the learning rate is read from it: one f64 on the GPU.
    pub(crate) lr_at: Option<&'a Tensor>,
    pub(crate) weight_decay: f64,
    /// Gradients are multiplied by it.
    pub(crate) grad_factor: f32,
    /// If it is not zero, the step changes nothing.
    pub(crate) found_inf: Option<&'a Tensor>,
}

/// The rule of Adam.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuAdam {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) decay: WeightDecay,
    /// The seed of random bits.
    pub(crate) seed: u64,
}

/// The rule of LAMB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuLamb {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    /// 0: the bias of the means is corrected, 1: the step size, 2: nothing.
    pub(crate) correction: i32,
    pub(crate) coeffs: (f64, f64),
}

/// The layout is that of `Tensors` in the source.
#[repr(C)]
struct Lists {
    pointers: [[u64; LISTED]; 8],
    first_element: [u64; LISTED],
    count: [i64; LISTED],
    row_len: [i64; LISTED],
    key: [u32; LISTED],
    begin: [u32; LISTED],
    listed: i64,
}

/// Some parameters of one variant.
struct Launch {
    variant: Variant,
    lists: Lists,
    blocks: u32,
}

impl<'a> GpuElements<'a> {
    /// Whether our kernels step this parameter.
    pub(crate) fn have_kernel(&self) -> bool {
        self.variant().is_some()
    }

    fn variant(&self) -> Option<Variant> {
        let Device::Cuda(device) = self.weights.device() else { return None };
        let grad_kind = self.grad.kind();
        let weights = match (self.weights.kind(), self.twin.map(Tensor::kind)) {
            (Kind::Float, None) if grad_kind == Kind::Float => 0,
            (Kind::Float, Some(rounded)) if rounded == grad_kind && grad_kind != Kind::Float => 1,
            (Kind::BFloat16, Some(Kind::Int16)) if grad_kind == Kind::BFloat16 => 2,
            _ => return None,
        };
        let means = match self.means[0]?.kind() {
            Kind::Float => 0,
            Kind::BFloat16 => 1,
            Kind::Uint8 => 2,
            _ => return None,
        };
        let like = [Some(self.grad), self.twin, self.means[0], self.means[1]];
        let fits = like.into_iter().flatten().all(|tensor| self.is_like(tensor))
            && is_dense(self.weights).is_ok_and(|dense| dense)
            && self.means[1].is_none_or(|second| Some(second.kind()) == self.means[0].map(Tensor::kind))
            && (means == 2) == self.absmax.iter().all(Option::is_some)
            && self.absmax.into_iter().flatten().all(|scales| self.has_scales(scales))
            && self.step.is_none_or(|step| is_number(step, Kind::Float, self.weights.device()));
        let grad = Element::on(device, grad_kind)?;
        fits.then_some(Variant { device, grad, weights, means })
    }

    fn is_like(&self, tensor: &Tensor) -> bool {
        tensor.device() == self.weights.device()
            && tensor.size() == self.weights.size()
            && has_layout_of(tensor, self.weights)
    }

    fn has_scales(&self, scales: &Tensor) -> bool {
        let rows = self.weights.size().first().map_or(1, |rows| *rows as usize);
        scales.device() == self.weights.device()
            && scales.kind() == Kind::Float
            && scales.is_contiguous()
            && scales.numel() == rows * (self.row_len() as usize).div_ceil(BLOCK)
    }

    /// The elements between the starts of blocks: those of a row if the means are in 8 bits.
    fn row_len(&self) -> i64 {
        let (numel, rows) =
            (self.weights.numel() as i64, self.weights.size().first().map_or(1, |rows| *rows));
        if self.absmax[0].is_some() { numel / rows.max(1) } else { numel }
    }

    fn num_spans(&self) -> i64 {
        let (numel, row_len) = (self.weights.numel() as i64, self.row_len());
        if numel == 0 { 0 } else { numel / row_len * (row_len as u64).div_ceil(BLOCK as u64) as i64 }
    }
}

/// Whether our kernels step parameters of this kind on this GPU.
pub(crate) fn gpu_steps(kind: Kind, device: Device) -> bool {
    matches!(device, Device::Cuda(index) if Element::on(index, kind).is_some())
}

/// A step of Adam.
pub(crate) fn adam_on_gpu(
    all: &[GpuElements<'_>],
    rates: &GpuRates<'_>,
    rule: &GpuAdam,
) -> Result<(), TorchError> {
    let GpuAdam { betas, eps, decay, seed } = *rule;
    let decoupled = i32::from(decay == WeightDecay::Decoupled);
    let numbers = [betas.0, betas.1, eps, rates.weight_decay].map(Argument::from);
    let rest = [decoupled.into(), rates.grad_factor.into(), Argument::from((seed >> 32) as u32 as i64)];
    let arguments = [&rates.begin()[..], &numbers, &rest].concat();
    for launch in launches(all)? {
        launch.blocks("adam_step", &arguments)?;
        launch.count_step(rates)?;
    }
    Ok(())
}

/// A step of Lion.
pub(crate) fn lion_on_gpu(
    all: &[GpuElements<'_>],
    rates: &GpuRates<'_>,
    betas: [f64; 2],
) -> Result<(), TorchError> {
    let numbers = [betas[0], betas[1], rates.weight_decay].map(Argument::from);
    let arguments = [&rates.begin()[..], &numbers, &[rates.grad_factor.into()]].concat();
    launches(all)?.iter().try_for_each(|launch| launch.blocks("lion_step", &arguments))
}

/// Updates the means of LAMB. Writes the sums of squares of weights and direction of the parameter with key `k` to
/// `squares[2k]` and the next.
pub(crate) fn lamb_means_on_gpu(
    all: &[GpuElements<'_>],
    rates: &GpuRates<'_>,
    rule: &GpuLamb,
    squares: &Tensor,
) -> Result<(), TorchError> {
    let found_inf = pointer(rates.found_inf);
    for launch in launches(all)? {
        let device = Device::Cuda(launch.variant.device);
        let sums = Tensor::f_empty([2 * i64::from(launch.blocks)], (Kind::Double, device))?;
        let [beta1, beta2, eps, weight_decay] = rule.numbers(rates);
        let (correction, factor) = (rule.correction.into(), rates.grad_factor.into());
        let arguments =
            [found_inf, beta1, beta2, eps, weight_decay, correction, factor, pointer(Some(&sums))];
        launch.blocks("lamb_means", &arguments)?;
        let num_blocks = i64::from(launch.blocks).into();
        let grid = Grid { blocks: (launch.lists.listed as u32, 1), threads: 2, shared: 0 };
        let arguments = [found_inf, pointer(Some(&sums)), pointer(Some(squares)), num_blocks];
        launch.run("lamb_norms", grid, &arguments)?;
    }
    Ok(())
}

/// Changes the weights in the direction of the means, by a size that follows from `squares`, and counts the step.
pub(crate) fn lamb_weights_on_gpu(
    all: &[GpuElements<'_>],
    rates: &GpuRates<'_>,
    rule: &GpuLamb,
    squares: &Tensor,
) -> Result<(), TorchError> {
    let bounds = [rule.coeffs.0, rule.coeffs.1].map(Argument::from);
    let rest = [&[rule.correction.into()], &bounds[..], &[pointer(Some(squares))]].concat();
    let arguments = [&rates.begin()[..], &rule.numbers(rates), &rest].concat();
    for launch in launches(all)? {
        launch.blocks("lamb_weights", &arguments)?;
        launch.count_step(rates)?;
    }
    Ok(())
}

impl GpuLamb {
    fn numbers(&self, rates: &GpuRates<'_>) -> [Argument; 4] {
        [self.betas.0, self.betas.1, self.eps, rates.weight_decay].map(Argument::from)
    }
}

impl GpuRates<'_> {
    /// The first arguments of most kernels.
    fn begin(&self) -> [Argument; 3] {
        [pointer(self.lr_at), pointer(self.found_inf), self.lr.into()]
    }
}

/// The launches for these parameters: each has some of one variant.
fn launches(all: &[GpuElements<'_>]) -> Result<Vec<Launch>, TorchError> {
    let mut groups: Vec<(Variant, Vec<&GpuElements<'_>>)> = Vec::new();
    for elements in all {
        let variant = elements.variant().ok_or(TorchError::Internal { what: "a parameter has no kernel" })?;
        match groups.iter_mut().find(|(other, _)| *other == variant) {
            Some((_, group)) => group.push(elements),
            None => groups.push((variant, vec![elements])),
        }
    }
    let lists = |(variant, group): (Variant, Vec<&GpuElements<'_>>)| {
        let some = group.chunks(LISTED).map(|some| Launch::of(variant, some));
        some.collect::<Vec<_>>()
    };
    Ok(groups.into_iter().flat_map(lists).collect())
}

impl Launch {
    fn of(variant: Variant, some: &[&GpuElements<'_>]) -> Self {
        let mut lists = Lists {
            pointers: [[0; LISTED]; 8],
            first_element: [0; LISTED],
            count: [0; LISTED],
            row_len: [1; LISTED],
            key: [0; LISTED],
            begin: [0; LISTED],
            listed: some.len() as i64,
        };
        let mut blocks = 0;
        for (index, one) in some.iter().enumerate() {
            let all = [
                Some(one.weights),
                one.twin,
                one.means[0],
                one.means[1],
                one.absmax[0],
                one.absmax[1],
                one.step,
                Some(one.grad),
            ];
            for (list, tensor) in lists.pointers.iter_mut().zip(all) {
                list[index] = tensor.map_or(0, |tensor| tensor.data_ptr() as u64);
            }
            lists.first_element[index] = one.first_element;
            lists.count[index] = one.weights.numel() as i64;
            lists.row_len[index] = one.row_len().max(1);
            (lists.key[index], lists.begin[index]) = (one.key, blocks);
            blocks += (one.num_spans() as u64).div_ceil(SPANS as u64) as u32;
        }
        Self { variant, lists, blocks }
    }

    /// Runs a kernel with a thread for each lane of all spans.
    fn blocks(&self, name: &str, arguments: &[Argument]) -> Result<(), TorchError> {
        if self.blocks == 0 {
            return Ok(());
        }
        self.run(name, Grid { blocks: (self.blocks, 1), threads: THREADS, shared: 0 }, arguments)
    }

    fn count_step(&self, rates: &GpuRates<'_>) -> Result<(), TorchError> {
        let grid = Grid { blocks: (1, 1), threads: THREADS, shared: 0 };
        self.run("count_step", grid, &[pointer(rates.found_inf)])
    }

    fn run(&self, name: &str, grid: Grid, arguments: &[Argument]) -> Result<(), TorchError> {
        let Variant { device, grad, weights, means } = self.variant;
        let maps = [CodeMap::signed(), CodeMap::unsigned()];
        let constants = [
            ("THREADS", i64::from(THREADS)),
            ("SPANS", SPANS),
            ("LISTED", LISTED as i64),
            ("WEIGHTS", weights),
            ("MEANS", means),
            ("LOWEST", i64::from(LOWEST)),
            ("HIGHEST", i64::from(HIGHEST)),
            ("MAP_WORDS", maps[0].words().len() as i64),
        ];
        let arrays = || match means {
            2 => {
                ["signed_map", "unsigned_map"].iter().zip(maps).map(|(name, map)| array(name, map)).collect()
            }
            _ => String::new(),
        };
        let kernels = SOURCE.with_arrays(device, grad, &constants, &arrays)?;
        // SAFETY: the arguments are listed as in the source; the tensors of each parameter were found to be of its size
        // and on this GPU.
        unsafe { kernels.get(name)?.launch_with(device, grid, &self.lists, arguments) }
    }
}

/// A map as an array of the source.
fn array(name: &str, map: &CodeMap) -> String {
    let words: Vec<_> = map.words().iter().map(|word| format!("{word:#x}u")).collect();
    format!("__device__ const unsigned {name}[MAP_WORDS] = {{{}}};\n", words.join(","))
}

/// Whether a tensor is one number of this kind on this device.
pub(crate) fn is_number(tensor: &Tensor, kind: Kind, device: Device) -> bool {
    (tensor.kind(), tensor.device(), tensor.numel()) == (kind, device, 1)
}
