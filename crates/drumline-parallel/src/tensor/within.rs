//! Indices that must be within a range: classes, tokens.

use tch::Tensor;

use crate::error::ParallelError;

/// What indices are, and what they must be below.
pub(super) struct Within {
    pub(super) what: &'static str,
    pub(super) len: i64,
    /// What a user can do about one that is not: "; try …", or nothing.
    pub(super) advice: &'static str,
}

impl Within {
    /// An error, the same on all ranks, for an index that is not from 0 to below `len`, of those that `count`. On a GPU it
    /// would cost a wait.
    pub(super) fn check(&self, indices: &Tensor, count: Option<&Tensor>) -> Result<(), ParallelError> {
        if indices.device().is_cuda() || indices.numel() == 0 {
            return Ok(());
        }
        let mut wrong = indices.f_ge(0)?.f_logical_and(&indices.f_lt(self.len)?)?.f_logical_not()?;
        if let Some(count) = count {
            wrong = wrong.f_logical_and(count)?;
        }
        if wrong.f_any()?.f_int64_value(&[])? == 0 {
            return Ok(());
        }
        let first = indices.f_masked_select(&wrong)?.f_int64_value(&[0])?;
        let expected = format!("0 to {}{}", self.len - 1, self.advice);
        Err(ParallelError::value(self.what, first, expected))
    }
}
