//! Models, datasets and ready-made programs. The binary `drumline-train` only calls [`program`].
//!
//! ```text
//!   models::build("resnet50", …) ─▶ a model with torchvision's names ◀─ weights::load / save (safetensors)
//!   data: CIFAR, image folders, dummy ─▶ transforms: u8 pixels → crop, flip, normalise → the batch's f32 memory
//!   --cfg FILE KEY VALUE … ─▶ config ─▶ a task ─▶ driver: train, test ─▶ drumline-observe: progress, metrics.jsonl
//! ```
//!
//! - `models`: the ResNet family and two small image models; the Transformer, GPT-2, BERT, and text classifiers
//! - `decode`: beam search for translation
//! - `task`: the trait of a kind of training; `driver`: train, test, resume and parity for all tasks
//! - `images`: image classification, with Distribuuuu's keys
//! - `nmt`: translation, from NJUNMT's configuration to BLEU
//! - `text`: text classification and tagging, from files to metrics
//! - `gpt`: GPT language models, from token files to generation
//! - `mlm`: masked language modelling with BERT
//! - `data`: CIFAR, image folders, random images
//! - `synth_cifar`: a synthetic dataset for hosts without network access
//! - `transforms`: crop, flip and normalise, from an image's bytes into the batch
//! - `weights`: loads and saves safetensors files, which Python reads too
//! - `config`: configuration keys from YAML and the command line
#![forbid(unsafe_code)]

pub mod config;
pub mod data;
pub mod decode;
#[doc(hidden)]
pub mod driver;
mod error;
pub mod first_weights;
#[doc(hidden)]
pub mod formula;
pub mod gpt;
pub mod images;
pub mod mlm;
pub mod models;
pub mod nmt;
mod optimizer;
#[doc(hidden)]
pub mod percent;
mod precision;
pub mod program;
pub mod synth_cifar;
mod task;
pub mod text;
pub mod transforms;
pub mod weights;
mod weights_file;
pub mod words;

pub use error::{Mismatch, WrongShape, ZooError};

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
