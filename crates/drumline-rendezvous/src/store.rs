//! The store: a small shared map of keys to bytes, through which the processes of a job find each other.
//!
//! An implementation provides one method, [`Store::call`]; all other methods build on it.
//!
//! ```text
//!  set, get, add, ..  ─▶ Request ─▶ call ─▶ Reply      MemoryStore: a core behind a lock
//!                                                      TcpStore:    frames to a TcpStoreServer, which has the core
//!                                                      FileStore:   a log of requests that each process replays
//!                                                      PrefixStore: another store, with a prefix on each key
//! ```

pub(crate) mod error;
pub(crate) mod file;
pub(crate) mod memory;
pub(crate) mod prefix;
pub(crate) mod request;
pub(crate) mod tcp;
mod timed_out;

use error::StoreError;
use request::{Reply, Request};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

/// Keys and values shared by the processes of a job. Calls that wait are woken by the change itself.
///
/// ```
/// use drumline_rendezvous::{MemoryStore, Store};
/// use std::time::{Duration, Instant};
/// let store = MemoryStore::new();
/// store.set("colour", b"red")?;
/// assert_eq!(store.get("colour", Instant::now() + Duration::from_secs(1))?, b"red");
/// assert_eq!(store.add("arrived", 2)?, 2);
/// # Ok::<(), drumline_rendezvous::StoreError>(())
/// ```
pub trait Store: Send + Sync + Debug {
    /// Carries out one request. Requests that [wait](Request::waits) do so until `deadline`; others ignore it.
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError>;

    /// Sets the value of `key`.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.call(Request::Set { key: key.into(), value: value.into() }, None)?.done()
    }

    /// The value of `key`; waits until it has one.
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.call(Request::Get { key: key.into() }, Some(deadline))?.bytes()
    }

    /// Waits until all `keys` have a value.
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<(), StoreError> {
        self.call(Request::Wait { keys: owned(keys) }, Some(deadline))?.done()
    }

    /// Adds to the number under `key` (decimal digits; absent counts as 0) and returns the sum.
    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        self.call(Request::Add { key: key.into(), delta }, None)?.number()
    }

    /// Sets `key` to `desired` if its value is `expected` (`None`: if it does not exist). Returns its value afterwards,
    /// empty if it does not exist.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        let expected = expected.map(Vec::from);
        self.call(Request::CompareSet { key: key.into(), expected, desired: desired.into() }, None)?.bytes()
    }

    /// Adds bytes to the end of a value and returns its new length.
    fn append(&self, key: &str, value: &[u8]) -> Result<u64, StoreError> {
        self.call(Request::Append { key: key.into(), value: value.into() }, None)?.count()
    }

    /// Waits until the value of `key` is longer than `from`, and returns the bytes after `from`. This follows a log.
    fn tail(&self, key: &str, from: u64, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.call(Request::Tail { key: key.into(), from }, Some(deadline))?.bytes()
    }

    /// Removes `key`; returns whether it existed.
    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.call(Request::Delete { key: key.into() }, None)?.flag()
    }

    /// Number of keys.
    fn num_keys(&self) -> Result<u64, StoreError> {
        self.call(Request::NumKeys, None)?.count()
    }

    /// The keys that begin with `prefix`, sorted.
    fn list(&self, prefix: &str) -> Result<Vec<String>, StoreError> {
        self.call(Request::List { prefix: prefix.into() }, None)?.names()
    }

    /// The values of all `keys`, in their order; waits until each has one.
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.call(Request::MultiGet { keys: owned(keys) }, Some(deadline))?.values()
    }

    /// Sets several keys at once: no other client sees only some of them.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<(), StoreError> {
        let pairs = pairs.iter().map(|(key, value)| (String::from(*key), Vec::from(*value))).collect();
        self.call(Request::MultiSet { pairs }, None)?.done()
    }
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| String::from(*key)).collect()
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        (**self).call(request, deadline)
    }
}

impl<S: Store + ?Sized> Store for &S {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        (**self).call(request, deadline)
    }
}
