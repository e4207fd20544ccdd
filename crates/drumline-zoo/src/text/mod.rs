//! Text classification and tagging: configuration, data, network and metrics.
//!
//! ```text
//!   train.csv, train.conll ─▶ Texts ─┬▶ Lexicon: words and labels by number, made by rank 0 for all
//!                                    └▶ TextData: batches of ids ─▶ net ─▶ figures: accuracy, F1
//! ```
//! `drumline-train train --cfg config/text-classify.yaml` trains with it. Other programs can use the parts by
//! themselves.

pub mod config;
mod data;
mod figures;
mod lexicon;
mod net;
mod task;
mod texts;

pub use config::{TextConfig, TextTask};
pub use data::{NO_TAG, TextData};
pub use figures::{Figure, figure_of_step, figures, loss};
pub use lexicon::Lexicon;
pub use net::build;
pub(crate) use task::{LabelTask, REPORT_STYLE, check_alike, check_files, dev_plan, train_plan};
pub use texts::{Labelled, Texts};
