//! `drumline schedule show`: grids, tables, pictures and files of pipelines, and errors in them.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::started::BINARY;

/// Exit code, stdout, stderr of `drumline schedule show` in a folder.
fn show(folder: &Path, args: &str) -> (i32, String, String) {
    let mut command = Command::new(BINARY);
    let output = command
        .args(["schedule", "show"])
        .args(args.split_whitespace())
        .current_dir(folder)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_grid_is_plain_where_there_is_no_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let expected = "\
1f1b: 2 ranks, 2 stages, 3 micro-batches; forward 1, input gradient 1, weight gradients 1, hop 0

rank 0  F0 F1 ·  ·  B0─── F2 B1─── ·  B2───
rank 1  ·  F0 B0─── F1 B1─── F2 B2─── ·  ·

makespan 12.00, idle 25.0 %, 6 messages

rank      busy    idle %        hop    weight     drain   warm-up imbalance      peak of activations
   0      9.00      25.0       0.00      0.00      1.00      2.00      0.00      2.00
   1      9.00      25.0       0.00      0.00      2.00      1.00      0.00      1.00
";
    let (code, stdout, stderr) = show(folder.path(), "--schedule 1f1b --ranks 2 --micro-batches 3");
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, expected, ""));
}

#[test]
fn times_of_the_table_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    for (args, expected) in [
        ("--schedule gpipe", "makespan 33.00, idle 27.3 %"),
        ("--schedule 1F1B --hop 0.1", "idle 30.6 %"),
        ("--schedule Interleaved1F1B --chunks 4", "makespan 26.25, idle 8.6 %"),
        ("--schedule zb1p --input 1.2 --weight 0.8", "idle 14.9 %"),
        ("--schedule zbv", "makespan 25.50, idle 5.9 %"),
    ] {
        let (code, stdout, stderr) = show(folder.path(), args);
        assert!(code == 0 && stdout.contains(expected), "{args}: {stdout}{stderr}");
    }
}

#[test]
fn a_program_is_written_drawn_and_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (code, written, _) = show(folder.path(), "--schedule zbv --svg a.svg --csv a.csv");
    assert_eq!(code, 0);
    let (code, read, stderr) = show(folder.path(), "--from a.csv --csv b.csv");
    assert_eq!((code, stderr.as_str()), (0, ""));
    let [written, read] = [&written, &read].map(|text| text.split_once(": ").unwrap().1);
    assert_eq!(written, read);
    let [first, second] =
        ["a.csv", "b.csv"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
    assert_eq!(first, second);
    let svg = fs::read_to_string(folder.path().join("a.svg")).unwrap();
    let boxes = |class: &str| svg.matches(&format!("class=\"{class}\"")).count();
    // 8 micro-batches on 4 ranks, and one box in the legend.
    assert_eq!(["F0", "F1", "I0", "W1", "B0"].map(boxes), [33, 32, 33, 32, 0]);
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("idle 5.9 %"));
}

#[test]
fn json_is_one_object() {
    let folder = tempfile::tempdir().unwrap();
    let (code, stdout, _) = show(folder.path(), "--schedule gpipe --ranks 2 --micro-batches 1 --json");
    let object: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code, 0);
    assert_eq!((object["makespan"].as_f64(), object["idle_percent"].as_f64()), (Some(6.0), Some(50.0)));
    let first = &object["ranks"][0];
    assert_eq!((first["peak_activations"].as_f64(), first["idle"]["drain"].as_f64()), (Some(1.0), Some(3.0)));
    assert_eq!(first["actions"][1], "0SEND_F0");
}

#[test]
fn what_cannot_be_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("bad.csv"), "0F0,0B0\n1F0,,1X0\n").unwrap();
    let stuck = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    fs::write(folder.path().join("stuck.csv"), stuck).unwrap();
    for (args, code, expected) in [
        (
            "--schedule gpipe --chunks 2",
            1,
            "error: the schedule gpipe has 1 stage a rank, not 2; try interleaved or bfs",
        ),
        ("--schedule interleaved --micro-batches 9", 1, "error: the schedule interleaved divides"),
        (
            "--schedule gpipe --ranks 0",
            1,
            "error: a pipeline of 0 ranks with 1 stages each and 8 micro-batches; try",
        ),
        (
            "--schedule 1f1b --micro-batches 18446744073709551615",
            1,
            "error: a pipeline of 4 ranks with 1 stages each and 18446744073709551615 micro-batches is too large, with",
        ),
        ("--schedule zbv --ranks 9223372036854775807", 1, "error: a pipeline of 9223372036854775807 ranks"),
        (
            "--schedule bfs --chunks 1000000000000",
            1,
            "error: a pipeline of 4 ranks with 1000000000000 stages",
        ),
        ("--schedule interleaved --ranks 2 --micro-batches 7", 1, "error: the schedule interleaved divides"),
        (
            "--from bad.csv",
            1,
            "error: bad.csv: line 2, column 3: `1X0` is no action of a pipeline; try one like",
        ),
        (
            "--from stuck.csv",
            1,
            "error: stuck.csv: ranks 0 and 1 list their messages in different orders: where",
        ),
        ("--from none.csv", 1, "error: cannot read none.csv: No such file"),
        ("--schedule zb2p", 2, "error: invalid value 'zb2p' for '--schedule <SCHEDULE>'"),
        ("--schedule gpipe --hop -1", 2, "error: "),
        ("", 2, "error: the following required arguments were not provided"),
    ] {
        let (actual, stdout, stderr) = show(folder.path(), args);
        assert!(
            actual == code && stdout.is_empty() && stderr.starts_with(expected),
            "{args}: {actual} {stderr}"
        );
    }
    let (code, help, _) = show(folder.path(), "--help");
    assert!(
        code == 0 && help.contains("drumline schedule show --schedule gpipe --micro-batches 1"),
        "{help}"
    );
}
