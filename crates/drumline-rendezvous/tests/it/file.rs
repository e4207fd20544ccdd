//! Tests of the file store: stale files, incomplete records, and files that are not store files.

use crate::after;
use drumline_rendezvous::{FileStore, Store, StoreError};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;

fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    (dir, path)
}

#[test]
fn a_stale_file_is_noticed_and_not_changed() {
    let (_dir, path) = folder();
    FileStore::create(&path, "monday").unwrap().set("a", b"1").unwrap();
    let before = std::fs::read(&path).unwrap();
    for result in [FileStore::open(&path, "tuesday"), FileStore::create(&path, "tuesday")] {
        let error = result.unwrap_err();
        assert!(matches!(&error, StoreError::StaleFile { run, .. } if run == "monday"), "{error}");
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()) && text.contains("try removing the file"), "{text}");
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let again = FileStore::open(&path, "monday").expect("control: the same run");
    assert_eq!(again.get("a", after(0)).unwrap(), b"1");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn the_next_writer_removes_an_incomplete_record() {
    let (_dir, path) = folder();
    let store = FileStore::create(&path, "run").unwrap();
    store.set("a", b"1").unwrap();
    let whole = std::fs::read(&path).unwrap();
    store.set("b", b"2").unwrap();
    let longer = std::fs::read(&path).unwrap();
    for cut in whole.len()..longer.len() {
        std::fs::write(&path, &longer[..cut]).unwrap();
        let late = FileStore::open(&path, "run").unwrap();
        assert_eq!(late.list("").unwrap(), ["a"], "cut at {cut}");
        late.set("c", b"3").unwrap();
        assert_eq!(FileStore::open(&path, "run").unwrap().list("").unwrap(), ["a", "c"], "cut at {cut}");
    }
}

#[test]
fn a_file_that_is_not_a_store_file_is_not_changed() {
    let (_dir, path) = folder();
    for content in ["", "hello", "DRUMFILE\x07\x00\x00\x00", "DRUMFILE\x01\x00\x40\x00{}"] {
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let error = FileStore::open(&path, "run").unwrap_err();
        assert!(matches!(error, StoreError::BadFile { .. }), "{content:?}: {error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
    }
    std::fs::remove_file(&path).unwrap();
    FileStore::create(&path, "run").unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    assert!(FileStore::open(&path, "run").unwrap_err().to_string().contains("mode 0600"));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(&[0xff; 40]).unwrap();
    let error = FileStore::open(&path, "run").unwrap().num_keys().unwrap_err();
    assert!(matches!(error, StoreError::BadFile { .. }), "{error}");
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let (dir, path) = folder();
    let target = dir.path().join("target");
    FileStore::create(&target, "run").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    assert!(FileStore::open(&path, "run").is_err());
}

#[test]
fn joining_waits_for_the_file() {
    let (_dir, path) = folder();
    let error = FileStore::join(&path, after(50)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let joiner = std::thread::spawn({
        let path = path.clone();
        move || FileStore::join(&path, after(5000)).unwrap().get("a", after(5000)).unwrap()
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    FileStore::create(&path, "run").unwrap().set("a", b"1").unwrap();
    assert_eq!(joiner.join().unwrap(), b"1");
}
