//! The store's state: keys, values and those who wait. No sockets, no clock, no threads.
//!
//! A request comes in with a *ticket* that its answer will carry. Most are answered at once; one that has to wait
//! is *parked* on one key it misses, and looked at again when that key changes. So a change costs as much as the
//! number of those who wait for just this key, however many keys each of them waits for.
//!
//! ```text
//!  apply(ticket, request) ─▶ values ─▶ (ticket, reply), and the replies of all whose wait this ends
//! ```
//! In: requests within the limits. Out: exactly one reply per ticket. Used by the TCP server, the memory store
//! and the file store alike.

use crate::store::request::{MAX_VALUE, Reply, Request};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// Keys, values and waiters; `T` is the ticket by which answers find their way.
#[derive(Debug)]
pub struct Core<T> {
    values: BTreeMap<String, Vec<u8>>,
    waiters: HashMap<T, Waiter>,
    parked: HashMap<String, BTreeSet<T>>,
}

/// A request that cannot be answered yet, and which of its keys it is parked on.
#[derive(Debug)]
struct Waiter {
    request: Request,
    at: usize,
}

/// Answers on their way out.
pub type Replies<T> = Vec<(T, Reply)>;

impl<T> Default for Core<T> {
    fn default() -> Self {
        Core { values: BTreeMap::new(), waiters: HashMap::new(), parked: HashMap::new() }
    }
}

impl<T: Copy + Ord + Hash> Core<T> {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Carries out `request`; every answer it brings about, its own among them, is added to `replies`.
    pub fn apply(&mut self, ticket: T, request: Request, replies: &mut Replies<T>) {
        if request.waits() {
            return self.attend(ticket, Waiter { request, at: 0 }, replies);
        }
        let (reply, changed) = self.act(request);
        replies.push((ticket, reply));
        for key in changed {
            self.wake(&key, replies);
        }
    }

    /// Ends a wait that is no longer wanted; `false` if it was answered before (or never began).
    pub fn cancel(&mut self, ticket: T) -> bool {
        let Some(waiter) = self.waiters.remove(&ticket) else { return false };
        let key = waiter.key();
        if let Some(tickets) = self.parked.get_mut(key) {
            tickets.remove(&ticket);
            if tickets.is_empty() {
                self.parked.remove(key);
            }
        }
        true
    }

    /// Bytes that a key holds.
    pub fn len_of(&self, key: &str) -> usize {
        self.values.get(key).map_or(0, Vec::len)
    }

    /// Number of those who wait.
    pub fn num_waiters(&self) -> usize {
        self.waiters.len()
    }

    /// Requests that never wait: the reply, and the keys whose value is new.
    fn act(&mut self, request: Request) -> (Reply, Vec<String>) {
        match request {
            Request::Set { key, value } => self.put(key, value, Reply::Done),
            Request::MultiSet { pairs } => {
                let keys = pairs.iter().map(|(key, _)| key.clone()).collect();
                self.values.extend(pairs);
                (Reply::Done, keys)
            }
            Request::Add { key, delta } => self.add(key, delta),
            Request::CompareSet { key, expected, desired } => {
                let held = self.values.get(&key);
                if held == expected.as_ref() {
                    return self.put(key, desired.clone(), Reply::Bytes(desired));
                }
                (Reply::Bytes(held.cloned().unwrap_or_default()), Vec::new())
            }
            Request::Append { key, value } => self.append(key, &value),
            Request::Delete { key } => (Reply::Flag(self.values.remove(&key).is_some()), Vec::new()),
            Request::NumKeys => (Reply::Count(self.values.len() as u64), Vec::new()),
            Request::List { prefix } => (self.list(&prefix), Vec::new()),
            waiting => (Reply::Failed(format!("{waiting} is a wait")), Vec::new()),
        }
    }

    fn put(&mut self, key: String, value: Vec<u8>, reply: Reply) -> (Reply, Vec<String>) {
        self.values.insert(key.clone(), value);
        (reply, vec![key])
    }

    /// Numbers are held as decimal digits, as in PyTorch's stores.
    fn add(&mut self, key: String, delta: i64) -> (Reply, Vec<String>) {
        let held = match self.values.get(&key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()),
        };
        let Some(held) = held else {
            let reason = format!("add to {key:?}: what it holds is no whole number; try another key");
            return (Reply::Failed(reason), Vec::new());
        };
        match held.checked_add(delta) {
            Some(sum) => self.put(key, sum.to_string().into_bytes(), Reply::Number(sum)),
            None => {
                (Reply::Failed(format!("add to {key:?}: {held} + {delta} is beyond 64 bits")), Vec::new())
            }
        }
    }

    fn append(&mut self, key: String, more: &[u8]) -> (Reply, Vec<String>) {
        let len = self.len_of(&key) + more.len();
        if len > MAX_VALUE {
            let reason =
                format!("append to {key:?}: a value may have {MAX_VALUE} bytes, it would have {len}");
            return (Reply::Failed(reason), Vec::new());
        }
        self.values.entry(key.clone()).or_default().extend_from_slice(more);
        (Reply::Count(len as u64), vec![key])
    }

    fn list(&self, prefix: &str) -> Reply {
        let from_here =
            self.values.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        let names = from_here.map(|(key, _)| key).take_while(|key| key.starts_with(prefix));
        if names.clone().map(|key| key.len() + 4).sum::<usize>() > MAX_VALUE {
            return Reply::Failed(format!("list of {prefix:?}: the names have more than {MAX_VALUE} bytes"));
        }
        Reply::Names(names.cloned().collect())
    }

    /// Answers a waiter or parks it.
    fn attend(&mut self, ticket: T, mut waiter: Waiter, replies: &mut Replies<T>) {
        match waiter.answer(&self.values) {
            Some(reply) => replies.push((ticket, reply)),
            None => {
                self.parked.entry(waiter.key().to_owned()).or_default().insert(ticket);
                self.waiters.insert(ticket, waiter);
            }
        }
    }

    fn wake(&mut self, key: &str, replies: &mut Replies<T>) {
        for ticket in self.parked.remove(key).unwrap_or_default() {
            if let Some(waiter) = self.waiters.remove(&ticket) {
                self.attend(ticket, waiter, replies);
            }
        }
    }
}

impl Waiter {
    fn keys(&self) -> &[String] {
        match &self.request {
            Request::Get { key } | Request::Tail { key, .. } => std::slice::from_ref(key),
            Request::Wait { keys } | Request::MultiGet { keys } => keys,
            _ => &[],
        }
    }

    /// The key it is parked on.
    fn key(&self) -> &str {
        self.keys().get(self.at).map_or("", String::as_str)
    }

    /// The answer, or `None` with `at` moved to a key that is missing.
    fn answer(&mut self, values: &BTreeMap<String, Vec<u8>>) -> Option<Reply> {
        if let Request::Tail { key, from } = &self.request {
            let value = values.get(key)?;
            let from = usize::try_from(*from).ok()?;
            return (value.len() > from).then(|| Reply::Bytes(value[from..].to_vec()));
        }
        // Go on from where it was parked; only when the end is reached, look whether an earlier key has been deleted.
        let missing = |range: std::ops::Range<usize>| {
            range.into_iter().find(|i| !values.contains_key(&self.keys()[*i]))
        };
        let end = self.keys().len();
        if let Some(at) = missing(self.at..end).or_else(|| missing(0..self.at)) {
            self.at = at;
            return None;
        }
        Some(match &self.request {
            Request::Get { key } => Reply::Bytes(values[key].clone()),
            Request::MultiGet { keys } => several(keys, values),
            _ => Reply::Done,
        })
    }
}

fn several(keys: &[String], values: &BTreeMap<String, Vec<u8>>) -> Reply {
    let bytes: usize = keys.iter().map(|key| values[key].len() + 4).sum();
    if bytes > MAX_VALUE {
        return Reply::Failed(format!(
            "multi_get: the values have {bytes} bytes, one reply carries {MAX_VALUE}"
        ));
    }
    Reply::Values(keys.iter().map(|key| values[key].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> Request {
        Request::Set { key: key.into(), value: value.into() }
    }

    #[test]
    fn a_wait_for_many_keys_is_parked_on_one_at_a_time() {
        let (mut core, mut out) = (Core::new(), Vec::new());
        let keys = ["a", "b", "c"].map(String::from).to_vec();
        core.apply(1, Request::Wait { keys }, &mut out);
        for key in ["c", "a"] {
            core.apply(2, set(key, "x"), &mut out);
            assert_eq!(core.parked.values().map(BTreeSet::len).sum::<usize>(), 1);
        }
        core.apply(3, Request::Delete { key: "a".into() }, &mut out);
        out.clear();
        core.apply(4, set("b", "x"), &mut out);
        assert_eq!(out, [(4, Reply::Done)], "a is gone again");
        core.apply(5, set("a", "x"), &mut out);
        assert_eq!(out[1..], [(5, Reply::Done), (1, Reply::Done)]);
        assert!(core.waiters.is_empty() && core.parked.is_empty());
    }

    #[test]
    fn a_cancelled_wait_leaves_nothing() {
        let (mut core, mut out) = (Core::new(), Vec::new());
        core.apply(1, Request::Get { key: "a".into() }, &mut out);
        assert!(core.cancel(1) && !core.cancel(1));
        assert!(core.waiters.is_empty() && core.parked.is_empty() && out.is_empty());
    }

    #[test]
    fn tail_follows_a_log() {
        let (mut core, mut out) = (Core::new(), Vec::new());
        core.apply(1, Request::Tail { key: "log".into(), from: 0 }, &mut out);
        core.apply(2, Request::Append { key: "log".into(), value: b"abc".into() }, &mut out);
        core.apply(3, Request::Tail { key: "log".into(), from: 3 }, &mut out);
        core.apply(4, Request::Append { key: "log".into(), value: b"d".into() }, &mut out);
        let log = |text: &[u8]| Reply::Bytes(text.into());
        assert_eq!(out, [(2, Reply::Count(3)), (1, log(b"abc")), (4, Reply::Count(4)), (3, log(b"d"))]);
    }

    #[test]
    fn what_cannot_be_added_is_said() {
        let (mut core, mut out) = (Core::new(), Vec::new());
        core.apply(1, set("a", "red"), &mut out);
        core.apply(2, Request::Add { key: "a".into(), delta: 1 }, &mut out);
        core.apply(3, Request::Add { key: "b".into(), delta: i64::MAX }, &mut out);
        core.apply(4, Request::Add { key: "b".into(), delta: 1 }, &mut out);
        assert!(matches!(&out[1].1, Reply::Failed(why) if why.contains("no whole number")));
        assert!(matches!(&out[3].1, Reply::Failed(why) if why.contains("beyond 64 bits")));
    }
}
