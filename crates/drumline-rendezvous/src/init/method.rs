//! Parses the method of the rendezvous, which is a URL.

use super::InitError;
use std::path::PathBuf;

/// A parsed method, with rank and world size if the URL has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Method {
    Env,
    Tcp { host: String, port: u16, given: Given },
    File { path: PathBuf, given: Given },
}

/// The values after the `?`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) rank: Option<usize>,
    pub(super) world_size: Option<usize>,
}

/// Why a method is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// There is no scheme.
    #[error("there is no `://`")]
    NoScheme,
    /// The scheme is unknown.
    #[error("the scheme is unknown")]
    UnknownScheme,
    /// Something follows `env://`.
    #[error("nothing may follow `env://`")]
    AfterEnv,
    /// The host is missing.
    #[error("the host is missing")]
    NoHost,
    /// The port is missing.
    #[error("the port is missing")]
    NoPort,
    /// The port is invalid.
    #[error("the port is not a number from 1 to 65535")]
    BadPort,
    /// The path of the file is relative.
    #[error("the path must be absolute, so that there are three slashes")]
    RelativePath,
    /// A value after the `?` is not a number.
    #[error("{name}={value:?} is not a number")]
    NotANumber {
        /// The name.
        name: String,
        /// The value.
        value: String,
    },
    /// A name after the `?` is unknown.
    #[error("{0:?} is neither rank nor world_size")]
    UnknownName(String),
}

impl Method {
    pub(super) fn parse(method: &str) -> Result<Method, InitError> {
        Self::parse_url(method).map_err(|source| InitError::Method { method: method.into(), source })
    }

    fn parse_url(method: &str) -> Result<Method, MethodError> {
        let (scheme, rest) = method.split_once("://").ok_or(MethodError::NoScheme)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let given = Given::parse(query)?;
        match scheme {
            "env" if rest.is_empty() && query.is_empty() => Ok(Method::Env),
            "env" => Err(MethodError::AfterEnv),
            "tcp" => {
                let (host, port) = rest.rsplit_once(':').ok_or(MethodError::NoPort)?;
                let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                let port = port.parse().ok().filter(|port| *port != 0);
                match (host, port) {
                    ("", _) => Err(MethodError::NoHost),
                    (_, None) => Err(MethodError::BadPort),
                    (host, Some(port)) => Ok(Method::Tcp { host: host.into(), port, given }),
                }
            }
            "file" if rest.starts_with('/') && rest.len() > 1 => {
                Ok(Method::File { path: rest.into(), given })
            }
            "file" => Err(MethodError::RelativePath),
            _ => Err(MethodError::UnknownScheme),
        }
    }

    pub(super) fn given(&self) -> Given {
        match self {
            Method::Env => Given::default(),
            Method::Tcp { given, .. } | Method::File { given, .. } => *given,
        }
    }
}

impl Given {
    fn parse(query: &str) -> Result<Given, MethodError> {
        let mut given = Given::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let not_a_number = |_| MethodError::NotANumber { name: name.into(), value: value.into() };
            let number = value.parse().map_err(not_a_number)?;
            match name {
                "rank" => given.rank = Some(number),
                "world_size" => given.world_size = Some(number),
                _ => return Err(MethodError::UnknownName(name.into())),
            }
        }
        Ok(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods() {
        let given = Given { rank: Some(1), world_size: Some(4) };
        let tcp = |host: &str, given| Method::Tcp { host: host.into(), port: 29500, given };
        assert_eq!(Method::parse("env://").unwrap(), Method::Env);
        assert_eq!(Method::parse("tcp://h:29500").unwrap(), tcp("h", Given::default()));
        assert_eq!(Method::parse("tcp://[::1]:29500?rank=1&world_size=4").unwrap(), tcp("::1", given));
        let file = Method::File { path: "/a/b".into(), given: Given::default() };
        assert_eq!(Method::parse("file:///a/b").unwrap(), file);
    }

    #[test]
    fn errors_name_the_problem() {
        let cases = [
            ("envs", "no `://`"),
            ("env://x", "nothing may follow"),
            ("tcp://h", "port is missing"),
            ("tcp://:1", "host is missing"),
            ("tcp://h:0", "1 to 65535"),
            ("tcp://h:x", "1 to 65535"),
            ("tcp://h:1?rank=x", "rank=\"x\" is not a number"),
            ("tcp://h:1?size=4", "neither rank nor world_size"),
            ("file://a", "must be absolute"),
            ("http://h:1", "scheme is unknown"),
        ];
        for (method, part) in cases {
            let error = Method::parse(method).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("try `env://`"), "{method}: {error}");
        }
    }
}
