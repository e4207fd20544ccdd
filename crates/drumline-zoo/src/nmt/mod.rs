//! Translation as NJUNMT's users do it: its configuration, training, and translating.

pub mod config;

pub use config::NmtConfig;
