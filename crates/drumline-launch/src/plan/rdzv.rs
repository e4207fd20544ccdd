//! How the nodes of a job find each other: where, and how long they wait.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::seconds::{SecondsError, parse_seconds};

/// How the nodes find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rendezvous {
    /// One node, with a store on a free port.
    Standalone,
    /// A fixed set of nodes with assigned ranks, which meet at the first node's address.
    Static {
        /// Host of node 0.
        addr: String,
        /// Its port.
        port: u16,
    },
    /// Nodes that may join and leave; ranks are assigned when a round is formed.
    Dynamic {
        /// `host:port` of the store, which that host runs.
        endpoint: String,
        /// How long nodes wait.
        conf: RdzvConf,
    },
}

/// How long nodes wait for each other: `--rdzv-conf key=value,…` with torchrun's keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdzvConf {
    /// How long to wait for the minimum number of nodes.
    pub join_timeout: Duration,
    /// How long to wait for more nodes, once the minimum number has joined.
    pub last_call_timeout: Duration,
    /// Whether this node hosts the store; derived from the endpoint if `None`.
    pub is_host: Option<bool>,
    /// The time between two heartbeats of a node.
    pub keep_alive_interval: Option<Duration>,
    /// How many heartbeats may be missing before the node counts as lost.
    pub keep_alive_max_attempt: Option<u32>,
    /// How long the answer to a heartbeat may take before it is sent again.
    pub heartbeat_timeout: Option<Duration>,
    /// How long to wait at the end for nodes that do not answer.
    pub close_timeout: Option<Duration>,
    /// How long to wait for a reachable store to answer.
    pub read_timeout: Option<Duration>,
}

impl Default for RdzvConf {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            join_timeout: seconds(600),
            last_call_timeout: seconds(30),
            is_host: None,
            keep_alive_interval: None,
            keep_alive_max_attempt: None,
            heartbeat_timeout: None,
            close_timeout: None,
            read_timeout: None,
        }
    }
}

/// Why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RdzvConfError {
    /// Not `key=value`.
    #[error("`{0}` is not a setting; try key=value,key=value")]
    NoPair(String),
    /// No such key.
    #[error(
        "there is no setting `{0}`; try one of join_timeout, last_call_timeout, close_timeout, \
         heartbeat_timeout, keep_alive_interval, keep_alive_max_attempt, read_timeout, is_host, store_type"
    )]
    Unknown(String),
    /// The value does not fit the key.
    #[error("{key} cannot be `{value}`; try {expected}")]
    Value {
        /// The setting.
        key: String,
        /// What was given.
        value: String,
        /// What would be valid.
        expected: &'static str,
    },
    /// The time must not be zero.
    #[error("{0} cannot be 0; try a number of seconds")]
    Zero(String),
    /// The value is not a valid time.
    #[error("{key} cannot be `{value}`: {source}")]
    Seconds {
        /// The setting.
        key: String,
        /// What was given.
        value: String,
        /// Why it is invalid.
        source: SecondsError,
    },
}

impl FromStr for RdzvConf {
    type Err = RdzvConfError;

    fn from_str(text: &str) -> Result<Self, RdzvConfError> {
        let mut conf = Self::default();
        // Removes quotes that no shell has removed, as in job description files.
        let text = text.trim().trim_matches(['\'', '"']);
        for setting in text.split(',').filter(|_| !text.trim().is_empty()) {
            let pair = setting.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
            let (key, value) = pair
                .filter(|(key, value)| !key.is_empty() && !value.is_empty())
                .ok_or_else(|| RdzvConfError::NoPair(setting.to_string()))?;
            conf.set(key, value)?;
        }
        Ok(conf)
    }
}

/// Writes the form that [`RdzvConf::from_str`] reads.
impl fmt::Display for RdzvConf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { join_timeout, last_call_timeout, is_host, keep_alive_max_attempt, .. } = self;
        write!(f, "join_timeout={},", join_timeout.as_secs_f64())?;
        write!(f, "last_call_timeout={}", last_call_timeout.as_secs_f64())?;
        for (key, time) in [
            ("keep_alive_interval", self.keep_alive_interval),
            ("heartbeat_timeout", self.heartbeat_timeout),
            ("close_timeout", self.close_timeout),
            ("read_timeout", self.read_timeout),
        ] {
            time.map_or(Ok(()), |time| write!(f, ",{key}={}", time.as_secs_f64()))?;
        }
        keep_alive_max_attempt.map_or(Ok(()), |count| write!(f, ",keep_alive_max_attempt={count}"))?;
        is_host.map_or(Ok(()), |is_host| write!(f, ",is_host={is_host}"))
    }
}

impl RdzvConf {
    fn set(&mut self, key: &str, value: &str) -> Result<(), RdzvConfError> {
        let wrong =
            |expected| RdzvConfError::Value { key: key.to_string(), value: value.to_string(), expected };
        let time = || {
            let key = key.to_string();
            let value = value.to_string();
            parse_seconds(&value).map_err(|source| RdzvConfError::Seconds { key, value, source })
        };
        // As in torchrun, zero is not allowed here.
        let some_time = || match time()? {
            Duration::ZERO => Err(RdzvConfError::Zero(key.to_string())),
            time => Ok(Some(time)),
        };
        match key {
            // `timeout` is its name in torchrun's static rendezvous.
            "join_timeout" | "timeout" => self.join_timeout = time()?,
            "last_call_timeout" => self.last_call_timeout = time()?,
            "is_host" => self.is_host = Some(parse_bool(value).ok_or_else(|| wrong("1 or 0"))?),
            "store_type" if value == "tcp" => {}
            "store_type" => return Err(wrong("tcp")),
            "keep_alive_max_attempt" => {
                let count = value.parse().ok().filter(|count| *count > 0);
                self.keep_alive_max_attempt = Some(count.ok_or_else(|| wrong("a whole number from 1"))?);
            }
            "keep_alive_interval" => self.keep_alive_interval = some_time()?,
            "heartbeat_timeout" => self.heartbeat_timeout = some_time()?,
            "close_timeout" => self.close_timeout = some_time()?,
            "read_timeout" => self.read_timeout = some_time()?,
            _ => return Err(RdzvConfError::Unknown(key.to_string())),
        }
        Ok(())
    }
}

fn parse_bool(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Some(true),
        "0" | "false" | "f" | "no" | "n" => Some(false),
        _ => None,
    }
}

/// The endpoint is not `host:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an endpoint; try HOST:PORT with a port from 0 to 65535")]
pub struct EndpointError(String);

/// Splits `host:port`, `host`, `[::1]:port` or an empty text, which means localhost, into host and port.
pub fn split_endpoint(text: &str, default_port: Option<u16>) -> Result<(String, u16), EndpointError> {
    let wrong = || EndpointError(text.to_string());
    let trimmed = text.trim();
    let (host, port) = match trimmed.rsplit_once(':') {
        Some((host, port)) if !trimmed.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
        _ => (trimmed, default_port.ok_or_else(wrong)?),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = if host.is_empty() { "localhost" } else { host };
    let legal = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if host.chars().all(legal) { Ok((host.to_string(), port)) } else { Err(wrong()) }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standalone => f.write_str("standalone, on a free port of this node"),
            Self::Static { addr, port: 0 } => write!(f, "static, at {addr} on a free port"),
            Self::Static { addr, port } => write!(f, "static, at {addr} port {port}"),
            Self::Dynamic { endpoint, .. } => write!(f, "dynamic, at {endpoint}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_change_what_they_name() {
        assert_eq!("".parse(), Ok(RdzvConf::default()));
        assert_eq!("'join_timeout=9'".parse::<RdzvConf>(), "join_timeout=9".parse());
        let conf: RdzvConf =
            "join_timeout=9, keep_alive_max_attempt=5,is_host=true,read_timeout=1".parse().unwrap();
        let expected = RdzvConf {
            join_timeout: Duration::from_secs(9),
            is_host: Some(true),
            keep_alive_max_attempt: Some(5),
            read_timeout: Some(Duration::from_secs(1)),
            ..RdzvConf::default()
        };
        assert_eq!(conf, expected);
        assert_eq!(conf.to_string().parse(), Ok(conf));
    }

    #[test]
    fn invalid_settings_are_errors() {
        for (text, expected) in [
            ("join_timeout", "key=value"),
            ("=3", "key=value"),
            ("join_timeout=", "key=value"),
            ("join_timeout=-1", "seconds"),
            ("read_timeout=soon", "seconds"),
            ("last_call_timeout=1e19", "more than 100 years"),
            ("jion_timeout=3", "try one of join_timeout"),
            ("keep_alive_max_attempt=0", "from 1"),
            ("keep_alive_interval=0", "keep_alive_interval cannot be 0"),
            ("store_type=file", "try tcp"),
        ] {
            let error = text.parse::<RdzvConf>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn endpoints_are_split() {
        let split = |text| split_endpoint(text, Some(29400)).ok();
        let is = |host: &str, port| Some((host.to_string(), port));
        assert_eq!(split(""), is("localhost", 29400));
        assert_eq!(split("node-1.lan"), is("node-1.lan", 29400));
        assert_eq!(split("10.0.0.1:5"), is("10.0.0.1", 5));
        assert_eq!(split(":5"), is("localhost", 5));
        assert_eq!(split("[::1]:5"), is("::1", 5));
        assert_eq!(split("[::1]"), is("::1", 29400));
        assert_eq!(
            [split("a:70000"), split("a:b"), split("http://a:1"), split("a b:1")],
            [None, None, None, None]
        );
        assert!(split_endpoint("a", None).is_err());
    }
}
