//! The environment of Python scripts, modules and shell scripts under `drumline run`. Needs Python, not PyTorch.

use rank_test::require_tool;
use serde_json::Value;

use super::started::{Ended, Started, script};

/// What each rank of `drumline run ARGS` printed about itself, in order of rank.
fn started(args: &[&str], variables: &[(&str, &str)]) -> Vec<Value> {
    let ended = Started::with_variables(&[&["run", "--nproc-per-node", "2"], args].concat(), variables).end();
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    lines_by_rank(&ended).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The one line of each of two ranks, without its prefix.
fn lines_by_rank(ended: &Ended) -> [&str; 2] {
    [0, 1].map(|rank| {
        let prefix = format!("[rank {rank}]: ");
        let mut lines = ended.stdout.lines().filter_map(|line| line.strip_prefix(&prefix));
        let line = lines.next().unwrap_or_else(|| panic!("nothing of rank {rank} in {}", ended.stdout));
        assert_eq!(lines.next(), None, "{}", ended.stdout);
        line
    })
}

fn text<'a>(rank: &'a Value, name: &str) -> &'a str {
    rank["environment"][name].as_str().unwrap_or_else(|| panic!("no {name} in {rank}"))
}

#[test]
fn every_variable_that_torchrun_sets_is_set_and_right() {
    if !require_tool("python3") {
        return;
    }
    let variables = [("OF_THE_PARENT", "kept"), ("PET_ROLE", "trainer")];
    let script = script("environment.py");
    let ranks = started(&["--rdzv-id", "job-7", &script, "--lr", "0.1"], &variables);
    for (rank, printed) in ranks.iter().enumerate() {
        let number = rank.to_string();
        for (name, expected) in [
            ("LOCAL_RANK", number.as_str()),
            ("RANK", &number),
            ("GROUP_RANK", "0"),
            ("ROLE_RANK", &number),
            ("ROLE_NAME", "trainer"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_WORLD_SIZE", "2"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", "job-7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("GOMP_SPINCOUNT", "1000"),
            ("OF_THE_PARENT", "kept"),
        ] {
            assert_eq!(text(printed, name), expected, "{name} of rank {rank}");
        }
        assert_eq!(printed["argv"], serde_json::json!(["--lr", "0.1"]));
        assert!(text(printed, "OMP_NUM_THREADS").parse::<usize>().unwrap() > 0);
        let file = text(printed, "TORCHELASTIC_ERROR_FILE");
        assert!(file.ends_with(&format!("/attempt_0/{rank}/error.json")), "{file}");
    }
    for name in ["MASTER_ADDR", "MASTER_PORT"] {
        assert_eq!(text(&ranks[0], name), text(&ranks[1], name));
    }
    assert!(text(&ranks[0], "MASTER_PORT").parse::<u16>().unwrap() > 0);
}

#[test]
fn variables_that_the_user_has_set_are_kept() {
    if !require_tool("python3") {
        return;
    }
    let variables =
        [("OMP_NUM_THREADS", "3"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("GOMP_SPINCOUNT", "7")];
    for printed in started(&[&script("environment.py")], &variables) {
        assert_eq!(text(&printed, "OMP_NUM_THREADS"), "3");
        assert_eq!(text(&printed, "TORCH_NCCL_ASYNC_ERROR_HANDLING"), "0");
        assert_eq!(text(&printed, "GOMP_SPINCOUNT"), "7");
    }
}

#[test]
fn a_module_is_run_inside_its_package() {
    if !require_tool("python3") {
        return;
    }
    let folder = script("");
    for flag in ["-m", "--module"] {
        let ranks = started(&[flag, "package.train", "-x"], &[("PYTHONPATH", &folder)]);
        for printed in &ranks {
            assert_eq!(
                (&printed["name"], &printed["package"]),
                (&"__main__".into(), &"here".into()),
                "{printed}"
            );
            assert_eq!(printed["argv"], serde_json::json!(["-x"]));
        }
        assert_eq!(text(&ranks[1], "RANK"), "1");
    }
}

#[test]
fn a_script_through_run_path_is_main_and_has_its_arguments() {
    if !require_tool("python3") {
        return;
    }
    for printed in started(&["--run-path", &script("environment.py"), "a", "--b"], &[]) {
        assert_eq!(printed["name"], "__main__");
        assert_eq!(printed["argv"], serde_json::json!(["a", "--b"]));
    }
}

#[test]
fn any_program_is_executed_with_and_without_no_python() {
    if !require_tool("bash") {
        return;
    }
    let script = script("environment.sh");
    for before in [&[][..], &["--no-python"], &["--no-python", "bash"]] {
        let args = [&["run", "--nproc-per-node", "2"], before, &[script.as_str(), "x y", "-m"]].concat();
        let ended = Started::new(&args).end();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        for (rank, line) in lines_by_rank(&ended).into_iter().enumerate() {
            let place = format!("{rank} of 2, {rank} of 2, node 0 at ");
            assert!(line.starts_with(&place) && line.ends_with(": x y -m"), "{line}");
        }
    }
}

#[test]
fn a_module_that_is_to_be_executed_is_refused() {
    let ended = Started::new(&["run", "--no-python", "--module", "package.train"]).end();
    assert!(matches!(ended.code, Some(1 | 2)), "{:?}", ended.code);
    assert!(ended.stderr.contains("--no-python forbids"), "{}", ended.stderr);
}

#[test]
fn command_lines_of_torchruns_tests_are_accepted() {
    let logs = tempfile::tempdir().unwrap();
    let log_dir = format!("--log-dir={}", logs.path().display());
    let old = "--nnodes=1 --nproc_per_node=2 --monitor_interval=1 --start_method=spawn --master_addr=localhost \
               --node_rank=0 --role=r --rdzv_id=j --redirect=3 --tee=3";
    let new = "--nnodes=1:1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=j \
               --rdzv-conf=join_timeout=5,last_call_timeout=1 --monitor-interval=1 --start-method=spawn --no-python";
    let both = "--nnodes=1 --nproc-per-node=2 --rdzv_backend=c10d --rdzv-endpoint=localhost:0 --max_restarts=0 --local_addr=localhost";
    for line in [old, new, both] {
        let flags = line.split_whitespace().chain([log_dir.as_str(), "sh", "-c", "echo $RANK/$WORLD_SIZE"]);
        let ended = Started::new(&std::iter::once("run").chain(flags).collect::<Vec<_>>()).end();
        assert_eq!(ended.code, Some(0), "{line}: {}", ended.stderr);
        assert_eq!(lines_by_rank(&ended), ["0/2", "1/2"], "{line}");
    }
}

#[test]
fn the_given_port_is_the_master_port() {
    let port = drumline_rendezvous::free_port().unwrap().to_string();
    let args = ["run", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port", &port];
    let ended = Started::new(&[&args[..], &["sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT"]].concat()).end();
    let expected = format!("127.0.0.1:{port}");
    assert_eq!(lines_by_rank(&ended), [expected.as_str(); 2], "{}", ended.stderr);
}

#[test]
fn a_virtual_local_rank_is_zero_and_sees_its_own_gpu() {
    let print = "echo $RANK: $LOCAL_RANK ${CUDA_VISIBLE_DEVICES-none}";
    let seen = |flags: &[&str]| {
        let args = [&["run", "--nproc-per-node", "2"], flags, &["sh", "-c", print]].concat();
        let ended = Started::with_variables(&args, &[("CUDA_VISIBLE_DEVICES", "3,5")]).end();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        lines_by_rank(&ended).map(str::to_string)
    };
    assert_eq!(seen(&["--virtual-local-rank"]), ["0: 0 3", "1: 0 5"]);
    assert_eq!(seen(&[]), ["0: 0 3,5", "1: 1 3,5"], "the control");
}

#[test]
fn the_log_folder_is_laid_out_as_torchruns() {
    let logs = tempfile::tempdir().unwrap();
    let program = "echo out of $RANK; echo err of $RANK >&2";
    let folder = logs.path().to_str().unwrap();
    let args = ["run", "--nproc-per-node=2", "--rdzv-id=j", "--log-dir", folder, "-r", "3", "-t", "0:1"];
    let ended = Started::new(&[&args[..], &["sh", "-c", program]].concat()).end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let runs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [run] = &runs[..] else { panic!("one folder for the run, got {runs:?}") };
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("j_"), "{run:?}");
    for rank in 0..2 {
        for (file, expected) in [("stdout.log", "out"), ("stderr.log", "err")] {
            let text = std::fs::read_to_string(run.join(format!("attempt_0/{rank}/{file}"))).unwrap();
            assert_eq!(text, format!("{expected} of {rank}\n"));
        }
    }
    assert_eq!(ended.stdout, "[rank 0]: out of 0\n", "only what is teed reaches the console");
}
