//! Configuration files of other systems.
//!
//! - [`deepspeed`]: `ds_config.json`, with everything that people write into it
//! - [`json`]: JSON with comments, trailing commas and Python's words, with the position of each value
//!
//! Not here: the YAML files of `drumline train` (`drumline-zoo`).

pub mod deepspeed;
pub mod json;
