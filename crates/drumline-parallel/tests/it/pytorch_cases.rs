//! Uneven inputs, unused parameters, accumulation and gradients that are not zeroed: results equal those of PyTorch's
//! DistributedDataParallel (`bench/oracle/ddp_cases.py`) to 1e-6.

use std::collections::BTreeMap;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, DivideBy, UnevenTurn};
use drumline_torch::{Named, Optimizer, Sgd, SgdOptions, buffers, parameters};
use rank_test::ranks_test;
use serde_json::Value;
use tch::nn::{self, Linear, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::loss;

const BATCH: i64 = 4;
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Two layers with a norm between them, and an optional third layer.
#[derive(Debug)]
struct Net {
    first: Linear,
    norm: nn::BatchNorm,
    second: Linear,
    extra: Linear,
}

impl Net {
    fn new(vs: &VarStore) -> Self {
        tch::set_num_threads(1);
        let layer = |name: &str, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let net = Self {
            first: layer("first", 6, 12),
            norm: nn::batch_norm1d(vs.root() / "norm", 12, Default::default()),
            second: layer("second", 12, 3),
            extra: layer("extra", 3, 3),
        };
        let sorted: BTreeMap<_, _> =
            parameters(vs).into_iter().map(|named| (named.name, named.tensor)).collect();
        for (place, mut tensor) in sorted.into_values().enumerate() {
            let values = (Tensor::arange(tensor.numel() as i64, DOUBLE) * 0.7 + place as f64).sin() * 0.3;
            tch::no_grad(|| tensor.copy_(&values.view_as(&tensor)));
        }
        net
    }
}

impl ModuleT for Net {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.second.forward(&self.norm.forward_t(&self.first.forward(x), train).tanh())
    }
}

/// A rank's batch number `index`: inputs and targets.
fn batch(rank: usize, index: i64) -> (Tensor, Tensor) {
    let first = rank as i64 * 1000 + index * BATCH;
    let rows = Tensor::arange_start(first, first + BATCH, DOUBLE).unsqueeze(1);
    let x = (rows * 1.3 + Tensor::arange(6, DOUBLE) * 0.9).sin();
    let y = x.narrow(1, 0, 3) * x.narrow(1, 3, 3);
    (x.to_kind(Kind::Float), y.to_kind(Kind::Float))
}

/// The extra layer is used by one rank, by both, by none, in turns.
fn uses_extra(rank: usize, step: i64) -> bool {
    ((step + 1) >> rank) & 1 == 1
}

/// One rank of a case.
struct Training {
    group: ProcessGroup,
    vs: VarStore,
    ddp: Ddp<Net>,
    optimizer: Sgd,
}

impl Training {
    fn new() -> Result<Self> {
        let group = ProcessGroup::from_env()?;
        let vs = VarStore::new(Device::Cpu);
        let net = Net::new(&vs);
        let options = DdpOptions { bucket_cap: 200, first_bucket: 64, ..DdpOptions::default() };
        let ddp = Ddp::new(net, &vs, &group, options)?;
        let options = SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() };
        let optimizer = Sgd::new(parameters(&vs), options)?;
        Ok(Self { group, vs, ddp, optimizer })
    }

    fn loss(&self, index: i64, with_extra: bool) -> Result<Tensor> {
        let (x, y) = batch(self.group.rank(), index);
        let output = self.ddp.forward(&x)?;
        let output = if with_extra { self.ddp.module().extra.forward(&output) } else { output };
        Ok(loss(&output, &y))
    }

    fn step(&mut self) -> Result<()> {
        self.optimizer.step()?;
        Ok(self.optimizer.zero_grad()?)
    }

    /// Parameters on all ranks, and buffers where PyTorch's ranks share them or this is rank 0.
    fn assert_is_pytorchs(&self, case: &str) -> Result<()> {
        let golden: Value =
            serde_json::from_str(include_str!("../../../../bench/oracle/golden/ddp_cases.json"))?;
        let golden = &golden["cases"][case];
        assert_eq!(golden["world"].as_u64(), Some(self.group.size() as u64), "{case}");
        let mut ours = parameters(&self.vs);
        assert_eq!(ours.len(), 8);
        if self.group.rank() == 0 || golden["equal_buffers"] == true {
            ours.extend(buffers(&self.vs));
            assert_eq!(ours.len(), 10);
        }
        for Named { name, tensor } in ours {
            let theirs: Vec<f64> = serde_json::from_value(golden["final"][&name].clone())?;
            let difference =
                (tensor.detach().to_kind(Kind::Double).flatten(0, -1) - Tensor::from_slice(&theirs)).abs();
            let difference = difference.max().double_value(&[]);
            assert!(
                difference <= 1e-6,
                "{case}: {name} differs by {difference:e} on rank {}",
                self.group.rank()
            );
        }
        Ok(())
    }
}

fn uneven(case: &str, batches: &[i64], share: DivideBy) -> Result<()> {
    let mut training = Training::new()?;
    let mine = 0..batches[training.group.rank()];
    // The loop borrows the replica while the optimizer steps.
    let (ddp, rank) = (&training.ddp, training.group.rank());
    for turn in ddp.uneven(mine, share) {
        match turn? {
            UnevenTurn::Batch(index) => {
                let (x, y) = batch(rank, index);
                ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
            }
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        training.optimizer.step()?;
        training.optimizer.zero_grad()?;
    }
    training.assert_is_pytorchs(case)
}

ranks_test!(uneven_inputs_divided_among_all_ranks, 3, {
    uneven("uneven_divided_among_all_ranks", &[4, 2, 5], DivideBy::AllRanks)?
});

ranks_test!(uneven_inputs_divided_among_ranks_with_data, 3, {
    uneven("uneven_divided_among_ranks_with_data", &[4, 2, 5], DivideBy::RanksWithData)?
});

ranks_test!(uneven_inputs_of_two_ranks, 2, {
    uneven("uneven_first_rank_is_last", &[5, 3], DivideBy::AllRanks)?;
    uneven("uneven_first_rank_has_nothing", &[0, 3], DivideBy::RanksWithData)?;
    // The buffers are the last rank's, as long as it has data, as in PyTorch.
    uneven("even_in_join", &[3, 3], DivideBy::AllRanks)?
});

ranks_test!(control_flow_that_differs_by_rank_and_step, 2, {
    let mut training = Training::new()?;
    for step in 0..8 {
        let loss = training.loss(step, uses_extra(training.group.rank(), step))?;
        training.ddp.backward(&loss)?;
        training.step()?;
    }
    training.assert_is_pytorchs("control_flow_that_differs")?
});

/// With `with_extra` rank 1 uses the extra layer in the first micro-batch, which is not reduced.
fn accumulation(case: &str, micro_batches: i64, with_extra: bool) -> Result<()> {
    let mut training = Training::new()?;
    let has_extra = |micro| with_extra && training.group.rank() == 1 && micro == 0;
    let extra: Vec<bool> = (0..micro_batches).map(has_extra).collect();
    for step in 0..4 {
        let backward = |micro: i64| -> Result<()> {
            let loss = training.loss(step * micro_batches + micro, extra[micro as usize])?;
            Ok(training.ddp.backward(&(loss / micro_batches))?)
        };
        training.ddp.no_sync(|| (0..micro_batches - 1).try_for_each(backward))?;
        backward(micro_batches - 1)?;
        training.step()?;
    }
    training.assert_is_pytorchs(case)
}

ranks_test!(accumulation_without_sync, 2, {
    accumulation("accumulation", 3, false)?;
    accumulation("accumulation_with_unused", 2, true)?
});

fn not_zeroed(case: &str, steps: i64, with_extra: bool) -> Result<()> {
    let mut training = Training::new()?;
    for step in 0..steps {
        let loss = training.loss(step, with_extra && uses_extra(training.group.rank(), step))?;
        training.ddp.backward(&loss)?;
        training.optimizer.step()?;
    }
    training.assert_is_pytorchs(case)
}

ranks_test!(gradients_that_are_not_zeroed, 2, {
    not_zeroed("gradients_not_zeroed", 4, false)?;
    not_zeroed("gradients_not_zeroed_with_unused", 6, true)?
});
