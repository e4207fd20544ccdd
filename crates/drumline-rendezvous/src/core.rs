//! The store's state: keys, values and waiting requests. No sockets, no clock, no threads.
//!
//! A request comes with a *ticket*, which its answer carries. Most requests are answered at once. One that has to wait
//! is *parked* on one key that it misses, and checked again when that key changes. So a change costs as much as the
//! number of requests that wait for just this key, however many keys each of them waits for.
//!
//! ```text
//!  apply(ticket, request) ─▶ values ─▶ (ticket, reply), and the replies of all waits that this ends
//! ```
//! In: requests within the limits. Out: exactly one reply per ticket. Used by the TCP server, the memory store and the
//! file store.

use crate::store::request::{MAX_VALUE, Reply, Request};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// Keys, values and waiting requests; `T` is the ticket that connects an answer with its request.
#[derive(Debug)]
pub struct Core<T> {
    values: BTreeMap<String, Vec<u8>>,
    waiters: HashMap<T, Waiter>,
    parked: HashMap<String, BTreeSet<T>>,
}

/// A request that cannot be answered yet, and the index of the key that it is parked on.
#[derive(Debug)]
struct Waiter {
    request: Request,
    at: usize,
}

/// Answers to send, with their tickets.
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

    /// Carries out `request`. Adds its own answer, and every answer that it triggers, to `replies`.
    pub fn apply(&mut self, ticket: T, request: Request, replies: &mut Replies<T>) {
        if request.waits() {
            return self.answer_or_park(ticket, Waiter { request, at: 0 }, replies);
        }
        let (reply, changed) = self.act(request);
        replies.push((ticket, reply));
        for key in changed {
            self.wake(&key, replies);
        }
    }

    /// Cancels a wait; `false` if it was already answered, or never began.
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

    /// The length of a key's value in bytes.
    pub fn len_of(&self, key: &str) -> usize {
        self.values.get(key).map_or(0, Vec::len)
    }

    /// The number of waiting requests.
    pub fn num_waiters(&self) -> usize {
        self.waiters.len()
    }

    /// Carries out a request that never waits. Returns the reply, and the keys whose value changed.
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

    /// Numbers are stored as decimal digits, as in PyTorch's stores.
    fn add(&mut self, key: String, delta: i64) -> (Reply, Vec<String>) {
        let held = match self.values.get(&key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()),
        };
        let Some(held) = held else {
            let reason = format!("add to {key:?}: its value is not an integer; try another key");
            return (Reply::Failed(reason), Vec::new());
        };
        match held.checked_add(delta) {
            Some(sum) => self.put(key, sum.to_string().into_bytes(), Reply::Number(sum)),
            None => (
                Reply::Failed(format!("add to {key:?}: {held} + {delta} does not fit in 64 bits")),
                Vec::new(),
            ),
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

    /// Answers a waiting request, or parks it.
    fn answer_or_park(&mut self, ticket: T, mut waiter: Waiter, replies: &mut Replies<T>) {
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
                self.answer_or_park(ticket, waiter, replies);
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

    /// The answer, or `None` with `at` moved to a missing key.
    fn answer(&mut self, values: &BTreeMap<String, Vec<u8>>) -> Option<Reply> {
        if let Request::Tail { key, from } = &self.request {
            let value = values.get(key)?;
            let from = usize::try_from(*from).ok()?;
            return (value.len() > from).then(|| Reply::Bytes(value[from..].to_vec()));
        }
        // Continue from where it was parked. Only at the end, check whether an earlier key has been deleted.
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
            Request::MultiGet { keys } => values_of(keys, values),
            _ => Reply::Done,
        })
    }
}

fn values_of(keys: &[String], values: &BTreeMap<String, Vec<u8>>) -> Reply {
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
        assert_eq!(out, [(4, Reply::Done)], "a was deleted");
        core.apply(5, set("a", "x"), &mut out);
        assert_eq!(out[1..], [(5, Reply::Done), (1, Reply::Done)]);
        assert!(core.waiters.is_empty() && core.parked.is_empty());
    }

    #[test]
    fn a_cancelled_wait_leaves_nothing_behind() {
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
    fn impossible_additions_are_errors() {
        let (mut core, mut out) = (Core::new(), Vec::new());
        core.apply(1, set("a", "red"), &mut out);
        core.apply(2, Request::Add { key: "a".into(), delta: 1 }, &mut out);
        core.apply(3, Request::Add { key: "b".into(), delta: i64::MAX }, &mut out);
        core.apply(4, Request::Add { key: "b".into(), delta: 1 }, &mut out);
        assert!(matches!(&out[1].1, Reply::Failed(why) if why.contains("not an integer")));
        assert!(matches!(&out[3].1, Reply::Failed(why) if why.contains("does not fit in 64 bits")));
    }
}
