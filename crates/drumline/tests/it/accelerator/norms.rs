//! Batch norms over all ranks, in windows in which some ranks have fewer batches than others: each turn is that of one
//! batch.

use drumline::accelerator::{PreparedModel, PreparedOptimizer};
use drumline::engine::{SyncBatchNorm, SyncGroup, UnevenTurn};
use drumline::optim::Optimizer;
use drumline::{DdpOptions, ProcessGroup};
use rank_test::ranks_test;
use tch::Kind;
use tch::nn::{ModuleT, SequentialT, batch_norm1d, linear, seq_t};

use super::super::trainer::{CLASSES, INPUTS};
use super::*;

/// A norm between two layers, with weights that are always the same at first.
fn normed(store: &VarStore, norm: impl ModuleT + 'static) -> SequentialT {
    let layer = |name: &str, from, to| linear(store.root() / name, from, to, Default::default());
    let net = seq_t().add(layer("a", INPUTS, 4)).add(norm).add_fn(|x| x.tanh()).add(layer("b", 4, CLASSES));
    for named in drumline::optim::parameters(store) {
        let values = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu)) + 1.0;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&values.sin().view_as(&named.tensor)));
    }
    net
}

/// A model whose norms are over all ranks, and the same for one process.
struct Twins {
    accelerator: Accelerator,
    store: VarStore,
    model: PreparedModel<SequentialT>,
    optimizer: PreparedOptimizer<Sgd>,
    alone: VarStore,
    reference: SequentialT,
    by_hand: Sgd,
}

impl Twins {
    fn new(group: &ProcessGroup, window: usize) -> anyhow::Result<Self> {
        tch::set_num_threads(1);
        let sync = SyncGroup::new(group)?;
        let accelerator = Accelerator::builder().group(group).gradient_accumulation_steps(window).build()?;
        let store = VarStore::new(Device::Cpu);
        let norm = SyncBatchNorm::new(store.root() / "norm", 4, Default::default(), &sync);
        let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
        let model = accelerator.prepare_model(normed(&store, norm), &store, options)?;
        let alone = VarStore::new(Device::Cpu);
        let reference = normed(&alone, batch_norm1d(alone.root() / "norm", 4, Default::default()));
        assert_eq!(difference(&weights(&store), &weights(&alone)), 0.0);
        let (optimizer, by_hand) = (accelerator.prepare_optimizer(sgd(&store)?), sgd(&alone)?);
        Ok(Self { accelerator, store, model, optimizer, alone, reference, by_hand })
    }

    /// The end of a turn.
    fn step(&mut self) -> anyhow::Result<()> {
        self.optimizer.step()?;
        Ok(self.optimizer.zero_grad()?)
    }

    /// A window of the reference: each turn has the samples of all ranks.
    fn one_process(&mut self, turns: &[Vec<usize>]) -> anyhow::Result<()> {
        let all: usize = turns.iter().map(Vec::len).sum();
        for turn in turns {
            let (x, y) = collate(turn.iter().map(|index| sample(*index)).collect()).unwrap();
            let loss = self.reference.forward_t(&x, true).cross_entropy_for_logits(&y);
            (loss * (turn.len() as f64 / all as f64)).backward();
        }
        Optimizer::step(&mut self.by_hand)?;
        Ok(Optimizer::zero_grad(&mut self.by_hand)?)
    }

    fn check(&self) -> anyhow::Result<()> {
        same_on_all_ranks(self.accelerator.group(), &self.store)?;
        let off = difference(&weights(&self.store), &weights(&self.alone));
        let means = [&self.store, &self.alone].map(|store| store.variables()["norm.running_mean"].copy());
        let means_off = difference(&means[..1], &means[1..]);
        assert!(off < 1e-6 && means_off < 1e-6, "{off:e}, running means {means_off:e}");
        assert!(means[0].abs().max().double_value(&[]) > 1e-3, "the norm has learned");
        Ok(())
    }
}

/// What a forward is written as.
#[derive(Clone, Copy, PartialEq)]
enum Forward {
    Plain,
    With,
}

ranks_test!(norms_over_all_ranks_are_those_of_one_big_batch_also_beside_fillers, 3, {
    let group = ProcessGroup::from_env()?;
    // Turns of 12 samples, and then one of 2: rank 2 has a filler in the only turn of a window, in its first (26) or in
    // its last (38).
    for (samples, window) in [(14, 1), (26, 2), (38, 2), (38, 4)] {
        for forward in [Forward::Plain, Forward::With] {
            let mut twins = Twins::new(&group, window)?;
            let loader = twins.accelerator.prepare_loader(whole(data(samples), 4)?)?;
            assert!(loader.is_uneven());
            for epoch in 0..2 {
                for batch in loader.epoch(epoch) {
                    let (x, y) = batch?;
                    let output = match forward {
                        Forward::Plain => twins.model.forward_t(&x, true),
                        Forward::With => twins.model.forward_with(|model| model.forward_t(&x, true))?,
                    };
                    twins.accelerator.backward(&output.cross_entropy_for_logits(&y))?;
                    twins.step()?;
                }
                let turns: Vec<_> = order(samples, epoch).chunks(12).map(<[usize]>::to_vec).collect();
                turns.chunks(window).try_for_each(|window| twins.one_process(window))?;
            }
            twins.check()?;
        }
    }
});

ranks_test!(norms_over_all_ranks_work_where_ranks_bring_batches_of_their_own, 2, {
    let group = ProcessGroup::from_env()?;
    let lens: [&[usize]; 2] = [&[4, 3, 5, 2, 6], &[3, 2]];
    let samples = |rank: usize, place: usize| -> Vec<usize> {
        let len = lens[rank].get(place).copied().unwrap_or(0);
        (0..len).map(|index| rank * 100 + place * 10 + index).collect()
    };
    let batch =
        |place: usize| collate(samples(group.rank(), place).into_iter().map(sample).collect()).unwrap();
    for window in [1, 3, 4] {
        let mut twins = Twins::new(&group, window)?;
        for turn in twins.accelerator.join_uneven_inputs((0..lens[group.rank()].len()).map(batch)) {
            match turn? {
                UnevenTurn::Batch((x, y)) => twins
                    .accelerator
                    .backward(&twins.model.forward_t(&x, true).cross_entropy_for_logits(&y))?,
                UnevenTurn::Empty => twins.accelerator.backward_nothing()?,
            }
            twins.step()?;
        }
        let turns: Vec<_> = (0..5).map(|place| [samples(0, place), samples(1, place)].concat()).collect();
        turns.chunks(window).try_for_each(|window| twins.one_process(window))?;
        twins.check()?;
    }
});

ranks_test!(a_rank_that_never_had_a_batch_is_reported_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let twins = Twins::new(&group, 2)?;
    let own = if group.rank() == 0 { big_batches(8, 0) } else { Vec::new() };
    let mut message = None;
    for turn in twins.accelerator.join_uneven_inputs(own) {
        let outcome = match turn? {
            UnevenTurn::Batch((x, y)) => {
                let loss = twins.model.forward_t(&x, true).cross_entropy_for_logits(&y);
                twins.accelerator.backward(&loss)
            }
            UnevenTurn::Empty => twins.accelerator.backward_nothing(),
        };
        message = outcome.err().map(|error| error.to_string());
    }
    let message = group.all_gather_object(&message)?;
    let expected = "rank 1 has no batch in the first step, and cannot know which synchronised norms";
    assert!(
        message.iter().all(|message| message.as_ref().is_some_and(|message| message.starts_with(expected))),
        "{message:?}"
    );
});
