//! Command lines of other launchers: they work, or the error names what does.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::started::{BINARY, Ended, Started};

/// A script as those for `torch.distributed.launch` were written before PyTorch 2.
const OLD: &str = "import argparse\nparser = argparse.ArgumentParser()\n\
                   parser.add_argument('--local_rank', type=int)\nprint('local rank', parser.parse_args().local_rank)\n";

fn typed(folder: &Path, args: &str) -> Ended {
    let mut command = Command::new(BINARY);
    command.args(args.split_whitespace()).current_dir(folder).env_remove("PYTHON_EXEC");
    command.env_remove("DRUMLINE_JOB_KEY_FILE").env_remove("DRUMLINE_JOB_KEY_FD");
    Started::of(command).end()
}

/// The stderr of a command line that is refused.
fn refused(args: &str) -> String {
    let ended = typed(Path::new("/"), args);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{args}: {}", ended.stderr);
    ended.stderr
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn a_script_gets_the_local_rank_in_its_own_spelling() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("src/bin");
    fs::create_dir_all(&package).unwrap();
    for (name, text) in [("old.py", OLD.to_string()), ("new.py", OLD.replace("local_rank'", "local-rank'"))] {
        fs::write(folder.path().join(name), &text).unwrap();
        fs::write(package.join(name), &text).unwrap();
    }
    for program in ["old.py", "new.py", "-m src.bin.old"] {
        let ended = typed(folder.path(), &format!("launch --nproc_per_node=2 {program}"));
        assert_eq!(ended.code, Some(0), "{program}: {}", ended.stderr);
        assert_eq!(sorted(&ended.stdout), ["[rank 0]: local rank 0", "[rank 1]: local rank 1"], "{program}");
    }
    let wrong = typed(folder.path(), "launch --rank-spelling dash old.py");
    assert_eq!(wrong.code, Some(1), "control: what is given wins: {}", wrong.stdout);
}

#[test]
fn the_failure_report_names_the_flag_if_the_parser_was_not_found() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("options.py"), OLD).unwrap();
    fs::write(folder.path().join("train.py"), "import options\n").unwrap();
    let ended = typed(folder.path(), "launch --nproc_per_node=2 train.py");
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains(
            "what to do: its parser has --local_rank; try drumline launch --rank-spelling underscore"
        )
    );
    let ended = typed(folder.path(), "launch --rank-spelling underscore train.py");
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), "[rank 0]: local rank 0\n"),
        "{}",
        ended.stderr
    );
}

#[test]
fn run_notes_that_it_passes_no_local_rank_to_a_script_that_declares_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("old.py"), OLD).unwrap();
    let both = format!("import os\nos.environ['LOCAL_RANK']\n{OLD}");
    fs::write(folder.path().join("both.py"), both).unwrap();
    let note =
        "note: old.py declares --local_rank, which run does not pass, like torchrun; drumline launch does\n";
    assert_eq!(typed(folder.path(), "run old.py").stderr, note);
    for silent in ["run old.py --local_rank=0", "run both.py", "launch --use_env old.py", "launch old.py"] {
        assert_eq!(typed(folder.path(), silent).stderr, "", "{silent}");
    }
}

#[test]
fn errors_about_flags_of_other_launchers_name_ours() {
    for (args, expected) in [
        ("run -n 2 ./a", "tip: try --nproc-per-node N\n"),
        ("run -np 2 ./a", "tip: try --nproc-per-node N\n"),
        ("run --num_processes 2 ./a", "tip: try --nproc-per-node N"),
        ("launch --num_machines=2 ./a", "tip: try --nnodes N\n"),
        ("run --gpus 2 ./a", "tip: try --num-gpus N\n"),
        ("train -n 2 --cfg f", "tip: try --nproc-per-node N\n"),
        ("run --nproc-per-nose 2 ./a", "a similar argument exists: '--nproc-per-node'"),
        ("rn --nproc-per-node 2 ./a", "a similar subcommand exists: 'run'"),
        ("trian --cfg f", "a similar subcommand exists: 'train'"),
        ("trane --cfg f", "some similar subcommands exist: 'trace', 'train'"),
        ("train.py --lr 0.1", "tip: try drumline run train.py --lr 0.1\n"),
        ("./train 8", "tip: try drumline run ./train 8\n"),
        ("ls", "tip: try drumline runs\n"),
        ("eval --cfg f", "tip: try drumline test\n"),
        (
            "train --lr 0.1 --cfg f",
            "tip: try OPTIM.BASE_LR 0.1 after the flags: keys of the configuration have no dashes\n",
        ),
        ("train --cfg f --OUT_DIR x", "tip: try OUT_DIR VALUE after the flags"),
        ("train -c f", "tip: try --cfg FILE\n"),
        ("train --cfg f --frobnicate", "tip: try KEY VALUE: keys of the configuration follow the flags"),
        ("train c.yaml", "tip: try drumline train --cfg c.yaml\n"),
    ] {
        let stderr = refused(args);
        assert!(stderr.contains(expected) && !stderr.contains("as a value, use '-- "), "{args}: {stderr}");
        assert_eq!(stderr.matches("tip: ").count(), 1, "{args}: {stderr}");
    }
}

#[test]
fn a_typed_interpreter_gets_the_local_rank_after_its_script() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("old.py"), OLD).unwrap();
    for program in ["python3 old.py", "python3 -u -m old"] {
        let ended = typed(folder.path(), &format!("launch --nproc_per_node=2 {program}"));
        assert_eq!(ended.code, Some(0), "{program}: {}", ended.stderr);
        assert_eq!(sorted(&ended.stdout), ["[rank 0]: local rank 0", "[rank 1]: local rank 1"], "{program}");
    }
    let ended = typed(folder.path(), "launch python3 -c print(__import__('sys').argv) x");
    assert_eq!(ended.stdout, "[rank 0]: ['-c', '--local-rank=0', 'x']\n", "{}", ended.stderr);
    let note =
        "note: old.py declares --local_rank, which run does not pass, like torchrun; drumline launch does\n";
    assert_eq!(typed(folder.path(), "run python3 old.py").stderr, note);
}

#[test]
fn a_dry_run_of_a_script_that_does_not_exist_is_refused() {
    let expected =
        "error: there is no file `nosuch.py` to be run with Python; try its full path, or -m for a module\n";
    assert_eq!(refused("run --dry-run nosuch.py"), expected);
    assert_eq!(refused("run --dry-run python3 nosuch.py"), expected);
    let plan = typed(Path::new("/"), "run --dry-run ./nosuch").stdout;
    assert!(
        plan.contains("cannot start     there is no program `./nosuch`: there is no such file"),
        "{plan}"
    );
    let control = typed(Path::new("/"), "run --dry-run sh").stdout;
    assert!(control.contains("$ sh\n") && !control.contains("cannot start"), "{control}");
}

#[test]
fn a_fault_of_a_step_in_a_python_program_is_noted() {
    let note = "will not happen: a Python program does not report its steps; try after=30s instead of a step";
    for (program, expected) in [("-m pkg", 1), ("python3 -c pass", 1), ("sh", 0)] {
        let ended = typed(Path::new("/"), &format!("run --dry-run --fault rank=0,step=3,kill {program}"));
        assert_eq!(ended.stderr.matches(note).count(), expected, "{program}: {}", ended.stderr);
    }
}

#[test]
fn errors_about_missing_gpus_name_the_flag_that_was_typed() {
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    for (args, flag) in
        [("run --include localhost:1 ./a", "--include"), ("run --num_gpus=-1 ./a", "--num-gpus")]
    {
        let stderr = refused(args);
        assert!(
            stderr.contains(&format!("error: {flag} chooses among this node's GPUs")),
            "{args}: {stderr}"
        );
        assert!(
            stderr.contains("try --nproc-per-node N") && !stderr.contains("--nproc-per-node gpu"),
            "{args}: {stderr}"
        );
    }
}

#[test]
fn a_module_that_is_typed_as_a_program_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("src/bin")).unwrap();
    fs::write(folder.path().join("src/bin/train.py"), "print('trains')\n").unwrap();
    let ended = typed(folder.path(), "launch --nproc_per_node=2 src.bin.train --reload");
    assert_ne!(ended.code, Some(0));
    let expected = "it is the Python module of src/bin/train.py; try -m before src.bin.train";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    let ended = typed(folder.path(), "launch -m src.bin.train --reload");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "[rank 0]: trains\n"), "{}", ended.stderr);
}

#[test]
fn the_error_for_several_nodes_without_a_key_names_the_command_that_makes_one() {
    for args in [
        "run --nnodes 2 --node-rank 0 --master-addr 192.0.2.2 ./a",
        "run --nnodes 2 --node-rank 1 --master-addr 192.0.2.2 ./a",
        "launch --nnodes=2 --node_rank=1 --nproc_per_node=2 --master_addr=192.0.2.2 --master_port=12333 ./a",
        "run --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.2:29400 ./a",
    ] {
        let stderr = refused(args);
        assert!(stderr.contains("try `drumline key new job.key`"), "{args}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args}: {stderr}");
    }
}

#[test]
fn the_error_of_a_rank_that_fails_at_once_does_not_suggest_more_restarts() {
    let ended = typed(Path::new("/"), "run --max-restarts 2 false");
    assert_eq!(ended.code, Some(1));
    let expected = "all 2 restarts are used; more restarts will hardly help; try what its error says";
    assert!(
        ended.stderr.contains(expected) && !ended.stderr.contains("larger --max-restarts"),
        "{}",
        ended.stderr
    );
}
