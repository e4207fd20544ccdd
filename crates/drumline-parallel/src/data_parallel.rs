//! One process with a thread for each device, as PyTorch's `DataParallel`: for comparison, and for one machine without
//! a launcher.
//!
//! ```text
//!   stage                            first device            other devices
//!   1 forward        scatter inputs ─┬▶ forward              forward        ◀─ replicate parameters (stage 8 of the step before)
//!   2 gather outputs                 ◀────────────────────── outputs
//!   3 loss                           by the program
//!   4 scatter                        ─▶ gradients of outputs ─▶
//!   5 backward                       backward                backward
//!   6 reduce                         ◀────────────────────── gradients of all parameters
//!   7 update                         by the program's optimizer
//! ```
//! On a CPU several devices are several replicas in host memory. [`StageBytes`] counts the bytes between devices.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use drumline_comm::panic_text;
use drumline_torch::{Named, buffers, grad, parameters, set_grad};
use tch::nn::{ModuleT, Path, VarStore};
use tch::{Device, Kind, Tensor};

use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Bytes that were copied from one device to another, by stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageBytes {
    /// Inputs, to all but the first device.
    pub scatter_inputs: usize,
    /// Parameters and buffers, to all but the first device.
    pub replicate: usize,
    /// Outputs, to the first device.
    pub gather_outputs: usize,
    /// Gradients of outputs, to all but the first device.
    pub scatter_gradients: usize,
    /// Gradients of parameters, to the first device.
    pub reduce_gradients: usize,
}

#[derive(Debug)]
struct Replica<M> {
    device: Device,
    module: M,
    parameters: Vec<Named>,
    buffers: Vec<Named>,
    /// Owns the variables.
    store: VarStore,
    /// The output of the last forward in training, with its autograd graph.
    output: Option<Tensor>,
}

/// A model with a replica on each device.
///
/// ```
/// use drumline_parallel::DataParallel;
/// use tch::{Device, Kind, Tensor, nn};
///
/// tch::manual_seed(1);
/// let devices = [Device::Cpu; 2];
/// let mut model = DataParallel::new(&devices, |path| nn::linear(path, 4, 2, Default::default()))?;
/// let loss = model.forward_t(&Tensor::rand([6, 4], (Kind::Float, Device::Cpu)), true)?.square().mean(Kind::Float);
/// model.backward(&loss)?; // the gradients are on the first device: `model.store()` goes to the optimizer
/// assert_eq!(model.traffic().reduce_gradients, (4 * 2 + 2) * 4);
/// # Ok::<(), drumline_parallel::ParallelError>(())
/// ```
#[derive(Debug)]
pub struct DataParallel<M> {
    replicas: Vec<Replica<M>>,
    /// The gathered outputs, at which backward continues on each device.
    gathered: Option<Tensor>,
    traffic: StageBytes,
}

impl<M: ModuleT> DataParallel<M> {
    /// Builds the model once for each device. Before each forward the parameters of the first device are copied to the
    /// others.
    pub fn new(devices: &[Device], build: impl Fn(Path<'_>) -> M) -> Result<Self> {
        Self::try_new(devices, |path| Ok(build(path)))
    }

    /// The same with a `build` that may fail.
    pub fn try_new<E: From<ParallelError>>(
        devices: &[Device],
        build: impl Fn(Path<'_>) -> std::result::Result<M, E>,
    ) -> std::result::Result<Self, E> {
        if devices.is_empty() {
            return Err(ParallelError::value("the number of devices", 0, "at least 1").into());
        }
        let replica = |device: &Device| {
            let store = VarStore::new(*device);
            let module = build(store.root())?;
            let (parameters, buffers) = (parameters(&store), buffers(&store));
            Ok(Replica { device: *device, module, parameters, buffers, store, output: None })
        };
        let replicas = devices.iter().map(replica).collect::<std::result::Result<_, E>>()?;
        Ok(Self { replicas, gathered: None, traffic: StageBytes::default() })
    }

    /// The variables of the first device, for the optimizer and for checkpoints.
    pub fn store(&self) -> &VarStore {
        &self.replicas[0].store
    }

    /// The bytes that the last forward and backward sent between devices.
    pub fn traffic(&self) -> StageBytes {
        self.traffic
    }

    /// Stages 8, 1 and 2: splits the batch into equal parts, one for each device, and gathers the outputs in order on
    /// the first device.
    pub fn forward_t(&mut self, input: &Tensor, train: bool) -> Result<Tensor> {
        self.traffic = StageBytes::default();
        // An earlier forward may have had no backward.
        self.replicas.iter_mut().for_each(|replica| replica.output = None);
        let parts = self.scatter(input)?;
        self.replicate(parts.len())?;
        let outputs = on_each_device(self.replicas.iter_mut().zip(parts), |replica, part| {
            Ok(replica.module.forward_t(&part, train))
        })?;
        let gathered = self.gather(&outputs)?;
        for (replica, output) in self.replicas.iter_mut().zip(outputs) {
            replica.output = Some(output).filter(|output| train && output.requires_grad());
        }
        let gathered = gathered.detach().set_requires_grad(train && self.replicas[0].output.is_some());
        self.gathered = Some(gathered.shallow_clone());
        Ok(gathered)
    }

    /// Stages 4 to 6, for a loss of the last forward's outputs. Afterwards the first device has the sum of all devices'
    /// gradients. The sum is not divided, because the loss is over the whole batch.
    pub fn backward(&mut self, loss: &Tensor) -> Result {
        let gathered = self.gathered.take().ok_or(ParallelError::BackwardWithoutForward)?;
        loss.f_backward()?;
        let gradient = grad(&gathered)?.ok_or(ParallelError::BackwardWithoutForward)?;
        let outputs: Vec<Tensor> =
            self.replicas.iter_mut().map_while(|replica| replica.output.take()).collect();
        let mut start = 0;
        let mut parts = Vec::new();
        for (place, (output, replica)) in outputs.iter().zip(&self.replicas).enumerate() {
            let rows = output.size()[0];
            let part = gradient.narrow(0, start, rows).to_device(replica.device);
            self.traffic.scatter_gradients += if place > 0 { bytes(&part) } else { 0 };
            start += rows;
            parts.push((output.shallow_clone(), part));
        }
        let active = parts.len();
        on_each_device(self.replicas.iter_mut().zip(parts), |_, (output, part)| {
            // The gradient of this sum by the output is `part`.
            Ok((output * part).sum(Kind::Float).f_backward()?)
        })?;
        self.reduce(active)
    }

    fn scatter(&mut self, input: &Tensor) -> Result<Vec<Tensor>> {
        let parts = input.f_chunk(self.replicas.len() as i64, 0)?;
        let to_device = |(part, replica): (&Tensor, &Replica<M>)| part.to_device(replica.device);
        self.traffic.scatter_inputs = parts.iter().skip(1).map(bytes).sum();
        Ok(parts.iter().zip(&self.replicas).map(to_device).collect())
    }

    fn replicate(&mut self, active: usize) -> Result {
        let _no_grad = tch::no_grad_guard();
        let (first, others) = self.replicas.split_at_mut(1);
        for other in others.iter_mut().take(active - 1) {
            let from = first[0].parameters.iter().chain(&first[0].buffers);
            for (from, to) in from.zip(other.parameters.iter().chain(&other.buffers)) {
                to.tensor.shallow_clone().f_copy_(&from.tensor)?;
                self.traffic.replicate += bytes(&from.tensor);
            }
        }
        Ok(())
    }

    fn gather(&mut self, outputs: &[Tensor]) -> Result<Tensor> {
        let first = self.replicas[0].device;
        self.traffic.gather_outputs = outputs.iter().skip(1).map(bytes).sum();
        let here: Vec<Tensor> = outputs.iter().map(|output| output.detach().to_device(first)).collect();
        Ok(Tensor::f_cat(&here, 0)?)
    }

    fn reduce(&mut self, active: usize) -> Result {
        let _no_grad = tch::no_grad_guard();
        let (first, others) = self.replicas.split_at_mut(1);
        for (param, other) in
            others.iter().take(active - 1).flat_map(|other| first[0].parameters.iter().zip(&other.parameters))
        {
            let Some(theirs) = grad(&other.tensor)? else { continue };
            self.traffic.reduce_gradients += bytes(&theirs);
            let theirs = theirs.to_device(first[0].device);
            match grad(&param.tensor)? {
                Some(mut ours) => drop(ours.f_add_(&theirs)?),
                None => set_grad(&param.tensor, Some(&theirs))?,
            }
            set_grad(&other.tensor, None)?;
        }
        Ok(())
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// Runs `work` for each device on its own thread; for the first device on this thread.
fn on_each_device<R: Send, P: Send, T: Send>(
    devices: impl Iterator<Item = (R, P)>,
    work: impl Fn(R, P) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let mut devices: Vec<(R, P)> = devices.collect();
    let threads = (tch::get_num_threads() / devices.len().max(1) as i32).max(1);
    let work = &work;
    std::thread::scope(|scope| {
        let others: Vec<_> = devices
            .drain(1..)
            .map(|(replica, part)| {
                scope.spawn(move || {
                    // Replicas on a CPU share its cores.
                    tch::set_num_threads(threads);
                    guarded(|| work(replica, part))
                })
            })
            .collect();
        let first = devices.pop().map(|(replica, part)| guarded(|| work(replica, part)));
        let others =
            others.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| Err(panicked(&*panic))));
        first.into_iter().chain(others).collect()
    })
}

/// Turns a panic into an error: tch's operations without `f_` panic if libtorch returns an error.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

fn panicked(panic: &(dyn Any + Send)) -> ParallelError {
    ParallelError::ReplicaPanicked { message: panic_text(panic).to_owned() }
}
