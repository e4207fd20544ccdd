//! What a panic in backward leaves behind.

use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_torch::{AdamOptions, AdamW, set_grad};
use tch::Kind;

use super::*;

fn leaf(name: &str) -> Named {
    let tensor = Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    Named { name: name.to_owned(), tensor }
}

#[test]
fn a_panic_in_backward_ends_the_steps_and_takes_the_limit_away() {
    let (host, device) = (leaf("host"), leaf("device"));
    let mut optimizer = AdamW::new(vec![host.clone(), device.clone()], AdamOptions::default()).unwrap();
    let unit = vec![Stepped { place: 0, named: host.clone(), bytes: 512 }];
    let memory = HostMemory::new(vec![unit], Device::Cpu).unwrap();
    let mut beside = Beside::with(memory, Device::Cpu, &mut optimizer, String::new()).unwrap();
    let ones = Tensor::ones([64], (Kind::Float, Device::Cpu));
    let set = || [&host, &device].into_iter().for_each(|one| set_grad(&one.tensor, Some(&ones)).unwrap());
    set();
    beside.step(&mut optimizer).unwrap();
    let panicked =
        catch_unwind(AssertUnwindSafe(|| beside.step_in_backward(&mut optimizer, &mut || panic!("lost"))));
    assert!(panicked.is_err());
    let error = beside.step(&mut optimizer).unwrap_err().to_string();
    assert!(error.contains("a step has panicked"), "{error}");
    // Without offload the optimizer steps all of its parameters again.
    set();
    let before = device.tensor.copy();
    optimizer.step().unwrap();
    assert!(!device.tensor.equal(&before));
}
