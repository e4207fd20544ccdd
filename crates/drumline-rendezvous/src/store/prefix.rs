//! A store within a store: every key gets a prefix, so that different parts of a program do not use the same key by
//! accident.

use super::Store;
use super::error::StoreError;
use super::request::{Reply, Request};
use std::time::Instant;

/// Puts `prefix/` before every key of another store.
///
/// ```
/// use drumline_rendezvous::{MemoryStore, PrefixStore, Store};
/// let all = MemoryStore::new();
/// let group = PrefixStore::new("group1", all.clone());
/// group.set("x", b"1")?;
/// assert_eq!(group.list("")?, ["x"]);
/// assert_eq!(all.list("")?, ["group1/x"]);
/// # Ok::<(), drumline_rendezvous::StoreError>(())
/// ```
#[derive(Debug, Clone)]
pub struct PrefixStore<S> {
    prefix: String,
    store: S,
}

impl<S: Store> PrefixStore<S> {
    /// A store whose keys are those of `store` under `prefix/`.
    pub fn new(prefix: &str, store: S) -> Self {
        PrefixStore { prefix: format!("{prefix}/"), store }
    }

    /// The whole store.
    pub fn inner(&self) -> &S {
        &self.store
    }
}

impl<S: Store> Store for PrefixStore<S> {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        if request == Request::NumKeys {
            let names = self.store.list(&self.prefix)?;
            return Ok(Reply::Count(names.len() as u64));
        }
        let reply = self.store.call(request.rename(|key| format!("{}{key}", self.prefix)), deadline)?;
        Ok(match reply {
            Reply::Names(names) => {
                Reply::Names(names.into_iter().map(|name| name[self.prefix.len()..].to_owned()).collect())
            }
            other => other,
        })
    }
}
