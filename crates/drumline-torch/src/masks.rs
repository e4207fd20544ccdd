//! Dropout by position: masks are a function of the seed, the step, the layer and the element, and not of an order.
//!
//! ```text
//!   Masks (seed, step) ─ enter(samples) ─ mask_layer("h", 3) ─▶ the nth dropout there ─▶ Position ─▶ bits of each element
//!          └ on a GPU a tensor, which a CUDA graph reads: each launch draws other masks
//! ```
//! So the second forward of a checkpoint draws the masks of the first, any number of ranks draws the same ones, and a CPU
//! draws those of a GPU. Outside of a scope dropout draws from libtorch's generators. Not here: the bits
//! (`kernels/dropout`).

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::error::TorchError;
use crate::kernels::mix;

/// Odd constants, so that equal numbers in two places of a key do not cancel each other.
const ODD: [u32; 2] = [0x9e37_79b9, 0x85eb_ca6b];

/// Which samples a micro-batch has, of all samples of the step: `first`, `first + stride`, `first + 2 · stride`, ….
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSamples {
    /// The position of the first one.
    pub first: u64,
    /// The distance of two neighbours.
    pub stride: u64,
    /// How many there are. The rows of a tensor are divided among them in order.
    pub count: u64,
}

/// The masks of a training.
///
/// ```
/// use drumline_torch::{Masks, StepSamples, dropout};
/// use tch::{Device, Kind, Tensor};
///
/// let masks = Masks::new(7, Device::Cpu)?;
/// let ones = Tensor::ones([4, 100], (Kind::Float, Device::Cpu));
/// let drawn = |first, count| {
///     let _scope = masks.enter(StepSamples { first, stride: 1, count });
///     dropout(&ones.narrow(0, 0, count as i64), 0.5)
/// };
/// let whole = drawn(0, 4)?;
/// assert_eq!(drawn(2, 2)?, whole.narrow(0, 2, 2));
/// masks.set_step(1)?;
/// assert_ne!(drawn(0, 4)?, whole);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Masks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    seed: u64,
    step: AtomicU64,
    /// The same number for kernels of a GPU.
    on_device: Option<Mutex<Tensor>>,
}

impl Masks {
    /// The masks of this seed, at step 0. Do not call it in a recording.
    pub fn new(seed: u64, device: Device) -> Result<Self, TorchError> {
        let number = || Ok::<_, TorchError>(Mutex::new(Tensor::f_zeros([1], (Kind::Int64, device))?));
        let on_device = device.is_cuda().then(number).transpose()?;
        // Graphs refer to it, and may outlive this.
        std::mem::forget(on_device.as_ref().map(|number| lock(number).shallow_clone()));
        Ok(Self(Arc::new(Shared { seed, step: AtomicU64::new(0), on_device })))
    }

    /// Sets the step. On a GPU later work of the current stream sees it, also as a part of a graph.
    ///
    /// Call it, and [`advance`](Self::advance), before a forward and not between a forward and its backward: kernels of a GPU
    /// read the step from its memory, and draw a mask once more in backward. In another step that is an error.
    pub fn set_step(&self, step: u64) -> Result<(), TorchError> {
        self.0.step.store(step, Ordering::Relaxed);
        if let Some(mut number) = self.0.device_step() {
            let _ = number.f_fill_(step as i64)?;
        }
        Ok(())
    }

    /// Begins the next step. In a recording each launch begins one, for masks of tensors on that GPU.
    pub fn advance(&self) -> Result<(), TorchError> {
        self.0.step.fetch_add(1, Ordering::Relaxed);
        if let Some(mut number) = self.0.device_step() {
            let _ = number.f_add_scalar_(1)?;
        }
        Ok(())
    }

    /// Dropout on this thread draws these masks for these samples, until the result is dropped.
    pub fn enter(&self, samples: StepSamples) -> MaskScope {
        let place = Place { masks: self.clone(), step: None, samples, layer: 0, calls: 0 };
        MaskScope { before: CURRENT.replace(Some(place)), stays: PhantomData }
    }
}

impl Shared {
    fn device_step(&self) -> Option<Tensor> {
        let number = self.on_device.as_ref()?;
        Some(lock(number).shallow_clone())
    }
}

fn lock(number: &Mutex<Tensor>) -> MutexGuard<'_, Tensor> {
    number.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a forward is.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    masks: Masks,
    /// Set if it stays at a step.
    step: Option<u64>,
    samples: StepSamples,
    layer: u32,
    /// Dropouts of this layer so far.
    calls: u32,
}

thread_local! {
    static CURRENT: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// A place of this thread, until this is dropped.
#[derive(Debug)]
#[must_use = "dropout draws as before when this is dropped"]
pub struct MaskScope {
    before: Option<Place>,
    /// The place belongs to the thread.
    stays: PhantomData<*const ()>,
}

impl Drop for MaskScope {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
    }
}

/// Names the layer whose forward runs, until the result is dropped. Inside, dropouts are counted from zero: so a layer
/// draws the same masks whichever layers run before it on this rank.
pub fn mask_layer(name: &str, index: usize) -> MaskScope {
    let before = CURRENT.take();
    let inside = |place: &Place| {
        let name = name
            .bytes()
            .fold(mix(place.layer.wrapping_add(ODD[0])), |hash, byte| mix(hash ^ u32::from(byte)));
        Place { layer: mix(name.wrapping_add(ODD[1]) ^ mix(index as u32 + 1)), calls: 0, ..place.clone() }
    };
    CURRENT.set(before.as_ref().map(inside));
    MaskScope { before, stays: PhantomData }
}

/// The step of which a forward has drawn masks.
#[derive(Debug, Clone)]
pub(crate) struct DrawnStep {
    of: Arc<Shared>,
    step: u64,
}

impl DrawnStep {
    /// An error if the same masks cannot be drawn again, because another step has begun.
    pub(crate) fn check(&self) -> Result<(), TorchError> {
        if self.of.step.load(Ordering::Relaxed) == self.step {
            return Ok(());
        }
        Err(TorchError::Unsupported {
            operation: "draw the masks of dropout again in backward",
            reason: "the step of its Masks has changed since forward; try set_step and advance after backward",
        })
    }
}

impl Place {
    /// The same, which stays at the present step.
    pub(crate) fn of_this_step(self) -> Self {
        Self { step: Some(self.step().step), ..self }
    }

    fn step(&self) -> DrawnStep {
        let of = Arc::clone(&self.masks.0);
        DrawnStep { step: self.step.unwrap_or_else(|| of.step.load(Ordering::Relaxed)), of }
    }

    /// That of this thread.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Makes it that of this thread.
    pub(crate) fn enter(place: Option<&Self>) -> MaskScope {
        MaskScope { before: CURRENT.replace(place.cloned()), stays: PhantomData }
    }
}

/// What the masks of one dropout depend on.
#[derive(Debug)]
pub(crate) struct Position {
    /// The seed and the layer.
    keys: [u32; 2],
    step: DrawnStep,
    /// For kernels of a GPU.
    step_on_device: Option<Tensor>,
    samples: StepSamples,
}

impl Position {
    /// That of the next dropout on this thread; `None` outside of a scope.
    pub(crate) fn next() -> Option<Self> {
        CURRENT.with_borrow_mut(|place| {
            let place = place.as_mut()?;
            let step = place.step();
            let Place { masks: Masks(shared), samples, layer, calls, .. } = place;
            *calls += 1;
            let site = mix(*layer ^ mix(*calls));
            let (low, high) = (shared.seed as u32, (shared.seed >> 32) as u32);
            Some(Self {
                keys: [mix(low ^ site), mix(high.wrapping_add(site.wrapping_mul(ODD[0])))],
                step,
                step_on_device: shared.device_step(),
                samples: *samples,
            })
        })
    }

    /// The samples of a tensor of this size, each of which has the same number of rows. If the numbers do not divide, all
    /// rows count as one.
    fn samples_of(&self, size: &[i64]) -> StepSamples {
        let count = self.samples.count;
        match size.first() {
            Some(rows) if count > 0 && (*rows as u64).is_multiple_of(count) => self.samples,
            _ => StepSamples { first: self.samples.first | 1 << 63, stride: 0, count: 1 },
        }
    }

    /// The seed of each sample of a tensor of this size.
    pub(crate) fn seeds(&self, size: &[i64]) -> Vec<[u32; 2]> {
        let StepSamples { first, stride, count } = self.samples_of(size);
        let step = fold(self.step.step);
        let [a, b] = [mix(self.keys[0] ^ step), mix(self.keys[1].wrapping_add(step.wrapping_mul(ODD[0])))];
        let of_sample = |nth: u64| {
            let sample = fold(first + nth * stride);
            [mix(a.wrapping_add(sample)), mix(b ^ sample.wrapping_mul(ODD[1]))]
        };
        (0..count).map(of_sample).collect()
    }

    /// The same for a kernel, which makes the seeds itself: `None` if the step is not on this GPU.
    pub(crate) fn on_device(self, device: Device, size: &[i64]) -> Option<DevicePosition> {
        let StepSamples { first, stride, count } = self.samples_of(size);
        let step = self.step_on_device.filter(|step| step.device() == device)?;
        Some(DevicePosition { keys: self.keys, drawn: self.step, step, first, stride, count })
    }
}

/// A [`Position`] for a kernel.
#[derive(Debug)]
pub(crate) struct DevicePosition {
    pub(crate) keys: [u32; 2],
    /// The step as the host knows it: a kernel reads the number that `step` has at its time.
    pub(crate) drawn: DrawnStep,
    pub(crate) step: Tensor,
    pub(crate) first: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
}

fn fold(number: u64) -> u32 {
    mix(number as u32 ^ mix((number >> 32) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{checkpoint, dropout, relu_dropout, sum_with_dropout};

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn ones(size: &[i64]) -> Tensor {
        Tensor::ones(size, FLOAT)
    }

    fn every(count: u64) -> StepSamples {
        StepSamples { first: 0, stride: 1, count }
    }

    #[test]
    fn a_mask_depends_on_seed_step_layer_call_and_sample() {
        let drawn = |seed, step, layer, calls, samples| {
            let masks = Masks::new(seed, Device::Cpu).unwrap();
            masks.set_step(step).unwrap();
            let _scope = masks.enter(samples);
            let _layer = mask_layer("block", layer);
            (0..calls).for_each(|_| drop(dropout(&ones(&[2, 999]), 0.5)));
            dropout(&ones(&[2, 999]), 0.5).unwrap()
        };
        let first = drawn(1, 2, 3, 0, every(2));
        assert_eq!(drawn(1, 2, 3, 0, every(2)), first);
        let moved = StepSamples { first: 5, ..every(2) };
        let others = [
            drawn(2, 2, 3, 0, every(2)),
            drawn(1 << 40 | 1, 2, 3, 0, every(2)),
            drawn(1, 3, 3, 0, every(2)),
            drawn(1, 1 << 40 | 2, 3, 0, every(2)),
            drawn(1, 2, 4, 0, every(2)),
            drawn(1, 2, 3, 1, every(2)),
            drawn(1, 2, 3, 0, moved),
            first.flip([0]),
        ];
        for (place, other) in others.iter().enumerate() {
            let same = other.eq_tensor(&first).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            assert!((same - 0.5).abs() < 0.07, "{place}: {same}");
        }
    }

    #[test]
    fn ranks_that_take_samples_in_turn_draw_the_masks_of_one() {
        let masks = Masks::new(7, Device::Cpu).unwrap();
        let drawn = |samples: StepSamples| {
            let _scope = masks.enter(samples);
            let xs = ones(&[samples.count as i64, 5, 33]);
            [dropout(&xs, 0.3), relu_dropout(&xs, 0.3), sum_with_dropout(&xs, &xs, 0.3)].map(Result::unwrap)
        };
        let whole = drawn(every(6));
        for rank in 0..3 {
            let own = drawn(StepSamples { first: rank, stride: 3, count: 2 });
            for (own, whole) in own.iter().zip(&whole) {
                let expected = Tensor::stack(&[whole.get(rank as i64), whole.get(rank as i64 + 3)], 0);
                assert_eq!(*own, expected, "rank {rank}");
            }
        }
    }

    #[test]
    fn rows_that_are_no_samples_and_other_types_have_masks_too() {
        let masks = Masks::new(7, Device::Cpu).unwrap();
        let drawn = |xs: &Tensor, first| {
            let _scope = masks.enter(StepSamples { first, ..every(4) });
            dropout(xs, 0.5).unwrap()
        };
        let rows = drawn(&ones(&[9, 50]), 0);
        assert_eq!(drawn(&ones(&[9, 50]), 0), rows);
        assert_ne!(drawn(&ones(&[9, 50]), 4), rows);
        for kind in [Kind::Double, Kind::BFloat16] {
            let found = drawn(&ones(&[9, 50]).to_kind(kind), 0);
            assert_eq!((found.kind(), found.to_kind(Kind::Float)), (kind, rows.shallow_clone()));
        }
        assert_eq!(drawn(&ones(&[0, 50]), 0).size(), [0, 50]);
    }

    #[test]
    fn scopes_end_and_layers_nest() {
        let masks = Masks::new(7, Device::Cpu).unwrap();
        let _scope = masks.enter(every(1));
        let inner = || {
            let _layer = mask_layer("inner", 0);
            dropout(&ones(&[1, 200]), 0.5).unwrap()
        };
        let first = inner();
        assert_eq!(inner(), first, "calls are counted in each layer");
        let nested = {
            let _outer = mask_layer("outer", 0);
            inner()
        };
        assert_ne!(nested, first);
        let count = |place: Option<Place>| place.map(|place| (place.layer, place.calls));
        assert_eq!(count(Place::current()), Some((0, 0)));
        drop(_scope);
        assert_eq!(count(Place::current()), None);
        let _layer = mask_layer("nowhere", 0);
        assert_eq!(count(Place::current()), None);
    }

    #[test]
    fn the_second_forward_of_a_checkpoint_draws_the_masks_of_the_first() {
        let masks = Masks::new(7, Device::Cpu).unwrap();
        let grad = |checkpointed: bool| {
            let x = ones(&[4, 30]).set_requires_grad(true);
            let block = |xs: &[Tensor]| Ok(dropout(&dropout(&xs[0], 0.5)?.f_exp()?, 0.5)?);
            let _scope = masks.enter(every(4));
            let _before = dropout(&x, 0.5).unwrap();
            let y = if checkpointed {
                checkpoint(block, &[&x]).unwrap()
            } else {
                block(&[x.shallow_clone()]).unwrap()
            };
            let _after = dropout(&y, 0.5).unwrap();
            y.sum(Kind::Float).backward();
            assert_eq!(Place::current().map(|place| place.calls), Some(4));
            x.grad()
        };
        assert_eq!(grad(true), grad(false));
    }

    #[test]
    fn a_backward_in_another_step_has_the_masks_of_its_forward() {
        let masks = Masks::new(7, Device::Cpu).unwrap();
        let _scope = masks.enter(every(4));
        let grad = |checkpointed: bool| {
            masks.set_step(3).unwrap();
            let x = ones(&[4, 30]).set_requires_grad(true);
            let block = |xs: &[Tensor]| {
                let _layer = mask_layer("block", 0);
                Ok(dropout(&xs[0].f_exp()?, 0.5)?.f_exp()?)
            };
            let y = if checkpointed {
                checkpoint(block, &[&x]).unwrap()
            } else {
                block(&[x.shallow_clone()]).unwrap()
            };
            masks.advance().unwrap();
            y.sum(Kind::Float).backward();
            x.grad()
        };
        assert_eq!(grad(true), grad(false));
        // A kernel of a GPU would draw others, and is not launched.
        let position = Position::next().unwrap();
        position.step.check().unwrap();
        masks.advance().unwrap();
        let error = position.step.check().unwrap_err().to_string();
        assert!(error.contains("the step of its Masks has changed since forward; try set_step"), "{error}");
    }

    /// The bits are part of what a seed means.
    #[test]
    fn seeds_do_not_change() {
        let masks = Masks::new(0x0123_4567_89ab_cdef, Device::Cpu).unwrap();
        masks.set_step(1000).unwrap();
        let _scope = masks.enter(StepSamples { first: 3, stride: 2, count: 2 });
        let _layer = mask_layer("block", 5);
        let position = Position::next().unwrap();
        assert_eq!(position.seeds(&[2, 8]), SEEDS);
        assert_eq!(position.seeds(&[3, 8]).len(), 1);
    }

    const SEEDS: [[u32; 2]; 2] = [[0x4326_9f6e, 0x1f4b_fc27], [0x2bdd_e748, 0x12c0_19d4]];
}
