//! How often each collective of a group was called, and with how many bytes: what a plan's traffic is compared with.

use crate::call::{Call, Op};

/// The calls of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCount {
    /// How often it was called.
    pub calls: u64,
    /// The bytes of the data that this rank passed in all calls together: of the input, where there is an output beside
    /// it.
    pub bytes: u64,
}

/// The calls of a group.
#[derive(Debug, Default)]
pub(super) struct Counts([CallCount; Op::NUM]);

impl Counts {
    #[inline]
    pub(super) fn add(&mut self, call: &Call) {
        let bytes = call.count * call.dtype.map_or(0, |dtype| dtype.size());
        let count = &mut self.0[call.op.index()];
        count.calls += 1;
        count.bytes += bytes as u64;
    }

    pub(super) fn of(&self, op: Op) -> CallCount {
        self.0[op.index()]
    }
}
