//! `drumline plot`: pictures of runs, and errors if there are none.

use std::fs;
use std::path::Path;
use std::process::Command;

use drumline_observe::events::{Begin, EvalEvent, Event, EventLog, StepEvent, metrics};

use super::started::BINARY;

/// A run of 50 steps with two evaluations.
fn write_run(folder: &Path) {
    let mut log = EventLog::open(folder, Begin::New).unwrap();
    for step in 1..=50_u64 {
        let (loss, lr) = (2.3 / step as f64, 0.1);
        let step_event =
            StepEvent { step, loss, lr, metrics: metrics([("acc1", step as f64)]), ..Default::default() };
        log.write(&Event::Step(step_event)).unwrap();
        if step % 25 == 0 {
            let metrics = metrics([("acc1", step as f64 - 5.0), ("loss", loss + 0.1)]);
            log.write(&Event::Eval(EvalEvent {
                epoch: step / 25,
                step,
                samples: 9,
                metrics,
                ..EvalEvent::default()
            }))
            .unwrap();
        }
    }
}

/// Exit code, stdout, stderr of `drumline plot` in a folder.
fn plot(folder: &Path, args: &str) -> (i32, String, String) {
    let mut command = Command::new(BINARY);
    let output = command.arg("plot").args(args.split_whitespace()).current_dir(folder).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn runs_are_drawn_to_the_given_file() {
    let folder = tempfile::tempdir().unwrap();
    ["one", "two"].iter().for_each(|name| write_run(&folder.path().join(name)));
    assert_eq!(plot(folder.path(), "one"), (0, "plot.svg\n".into(), String::new()));
    let svg = fs::read_to_string(folder.path().join("plot.svg")).unwrap();
    for text in ["loss", "acc1", "one", "one (eval)"] {
        assert!(svg.contains(&format!("\n{text}\n")), "{text}");
    }
    let args = "one two --metric loss,lr --smooth 0.9 --log --out both.png";
    assert_eq!(plot(folder.path(), args), (0, "both.png\n".into(), String::new()));
    assert!(fs::read(folder.path().join("both.png")).unwrap().starts_with(b"\x89PNG"));
}

#[test]
fn runs_are_found_one_level_down() {
    let folder = tempfile::tempdir().unwrap();
    ["exp/one", "exp/two"].iter().for_each(|name| write_run(&folder.path().join(name)));
    assert_eq!(plot(folder.path(), "exp --metric loss"), (0, "plot.svg\n".into(), String::new()));
    let svg = fs::read_to_string(folder.path().join("plot.svg")).unwrap();
    assert!(svg.contains("\none\n") && svg.contains("\ntwo\n"));
    assert_eq!(plot(folder.path(), "exp exp/one").0, 0, "also twice");
    let (code, _, stderr) = plot(folder.path(), ".");
    assert!(code == 1 && stderr.contains("one level down"), "control: two levels down: {stderr}");
}

#[test]
fn errors_list_what_exists() {
    let folder = tempfile::tempdir().unwrap();
    write_run(&folder.path().join("one"));
    fs::create_dir(folder.path().join("empty")).unwrap();
    for (args, expected) in [
        (
            "none",
            "error: no run in none: there is no metrics.jsonl in it or one level down; try the OUT_DIR of a run",
        ),
        ("one empty", "error: no run in empty: there is no metrics.jsonl"),
        ("one --metric accuracy", "error: no metric `accuracy` in one; try acc1, loss, lr"),
        ("one --smooth 1.5", "error: smoothing of 1.5, expected at least 0 and less than 1; try 0.9"),
        (
            "one --out plot.pdf",
            "error: the format of plot.pdf is not known; try a name that ends in .svg or .png",
        ),
        ("one --out no/such/folder.svg", "error: cannot write no/such/folder.svg: "),
    ] {
        let (code, stdout, stderr) = plot(folder.path(), args);
        assert!(code == 1 && stdout.is_empty() && stderr.starts_with(expected), "{args}: {stderr}");
    }
    assert!(!folder.path().join("plot.svg").exists());
    let (code, help, _) = plot(folder.path(), "--help");
    assert!(
        code == 0 && help.contains("drumline plot exp/a exp/b --metric loss,acc1 --out ab.png"),
        "{help}"
    );
}
