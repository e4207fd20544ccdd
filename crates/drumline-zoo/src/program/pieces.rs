//! From a configuration to the parts that a run is put together from, one file a part.
//!
//! | file | what it makes |
//! |---|---|
//! | `model` | a network by its name, with its first weights |
//! | `optimizer` | SGD and its learning rate |
//! | `data` | batches of images for this rank |
//! | `checkpoint` | the state of a run, to and from disk |

mod checkpoint;
mod data;
mod model;
mod optimizer;

pub(super) use checkpoint::{Resumed, checkpoints, state};
pub(super) use data::{Images, test_loader, train_images, train_loader};
pub(super) use model::model;
pub(super) use optimizer::{schedule, sgd};
