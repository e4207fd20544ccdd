//! One process and two ranks come to the same result: losses, accuracy and weights.

use std::path::Path;

use drumline::tch::nn::VarStore;
use drumline::tch::{Device, Kind};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::weights;

use super::started::{Data, alone, as_ranks, numbers_after};

/// What is allowed between sums that are added up in another order.
const NEAR: f64 = 1e-5;

#[test]
fn train_and_train_dist_come_to_the_same() {
    // Without a norm, and with one whose statistics are those of all ranks: that makes rounding grow from step to step, as another
    // number of threads does in one process, so there it is but a few.
    for (arch, steps) in [("mlp", 5), ("convnet", 2)] {
        let data = Data::new(160, 51);
        let file = |name: &str| data.path().join(name);
        let args = |name: &str| {
            let words = format!(
                "--arch {arch} --epochs 2 --steps {steps} --batch-size 32 --save {}",
                file(name).display()
            );
            data.args(&words)
        };
        let one = alone(env!("CARGO_BIN_EXE_train"), args("one"));
        let ranks = as_ranks(2, env!("CARGO_BIN_EXE_train_dist"), args("two"));
        assert_eq!(ranks[1], "[init] == local rank: 1, global rank: 1 ==\n");
        let figures = |said: &str| [numbers_after(said, "loss "), numbers_after(said, "accuracy ")].concat();
        let (one, two) = (figures(&one), figures(&ranks[0]));
        assert_eq!((one.len(), two.len()), (4, 4), "two epochs, and loss and accuracy of the test");
        assert!(arch != "mlp" || one[1] < one[0], "the loss falls: {one:?}");
        for (one, two) in one.iter().zip(&two) {
            assert!((one - two).abs() < NEAR, "{arch}: 1 process {one}, 2 ranks {two}");
        }
        let difference = largest_difference(arch, &file("one"), &file("two"));
        assert!(difference < NEAR, "{arch}: weights differ by {difference}");
    }
}

fn largest_difference(arch: &str, one: &Path, two: &Path) -> f64 {
    let [one, two] = [one, two].map(|file| {
        let store = VarStore::new(Device::Cpu);
        build(arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() }).unwrap();
        weights::load(&store, file).unwrap();
        store.variables()
    });
    let difference =
        |name: &String| (&one[name] - &two[name]).abs().max().to_kind(Kind::Double).double_value(&[]);
    one.keys().map(difference).fold(0.0, f64::max)
}
