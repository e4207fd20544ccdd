//! Classification and tagging of text: its configuration, its data, its net and its figures.
//!
//! ```text
//!   train.csv, train.conll ─▶ Texts ─┬▶ Lexicon: words and labels by number, made by rank 0 for all
//!                                    └▶ TextData: batches of ids ─▶ net ─▶ figures: accuracy, F1
//! ```
//! The program that trains is `drumline-train train --cfg config/text-classify.yaml`; a program of your own takes the parts from here.

pub mod config;
mod data;
mod figures;
mod lexicon;
mod net;
mod texts;

pub use config::{Task, TextConfig};
pub use data::{NO_TAG, TextData};
pub use figures::{Figure, figure_of_step, figures, loss};
pub use lexicon::Lexicon;
pub use net::build;
pub use texts::{Labelled, Texts};
