//! `drumline doctor`: the report about a host, links between ranks, and an exit code that shows whether there is a problem.

use std::process::{Command, Output};

use serde_json::Value;

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

/// Runs a shell command in which `$D` is the program.
fn shell(line: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", line]).env("D", DRUMLINE).env_remove("RANK").env_remove("WORLD_SIZE");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    // A launcher puts the rank before each line.
    let text = text(&output.stdout).replace("[rank 0]: ", "");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn problems(output: &Output) -> Vec<String> {
    let json = json(output);
    json["problems"].as_array().unwrap().iter().map(|problem| problem.as_str().unwrap().to_owned()).collect()
}

/// The number of problems about open files.
fn about_files(output: &Output) -> usize {
    problems(output).iter().filter(|problem| problem.contains("open files are allowed")).count()
}

#[test]
fn a_host_is_examined_and_low_limits_are_problems() {
    let lines = shell("exec $D doctor");
    let stdout = text(&lines.stdout);
    for part in ["cores ", "memory ", "/dev/shm", "limits ", "name ", "ports "] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    // The control: without the limit it is no problem. The machine may have others.
    let control = shell("exec $D doctor --json");
    assert_eq!((about_files(&control), control.status.success()), (0, problems(&control).is_empty()));
    let tight = shell("ulimit -n 60; exec $D doctor --json");
    assert_eq!((about_files(&tight), tight.status.code()), (1, Some(1)), "{tight:?}");
    let output = shell("ulimit -n 60; exec $D doctor");
    let stdout = text(&output.stdout);
    let (first, second) = stdout.split_once('\n').unwrap();
    assert!(
        first.contains("problem") && second.contains("try ulimit -n 65536"),
        "problems come first: {stdout}"
    );
    assert_eq!(text(&output.stderr), "", "they are printed once");
}

#[test]
fn links_between_ranks_are_measured_and_intact() {
    for line in
        ["exec $D doctor --nproc-per-node 2 --json", "exec $D run --nproc-per-node 2 -- $D doctor --json"]
    {
        for transport in ["auto", "tcp"] {
            let output = shell(&format!("export DRUMLINE_TRANSPORT={transport}; {line}"));
            let report = json(&output);
            let links = report["links"].as_array().unwrap();
            assert_eq!((links.len(), &report["ranks"]), (1, &2.into()), "{output:?}");
            let link = &links[0];
            assert_eq!(
                (&link["ranks"], &link["wrong_bytes"]),
                (&serde_json::json!([0, 1]), &0.into()),
                "{link}"
            );
            assert_eq!(link["way"], if transport == "tcp" { "tcp" } else { "shared_memory" }, "{line}");
            assert!(
                link["latency_us"].as_f64() > Some(0.0) && link["gb_per_s"].as_f64() > Some(0.0),
                "{link}"
            );
            assert_eq!(output.status.success(), problems(&output).is_empty(), "{output:?}");
        }
    }
}
