//! Dropout draws the same masks on any number of ranks, with and without accumulation.

use drumline::ProcessGroup;
use drumline::comm::LocalGroup;
use drumline::torch::dropout;
use rank_test::ranks_test;
use tch::nn::ModuleT;

use super::*;

/// The usual net with dropout.
#[derive(Debug)]
struct Dropping(Net);

impl ModuleT for Dropping {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        let output = self.0.forward(input);
        if train { dropout(&output, 0.5).unwrap() } else { output }
    }
}

/// The weights after two epochs of steps of 8 samples.
fn trained(builder: AcceleratorBuilder, batch_size: usize) -> anyhow::Result<Vec<Tensor>> {
    let accelerator = builder.cpu().build()?;
    let store = VarStore::new(Device::Cpu);
    let net = Dropping(Net::new(&store));
    let (model, mut optimizer, loader) =
        accelerator.prepare(net, &store, sgd(&store)?, whole(data(SAMPLES), batch_size)?)?;
    for batch in (0..2).flat_map(|epoch| loader.epoch(epoch)) {
        let (x, y) = batch?;
        accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(weights(&store))
}

/// The same in a job of one rank.
fn trained_alone(seed: u64, batch_size: usize, window: usize) -> Vec<Tensor> {
    let run = |group: ProcessGroup| {
        let builder = Accelerator::builder().group(&group).seed(seed).gradient_accumulation_steps(window);
        Ok(trained(builder, batch_size).unwrap())
    };
    LocalGroup::run(1, run).unwrap().remove(0)
}

ranks_test!(dropout_of_two_ranks_draws_the_masks_of_one, 2, {
    let group = ProcessGroup::from_env()?;
    let builder = || Accelerator::builder().group(&group).seed(7);
    let expected = trained_alone(7, 8, 1);
    let found = [
        trained(builder(), 4)?,
        trained(builder().gradient_accumulation_steps(2), 2)?,
        trained_alone(7, 4, 2),
        trained_alone(7, 2, 4),
    ];
    for (place, found) in found.iter().enumerate() {
        assert!(difference(found, &expected) < 1e-5, "{place}: {:e}", difference(found, &expected));
    }
    // The control: another seed draws other masks.
    assert!(difference(&trained_alone(8, 8, 1), &expected) > 1e-3);
});
