//! What `--dry-run` shows is what the ranks get.

use std::collections::BTreeMap;
use std::process::Command;

use super::started::{BINARY, Started};

/// Shown instead of a value that is known only once the job runs.
const LATER: &str = "(when the job starts)";

type Variables = BTreeMap<String, String>;

/// The stdout of `drumline run` in an environment with only a `PATH`.
fn stdout(args: &[&str]) -> String {
    let mut command = Command::new(BINARY);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).arg("run").args(args).arg("env");
    let ended = Started::of(command).end();
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    ended.stdout
}

fn variables<'a>(lines: impl Iterator<Item = &'a str>) -> Variables {
    let pairs = lines.filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn shown(args: &[&str], rank: usize) -> Variables {
    let text = stdout(&[&["--dry-run"], args].concat());
    let begin = format!("rank {rank} (");
    let lines = text.lines().skip_while(|line| !line.starts_with(&begin)).skip(1);
    variables(lines.map_while(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with("$ ")))
}

fn given(args: &[&str], rank: usize) -> Variables {
    let text = stdout(args);
    let mut given = variables(text.lines().filter_map(|line| line.strip_prefix(&format!("[rank {rank}]: "))));
    given.remove("PATH");
    given
}

#[test]
fn ranks_get_the_variables_that_dry_run_shows() {
    let later = ["DRUMLINE_JOB_KEY_FD", "DRUMLINE_STORE", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"];
    for (args, later) in [
        (&["--nproc-per-node", "2"][..], &later[..]),
        (&["--standalone", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--role", "r"], &later),
        (
            &["--nproc-per-node", "2", "--max-restarts", "3", "--omp", "1", "--log-dir", "/dev/null"],
            &later[..3],
        ),
        (&["--nproc-per-node", "2", "--virtual-local-rank", "--rdzv-id", "j"], &later),
    ] {
        for rank in 0..2 {
            let (mut shown, mut given) = (shown(args, rank), given(args, rank));
            assert_eq!(names(&shown), names(&given), "{args:?}");
            let known_later: Vec<_> =
                shown.iter().filter(|(_, value)| *value == LATER).map(|(name, _)| name.clone()).collect();
            assert_eq!(known_later, later, "{args:?}");
            let fresh_id = if args.contains(&"--standalone") { "TORCHELASTIC_RUN_ID" } else { "" };
            for name in known_later.iter().map(String::as_str).chain([fresh_id]) {
                shown.remove(name);
                given.remove(name);
            }
            assert_eq!(shown, given, "{args:?}");
        }
    }
}

fn names(variables: &Variables) -> Vec<&String> {
    variables.keys().collect()
}
