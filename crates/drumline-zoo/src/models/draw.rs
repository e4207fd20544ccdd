//! First weights, which belong to the seed: they are drawn on the CPU, whatever the device of the model.
//!
//! GPUs draw other numbers from the same seed. So a tensor is drawn on the CPU and then copied, as is the custom in
//! PyTorch. Only one tensor at a time is in host memory. A rank that gets its weights from another one draws none
//! ([`FirstWeights`]).

use std::borrow::Borrow;

use tch::nn::{Init, Path, init};
use tch::{Device, Kind, Tensor, no_grad};

use crate::first_weights::FirstWeights;

/// Creates a variable with drawn values.
pub(super) fn drawn<'a>(path: impl Borrow<Path<'a>>, name: &str, size: &[i64], how: Init) -> Tensor {
    let path = path.borrow();
    if !FirstWeights::of_this_build().have_values() {
        path.add(name, Tensor::empty(size, (Kind::Float, path.device())), true)
    } else if path.device() == Device::Cpu {
        path.var(name, size, how)
    } else {
        drawn_and_copied(path, name, size, how)
    }
}

fn drawn_and_copied(path: &Path<'_>, name: &str, size: &[i64], how: Init) -> Tensor {
    path.var_copy(name, &init(how, size, Device::Cpu))
}

/// Draws the values of a variable again, from a normal distribution around zero.
pub(super) fn draw_normal_again(variable: &mut Tensor, stdev: f64) {
    if !FirstWeights::of_this_build().have_values() {
        return;
    }
    no_grad(|| {
        if variable.device() == Device::Cpu {
            let _ = variable.normal_(0.0, stdev);
        } else {
            let mut values = Tensor::empty(variable.size(), (variable.kind(), Device::Cpu));
            variable.copy_(&values.normal_(0.0, stdev));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use rank_test::ranks_test;
    use tch::nn::VarStore;

    // Runs in its own process, because the random generator is global.
    ranks_test!(a_copied_draw_has_the_values_of_a_draw_in_place, 1, {
        let [one, other] = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
        let ways = [Init::Randn { mean: 0.5, stdev: 0.02 }, Init::Uniform { lo: -0.1, up: 0.3 }];
        for (place, how) in ways.into_iter().enumerate() {
            let name = format!("w{place}");
            tch::manual_seed(3);
            let in_place = drawn(one.root(), &name, &[7, 33], how);
            tch::manual_seed(3);
            let copied = drawn_and_copied(&other.root(), &name, &[7, 33], how);
            assert_eq!(in_place, copied);
            assert!(copied.requires_grad() && copied.is_leaf());
        }
        assert_eq!(other.trainable_variables().len(), 2);
    });
}
