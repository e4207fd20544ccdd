//! How ranks divide the parameters of an optimizer by rows.

use std::sync::Arc;

use drumline_comm::ProcessGroup;
use tch::Tensor;

use crate::named::Named;

/// The rows of a parameter that a rank steps.
#[derive(Debug)]
pub struct OwnRows {
    /// The rows.
    pub tensor: Tensor,
    /// The index of the first of them.
    pub first: i64,
    /// The shape of the whole parameter.
    pub whole: Vec<i64>,
}

/// How ranks divide the parameters of an optimizer by rows.
pub struct Division<'a> {
    /// The ranks that have all rows together. Some optimizers need sums over all rows of a parameter.
    pub group: Arc<ProcessGroup>,
    /// The rows of a parameter that this rank steps; `None` if it has none.
    pub rows: &'a dyn Fn(&Named) -> Option<OwnRows>,
}
