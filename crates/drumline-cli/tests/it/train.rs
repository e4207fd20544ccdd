//! `drumline train`, `test` and `data` start `drumline-train`: beside the launcher, as its ranks, or in this process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::started::{BINARY, Ended, Started};

/// Says what it was started as.
const STUB: &str = "#!/bin/sh\necho \"rank=${RANK-none} world=${WORLD_SIZE-none} args=$*\"\n";

/// A folder with a copy of `drumline`.
struct Installed {
    folder: TempDir,
}

impl Installed {
    fn without_trainer() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // A copy, as the place of a program is where its file is.
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

    fn ends(&self, words: &str, variables: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(self.folder.path().join("drumline"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SLURM_") {
                command.env_remove(name);
            }
        }
        command.args(words.split_whitespace()).envs(variables.iter().copied());
        Started::of(command).end()
    }

    fn said(&self, words: &str, variables: &[(&str, &str)]) -> String {
        let ended = self.ends(words, variables);
        assert_eq!(ended.code, Some(0), "{words}: {}", ended.stderr);
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
    let said = drumline.said("train --cfg c.yaml OUT_DIR exp TRAIN.MAX_STEPS -1", &[]);
    assert_eq!(said, "rank=0 world=1 args=train --cfg c.yaml OUT_DIR exp TRAIN.MAX_STEPS -1\n");
    let said = drumline.said("test --nproc-per-node 1 --cfg c.yaml", &[]);
    assert_eq!(said, "rank=0 world=1 args=test --cfg c.yaml\n");
    for command in ["train", "test"] {
        let said = drumline.said(&format!("{command} --device cuda --cfg c.yaml DEVICE cpu"), &[]);
        assert_eq!(said, format!("rank=0 world=1 args={command} --cfg c.yaml --device=cuda DEVICE cpu\n"));
        let ended = drumline.ends(&format!("{command} --device tpu --cfg c.yaml"), &[]);
        assert!(ended.code != Some(0) && ended.stderr.contains("tpu"), "{}", ended.stderr);
    }
    let said = drumline.said("data synth-cifar --out d --train 10", &[]);
    assert_eq!(said, "rank=none world=none args=data synth-cifar --out d --train 10\n");
    for data in ["synth-text --out d --dev 10", "synth-translation --out d --valid 10 --seed 3"] {
        let said = drumline.said(&format!("data {data}"), &[]);
        assert_eq!(said, format!("rank=none world=none args=data {data}\n"));
    }
    assert_eq!(drumline.said("data --help", &[]), "rank=none world=none args=data --help\n");
    for words in ["generate --from exp --top-k 5 Ada", "generate --help", "export --from exp --out hf"] {
        assert_eq!(drumline.said(words, &[]), format!("rank=none world=none args={words}\n"));
    }
}

#[test]
fn a_library_that_is_not_there_is_said_with_what_helps() {
    let drumline = Installed::without_trainer();
    let folder = drumline.folder.path();
    let cc = |words: &str| {
        let mut command = Command::new("cc");
        assert!(command.args(words.split_whitespace()).current_dir(folder).status().unwrap().success());
    };
    fs::write(folder.join("lib.c"), "int answer(void) { return 0; }").unwrap();
    fs::write(folder.join("main.c"), "int answer(void); int main(void) { return answer(); }").unwrap();
    cc("-shared -fPIC -o libtorch_of_elsewhere.so lib.c");
    cc("-o drumline-train main.c -L. -ltorch_of_elsewhere");
    let here = [("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    for words in ["train --cfg c.yaml", "train --nproc-per-node 2 --cfg c.yaml", "keys", "data synth-cifar"] {
        let ended = drumline.ends(words, &[]);
        let said = &ended.stderr;
        assert!(
            ended.code != Some(0) && said.contains("try LD_LIBRARY_PATH with libtorch's folder"),
            "{said}"
        );
        assert_eq!(drumline.ends(words, &here).code, Some(0), "control: {words}");
    }
}

#[test]
fn one_rank_knows_that_no_launcher_tells_of_its_end() {
    let drumline = Installed::without_trainer();
    stub(drumline.folder.path(), "#!/bin/sh\necho \"alone=${DRUMLINE_ALONE-no}\"\n");
    assert_eq!(drumline.said("train --cfg c.yaml", &[]), "alone=1\n");
    let said = drumline.said("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!(said.matches("alone=no").count(), 2, "{said}");
}

#[test]
fn the_doctor_for_gpus_is_this_process_and_a_rank_of_a_job_stays_one() {
    let drumline = Installed::new();
    assert_eq!(drumline.said("doctor gpu", &[]), "rank=none world=none args=doctor gpu\n");
    let said = drumline.said("doctor gpu --json", &[("RANK", "1"), ("WORLD_SIZE", "2")]);
    assert_eq!(said, "rank=1 world=2 args=doctor gpu --json\n");
}

#[test]
fn translate_hands_its_flags_on() {
    let drumline = Installed::new();
    let said = drumline
        .said("translate --model_path a b --source s --saveto o --alpha -1 --beam_size=3 --use_gpu", &[]);
    let flags = "--model=a --model=b --source=s --out=o --beam-size=3 --alpha=-1 --use_gpu";
    assert_eq!(said, format!("rank=0 world=1 args=translate {flags}\n"));
    let said = drumline.said("translate --nproc-per-node 2 --model a --source s --out o", &[]);
    assert_eq!(said.matches("world=2 args=translate --model=a --source=s --out=o").count(), 2, "{said}");
    let ended = drumline.ends("translate --model a --source s --out o more", &[]);
    assert!(ended.code != Some(0) && ended.stderr.contains("`more` belongs to no flag"), "{}", ended.stderr);
    let ended = drumline.ends("translate --model a --out o", &[]);
    assert!(ended.code != Some(0) && ended.stderr.contains("--source"), "{}", ended.stderr);
}

#[test]
fn several_ranks_are_started_as_run_starts_them() {
    let said = Installed::new().said("train --nproc_per_node=2 --cfg c.yaml --verify-parity RNG_SEED 1", &[]);
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort_unstable();
    let args = "world=2 args=train --cfg c.yaml --verify-parity=5 RNG_SEED 1";
    assert_eq!(lines, [format!("[rank 0]: rank=0 {args}"), format!("[rank 1]: rank=1 {args}")]);
}

#[test]
fn what_is_wrong_is_said_once_before_ranks_are_started() {
    let drumline = Installed::without_trainer();
    let check = |outcome: &str| {
        format!("#!/bin/sh\n[ \"$1\" = --check ] || {{ echo started; exit 0; }}\n{outcome}\n")
    };
    stub(drumline.folder.path(), &check("echo 'error: c.yaml:3: unknown key' >&2; exit 1"));
    let translate = "translate --nproc-per-node 2 --model a --source s --out o";
    for words in ["train --nproc-per-node 2 --cfg c.yaml", "test --nproc-per-node 2 --cfg c.yaml", translate]
    {
        let ended = drumline.ends(words, &[]);
        let said = (ended.code, ended.stdout.as_str(), ended.stderr.as_str());
        assert_eq!(said, (Some(1), "", "error: c.yaml:3: unknown key\n"), "{words}");
    }
    assert_eq!(drumline.said("train --cfg c.yaml", &[]), "started\n", "one rank says it by itself");
    stub(drumline.folder.path(), &check("exit 127"));
    let ended = drumline.ends("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert!(
        ended.code == Some(1) && ended.stderr.contains("needs libtorch, which is not"),
        "{}",
        ended.stderr
    );
    stub(drumline.folder.path(), &check("echo unseen; exit 0"));
    let said = drumline.said("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!((said.matches("started").count(), said.contains("unseen")), (2, false), "control: {said}");
}

#[test]
fn one_rank_with_a_flag_that_needs_a_launcher_gets_one() {
    let said = Installed::new().said("train --max-restarts 1 --cfg c.yaml", &[]);
    assert!(said.contains("rank=0 world=1 args=train --cfg c.yaml"), "{said}");
}

#[test]
fn a_rank_of_a_job_trains_itself() {
    let drumline = Installed::new();
    for variables in [
        &[("RANK", "3"), ("WORLD_SIZE", "4")][..],
        &[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NODELIST", "n[1-2]")],
        &[("OMPI_COMM_WORLD_RANK", "1")][..],
    ] {
        let said = drumline.said("train --cfg c.yaml", variables);
        assert!(said.ends_with("args=train --cfg c.yaml\n") && said.lines().count() == 1, "{said}");
        assert!(!said.contains("rank=0"), "its place is its launcher's to say: {said}");
    }
    let allocation = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
    assert!(drumline.said("train --cfg c.yaml", &allocation).starts_with("rank=0 world=1 "));
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
    let one = drumline.said("train --dry-run --cfg c.yaml OUT_DIR 'a", &[]);
    assert!(one.starts_with("plan (one rank)") && one.contains("drumline-train train --cfg c.yaml"), "{one}");
    let two = drumline.said("train --dry-run --nproc-per-node 2 --cfg c.yaml", &[]);
    assert!(two.contains("2 ranks") && two.contains("rank 1 ("), "{two}");
    assert!(!one.contains("rank=") && !two.contains("args="), "{one}{two}");
}

#[test]
fn the_trainer_is_found_beside_then_in_path_and_missed_with_advice() {
    let drumline = Installed::without_trainer();
    let elsewhere = tempfile::tempdir().unwrap();
    stub(elsewhere.path(), STUB);
    let path = format!("{}:/usr/bin:/bin", elsewhere.path().display());
    let said = drumline.said("train --cfg c.yaml", &[("PATH", &path)]);
    assert_eq!(said, "rank=0 world=1 args=train --cfg c.yaml\n");
    stub(drumline.folder.path(), "#!/bin/sh\necho beside\n");
    assert_eq!(drumline.said("train --cfg c.yaml", &[("PATH", &path)]), "beside\n");

    let missed = Installed::without_trainer().ends("train --cfg c.yaml", &[("PATH", "/usr/bin:/bin")]);
    assert_eq!(missed.code, Some(1));
    assert!(missed.stderr.contains("drumline-train was found neither"), "{}", missed.stderr);
    assert!(missed.stderr.contains("; try "), "{}", missed.stderr);
}

#[test]
fn wrong_command_lines_are_told() {
    let drumline = Installed::new();
    let no_file = drumline.ends("train --nproc-per-node 2", &[]);
    assert_eq!(no_file.code, Some(2));
    assert!(no_file.stderr.contains("--cfg"), "{}", no_file.stderr);
    let late = drumline.ends("train --cfg c.yaml RNG_SEED 1 --nproc-per-node 2", &[]);
    assert_eq!(late.code, Some(1));
    assert!(late.stderr.contains("try it before the first key"), "{}", late.stderr);
    let zero = drumline.ends("train --cfg c.yaml --verify-parity=0", &[]);
    assert_eq!(zero.code, Some(2));
}

#[test]
fn a_failing_rank_is_the_commands_failure() {
    let drumline = Installed::without_trainer();
    stub(drumline.folder.path(), "#!/bin/sh\n[ \"$1\" = --check ] || exit 7\n");
    assert_eq!(drumline.ends("train --cfg c.yaml", &[]).code, Some(7), "this process became it");
    let ended = drumline.ends("train --nproc-per-node 2 --cfg c.yaml", &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("exit code 7") || ended.stderr.contains("code 7"), "{}", ended.stderr);
}
