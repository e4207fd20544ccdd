//! The clock that also runs while the machine sleeps. Its times mean nothing on another machine.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since the machine was started.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
