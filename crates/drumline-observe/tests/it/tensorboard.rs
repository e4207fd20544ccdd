//! Event files as the real TensorBoard sees them: through its reader, and through its server.

use std::path::Path;
use std::process::Command;

use drumline_observe::tensorboard::Writer;
use rank_test::python_with_tensorboard;
use serde_json::Value;

/// Prints everything that TensorBoard's own reader finds; it checks the checksums of each record.
const READ: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
a = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0, 'tensors': 0, 'histograms': 0})
a.Reload()
tags = a.Tags()
out = {'scalars': {}, 'histograms': {}, 'texts': {}}
for tag in tags['scalars']:
    out['scalars'][tag] = [[e.step, e.value if e.value == e.value else 'nan'] for e in a.Scalars(tag)]
for tag in tags['histograms']:
    h = a.Histograms(tag)[0].histogram_value
    out['histograms'][tag] = [h.min, h.max, h.num, h.sum, sum(h.bucket), len(h.bucket) == len(h.bucket_limit)]
for tag in tags['tensors']:
    assert a.SummaryMetadata(tag).plugin_data.plugin_name == 'text', tag
    out['texts'][tag] = [t.decode() for t in tensor_util.make_ndarray(a.Tensors(tag)[0].tensor_proto)]
json.dump(out, sys.stdout)
"#;

/// Prints what TensorBoard's server sends to a browser.
const SERVE: &str = r#"
import json, sys, time, urllib.parse, urllib.request
from tensorboard import program
board = program.TensorBoard()
board.configure(argv=[None, '--logdir', sys.argv[1], '--host', '127.0.0.1', '--port', '0', '--load_fast', 'false'])
url = board.launch()
def ask(path, **query):
    with urllib.request.urlopen(url + 'data/plugin/' + path + '?' + urllib.parse.urlencode(query), timeout=10) as answer:
        return json.load(answer)
end = time.monotonic() + 60
while not (ask('scalars/tags') and ask('histograms/tags') and ask('text/tags')):
    assert time.monotonic() < end, 'nothing was loaded'
    time.sleep(0.2)
run = next(iter(ask('scalars/tags')))
json.dump({
    'loss': [[step, value] for _, step, value in ask('scalars/scalars', run=run, tag='train/loss')],
    'histogram': [[h[1], sum(b[2] for b in h[2])] for h in ask('histograms/histograms', run=run, tag='grad')],
    'text': [t['text'] for t in ask('text/text', run=run, tag='config')],
}, sys.stdout)
"#;

/// Writes a small run.
fn write(folder: &Path) {
    let mut writer = Writer::create(folder).unwrap();
    writer.text("config", 0, "**OPTIM.BASE_LR** 0.1 <script>alert(1)</script> ü").unwrap();
    for step in 1..=100_u64 {
        writer.scalars(step, &[("train/loss", 1.0 / step as f64), ("lr", 0.25)]).unwrap();
    }
    let values: Vec<f32> = (0..1001).map(|at| (at - 500) as f32 / 500.0).collect();
    writer.histogram("grad", 7, &values).unwrap();
    writer.scalar("nan", 3, f64::NAN).unwrap();
}

fn ask(python: &Path, script: &str, folder: &Path) -> Value {
    let mut command = Command::new("timeout");
    let output =
        command.arg("120").arg(python).args(["-W", "ignore", "-c", script]).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(stdout.lines().last().unwrap_or_default()).unwrap_or_else(|_| panic!("{stdout}"))
}

#[test]
fn the_reader_of_tensorboard_finds_all_that_was_written() {
    let Some(python) = python_with_tensorboard() else { return };
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let found = ask(&python, READ, folder.path());
    let losses = found["scalars"]["train/loss"].as_array().unwrap();
    assert_eq!((losses.len(), &losses[3]), (100, &serde_json::json!([4, 0.25])));
    assert_eq!(found["scalars"]["lr"][99], serde_json::json!([100, 0.25]));
    assert_eq!(found["scalars"]["nan"], serde_json::json!([[3, "nan"]]));
    let grad = &found["histograms"]["grad"];
    assert_eq!((&grad[0], &grad[1], &grad[2]), (&(-1.0).into(), &1.0.into(), &1001.0.into()));
    assert!(grad[3].as_f64().unwrap().abs() < 1e-4 && grad[4] == 1001.0 && grad[5] == true, "{grad}");
    let text = found["texts"]["config"][0].as_str().unwrap();
    assert!(text.starts_with("**OPTIM.BASE_LR** 0.1") && text.ends_with('ü'), "{text}");
}

#[test]
fn repeated_steps_are_shown_once() {
    let Some(python) = python_with_tensorboard() else { return };
    let steps = |resume: fn(&mut Writer)| {
        let folder = tempfile::tempdir().unwrap();
        let mut first = Writer::create(folder.path()).unwrap();
        (1..=5).for_each(|step| first.scalar("loss", step, 1.0).unwrap());
        // The run is killed. Its last checkpoint is that of step 3.
        let mut second = Writer::create(folder.path()).unwrap();
        resume(&mut second);
        (4..=6).for_each(|step| second.scalar("loss", step, 0.5).unwrap());
        let found = ask(&python, READ, folder.path());
        let steps =
            found["scalars"]["loss"].as_array().unwrap().iter().map(|point| point[0].as_u64().unwrap());
        steps.collect::<Vec<_>>()
    };
    assert_eq!(steps(|writer| writer.resume_after(3).unwrap()), [1, 2, 3, 4, 5, 6]);
    assert_eq!(steps(|_| ()).len(), 8, "control: without the call they stay");
}

#[test]
fn a_broken_record_is_not_read() {
    let Some(python) = python_with_tensorboard() else { return };
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    // Flips a bit within the scalars. The control is the test above.
    let place = bytes.len() / 10;
    bytes[place] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let found = ask(&python, READ, folder.path());
    let losses = found["scalars"]["train/loss"].as_array().unwrap().len();
    assert!(losses > 0 && losses < 100, "{losses} of 100");
}

#[test]
fn the_server_of_tensorboard_shows_all_that_was_written() {
    let Some(python) = python_with_tensorboard() else { return };
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let shown = ask(&python, SERVE, folder.path());
    let losses = shown["loss"].as_array().unwrap();
    assert_eq!((losses.len(), &losses[3]), (100, &serde_json::json!([4, 0.25])));
    let histogram = &shown["histogram"][0];
    assert_eq!(histogram[0], 7);
    assert!((histogram[1].as_f64().unwrap() - 1001.0).abs() < 1e-3, "{histogram}");
    let text = shown["text"][0].as_str().unwrap();
    assert!(text.contains("<strong>OPTIM.BASE_LR</strong>") && !text.contains("<script>"), "{text}");
}
