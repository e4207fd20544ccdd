//! Activation checkpointing: which blocks of a model are computed again in backward, and what of them is kept.
//!
//! ```text
//!   none        all that backward needs is kept
//!   full        of each block, only its input
//!   selective   and the results of its matrix products, convolutions and attention
//!   N           as full, for every Nth block only
//!   offload     all that backward needs, but in host memory instead of a GPU's: nothing is computed again
//! ```
//! A model has its blocks in [`Blocks`], and its expensive operations call [`product`].

use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_torch::{
    FunctionError, MaskScope, TorchError, checkpoint, keep, keep_drawn, mask_layer, offload_saved,
    selective_checkpoint,
};
use serde_json::{Value as Json, json};
use tch::{Device, TchError, Tensor};

use crate::config::Value;
use crate::config::setting::Setting;
use crate::error::ZooError;

/// How much of a model is kept for backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Checkpointing {
    /// All that backward needs.
    #[default]
    None,
    /// The inputs of blocks.
    Full,
    /// The inputs of blocks, and the results of their matrix products, convolutions and attention.
    Selective,
    /// The inputs of every Nth block, and all that backward needs of the others.
    Every(usize),
    /// All that backward needs. What blocks save on a GPU is moved to pinned host memory, and back in backward.
    Offload,
}

impl Checkpointing {
    /// Returns an error if a model without blocks is to be checkpointed.
    pub(super) fn check_no_blocks(self, model: &str) -> Result<(), ZooError> {
        match self {
            Self::None => Ok(()),
            _ => {
                let what = format!(
                    "checkpointing is {self}, but {model} has no blocks that could be computed again"
                );
                Err(ZooError::Unsuitable { what, fix: "none".to_owned() })
            }
        }
    }

    /// A line for the user if it saves nothing on the device on which the model trains.
    pub(crate) fn note(self, device: Device) -> Option<String> {
        let saves = self != Self::Offload || device.is_cuda();
        (!saves).then(|| {
            "[init] == checkpointing is offload, which saves nothing on a CPU, where activations are in host memory anyway; \
             try full or selective =="
                .to_owned()
        })
    }

    /// Returns an error if a model with so many blocks cannot be checkpointed in this way.
    pub(crate) fn check(self, num_blocks: usize) -> Result<(), ZooError> {
        match self {
            Self::Every(every) if every == 0 || every > num_blocks => {
                let what = format!("checkpointing is {every}, but the model has {num_blocks} blocks");
                Err(ZooError::Unsuitable { what, fix: format!("a number from 1 to {num_blocks}, or none") })
            }
            _ => Ok(()),
        }
    }

    /// What happens to a block.
    fn of_block(self, index: usize) -> Self {
        match self {
            Self::Every(every) if (index + 1).is_multiple_of(every) => Self::Full,
            Self::Every(_) => Self::None,
            all => all,
        }
    }
}

impl std::fmt::Display for Checkpointing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Full => f.write_str("full"),
            Self::Selective => f.write_str("selective"),
            Self::Every(every) => write!(f, "{every}"),
            Self::Offload => f.write_str("offload"),
        }
    }
}

impl FromStr for Checkpointing {
    type Err = ZooError;

    fn from_str(text: &str) -> Result<Self, ZooError> {
        match text.trim() {
            "none" => Ok(Self::None),
            "full" => Ok(Self::Full),
            "selective" => Ok(Self::Selective),
            "offload" => Ok(Self::Offload),
            number => match number.parse() {
                Ok(every) if every > 0 => Ok(Self::Every(every)),
                _ => {
                    let what = format!("checkpointing is {text}");
                    Err(ZooError::Unsuitable { what, fix: Self::expects() })
                }
            },
        }
    }
}

impl Setting for Checkpointing {
    fn expects() -> String {
        "none, full, selective, offload, or a number from 1".into()
    }

    fn schema() -> Json {
        json!({"anyOf": [{"enum": ["none", "full", "selective", "offload"]}, {"type": "integer", "minimum": 1}]})
    }

    fn read(value: &Value) -> Option<Self> {
        match usize::read(value) {
            Some(every) => (every > 0).then_some(Self::Every(every)),
            None => String::read(value)?.parse().ok(),
        }
    }

    fn write(&self) -> Value {
        match self {
            Self::Every(every) => every.write(),
            named => Value::Text(named.to_string()),
        }
    }
}

/// A block of a model.
#[derive(Debug)]
pub(crate) struct OneBlock<B> {
    /// A checkpoint owns its block until backward, and a block is used by one thread at a time.
    block: Arc<Mutex<B>>,
    index: usize,
    /// What happens to this block.
    how: Checkpointing,
}

impl<B: Send + 'static> OneBlock<B> {
    /// The block at this index of all.
    pub(crate) fn new(block: B, index: usize, of_all: Checkpointing) -> Self {
        Self { block: Arc::new(Mutex::new(block)), index, how: of_all.of_block(index) }
    }

    /// Runs the block, in a checkpoint if it is to be one. Activations are `inputs`; `forward` owns whatever else it needs.
    ///
    /// Panics if a checkpoint fails, as modules do. The trainer reports the panic.
    pub(crate) fn forward<R>(
        &self,
        inputs: &[&Tensor],
        forward: impl Fn(&B, &[Tensor]) -> R + Send + 'static,
    ) -> R {
        let made = self.try_forward(inputs, move |block, inputs| Ok(forward(block, inputs)));
        made.unwrap_or_else(|error| panic!("block {}: {error}", self.index))
    }

    /// The same of a block that may fail, in the second forward of a checkpoint as well.
    pub(crate) fn try_forward<R>(
        &self,
        inputs: &[&Tensor],
        forward: impl Fn(&B, &[Tensor]) -> Result<R, FunctionError> + Send + 'static,
    ) -> Result<R, FunctionError> {
        let (block, index) = (Arc::clone(&self.block), self.index);
        let function = move |inputs: &[Tensor]| {
            let _masks = masks_of(index);
            forward(&lock(&block), inputs)
        };
        let all = || inputs.iter().map(|input| input.shallow_clone()).collect::<Vec<_>>();
        match self.how {
            Checkpointing::None => function(&all()),
            Checkpointing::Offload => {
                offload_saved(|| function(&all())).map_err(FunctionError::from).and_then(|made| made)
            }
            Checkpointing::Selective => selective_checkpoint(function, inputs).map_err(Into::into),
            Checkpointing::Full | Checkpointing::Every(_) => checkpoint(function, inputs).map_err(Into::into),
        }
    }
}

/// The blocks of a model, in the order in which they run.
#[derive(Debug)]
pub(crate) struct Blocks<B>(Vec<OneBlock<B>>);

impl<B: Send + 'static> Blocks<B> {
    pub(crate) fn new(blocks: impl IntoIterator<Item = B>, how: Checkpointing) -> Result<Self, ZooError> {
        let blocks = blocks.into_iter().enumerate().map(|(index, block)| OneBlock::new(block, index, how));
        let blocks: Vec<_> = blocks.collect();
        how.check(blocks.len())?;
        Ok(Self(blocks))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, index: usize) -> MutexGuard<'_, B> {
        lock(&self.0[index].block)
    }

    /// The blocks. Each is locked as long as it is held.
    pub(crate) fn iter(&self) -> impl Iterator<Item = MutexGuard<'_, B>> {
        self.0.iter().map(|one| lock(&one.block))
    }

    pub(crate) fn is_checkpointed(&self, index: usize) -> bool {
        self.0[index].how != Checkpointing::None
    }

    /// [`OneBlock::forward`] of the block at an index.
    pub(crate) fn forward<R>(
        &self,
        index: usize,
        inputs: &[&Tensor],
        forward: impl Fn(&B, &[Tensor]) -> R + Send + 'static,
    ) -> R {
        self.0[index].forward(inputs, forward)
    }

    /// The blocks by themselves.
    pub(crate) fn each(&self) -> &[OneBlock<B>] {
        &self.0
    }
}

/// Dropout is that of the block at this index, until the result is dropped. [`Blocks::forward`] does this.
pub(crate) fn masks_of(index: usize) -> MaskScope {
    mask_layer("block", index)
}

fn lock<B>(block: &Mutex<B>) -> MutexGuard<'_, B> {
    block.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result of an expensive operation of libtorch on `inputs`, which selective checkpointing keeps. Panics if it
/// fails, as tch's methods do.
pub(crate) fn product(inputs: &[&Tensor], function: impl FnOnce() -> Result<Tensor, TchError>) -> Tensor {
    product_of(inputs, || Ok(function()?))
}

/// The same for an operation of ours.
pub(crate) fn product_of(
    inputs: &[&Tensor],
    function: impl FnOnce() -> Result<Tensor, TorchError>,
) -> Tensor {
    keep(inputs, function).unwrap_or_else(|error| panic!("{error}"))
}

/// The same for an operation that draws random numbers from libtorch's generators: every checkpoint keeps its result.
pub(crate) fn drawn_product(
    inputs: &[&Tensor],
    function: impl FnOnce() -> Result<Tensor, TchError>,
) -> Tensor {
    keep_drawn(inputs, || Ok(function()?)).unwrap_or_else(|error| panic!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_written() {
        let text = |text: &str| Checkpointing::read(&Value::Text(text.into()));
        for (name, how) in [
            ("none", Checkpointing::None),
            ("full", Checkpointing::Full),
            ("selective", Checkpointing::Selective),
            ("offload", Checkpointing::Offload),
            ("3", Checkpointing::Every(3)),
        ] {
            assert_eq!((text(name), how.to_string()), (Some(how), name.to_owned()));
            assert_eq!(Checkpointing::read(&how.write()), Some(how));
        }
        assert_eq!(Checkpointing::read(&Value::Int(2)), Some(Checkpointing::Every(2)));
        assert_eq!([text("0"), text("some"), text("-1"), Checkpointing::read(&Value::Bool(true))], [None; 4]);
    }

    #[test]
    fn offload_on_a_cpu_is_noted() {
        let note = Checkpointing::Offload.note(Device::Cpu).unwrap();
        assert!(
            note.contains("saves nothing on a CPU") && note.ends_with("; try full or selective =="),
            "{note}"
        );
        assert_eq!(Checkpointing::Offload.note(Device::Cuda(0)), None);
        assert_eq!(Checkpointing::Full.note(Device::Cpu), None);
    }

    #[test]
    fn every_second_block_is_the_second_of_a_pair() {
        let blocks = Blocks::new([(); 5], Checkpointing::Every(2)).unwrap();
        let found: Vec<_> = (0..5).map(|index| blocks.is_checkpointed(index)).collect();
        assert_eq!(found, [false, true, false, true, false]);
        let error = Blocks::new([(); 5], Checkpointing::Every(6)).unwrap_err().to_string();
        assert_eq!(
            error,
            "checkpointing is 6, but the model has 5 blocks; try a number from 1 to 5, or none"
        );
    }
}
