//! Each training example, as its header says that it is started.

use std::process::Command;

use super::started::{Data, alone, as_ranks, check, check_steps, drumline, numbers_after, output_of};

const FEW: &str = "--epochs 3 --batch-size 16 --steps 8";

#[test]
fn a_single_process_trains() {
    let said = alone(env!("CARGO_BIN_EXE_snsc"), Data::new(160, 10).args(FEW));
    check(&said, 0, 3);
    assert!(said.contains("   == step: [  8/8] [1/3] | loss: "), "{said}");
}

#[test]
fn pictures_are_made_where_no_data_is_given() {
    let temp = tempfile::tempdir().unwrap();
    let mut command = Command::new("timeout");
    command.args(["240", env!("CARGO_BIN_EXE_snsc"), "--arch", "mlp", "--epochs", "2"]);
    let said = output_of(command.env("TMPDIR", temp.path()));
    assert_eq!(numbers_after(&said, "] [1/2] | loss: ").len(), 2, "after 25 steps and at the end: {said}");
    let made: Vec<_> =
        std::fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(made, ["drumline-examples-cifar-2000"]);
}

#[test]
fn several_devices_of_one_process_train_as_one() {
    let data = Data::new(160, 10);
    let words = |devices| format!("{FEW} --arch mlp --devices {devices}");
    let said = [1, 3].map(|devices| alone(env!("CARGO_BIN_EXE_snmc_dp"), data.args(&words(devices))));
    said.iter().for_each(|said| check(said, 0, 3));
    assert!(said[1].starts_with("[init] == 3 devices =="), "{}", said[1]);
}

#[test]
fn ranks_of_a_launcher_train() {
    let Some(drumline) = drumline() else { return };
    let data = Data::new(320, 10);
    let mut command = Command::new("timeout");
    command.arg("240").arg(drumline).args(["run", "--nproc-per-node", "2"]);
    command.arg(env!("CARGO_BIN_EXE_mnmc_ddp_launch")).args(data.args(FEW));
    check(&output_of(&mut command), 2, 3);
}

#[test]
fn ranks_that_a_program_spawns_train() {
    let data = Data::new(320, 10);
    let args = data.args(&format!("{FEW} --nproc 2"));
    check(&alone(env!("CARGO_BIN_EXE_mnmc_ddp_spawn"), args), 2, 3);
}

#[test]
fn a_resnet_trains() {
    let data = Data::new(256, 10);
    let args = data.args("--arch resnet18 --epochs 3 --batch-size 32");
    check(&alone(env!("CARGO_BIN_EXE_snsc"), args), 0, 3);
}

#[test]
fn imagenets_way_trains_and_evaluates() {
    let said =
        as_ranks(2, env!("CARGO_BIN_EXE_imagenet"), Data::new(640, 51).args("--epochs 3 --batch-size 32"));
    check_steps(&said[0], 3);
    assert_eq!(said[1], "[init] == local rank: 1, global rank: 1 ==\n");
    let (acc1, acc5) = (numbers_after(&said[0], "acc@1: "), numbers_after(&said[0], "acc@5: "));
    assert!(acc1.len() == 3 && acc1.iter().zip(&acc5).all(|(one, five)| one <= five), "{}", said[0]);
}
