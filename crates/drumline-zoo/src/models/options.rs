//! Checks of options that several models share.

use crate::error::ZooError;

/// Returns an error for sizes below 1.
pub(super) fn check_sizes(sizes: &[(&str, i64)]) -> Result<(), ZooError> {
    match sizes.iter().find(|(_, size)| *size < 1) {
        Some((name, size)) => refused(format!("{name} is {size}"), "1 or more"),
        None => Ok(()),
    }
}

/// Returns an error if vectors cannot be split evenly among attention heads.
pub(super) fn check_heads(name: &str, size: i64, n_head: i64) -> Result<(), ZooError> {
    if n_head > 0 && size % n_head == 0 {
        return Ok(());
    }
    let multiple = format!("a multiple of {n_head}, or another number of heads");
    refused(format!("{name} {size} cannot be split among {n_head} heads"), &multiple)
}

/// Returns an error if `dropout` is not a probability below 1.
pub(super) fn check_dropout(dropout: f64) -> Result<(), ZooError> {
    if (0.0..1.0).contains(&dropout) {
        Ok(())
    } else {
        refused(format!("dropout is {dropout}"), "0 to below 1")
    }
}

fn refused(what: String, fix: &str) -> Result<(), ZooError> {
    Err(ZooError::Unsuitable { what, fix: fix.to_owned() })
}
