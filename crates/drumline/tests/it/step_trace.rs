//! A trace of real steps of two ranks: each bucket is there, and the wait lies within backward.

use drumline::engine::StepTrace;
use drumline::{Ddp, DdpOptions, ProcessGroup};
use rank_test::ranks_test;
use serde_json::Value;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

fn spans<'a>(lines: &'a [Value], name: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["ph"] == "X" && line["name"] == name).collect()
}

fn times(span: &Value) -> (f64, f64) {
    let begin = span["ts"].as_f64().unwrap();
    (begin, begin + span["dur"].as_f64().unwrap())
}

ranks_test!(a_trace_shows_each_bucket_and_what_was_not_hidden, 2, {
    let group = ProcessGroup::from_env()?;
    let (trace, folder) = (StepTrace::new(group.rank()), tempfile::tempdir()?);
    let vs = VarStore::new(Device::Cpu);
    let layer = |name: &str| nn::linear(vs.root() / name, 256, 256, Default::default());
    let model = nn::seq().add(layer("a")).add_fn(|x| x.relu()).add(layer("b"));
    // The weights of each layer fill a bucket.
    let options = DdpOptions {
        bucket_cap: 200_000,
        first_bucket: 200_000,
        observer: Some(trace.clone()),
        ..DdpOptions::default()
    };
    let model = Ddp::new(model, &vs, &group, options)?;
    for _ in 0..3 {
        let x = Tensor::rand([16, 256], (Kind::Float, Device::Cpu));
        let loss = trace.over("forward", || model.forward(&x))?.square().mean(Kind::Float);
        trace.over("backward", || model.backward(&loss))?;
    }
    trace.write(folder.path())?;
    let path = folder.path().join(format!("trace/rank-{:05}.json", group.rank()));
    let whole: Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let lines = whole["traceEvents"].as_array().unwrap();
    for (name, track) in
        [("forward", "compute"), ("bucket 0", "communication"), ("bucket 1", "communication")]
    {
        let found = spans(lines, name);
        assert!(found.len() == 3 && found.iter().all(|span| span["cat"] == track), "{name}: {found:?}");
    }
    let bytes = spans(lines, "bucket 0")[0]["args"]["bytes"].as_u64();
    assert!(bytes >= Some(256 * 256 * 4), "{bytes:?}");
    for (wait, backward) in spans(lines, "wait").iter().zip(spans(lines, "backward")) {
        let ((begin, end), (outer_begin, outer_end)) = (times(wait), times(backward));
        assert!(outer_begin <= begin && end <= outer_end && wait["tid"] == backward["tid"]);
    }
    assert_eq!(spans(lines, "wait").len(), 3);
});
