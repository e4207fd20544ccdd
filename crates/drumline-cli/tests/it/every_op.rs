//! Every operation, in both memories and over both transports, measured and checked.

use super::started::{Started, rows};

const FIELDS: [&str; 11] = [
    "op",
    "world",
    "bytes",
    "dtype",
    "memory",
    "backend",
    "transport",
    "median_us",
    "p99_us",
    "algbw_gbps",
    "busbw_gbps",
];

/// The operations that `drumline bench` knows, from its error about another one.
fn operations() -> Vec<String> {
    let error = Started::new(&["bench", "nothing"]).end().stderr;
    let list = error.split_once("[possible values: ").and_then(|(_, rest)| rest.split_once(']'));
    let (list, _) = list.unwrap_or_else(|| panic!("no list in {error}"));
    list.split(", ").map(str::to_owned).collect()
}

#[test]
fn each_is_measured_in_both_memories_over_both_transports() {
    let operations = operations();
    assert!(operations.len() >= 10, "{operations:?}");
    for op in &operations {
        for (memory, transport) in [("private", "shm"), ("private", "tcp"), ("heap", "shm"), ("heap", "tcp")]
        {
            measured(op, memory, transport);
        }
    }
}

fn measured(op: &str, memory: &str, transport: &str) {
    let asked: &[&str] = if op == "barrier" { &[] } else { &["--sizes", "16,8K"] };
    let rows = rows(&[&[op, "--memory", memory, "--transport", transport], asked].concat());
    let sizes: &[u64] = if op == "barrier" { &[0] } else { &[16, 8192] };
    assert_eq!(rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), sizes, "{op}");
    for row in &rows {
        let object = row.as_object().unwrap();
        let has_all = FIELDS.iter().all(|field| object.contains_key(*field));
        assert!(object.len() == FIELDS.len() && has_all, "{row}");
        assert_eq!((row["op"].as_str(), row["world"].as_u64()), (Some(op), Some(2)));
        assert_eq!([&row["memory"], &row["transport"], &row["dtype"]], [memory, transport, "f32"]);
        let (median, p99) = (row["median_us"].as_f64().unwrap(), row["p99_us"].as_f64().unwrap());
        assert!(median > 0.0 && p99 >= median, "{row}");
    }
}

#[test]
fn every_type_and_a_world_that_does_not_divide_the_ladder() {
    for dtype in "f64 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64 bool".split(' ') {
        let rows = rows(&["all-reduce", "--dtype", dtype, "--sizes", "4K"]);
        assert_eq!(rows[0]["dtype"], dtype);
    }
    let rows = rows(&["reduce-scatter", "--nproc-per-node", "3", "--sizes", "24", "--no-bind"]);
    assert_eq!(rows[0]["world"], 3);
}

#[test]
fn cold_buffers() {
    assert_eq!(rows(&["all-reduce", "--cold", "--sizes", "1M"]).len(), 1);
}

#[test]
fn the_default_output_is_a_table() {
    let ended =
        Started::new(&["bench", "all-gather", "--sizes", "4K,64K", "--seconds-per-size", "0.01"]).end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert!(
        lines[0].starts_with("all-gather of f32, 2 ranks; private memory, hot; transport shm; "),
        "{}",
        ended.stdout
    );
    assert!(
        lines[3].contains("4 KiB") && lines[4].contains("64 KiB") && ended.stdout.contains('█'),
        "{}",
        ended.stdout
    );
}

#[test]
fn a_table_of_one_rank_has_no_bus_rate() {
    let args = ["all-reduce", "--nproc-per-node", "1", "--sizes", "1KiB", "--seconds-per-size", "0.01"];
    let ended = Started::new(&[&["bench"], &args[..]].concat()).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let last = ended.stdout.lines().last().unwrap();
    assert!(last.contains("1 KiB") && last.ends_with('–'), "{}", ended.stdout);
}

#[test]
fn rows_are_printed_as_they_are_measured() {
    let mut job = Started::new(&["bench", "all-reduce", "--sizes", "4K,8M", "--seconds-per-size", "1"]);
    let line = job.line_of_stdout(" 4 KiB");
    assert!(job.is_running(), "{line}");
    assert_eq!(job.end().code, Some(0));
}

#[test]
fn flags_that_do_not_apply_are_noted() {
    let args = ["bench", "barrier", "--sizes", "4K", "--dtype", "f32", "--seconds-per-size", "0.01"];
    let ended = Started::new(&args).end();
    assert_eq!(ended.code, Some(0));
    assert_eq!(ended.stderr, "note: a barrier moves no data: --sizes and --dtype do not apply\n");
}
