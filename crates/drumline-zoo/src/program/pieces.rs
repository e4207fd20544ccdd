//! The parts that the programs are put together from: a thin door to each, one file a part.
//!
//! | file | what it stands for |
//! |---|---|
//! | `model` | a network by its name, with its first weights |
//! | `replica` | the network with gradients that are the mean of all ranks' |
//! | `optimizer` | SGD and its learning rate |
//! | `data` | batches of images for this rank |
//! | `checkpoint` | the state of a run on disk |

mod checkpoint;
mod data;
mod model;
mod optimizer;
mod replica;

pub(super) use checkpoint::{TrainState, load_latest, save, save_best};
pub(super) use data::{ImageBatch, TestLoader, TrainLoader, synth_cifar};
pub(super) use model::model;
pub(super) use optimizer::{Sgd, lr};
pub(super) use replica::Replica;

use crate::config::Config;

/// What the configuration asks for and these parts do not do.
pub(super) fn remarks(config: &Config) -> Vec<&'static str> {
    let lacks = [
        (config.train.augment, "TRAIN.AUGMENT is True, but images are not augmented in this build"),
        (
            config.train.workers > 0,
            "TRAIN.WORKERS has no effect: images are loaded between steps in this build",
        ),
    ];
    lacks.into_iter().filter(|(asked, _)| *asked).map(|(_, words)| words).collect()
}
