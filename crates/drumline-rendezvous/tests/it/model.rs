//! Compares every implementation of the store with a plain map: the same requests, the same answers.

use crate::{Job, after};
use drumline_rendezvous::{FileStore, MemoryStore, PrefixStore, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Requests that never have to wait, or whose wait is over before it begins.
#[derive(Debug, Clone)]
enum Op {
    Set(String, Vec<u8>),
    Get(String),
    Wait(Vec<String>),
    Add(String, i64),
    CompareSet(String, Option<Vec<u8>>, Vec<u8>),
    Append(String, Vec<u8>),
    Tail(String, u64),
    Delete(String),
    NumKeys,
    List(String),
    MultiGet(Vec<String>),
    MultiSet(Vec<(String, Vec<u8>)>),
}

/// Few keys, so that they collide; `1`, `-5` and the like so that some values are numbers.
fn op() -> impl Strategy<Value = Op> {
    let key = || "[ab]{0,2}";
    let value = || {
        prop_oneof![Just(b"1".to_vec()), Just(b"-5".to_vec()), proptest::collection::vec(any::<u8>(), 0..4)]
    };
    let keys = || proptest::collection::vec(key(), 0..4);
    prop_oneof![
        (key(), value()).prop_map(|(k, v)| Op::Set(k, v)),
        key().prop_map(Op::Get),
        keys().prop_map(Op::Wait),
        (key(), prop_oneof![-9..9i64, Just(i64::MAX), Just(i64::MIN)]).prop_map(|(k, d)| Op::Add(k, d)),
        (key(), proptest::option::of(value()), value()).prop_map(|(k, e, d)| Op::CompareSet(k, e, d)),
        (key(), value()).prop_map(|(k, v)| Op::Append(k, v)),
        (key(), 0..6u64).prop_map(|(k, from)| Op::Tail(k, from)),
        key().prop_map(Op::Delete),
        Just(Op::NumKeys),
        key().prop_map(Op::List),
        keys().prop_map(Op::MultiGet),
        proptest::collection::vec((key(), value()), 0..4).prop_map(Op::MultiSet),
    ]
}

/// The answer as text; errors only by their kind.
fn ask(store: &dyn Store, op: &Op) -> String {
    let refs = |keys: &'_ [String]| keys.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
    let now = after(0);
    let answer = match op {
        Op::Set(k, v) => store.set(k, v).map(|()| "done".into()),
        Op::Get(k) => store.get(k, now).map(|v| format!("{v:?}")),
        Op::Wait(ks) => store.wait(&as_refs(ks), now).map(|()| "done".into()),
        Op::Add(k, d) => store.add(k, *d).map(|n| n.to_string()),
        Op::CompareSet(k, e, d) => store.compare_set(k, e.as_deref(), d).map(|v| format!("{v:?}")),
        Op::Append(k, v) => store.append(k, v).map(|n| n.to_string()),
        Op::Tail(k, from) => store.tail(k, *from, now).map(|v| format!("{v:?}")),
        Op::Delete(k) => store.delete(k).map(|was| was.to_string()),
        Op::NumKeys => store.num_keys().map(|n| n.to_string()),
        Op::List(p) => store.list(p).map(|names| refs(&names)),
        Op::MultiGet(ks) => store.multi_get(&as_refs(ks), now).map(|vs| format!("{vs:?}")),
        Op::MultiSet(pairs) => {
            let pairs: Vec<(&str, &[u8])> = pairs.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect();
            store.multi_set(&pairs).map(|()| "done".into())
        }
    };
    answer.unwrap_or_else(|error| if error.is_timeout() { "timeout".into() } else { "rejected".into() })
}

fn as_refs(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

/// The same on a plain map.
fn expect(map: &mut BTreeMap<String, Vec<u8>>, op: &Op) -> String {
    let all = |map: &BTreeMap<String, Vec<u8>>, keys: &[String]| keys.iter().all(|k| map.contains_key(k));
    match op {
        Op::Set(k, v) => {
            map.insert(k.clone(), v.clone());
            "done".into()
        }
        Op::Get(k) => map.get(k).map_or("timeout".into(), |v| format!("{v:?}")),
        Op::Wait(ks) => if all(map, ks) { "done" } else { "timeout" }.into(),
        Op::Add(k, d) => {
            let held = map.get(k).map_or(Some(0), |v| std::str::from_utf8(v).ok()?.parse::<i64>().ok());
            let Some(sum) = held.and_then(|held| held.checked_add(*d)) else { return "rejected".into() };
            map.insert(k.clone(), sum.to_string().into_bytes());
            sum.to_string()
        }
        Op::CompareSet(k, e, d) => {
            if map.get(k) == e.as_ref() {
                map.insert(k.clone(), d.clone());
            }
            format!("{:?}", map.get(k).cloned().unwrap_or_default())
        }
        Op::Append(k, v) => {
            let value = map.entry(k.clone()).or_default();
            value.extend(v);
            value.len().to_string()
        }
        Op::Tail(k, from) => {
            let tail = map.get(k).and_then(|v| v.get(*from as usize..)).filter(|tail| !tail.is_empty());
            tail.map_or("timeout".into(), |tail| format!("{tail:?}"))
        }
        Op::Delete(k) => map.remove(k).is_some().to_string(),
        Op::NumKeys => map.len().to_string(),
        Op::List(p) => {
            map.keys().filter(|k| k.starts_with(p)).map(String::as_str).collect::<Vec<_>>().join(" ")
        }
        Op::MultiGet(ks) if all(map, ks) => format!("{:?}", ks.iter().map(|k| &map[k]).collect::<Vec<_>>()),
        Op::MultiGet(_) => "timeout".into(),
        Op::MultiSet(pairs) => {
            map.extend(pairs.iter().cloned());
            "done".into()
        }
    }
}

/// Applies `ops` to all handles in turn, which must be the same store.
fn check(handles: &[&dyn Store], ops: &[Op]) -> Result<(), TestCaseError> {
    let mut map = BTreeMap::new();
    for (i, op) in ops.iter().enumerate() {
        let answer = ask(handles[i % handles.len()], op);
        prop_assert_eq!(answer, expect(&mut map, op), "step {} of {:?}", i, ops);
    }
    Ok(())
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn memory(ops in ops()) {
        let store = MemoryStore::new();
        check(&[&store, &store.clone()], &ops)?;
    }

    #[test]
    fn prefix(ops in ops()) {
        let all = MemoryStore::new();
        all.set("a", b"outside")?;
        let outer = PrefixStore::new("g", all.clone());
        let inner = PrefixStore::new("h", &outer);
        check(&[&inner], &ops)?;
        prop_assert_eq!(all.get("a", after(0))?, b"outside");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn tcp(ops in ops()) {
        let job = Job::start();
        check(&[&job.guest(), &job.guest()], &ops)?;
    }

    #[test]
    fn file(ops in ops()) {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("store");
        let (one, two) = (FileStore::create(&path, "run")?, FileStore::open(&path, "run")?);
        check(&[&one, &two], &ops)?;
        check_replay(&FileStore::open(&path, "run")?, &one)?;
    }
}

/// A process that opens the file late reads the same state.
fn check_replay(late: &FileStore, early: &FileStore) -> Result<(), TestCaseError> {
    let names = early.list("")?;
    prop_assert_eq!(late.list("")?, names.clone());
    prop_assert_eq!(
        late.multi_get(&as_refs(&names), after(0))?,
        early.multi_get(&as_refs(&names), after(0))?
    );
    Ok(())
}
