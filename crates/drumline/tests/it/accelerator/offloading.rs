//! Where the state of a prepared optimizer lies is decided before training.

use drumline::engine::{Offload, Place, ShardOptions, Stage};
use drumline::optim::{AdamOptions, AdamW, Lamb, LambOptions, parameters};
use drumline::{LogOptions, ProcessGroup};
use rank_test::ranks_test;

use super::*;

/// As on a GPU, with the optimizer's state in host memory.
fn beside() -> ShardOptions {
    let offload = Offload { optimizer: Place::Host, mimics_gpu: true, ..Offload::default() };
    ShardOptions { offload, ..ShardOptions::new(Stage::Zero1) }
}

fn adam(store: &VarStore) -> anyhow::Result<AdamW> {
    Ok(AdamW::new(parameters(store), AdamOptions::default())?)
}

fn decides_before_training() -> anyhow::Result<()> {
    drumline::init_logging(LogOptions { filter: Some("info".into()), ..LogOptions::default() })?;
    let group = ProcessGroup::from_env()?;
    let accelerator = || Accelerator::builder().group(&group).engine(beside).cpu().build();
    for is_model_first in [true, false] {
        let (accelerator, store) = (accelerator()?, VarStore::new(Device::Cpu));
        let net = Net::new(&store);
        let model = || accelerator.prepare_model(net, &store, beside());
        let (model, mut optimizer) = if is_model_first {
            let model = model()?;
            assert_eq!(model.offload_note(), None, "there is no state yet");
            (model, accelerator.prepare_optimizer(adam(&store)?))
        } else {
            let optimizer = accelerator.prepare_optimizer(adam(&store)?);
            (model()?, optimizer)
        };
        let note = model.offload_note().unwrap();
        assert!(note.contains("\n  host "), "{note}");
        let (x, y) = big_batches(8, 0).remove(0);
        accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        optimizer.step()?;
        same_on_all_ranks(&group, &store)?;
    }
    let (accelerator, store) = (accelerator()?, VarStore::new(Device::Cpu));
    let (net, lamb) = (Net::new(&store), Lamb::new(parameters(&store), LambOptions::default())?);
    let refused = accelerator.prepare(net, &store, lamb, whole(data(8), 2)?);
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("the optimizer `lamb` does not say how much state it keeps"), "{error}");
    Ok(())
}

ranks_test!(
    state_of_a_prepared_optimizer_is_placed_before_training,
    2,
    { decides_before_training()? },
    |ranks| {
        let report = ranks.env([("DRUMLINE_LOG", "info")]).pass()?;
        let noted: Vec<usize> = report
            .ranks
            .iter()
            .map(|rank| rank.stderr_text().matches("where each rank's optimizer state lies").count())
            .collect();
        assert_eq!(noted, [2, 0], "{report}");
    }
);

ranks_test!(state_of_one_rank_is_placed_before_training, 1, { decides_before_training()? });
