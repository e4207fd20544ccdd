//! A clock that keeps running while the machine sleeps. Its times are not comparable between machines.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time since the machine booted.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
