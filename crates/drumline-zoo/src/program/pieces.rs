//! From a configuration to the parts that a run is put together from, one file a part.
//!
//! | file | what it makes |
//! |---|---|
//! | `model` | a network by its name, with its first weights |
//! | `optimizer` | SGD and its learning rate |
//! | `data` | batches of images for this rank |
//! | `placing` | where images are kept |
//! | `metric` | accuracy in percent |
//! | `checkpoint` | where a run goes on from |

mod checkpoint;
mod data;
mod metric;
mod model;
mod optimizer;
mod placing;

pub(super) use checkpoint::{checkpoints, with_optimizer};
pub(super) use data::{Images, test_images, test_loader, train_images, train_loader, train_sampler};
pub(super) use metric::Percent;
pub(super) use model::model;
pub(super) use optimizer::{schedule, sgd, sgd_options};
pub(super) use placing::Placing;
