//! How the nodes of a job stay in contact, and how long they wait for a silent one.
//!
//! Not here: the leases and evictions that follow from it ([`Policy`](crate::membership::Policy)).

use std::str::FromStr;
use std::time::Duration;

use drumline_rendezvous::worker_env::{DEFAULT_HOST_TIMEOUT, LONGEST_DURATION, parse_duration};

use super::RdzvConf;
use crate::membership::{HEARTBEAT, SHORTEST_HOST_TIMEOUT};

/// torchrun's defaults for `keep_alive_interval` and `keep_alive_max_attempt`, if only one of them is given.
const TORCH_INTERVAL: Duration = Duration::from_secs(5);
const TORCH_ATTEMPTS: u32 = 3;
/// After this time a new connection is better than more waiting: TCP may delay an answer for as long as the outage
/// before it.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// How nodes stay in contact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contact {
    /// How long to wait for a silent host.
    pub host_timeout: Duration,
    /// How often an agent sends a heartbeat.
    pub keep_alive_interval: Duration,
    /// A heartbeat that is not answered within this time is sent again over a new connection.
    pub heartbeat_timeout: Duration,
    /// How long the first node waits at the end for others that do not answer; if `None`, as long as it would wait for
    /// a silent host.
    pub close_timeout: Option<Duration>,
    /// How long a reachable store may take to answer a joining node.
    pub read_timeout: Duration,
}

impl Default for Contact {
    fn default() -> Self {
        RdzvConf::default().contact(HostTimeout::default())
    }
}

/// How long to wait for a silent host, at least one second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTimeout(Duration);

impl Default for HostTimeout {
    fn default() -> Self {
        Self(DEFAULT_HOST_TIMEOUT)
    }
}

/// Why a text is not a valid host timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HostTimeoutError {
    /// It is not a time.
    #[error("not a time; try 30s, 500ms, 5m or a number of seconds")]
    NoTime,
    /// It is so short that a busy machine would count as dead.
    #[error("less than {SHORTEST_HOST_TIMEOUT:?}, in which a busy machine may not answer; try 30s")]
    TooShort,
}

impl HostTimeout {
    /// Checks that a time is a valid host timeout.
    pub fn new(time: Duration) -> Result<Self, HostTimeoutError> {
        let is_long = time >= SHORTEST_HOST_TIMEOUT;
        if is_long { Ok(Self(time.min(LONGEST_DURATION))) } else { Err(HostTimeoutError::TooShort) }
    }
}

impl FromStr for HostTimeout {
    type Err = HostTimeoutError;

    fn from_str(text: &str) -> Result<Self, HostTimeoutError> {
        Self::new(parse_duration(text).ok_or(HostTimeoutError::NoTime)?)
    }
}

impl From<HostTimeout> for Duration {
    fn from(timeout: HostTimeout) -> Self {
        timeout.0
    }
}

impl RdzvConf {
    /// The host timeout that torchrun's settings mean: interval times attempts. `None` if neither is given.
    pub fn host_timeout(&self) -> Option<Duration> {
        let is_given = self.keep_alive_interval.is_some() || self.keep_alive_max_attempt.is_some();
        let interval = self.keep_alive_interval.unwrap_or(TORCH_INTERVAL);
        is_given.then(|| interval.saturating_mul(self.keep_alive_max_attempt.unwrap_or(TORCH_ATTEMPTS)))
    }

    /// How nodes with these settings stay in contact.
    pub fn contact(&self, host_timeout: HostTimeout) -> Contact {
        Contact {
            host_timeout: host_timeout.into(),
            keep_alive_interval: self.keep_alive_interval.unwrap_or(HEARTBEAT),
            heartbeat_timeout: self.heartbeat_timeout.unwrap_or(HEARTBEAT_TIMEOUT),
            close_timeout: self.close_timeout,
            read_timeout: self.read_timeout.unwrap_or(READ_TIMEOUT),
        }
    }
}

impl Contact {
    /// The settings that are equivalent to this, without the host timeout.
    pub fn conf(&self) -> RdzvConf {
        let Self { host_timeout: _, keep_alive_interval, heartbeat_timeout, close_timeout, read_timeout } =
            *self;
        let unless = |default: Duration, time: Duration| (time != default).then_some(time);
        RdzvConf {
            keep_alive_interval: unless(HEARTBEAT, keep_alive_interval),
            heartbeat_timeout: unless(HEARTBEAT_TIMEOUT, heartbeat_timeout),
            close_timeout,
            read_timeout: unless(READ_TIMEOUT, read_timeout),
            ..RdzvConf::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_settings_mean_a_host_timeout() {
        let timeout = |text: &str| text.parse::<RdzvConf>().unwrap().host_timeout();
        assert_eq!(timeout("join_timeout=3"), None);
        assert_eq!(timeout("keep_alive_interval=30"), Some(Duration::from_secs(90)));
        assert_eq!(timeout("keep_alive_max_attempt=10"), Some(Duration::from_secs(50)));
        assert_eq!(timeout("keep_alive_interval=2,keep_alive_max_attempt=4"), Some(Duration::from_secs(8)));
    }

    #[test]
    fn a_contact_is_written_as_settings_that_mean_the_same() {
        let contact = Contact::default();
        assert_eq!(contact.conf(), RdzvConf::default());
        assert_eq!(contact.host_timeout, Duration::from_secs(30));
        let text = "keep_alive_interval=2,heartbeat_timeout=3,close_timeout=4,read_timeout=5";
        let ten = || "10s".parse().unwrap();
        let other = text.parse::<RdzvConf>().unwrap().contact(ten());
        let again = other.conf().to_string().parse::<RdzvConf>().unwrap().contact(ten());
        assert_eq!((&again, again.close_timeout), (&other, Some(Duration::from_secs(4))));
    }

    #[test]
    fn host_timeouts_have_a_unit_or_not() {
        let seconds = |text: &str| text.parse().map(|timeout: HostTimeout| Duration::from(timeout).as_secs());
        assert_eq!([seconds("30s"), seconds("5m"), seconds("7")], [Ok(30), Ok(300), Ok(7)]);
        assert_eq!([seconds("0"), seconds("900ms")], [Err(HostTimeoutError::TooShort); 2]);
        assert_eq!([seconds("soon"), seconds("-3")], [Err(HostTimeoutError::NoTime); 2]);
    }
}
