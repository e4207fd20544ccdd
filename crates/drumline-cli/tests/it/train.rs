//! `drumline train`, `test` and `data` run `drumline-train`: as ranks of the launcher, or in this process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::started::{BINARY, Ended, Started};

/// Prints how it was started.
const STUB: &str = "#!/bin/sh\necho \"rank=${RANK-none} world=${WORLD_SIZE-none} args=$*\"\n";

/// A folder with a copy of `drumline`.
struct Installed {
    folder: TempDir,
}

impl Installed {
    fn without_trainer() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // A copy, since the trainer is searched in the folder of the program's file.
        if fs::hard_link(BINARY, folder.path().join("drumline")).is_err() {
            fs::copy(BINARY, folder.path().join("drumline")).unwrap();
        }
        Self { folder }
    }

    fn new() -> Self {
        let installed = Self::without_trainer();
        stub(installed.folder.path(), STUB);
        installed
    }

    fn ends(&self, args: &str, variables: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(self.folder.path().join("drumline"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SLURM_") {
                command.env_remove(name);
            }
        }
        command.args(args.split_whitespace()).envs(variables.iter().copied());
        Started::of(command).end()
    }

    fn stdout(&self, args: &str, variables: &[(&str, &str)]) -> String {
        let ended = self.ends(args, variables);
        assert_eq!(ended.code, Some(0), "{args}: {}", ended.stderr);
        ended.stdout
    }
}

fn stub(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("drumline-train");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn one_rank_is_this_process() {
    let drumline = Installed::new();
    let stdout = drumline.stdout("train --cfg c.yaml OUT_DIR exp TRAIN.MAX_STEPS -1", &[]);
    assert_eq!(stdout, "rank=0 world=1 args=train --cfg c.yaml OUT_DIR exp TRAIN.MAX_STEPS -1\n");
    let stdout = drumline.stdout("test --nproc-per-node 1 --cfg c.yaml", &[]);
    assert_eq!(stdout, "rank=0 world=1 args=test --cfg c.yaml\n");
    for command in ["train", "test"] {
        let stdout = drumline.stdout(&format!("{command} --device cuda --cfg c.yaml DEVICE cpu"), &[]);
        assert_eq!(stdout, format!("rank=0 world=1 args={command} --cfg c.yaml --device=cuda DEVICE cpu\n"));
        let ended = drumline.ends(&format!("{command} --device tpu --cfg c.yaml"), &[]);
        assert!(ended.code != Some(0) && ended.stderr.contains("tpu"), "{}", ended.stderr);
    }
    let stdout = drumline.stdout("data synth-cifar --out d --train 10", &[]);
    assert_eq!(stdout, "rank=none world=none args=data synth-cifar --out d --train 10\n");
    for data in ["synth-text --out d --dev 10", "synth-translation --out d --valid 10 --seed 3"] {
        let stdout = drumline.stdout(&format!("data {data}"), &[]);
        assert_eq!(stdout, format!("rank=none world=none args=data {data}\n"));
    }
    assert_eq!(drumline.stdout("data --help", &[]), "rank=none world=none args=data --help\n");
    for args in ["generate --from exp --top-k 5 Ada", "generate --help", "export --from exp --out hf"] {
        assert_eq!(drumline.stdout(args, &[]), format!("rank=none world=none args={args}\n"));
    }
}

#[test]
fn the_error_of_a_missing_library_names_what_helps() {
    let drumline = Installed::without_trainer();
    let folder = drumline.folder.path();
    let cc = |args: &str| {
        let mut command = Command::new("cc");
        assert!(command.args(args.split_whitespace()).current_dir(folder).status().unwrap().success());
    };
    fs::write(folder.join("lib.c"), "int answer(void) { return 0; }").unwrap();
    fs::write(folder.join("main.c"), "int answer(void); int main(void) { return answer(); }").unwrap();
    cc("-shared -fPIC -o libtorch_of_elsewhere.so lib.c");
    cc("-o drumline-train main.c -L. -ltorch_of_elsewhere");
    let here = [("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    for args in ["train --cfg c.yaml", "train --nproc-per-node 2 --cfg c.yaml", "keys", "data synth-cifar"] {
        let ended = drumline.ends(args, &[]);
        let stderr = &ended.stderr;
        assert!(
            ended.code != Some(0) && stderr.contains("try LD_LIBRARY_PATH with libtorch's folder"),
            "{stderr}"
        );
        assert_eq!(drumline.ends(args, &here).code, Some(0), "control: {args}");
    }
}

#[test]
fn one_rank_knows_that_no_launcher_reports_its_end() {
    let drumline = Installed::without_trainer();
    stub(drumline.folder.path(), "#!/bin/sh\necho \"alone=${DRUMLINE_ALONE-no}\"\n");
    assert_eq!(drumline.stdout("train --cfg c.yaml", &[]), "alone=1\n");
    let stdout = drumline.stdout("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!(stdout.matches("alone=no").count(), 2, "{stdout}");
}

#[test]
fn the_doctor_for_gpus_is_this_process_and_a_rank_of_a_job_stays_one() {
    let drumline = Installed::new();
    assert_eq!(drumline.stdout("doctor gpu", &[]), "rank=none world=none args=doctor gpu\n");
    let stdout = drumline.stdout("doctor gpu --json", &[("RANK", "1"), ("WORLD_SIZE", "2")]);
    assert_eq!(stdout, "rank=1 world=2 args=doctor gpu --json\n");
}

#[test]
fn translate_passes_its_flags_on() {
    let drumline = Installed::new();
    let stdout = drumline
        .stdout("translate --model_path a b --source s --saveto o --alpha -1 --beam_size=3 --use_gpu", &[]);
    let flags = "--model=a --model=b --source=s --out=o --beam-size=3 --alpha=-1 --use_gpu";
    assert_eq!(stdout, format!("rank=0 world=1 args=translate {flags}\n"));
    let stdout = drumline.stdout("translate --nproc-per-node 2 --model a --source s --out o", &[]);
    assert_eq!(stdout.matches("world=2 args=translate --model=a --source=s --out=o").count(), 2, "{stdout}");
    let ended = drumline.ends("translate --model a --source s --out o more", &[]);
    assert!(ended.code != Some(0) && ended.stderr.contains("`more` belongs to no flag"), "{}", ended.stderr);
    let ended = drumline.ends("translate --model a --out o", &[]);
    assert!(ended.code != Some(0) && ended.stderr.contains("--source"), "{}", ended.stderr);
}

#[test]
fn several_ranks_are_started_as_run_starts_them() {
    let stdout =
        Installed::new().stdout("train --nproc_per_node=2 --cfg c.yaml --verify-parity RNG_SEED 1", &[]);
    let mut lines: Vec<_> = stdout.lines().collect();
    lines.sort_unstable();
    let args = "world=2 args=train --cfg c.yaml --verify-parity=5 RNG_SEED 1";
    assert_eq!(lines, [format!("[rank 0]: rank=0 {args}"), format!("[rank 1]: rank=1 {args}")]);
}

#[test]
fn a_ds_config_is_passed_on_and_explained_without_ranks() {
    let drumline = Installed::new();
    let args = "train --cfg c.yaml --deepspeed ds.json --strict";
    assert_eq!(
        drumline.stdout(&format!("{args} RNG_SEED 1"), &[]),
        format!("rank=0 world=1 args={args} RNG_SEED 1\n")
    );
    let explain = "train --cfg c.yaml --deepspeed ds.json --explain --json";
    let stdout = drumline.stdout(&format!("{explain} --nproc-per-node 4 RNG_SEED 1"), &[]);
    assert_eq!(stdout, format!("rank=0 world=4 args={explain} RNG_SEED 1\n"), "once, for four ranks");
    for args in ["train --cfg c.yaml --explain", "train --cfg c.yaml --deepspeed ds.json --json"] {
        assert_eq!(drumline.ends(args, &[]).code, Some(2), "{args}");
    }
    // The check before ranks start knows how many there will be.
    stub(drumline.folder.path(), "#!/bin/sh\necho $WORLD_SIZE >&2\nexit 1\n");
    let ended = drumline.ends("train --nproc-per-node 3 --cfg c.yaml --deepspeed ds.json", &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(1), "3\n"));
}

#[test]
fn a_mistake_is_printed_once_before_ranks_start() {
    let drumline = Installed::without_trainer();
    let check = |outcome: &str| {
        format!("#!/bin/sh\n[ \"$1\" = --check ] || {{ echo started; exit 0; }}\n{outcome}\n")
    };
    stub(drumline.folder.path(), &check("echo 'error: c.yaml:3: unknown key' >&2; exit 1"));
    let translate = "translate --nproc-per-node 2 --model a --source s --out o";
    for args in ["train --nproc-per-node 2 --cfg c.yaml", "test --nproc-per-node 2 --cfg c.yaml", translate] {
        let ended = drumline.ends(args, &[]);
        let outcome = (ended.code, ended.stdout.as_str(), ended.stderr.as_str());
        assert_eq!(outcome, (Some(1), "", "error: c.yaml:3: unknown key\n"), "{args}");
    }
    assert_eq!(drumline.stdout("train --cfg c.yaml", &[]), "started\n", "one rank checks for itself");
    stub(drumline.folder.path(), &check("exit 127"));
    let ended = drumline.ends("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert!(
        ended.code == Some(1) && ended.stderr.contains("needs libtorch, which is not"),
        "{}",
        ended.stderr
    );
    stub(drumline.folder.path(), &check("echo unseen; exit 0"));
    let stdout = drumline.stdout("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!(
        (stdout.matches("started").count(), stdout.contains("unseen")),
        (2, false),
        "control: {stdout}"
    );
}

#[test]
fn one_rank_with_a_flag_that_needs_a_launcher_gets_one() {
    let stdout = Installed::new().stdout("train --max-restarts 1 --cfg c.yaml", &[]);
    assert!(stdout.contains("rank=0 world=1 args=train --cfg c.yaml"), "{stdout}");
}

#[test]
fn a_rank_of_a_job_trains_itself() {
    let drumline = Installed::new();
    for variables in [
        &[("RANK", "3"), ("WORLD_SIZE", "4")][..],
        &[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NODELIST", "n[1-2]")],
        &[("OMPI_COMM_WORLD_RANK", "1")][..],
    ] {
        let stdout = drumline.stdout("train --cfg c.yaml", variables);
        assert!(stdout.ends_with("args=train --cfg c.yaml\n") && stdout.lines().count() == 1, "{stdout}");
        assert!(!stdout.contains("rank=0"), "its launcher sets its rank: {stdout}");
    }
    let allocation = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
    assert!(drumline.stdout("train --cfg c.yaml", &allocation).starts_with("rank=0 world=1 "));
    let refused = drumline.ends("train --nproc-per-node 2 --cfg c.yaml", &[("RANK", "0")]);
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""));
    assert!(
        refused.stderr.contains("RANK is set") && refused.stderr.contains("try without"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_dry_run_shows_the_plan_and_starts_nothing() {
    let drumline = Installed::new();
    let one = drumline.stdout("train --dry-run --cfg c.yaml OUT_DIR 'a", &[]);
    assert!(one.starts_with("plan (one rank)") && one.contains("drumline-train train --cfg c.yaml"), "{one}");
    let two = drumline.stdout("train --dry-run --nproc-per-node 2 --cfg c.yaml", &[]);
    assert!(two.contains("2 ranks") && two.contains("rank 1 ("), "{two}");
    assert!(!one.contains("rank=") && !two.contains("args="), "{one}{two}");
}

#[test]
fn the_trainer_is_searched_in_the_same_folder_and_then_in_path() {
    let drumline = Installed::without_trainer();
    let elsewhere = tempfile::tempdir().unwrap();
    stub(elsewhere.path(), STUB);
    let path = format!("{}:/usr/bin:/bin", elsewhere.path().display());
    let stdout = drumline.stdout("train --cfg c.yaml", &[("PATH", &path)]);
    assert_eq!(stdout, "rank=0 world=1 args=train --cfg c.yaml\n");
    stub(drumline.folder.path(), "#!/bin/sh\necho beside\n");
    assert_eq!(drumline.stdout("train --cfg c.yaml", &[("PATH", &path)]), "beside\n");

    let missed = Installed::without_trainer().ends("train --cfg c.yaml", &[("PATH", "/usr/bin:/bin")]);
    assert_eq!(missed.code, Some(1));
    assert!(missed.stderr.contains("drumline-train was found neither"), "{}", missed.stderr);
    assert!(missed.stderr.contains("; try "), "{}", missed.stderr);
}

#[test]
fn wrong_command_lines_are_errors() {
    let drumline = Installed::new();
    let no_file = drumline.ends("train --nproc-per-node 2", &[]);
    assert_eq!(no_file.code, Some(2));
    assert!(no_file.stderr.contains("--cfg"), "{}", no_file.stderr);
    let late = drumline.ends("train --cfg c.yaml RNG_SEED 1 --nproc-per-node 2", &[]);
    assert_eq!(late.code, Some(1));
    assert!(late.stderr.contains("try it before the first key"), "{}", late.stderr);
    let key = drumline.ends("train --cfg c.yaml RNG_SEED 1 --lr 0.1", &[]);
    assert!(
        key.stderr.contains("there is no flag --lr; try OPTIM.BASE_LR 0.1 after the flags"),
        "{}",
        key.stderr
    );
    let zero = drumline.ends("train --cfg c.yaml --verify-parity=0", &[]);
    assert_eq!(zero.code, Some(2));
}

#[test]
fn keys_passes_on_every_name_and_file() {
    let drumline = Installed::new();
    for kind in ["bert", "config/bert-small.yaml", "gpt"] {
        let stdout = drumline.stdout(&format!("keys {kind}"), &[]);
        assert!(stdout.ends_with(&format!("args=keys {kind}\n")), "{stdout}");
    }
}

#[test]
fn a_failing_rank_makes_the_command_fail() {
    let drumline = Installed::without_trainer();
    stub(drumline.folder.path(), "#!/bin/sh\n[ \"$1\" = --check ] || exit 7\n");
    assert_eq!(drumline.ends("train --cfg c.yaml", &[]).code, Some(7), "this process became it");
    let ended = drumline.ends("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("exit code 7") || ended.stderr.contains("code 7"), "{}", ended.stderr);
}
