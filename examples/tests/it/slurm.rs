//! The example for Slurm, on a real Slurm of two nodes.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use rank_test::slurm::Slurm;

use super::started::{Data, check, output_of};

#[test]
fn each_task_is_a_rank_that_trains() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let key = slurm.folder().join("key");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&key).unwrap();
    file.write_all("5a".repeat(32).as_bytes()).unwrap();
    let data = Data::new(320, 10);
    for step in [["-N1", "-n2"], ["-N2", "-n2"]] {
        let mut command = slurm.command("timeout");
        command.args(["120", "srun"]).args(step).arg(env!("CARGO_BIN_EXE_mnmc_ddp_slurm"));
        command.args(data.args("--epochs 3 --batch-size 16 --steps 8"));
        let said = output_of(command.env("DRUMLINE_JOB_KEY_FILE", &key).env("DRUMLINE_TIMEOUT", "60s"));
        check(&said, 2, 3);
        let on_two_nodes = step[0] == "-N2";
        let firsts = said.matches("local rank: 0").count();
        assert_eq!(firsts, if on_two_nodes { 2 } else { 1 }, "{said}");
    }
}
