//! `drumline key new`: makes a job key in a new file that only its owner can read.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use drumline_rendezvous::JobKey;

#[test]
fn a_new_key_can_be_used_and_never_overwrites_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.key");
    let new =
        || Command::new(env!("CARGO_BIN_EXE_drumline")).args(["key", "new"]).arg(&path).output().unwrap();
    let made = new();
    let stderr = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success() && made.stdout.is_empty(), "{stderr}");
    assert!(stderr.contains("DRUMLINE_JOB_KEY_FILE="), "{stderr}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let key = JobKey::from_file(&path).unwrap();
    let again = new();
    let stderr = String::from_utf8_lossy(&again.stderr);
    assert!(!again.status.success() && stderr.contains("already exists"), "{stderr}");
    assert_eq!(JobKey::from_file(&path).unwrap(), key, "left alone");
}
