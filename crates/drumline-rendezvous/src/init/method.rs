//! The method by which to meet, as a URL.

use super::InitError;
use std::path::PathBuf;

/// A parsed method; rank and world size where the URL gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Method {
    Env,
    Tcp { host: String, port: u16, given: Given },
    File { path: PathBuf, given: Given },
}

/// What follows the `?`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) rank: Option<usize>,
    pub(super) world_size: Option<usize>,
}

impl Method {
    pub(super) fn parse(method: &str) -> Result<Method, InitError> {
        let bad = |reason: &str| InitError::Method { method: method.into(), reason: reason.into() };
        let (scheme, rest) = method.split_once("://").ok_or_else(|| bad("there is no `://`"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let given = Given::parse(query).map_err(|reason| bad(&reason))?;
        match scheme {
            "env" if rest.is_empty() && query.is_empty() => Ok(Method::Env),
            "env" => Err(bad("nothing may follow `env://`")),
            "tcp" => {
                let (host, port) = rest.rsplit_once(':').ok_or_else(|| bad("the port is missing"))?;
                let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                let port = port.parse().ok().filter(|port| *port != 0);
                match (host, port) {
                    ("", _) => Err(bad("the host is missing")),
                    (_, None) => Err(bad("the port is not a number from 1 to 65535")),
                    (host, Some(port)) => Ok(Method::Tcp { host: host.into(), port, given }),
                }
            }
            "file" if rest.starts_with('/') && rest.len() > 1 => {
                Ok(Method::File { path: rest.into(), given })
            }
            "file" => Err(bad("the path must be absolute, so that there are three slashes")),
            _ => Err(bad("the scheme is unknown")),
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
    fn parse(query: &str) -> Result<Given, String> {
        let mut given = Given::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let number = value.parse().map_err(|_| format!("{name}={value:?} is not a number"))?;
            match name {
                "rank" => given.rank = Some(number),
                "world_size" => given.world_size = Some(number),
                _ => return Err(format!("{name:?} is neither rank nor world_size")),
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
    fn faults_are_named() {
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
