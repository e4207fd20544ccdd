//! Traces as a viewer reads them.

use super::*;

const MS: Duration = Duration::from_millis(1);

fn lines(path: &Path) -> Vec<Value> {
    let whole: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert_eq!(whole["displayTimeUnit"], "ms");
    whole["traceEvents"].as_array().unwrap().clone()
}

fn spans(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line["ph"] == "X").collect()
}

/// Two spans of one row that overlap have to lie within each other, to the last digit.
fn assert_nested(lines: &[Value]) {
    let times = |line: &Value| {
        (line["ts"].as_f64().unwrap(), line["ts"].as_f64().unwrap() + line["dur"].as_f64().unwrap())
    };
    for first in spans(lines) {
        for second in spans(lines) {
            let is_one_row = first["pid"] == second["pid"] && first["tid"] == second["tid"];
            let ((begin, end), (later, its_end)) = (times(first), times(second));
            let crosses = begin < later && later < end && end < its_end;
            assert!(!(is_one_row && crosses), "{first} crosses {second}");
        }
    }
}

/// A step: forward and backward, with two reductions that begin in backward and end behind it.
fn step(trace: &mut Trace, begin: Instant) {
    trace.span("batch", Track::Loading, begin, begin + MS, &[]);
    trace.span("step", Track::Compute, begin + MS, begin + 11 * MS, &[("step", 1.into())]);
    trace.span("forward", Track::Compute, begin + MS, begin + 4 * MS, &[]);
    trace.span("backward", Track::Compute, begin + 4 * MS, begin + 8 * MS, &[]);
    trace.span("bucket 0", Track::Communication, begin + 5 * MS, begin + 7 * MS, &[("bytes", 1024.into())]);
    trace.span("bucket 1", Track::Communication, begin + 6 * MS, begin + 9 * MS, &[]);
}

#[test]
fn a_step_has_its_tracks_and_no_span_crosses_another() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = Trace::new(3);
    step(&mut trace, Instant::now());
    let path = file_of(folder.path(), 3);
    assert!(path.ends_with("trace/rank-00003.json"));
    trace.write(&path).unwrap();
    let lines = lines(&path);
    assert_nested(&lines);
    assert_eq!(spans(&lines).len(), 6);
    assert!(lines.iter().all(|line| line["pid"] == 3));
    let names = |what: &str| -> Vec<_> {
        let named = lines.iter().filter(|line| line["name"] == what);
        named.map(|line| line["args"]["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("process_name"), ["rank 3"]);
    assert_eq!(names("thread_name"), ["compute", "communication", "communication", "loading"]);
    let bucket = lines.iter().find(|line| line["name"] == "bucket 0").unwrap();
    assert_eq!((&bucket["args"]["bytes"], &bucket["dur"]), (&1024.into(), &2000.0.into()));
}

#[test]
fn times_are_exact_whatever_the_date() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    let mut trace = Trace::new(0);
    // A span that began before the trace did, and many that touch.
    let begin = trace.clocks.0 - Duration::from_micros(500);
    let ns = Duration::from_nanos(1);
    trace.span("outer", Track::Compute, begin, begin + 1001 * ns, &[]);
    (0..1000).for_each(|at| trace.span("inner", Track::Compute, begin + at * ns, begin + (at + 1) * ns, &[]));
    trace.write(&path).unwrap();
    let lines = lines(&path);
    let inner = spans(&lines).iter().filter(|line| line["tid"] == 0).count();
    assert_eq!(inner, 1001, "all in one row");
    let first = spans(&lines)[0]["ts"].as_f64().unwrap();
    let second = spans(&lines)[2]["ts"].as_f64().unwrap();
    assert!((second - first - 1e-3).abs() < 6e-4, "{first} {second}");
}

#[test]
fn traces_of_several_ranks_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let files: Vec<_> = (0..3).map(|rank| file_of(folder.path(), rank)).collect();
    for (rank, file) in files.iter().enumerate() {
        let mut trace = Trace::new(rank);
        step(&mut trace, begin);
        trace.write(file).unwrap();
    }
    // As if rank 2 had begun in another period.
    let text = fs::read_to_string(&files[2]).unwrap();
    let mut whole: Value = serde_json::from_str(&text).unwrap();
    let base = whole["baseTimeNanoseconds"].as_u64().unwrap();
    whole["baseTimeNanoseconds"] = (base - 1_000_000_000).into();
    for line in whole["traceEvents"].as_array_mut().unwrap() {
        if let Some(ts) = line["ts"].as_f64() {
            line["ts"] = (ts + 1e6).into();
        }
    }
    fs::write(&files[2], whole.to_string()).unwrap();
    let all = folder.path().join("all.json");
    merge(&files, &all).unwrap();
    let lines = lines(&all);
    assert_nested(&lines);
    let forwards: Vec<f64> = spans(&lines)
        .iter()
        .filter(|line| line["name"] == "forward")
        .map(|line| line["ts"].as_f64().unwrap())
        .collect();
    assert_eq!(forwards.len(), 3);
    // The clocks of the three were read one after the other.
    assert!(forwards.iter().all(|ts| (ts - forwards[0]).abs() < 1e5), "{forwards:?}");
    let error = merge(&[folder.path().join("none.json")], &all).unwrap_err().to_string();
    assert!(error.contains("none.json"), "{error}");
}

#[test]
fn arrows_lead_from_a_span_of_one_rank_to_one_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let arrow = || Arrow { name: "activations".to_owned(), id: u64::MAX - 1 };
    let spans = [
        Span::new("sends", Track::Compute, [begin, begin + MS]).arg("stage", 0).arrow_out(arrow()),
        Span::new("uses", Track::Compute, [begin + 2 * MS, begin + 2 * MS]).arrow_in(arrow()),
    ];
    let files: Vec<_> = (0..2).map(|rank| file_of(folder.path(), rank)).collect();
    for (rank, span) in spans.into_iter().enumerate() {
        let mut trace = Trace::new(rank);
        trace.add(span);
        // Directly behind the first, and in a lane of its own.
        trace.span("next", Track::Compute, begin + MS, begin + 3 * MS, &[]);
        trace.span("across", Track::Compute, begin + MS / 2, begin + 2 * MS, &[]);
        trace.write(&files[rank]).unwrap();
    }
    let all = folder.path().join("all.json");
    merge(&files, &all).unwrap();
    let lines = lines(&all);
    let ends: Vec<_> = lines.iter().filter(|line| line["cat"] == "message").collect();
    let keys = ends.iter().map(|end| (end["ph"].as_str(), end["id"].as_str(), end["name"].as_str()));
    let expected = ["s", "f"].map(|ph| (Some(ph), Some("0xfffffffffffffffe"), Some("activations")));
    assert_eq!(keys.collect::<Vec<_>>(), expected);
    assert_eq!([&ends[0]["bp"], &ends[1]["bp"]], [&Value::Null, &"e".into()]);
    for (end, name) in ends.iter().zip(["sends", "uses"]) {
        let span = *self::spans(&lines).iter().find(|span| span["name"] == name).unwrap();
        assert_eq!([&end["pid"], &end["tid"]], [&span["pid"], &span["tid"]], "{name}");
        let number = |line: &Value, key: &str| line[key].as_f64().unwrap();
        let later = number(end, "ts") - number(span, "ts");
        assert!((0.0..=number(span, "dur")).contains(&later), "{name}: {later}");
        assert!(name == "uses" || later < number(span, "dur"), "the next span begins at the end");
    }
}

#[test]
fn a_trace_does_not_grow_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let (mut trace, now) = (Trace::new(0), Instant::now());
    (0..MOST_SPANS + 5).for_each(|_| trace.span("x", Track::Compute, now, now, &[]));
    assert_eq!(trace.len(), MOST_SPANS);
    let path = folder.path().join("t.json");
    trace.write(&path).unwrap();
    assert!(fs::read_to_string(path).unwrap().contains("5 spans left out"));
}
