//! Resolves a host name. A name may become known a little later than the program starts, but not much.

use crate::store::error::StoreError;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long to wait for a name to become known.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(250);

/// The addresses of `addr` (`host:port`). An unknown name is given up long before a late store would be.
pub(crate) fn resolve(addr: &str, deadline: Instant) -> Result<Vec<SocketAddr>, StoreError> {
    let began = Instant::now();
    loop {
        let source = match addr.to_socket_addrs() {
            Ok(addrs) => return Ok(addrs.collect()),
            Err(error) => error,
        };
        let left = deadline.min(began + RESOLVE_TIMEOUT).saturating_duration_since(Instant::now());
        if left.is_zero() {
            let host = addr.rsplit_once(':').map_or(addr, |(host, _)| host).into();
            return Err(StoreError::Unresolved { host, after: began.elapsed(), source });
        }
        std::thread::sleep(left.min(PAUSE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_given_up_early_and_named() {
        let began = Instant::now();
        let error = resolve("no.such.host.invalid:1", began + Duration::from_secs(60)).unwrap_err();
        assert!(
            error.to_string().starts_with("the name `no.such.host.invalid` cannot be resolved"),
            "{error}"
        );
        assert!((4..20).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        assert_eq!(resolve("127.0.0.1:7", began).unwrap(), ["127.0.0.1:7".parse().unwrap()]);
    }
}
