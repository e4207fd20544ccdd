//! Figures are logged once, where `drumline watch`, `drumline plot` and TensorBoard read them.

use std::path::Path;
use std::process::Command;

use drumline::accelerator::{JsonLines, TensorBoard};
use drumline_observe::events::{self, Event, Reason};
use drumline_observe::plot;
use rank_test::{python_with_tensorboard, ranks_test};

use super::super::trainer::FOLDER;
use super::*;

/// A letter for each line, with its step: `r0 s1 e1`.
fn story(file: &Path) -> String {
    let letter = |event: &Event| match event {
        Event::Run(run) => format!("r{}", run.step),
        Event::Epoch(epoch) => format!("E{}", epoch.step),
        Event::Step(step) => format!("s{}", step.step),
        Event::Eval(eval) => format!("v{}", eval.step),
        Event::End(end) => format!("e{}", end.step),
    };
    events::read(file).unwrap().iter().map(letter).collect::<Vec<_>>().join(" ")
}

ranks_test!(
    figures_are_logged_once_and_a_tracker_that_fails_ends_nothing,
    2,
    {
        drumline::init_logging(Default::default())?;
        let folder = folder()?;
        std::fs::write(folder.join(format!("file{}", std::env::var("RANK")?)), "")?;
        let broken = JsonLines::in_folder(folder.join("file0").join("below"));
        let curves = TensorBoard::in_folder(folder.join("tensorboard"));
        let builder = Accelerator::builder().project_dir(&folder).tracker(broken).tracker(curves);
        let accelerator = builder.seed(3).build()?;
        accelerator.init_trackers("a run", serde_json::json!({ "lr": 0.5 }));
        for step in 1..=3 {
            accelerator.log(step, [("loss", 1.0 / step as f64), ("worst", f64::NAN), ("acc1", 50.0)]);
        }
        accelerator.end_training();
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let report =
            ranks.env([(FOLDER, folder.path())]).env([("DRUMLINE_LOG", ""), ("RUST_LOG", "")]).pass()?;
        let reported: usize = report
            .ranks
            .iter()
            .map(|rank| rank.stderr_text().matches("a tracker failed and is not used any more").count())
            .sum();
        assert_eq!(reported, 1, "{report}");
        let file = folder.path().join("metrics.jsonl");
        assert_eq!(story(&file), "r0 s1 s2 s3 e3", "once, on all ranks together");
        let events = events::read(&file)?;
        let (Event::Run(run), Event::Step(step), Event::End(end)) = (&events[0], &events[2], &events[4])
        else {
            anyhow::bail!("{events:?}")
        };
        assert_eq!((run.world_size, run.seed, run.device.as_str()), (2, 3, "cpu"));
        assert_eq!(run.config["lr"].as_f64(), Some(0.5));
        assert_eq!((step.loss, step.metrics["acc1"], step.metrics["worst"]), (0.5, Some(50.0), None));
        assert_eq!(end.reason, Reason::Finished);
        let runs = plot::load(&[folder.path().to_owned()])?;
        assert!(plot::metrics(&runs).is_superset(&["loss".to_owned(), "acc1".to_owned()].into()), "{runs:?}");
        let picture = folder.path().join("curves.svg");
        plot::save(&picture, &runs, &["loss".to_owned(), "acc1".to_owned()], Default::default())?;
        assert!(std::fs::read_to_string(picture)?.contains("<svg"));
        assert_eq!(std::fs::read_dir(folder.path().join("tensorboard"))?.count(), 1);
        if let Some(python) = python_with_tensorboard() {
            assert_eq!(read_by_tensorboard(&python, folder.path()), "loss [1, 2, 3] 0.5; config True\n");
        }
    }
);

/// What the real package finds.
fn read_by_tensorboard(python: &Path, folder: &Path) -> String {
    let program = "import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]).Reload()
loss = found.Scalars('loss')
text = found.Tensors('config')[0].tensor_proto.string_val[0].decode()
print('loss', [at.step for at in loss], '%g; config' % loss[1].value, '| lr | 0.5 |' in text)";
    let done = Command::new(python).args(["-c", program]).arg(folder.join("tensorboard")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[derive(Clone, Copy)]
enum Run {
    New,
    GoesOn,
}

/// A run that logs each turn, of which a step has two, saves after two steps, and is then lost after a third.
fn logged_run(folder: &Path, run: Run) -> anyhow::Result<()> {
    let builder = Accelerator::builder().project_dir(folder).gradient_accumulation_steps(2);
    let mut training = training(builder, data(16), 2)?;
    // Before it is known whether the run is resumed, as programs for Accelerate do it.
    training.accelerator.init_trackers("a run", serde_json::Value::Null);
    let mut turn = 0;
    if let Run::GoesOn = run {
        turn = 2 * training.accelerator.load_state(folder.join("states"))?.unwrap().step;
    }
    for batch in training.loader.epoch(0).take(6) {
        training.turn(&batch?)?;
        turn += 1;
        training.accelerator.log(turn, [("loss", 1.0)]);
        if turn == 4 {
            training.accelerator.save_state(folder.join("states"))?;
        }
    }
    Ok(())
}

#[test]
fn a_resumed_run_reports_each_step_once_and_a_new_one_keeps_the_file() {
    if std::env::var_os("RANK").is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    logged_run(folder.path(), Run::New).unwrap();
    assert_eq!(story(&file("metrics.jsonl")), "r0 s1 s2 s3 s4 s5 s6");
    logged_run(folder.path(), Run::GoesOn).unwrap();
    assert_eq!(story(&file("metrics.jsonl")), "r0 s1 s2 s3 s4 r4 s5 s6 s7 s8");
    logged_run(folder.path(), Run::New).unwrap();
    assert_eq!(story(&file("metrics.1.jsonl")), "r0 s1 s2 s3 s4 r4 s5 s6 s7 s8");
    assert_eq!(story(&file("metrics.jsonl")), "r0 s1 s2 s3 s4 s5 s6");
}
