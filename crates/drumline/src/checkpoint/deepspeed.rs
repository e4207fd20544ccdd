//! Checkpoints that DeepSpeed wrote, converted into ours: stages 0 to 3 of ZeRO, saved by any number of ranks.
//!
//! ```text
//!   DIR/latest                                          the tag of the last save
//!   DIR/TAG/mp_rank_00_model_states.pt                  names, shapes, buffers; stage 3: one file of each rank
//!   DIR/TAG/zero_pp_rank_0_mp_rank_00_optim_states.pt   this rank's part of the f32 weights and of Adam's moments
//!
//!   folder ─▶ states ─▶ partition: which stretches of which files make up each parameter ─▶ export: safetensors
//! ```
//! The files are pickles, which `drumline-pickle` reads without running anything. They are mapped, and one tensor at a
//! time is put together while the result is written, so a model may be larger than memory.
//!
//! Not here: files of tensor parallel, pipeline or expert parallel trainings, which are refused.

mod error;
mod export;
mod fields;
mod folder;
mod moments;
mod partition;
mod states;
mod stretches;

pub use error::DeepSpeedError;
pub use export::DeepSpeedCheckpoint;
