//! What a function depends on beside its inputs: autocast, random numbers, masks, and the stream of weight gradients.
//!
//! Random numbers: the states of the generators before and after the first forward are compared. Only if they differ, the
//! second forward begins with the first state, and puts back the one that it found. In a CUDA graph the state of a GPU's
//! generator cannot be read, so there random operations are looked for, and are an error.

use tch::{Device, Tensor};

use super::operation::{self, Watch};
use crate::autocast::AutocastSettings;
use crate::convolution::Beside;
use crate::cuda::{device_count, is_open, is_recorded};
use crate::error::TorchError;
use crate::masks::Place;
use crate::recordable::NotRecordable;
use crate::rng::RngState;

/// The generators that a function may draw from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Generators {
    Host,
    All,
}

impl Generators {
    /// Those whose state can be read now, for a function of tensors on these devices. One of tensors in host memory may move
    /// them to a GPU.
    pub(super) fn of(mut devices: impl Iterator<Item = Device>) -> Result<Self, TorchError> {
        let gpu = devices.find(|device| device.is_cuda());
        let is_readable = match gpu {
            Some(device) => !is_recorded(device)?,
            None => is_open() && !some_gpu_is_recorded()?,
        };
        Ok(if is_readable { Self::All } else { Self::Host })
    }

    pub(super) fn state(self) -> Result<RngState, TorchError> {
        match self {
            Self::Host => RngState::of_host(),
            Self::All => RngState::capture(),
        }
    }
}

fn some_gpu_is_recorded() -> Result<bool, TorchError> {
    for device in 0..device_count()? {
        if is_recorded(Device::Cuda(device))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The first forward has begun.
pub(super) struct Begun {
    surroundings: Surroundings,
    generators: Generators,
    state: RngState,
    /// In a recording.
    random: Option<Watch>,
}

impl Begun {
    /// Now, with these inputs.
    pub(super) fn now(inputs: &[Tensor]) -> Result<Self, TorchError> {
        let generators = Generators::of(inputs.iter().map(Tensor::device))?;
        let is_recorded = is_open() && generators == Generators::Host;
        let random = is_recorded.then(Watch::random).transpose()?;
        let surroundings = Surroundings {
            autocast: AutocastSettings::now()?,
            beside: Beside::current(),
            drawn: None,
            place: Place::current().map(Place::of_this_step),
        };
        Ok(Self { surroundings, generators, state: generators.state()?, random })
    }

    pub(super) fn end(self) -> Result<Surroundings, TorchError> {
        let Self { mut surroundings, generators, state, random } = self;
        if let Some(operation) = random.and_then(|_| operation::random()) {
            return Err(NotRecordable::RandomInCheckpoint { operation }.into());
        }
        if generators.state()? != state {
            surroundings.drawn = Some((generators, state));
        }
        Ok(surroundings)
    }
}

/// Those of a first forward.
pub(super) struct Surroundings {
    autocast: AutocastSettings,
    beside: Option<Beside>,
    /// The state of the generators before it, if it has drawn from them.
    drawn: Option<(Generators, RngState)>,
    /// Where dropout was, and in which step.
    place: Option<Place>,
}

impl Surroundings {
    /// Runs the second forward in them.
    pub(super) fn within<R>(&self, body: impl FnOnce() -> R) -> Result<R, TorchError> {
        let (_autocast, _masks) = (self.autocast.enter()?, Place::enter(self.place.as_ref()));
        let _outer =
            self.drawn.as_ref().map(|(generators, state)| Outer::replace(*generators, state)).transpose()?;
        Ok(match &self.beside {
            Some(beside) => beside.forward(body),
            None => body(),
        })
    }
}

/// The state that the second forward found, which is put back when this is dropped.
struct Outer(RngState);

impl Outer {
    fn replace(generators: Generators, by: &RngState) -> Result<Self, TorchError> {
        let outer = Self(generators.state()?);
        by.restore()?;
        Ok(outer)
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        // A state that libtorch returned fits.
        let _ = self.0.restore();
    }
}
