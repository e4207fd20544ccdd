//! Waiting calls are woken at once, and can be cancelled.

use crate::{Job, after};
use drumline_rendezvous::{FileStore, MAX_KEY, MAX_VALUE, MemoryStore, Store, StoreError};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Runs the same test on memory, TCP and file; passes two handles of one store.
fn on_all_stores(test: impl Fn(&str, Arc<dyn Store>, Arc<dyn Store>)) {
    let memory = MemoryStore::new();
    test("memory", Arc::new(memory.clone()), Arc::new(memory));
    let job = Job::start();
    test("tcp", Arc::new(job.guest()), Arc::new(job.guest()));
    let job = Job::start();
    let one = Arc::new(job.guest());
    test("tcp, one client", one.clone(), one);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    test(
        "file",
        Arc::new(FileStore::open(&path, "r").unwrap()),
        Arc::new(FileStore::open(&path, "r").unwrap()),
    );
}

#[test]
fn a_change_wakes_its_waiter_at_once() {
    on_all_stores(|form, a, b| {
        let mut best = Duration::MAX;
        for i in 0..10 {
            let (key, b) = (format!("k{i}"), b.clone());
            let waiter = thread::spawn({
                let key = key.clone();
                move || (b.get(&key, after(10_000)).unwrap(), Instant::now())
            });
            thread::sleep(Duration::from_millis(10));
            let set = Instant::now();
            a.set(&key, b"v").unwrap();
            let (value, woken) = waiter.join().unwrap();
            assert_eq!(value, b"v");
            best = best.min(woken - set);
        }
        // The best of ten, so that a busy machine does not matter. Without inotify, a file is checked only every 200
        // ms.
        let limit = if form == "file" { 50 } else { 5 };
        assert!(best < Duration::from_millis(limit), "{form}: {best:?}");
    });
}

#[test]
fn a_wait_that_times_out_leaves_everything_in_order() {
    on_all_stores(|form, a, _| {
        for i in 0..20 {
            let began = Instant::now();
            let error = a.wait(&["never", "ever"], after(20)).unwrap_err();
            let took = began.elapsed();
            assert!(error.is_timeout(), "{form}: {error}");
            assert!((20..500).contains(&took.as_millis()), "{form}: {took:?}");
            assert!(error.to_string().starts_with("wait for \"never\", \"ever\" timed out after"), "{error}");
            assert_eq!(a.add("n", 1).unwrap(), i + 1, "{form}");
        }
        a.multi_set(&[("never", b"x"), ("ever", b"y")]).unwrap();
        a.wait(&["never", "ever"], after(0)).unwrap();
    });
}

#[test]
fn a_wait_that_times_out_names_only_what_is_missing() {
    on_all_stores(|form, a, b| {
        a.multi_set(&[("who/0", b"x"), ("who/2", b"y"), ("other", b"z")]).unwrap();
        let keys = ["who/0", "who/1", "who/2", "who/3"];
        let error = b.multi_get(&keys, after(50)).unwrap_err();
        let StoreError::Timeout { what, after: waited } = &error else { panic!("{form}: {error}") };
        assert_eq!(what, "multi_get of \"who/1\", \"who/3\" (2 of 4 keys)", "{form}");
        assert!((45..1000).contains(&waited.as_millis()), "{form}: {waited:?}");
        let error = b.wait(&keys[..2], after(20)).unwrap_err();
        assert!(error.to_string().starts_with("wait for \"who/1\" (1 of 2 keys) timed out after"), "{error}");
        let error = b.get("who/1", after(20)).unwrap_err().to_string();
        assert!(error.starts_with("get of \"who/1\" timed out after"), "{form}: {error}");
    });
}

#[test]
fn many_clients_wait_for_many_keys() {
    on_all_stores(|form, a, b| {
        let threads: Vec<_> = (0..8)
            .map(|rank| {
                let store = if rank % 2 == 0 { a.clone() } else { b.clone() };
                thread::spawn(move || {
                    let keys: Vec<String> = (0..8).map(|peer| format!("here/{peer}")).collect();
                    let refs: Vec<&str> = keys.iter().map(String::as_str).collect();
                    store.set(&keys[rank], &[rank as u8]).unwrap();
                    store.multi_get(&refs, after(10_000)).unwrap()
                })
            })
            .collect();
        let expected: Vec<Vec<u8>> = (0..8).map(|rank| vec![rank]).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), expected, "{form}");
        }
        assert_eq!(a.num_keys().unwrap(), 8);
    });
}

#[test]
fn adds_of_all_clients_are_counted() {
    on_all_stores(|form, a, b| {
        thread::scope(|scope| {
            for store in [&a, &b, &a, &b] {
                scope.spawn(move || (0..100).map(|_| store.add("n", 1).unwrap()).max());
            }
        });
        assert_eq!(a.add("n", 0).unwrap(), 400, "{form}");
    });
}

#[test]
fn large_values_are_stored_and_too_large_ones_are_errors() {
    on_all_stores(|form, a, b| {
        let large: Vec<u8> = (0..MAX_VALUE).map(|i| (i / 7) as u8).collect();
        a.set("large", &large).unwrap();
        assert!(b.get("large", after(30_000)).unwrap() == large, "{form}");
        let error = a.set("larger", &vec![0; MAX_VALUE + 1]).unwrap_err();
        assert!(matches!(error, StoreError::TooLarge { .. }), "{form}: {error}");
        let error = a.append("large", b"x").unwrap_err();
        assert!(error.to_string().contains("67108865"), "{form}: {error}");
        let error = a.set(&"k".repeat(MAX_KEY + 1), b"").unwrap_err();
        assert!(error.to_string().contains("a key may have 8192 bytes, got 8193"), "{form}: {error}");
        let error = a.multi_get(&["large", "large"], after(1000)).unwrap_err();
        assert!(error.to_string().contains("multi_get"), "{form}: {error}");
        a.delete("large").unwrap();
        a.set(&"k".repeat(MAX_KEY), b"fits").unwrap();
    });
}
