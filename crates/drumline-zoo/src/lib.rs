//! Models, data sets and the ready programs. The binary `drumline-train` is a thin door to [`program`].
//!
//! ```text
//!   models::build("resnet50", …) ─▶ a model with torchvision's names ◀─ weights::load / save (safetensors)
//!   data: CIFAR, image folders, dummy ─▶ transforms: u8 pixels → crop, flip, normalise → the batch's f32 memory
//!   --cfg FILE KEY VALUE … ─▶ config ─▶ program: train, test ─▶ drumline-observe: a bar or lines, metrics.jsonl
//! ```
//!
//! - `models`: the ResNet family, and two small models for tests; the Transformer, GPT-2, and nets that classify text
//! - `decode`: translations, one word after the other
//! - `nmt`: translation, from NJUNMT's configuration to BLEU
//! - `text`: classification and tagging, from files to figures
//! - `gpt`: models that continue text, from files of tokens to generation
//! - `data`: CIFAR, image folders, dummy input
//! - `synth_cifar`: pictures to learn from where no data set can be fetched
//! - `transforms`: crops, flips and colours, from an image's bytes straight into the batch
//! - `weights`: a model's tensors from and to a file that Python reads as well
//! - `config`: what a run is told, from YAML and from the command line
#![forbid(unsafe_code)]

pub mod config;
pub mod data;
pub mod decode;
mod error;
#[doc(hidden)]
pub mod formula;
pub mod gpt;
pub mod models;
pub mod nmt;
mod optimizer;
mod precision;
pub mod program;
pub mod synth_cifar;
pub mod text;
pub mod transforms;
pub mod weights;

pub use error::{Mismatch, WrongShape, ZooError};
