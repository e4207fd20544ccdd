//! The drumline command.
#![forbid(unsafe_code)]
fn main() {}
