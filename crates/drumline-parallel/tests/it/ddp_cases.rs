//! Cases of PyTorch's own tests of DistributedDataParallel (`docs/ddp-cases.md`) that no other test here covers.

use anyhow::Result;
use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_parallel::{Ddp, DdpOptions, DivideBy, UnevenTurn};
use drumline_torch::{TensorCollectives, autocast, grad, parameters, set_grad};
use rank_test::ranks_test;
use tch::nn::{self, EmbeddingConfig, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{Net, assert_close, descend, loss, replica, samples};

/// Eight samples that only this rank has.
fn own(group: &ProcessGroup) -> (Tensor, Tensor) {
    let start = group.rank() as i64 * 100;
    samples(start..start + 8)
}

/// The gradients of the first two layers under `loss_of`, averaged over the ranks without Ddp.
fn averaged(group: &ProcessGroup, loss_of: impl Fn(&Net) -> Tensor) -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    loss_of(&net).backward();
    let mut grads: Vec<Tensor> = parameters(&vs)[..4].iter().map(|named| named.tensor.grad()).collect();
    group.all_reduce_tensors(&mut grads, ReduceOp::Avg)?;
    Ok(grads)
}

fn gradients(vs: &VarStore) -> Vec<Tensor> {
    parameters(vs)[..4].iter().map(|named| named.tensor.grad()).collect()
}

ranks_test!(several_forwards_before_one_backward, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = own(&group);
    let halves = |forward: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<Tensor> {
        let (a, b) = (forward(&x.narrow(0, 0, 4))?, forward(&x.narrow(0, 4, 4))?);
        Ok(loss(&Tensor::cat(&[a, b], 0), &y))
    };
    ddp.backward(&halves(&|x| Ok(ddp.forward(x)?))?)?;
    assert_close(&gradients(&vs), &averaged(&group, |net| loss(&net.forward(&x), &y))?, 1e-6);
});

ranks_test!(outputs_that_the_loss_does_not_use, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let params = parameters(&vs);
    let (x, y) = own(&group);
    // Two outputs depend on parameters, a third does not; the loss uses one or both, in turns.
    for step in 0..4 {
        let output = ddp.forward(&x)?;
        let more = ddp.module().extra.forward(&output);
        let constant = Tensor::ones([1], (Kind::Float, Device::Cpu));
        let mut total = loss(&output, &y) + constant.sum(Kind::Float);
        if step % 2 == 1 {
            total += loss(&more, &y);
        }
        ddp.backward(&total)?;
        assert_eq!(grad(&params[4].tensor)?.is_some(), step % 2 == 1, "step {step}");
        if step % 2 == 0 {
            assert_close(&gradients(&vs), &averaged(&group, |net| loss(&net.forward(&x), &y))?, 1e-6);
        }
        params.iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    }
});

ranks_test!(a_shared_weight_beside_unused_ones, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = own(&group);
    // `extra` is applied twice; rank 1 does not use it.
    let shared = |net: &Net, is_used: bool| {
        let output = net.forward(&x);
        let output = if is_used { net.extra.forward(&net.extra.forward(&output)) } else { output };
        loss(&output, &y)
    };
    for _ in 0..3 {
        ddp.backward(&shared(ddp.module(), group.rank() == 0))?;
        let lone = VarStore::new(Device::Cpu);
        let net = Net::new(&lone, 0);
        shared(&net, true).backward();
        let mut expected = net.extra.ws.grad() * if group.rank() == 0 { 1.0 } else { 0.0 };
        group.all_reduce_tensor(&mut expected, ReduceOp::Avg)?;
        assert_close(&[ddp.module().extra.ws.grad()], &[expected], 1e-6);
        parameters(&vs).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    }
});

ranks_test!(a_loss_with_gradients_inside, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = own(&group);
    // The gradient of the output is part of the loss.
    let steep = |forward: &dyn Fn(&Tensor) -> Tensor| {
        let x = x.copy().set_requires_grad(true);
        let output = forward(&x);
        let slopes = Tensor::run_backward(&[output.sum(Kind::Float)], &[&x], true, true);
        loss(&output, &y) + slopes[0].square().sum(Kind::Float)
    };
    ddp.backward(&steep(&|x| ddp.module().forward(x)))?;
    let reference = averaged(&group, |net| steep(&|x| net.forward(x)))?;
    assert_close(&gradients(&vs), &reference, 1e-6);
    let control = averaged(&group, |net| loss(&net.forward(&x), &y))?;
    assert!(f64::try_from((&reference[0] - &control[0]).abs().max())? > 1e-4, "control: it weighs something");
});

ranks_test!(autocast_in_forward, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = own(&group);
    let output = autocast(Device::Cpu, Kind::BFloat16, || ddp.forward(&x))??;
    assert_eq!(output.kind(), Kind::BFloat16);
    ddp.backward(&loss(&output.to_kind(Kind::Float), &y))?;
    let reference = averaged(&group, |net| {
        let output = autocast(Device::Cpu, Kind::BFloat16, || net.forward(&x)).unwrap();
        loss(&output.to_kind(Kind::Float), &y)
    })?;
    assert!(
        gradients(&vs).iter().all(|grad| grad.kind() == Kind::Float),
        "gradients are the parameters' kind"
    );
    assert_close(&gradients(&vs), &reference, 1e-6);
});

ranks_test!(frozen_parameters_are_shared_and_not_trained, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, group.rank() as i64 * 10);
    for (name, tensor) in vs.variables() {
        if name.starts_with("first") {
            let _ = tensor.set_requires_grad(false);
        }
    }
    let ddp = Ddp::new(net, &vs, &group, DdpOptions::default())?;
    let (x, y) = own(&group);
    let lone = VarStore::new(Device::Cpu);
    let _ = Net::new(&lone, 0);
    for _ in 0..3 {
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    for name in ["first.weight", "first.bias"] {
        let tensor = &vs.variables()[name];
        assert!(grad(tensor)?.is_none());
        assert_close(&[tensor.detach()], &[lone.variables()[name].detach()], 0.0);
    }
    assert_eq!(ddp.parameters().len(), 4);
    let trained = (&vs.variables()["second.weight"] - &lone.variables()["second.weight"]).abs().max();
    assert!(f64::try_from(trained)? > 1e-4, "control: the others are trained");
});

ranks_test!(a_model_without_trained_parameters_gets_rank_zeros, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let mut own = vs.root().ones_no_train("table", &[3]);
    let _ = own.fill_(group.rank() as f64 + 5.0);
    let ddp = Ddp::new((), &vs, &group, DdpOptions::default())?;
    assert_eq!(Vec::<f32>::try_from(&vs.variables()["table"])?, [5.0; 3]);
    assert!(ddp.parameters().is_empty());
    let x = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    ddp.backward(&(&x * 2.0).sum(Kind::Float))?;
    assert_eq!(Vec::<f32>::try_from(x.grad())?, [2.0]);
});

ranks_test!(a_layer_without_outputs, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let body = nn::linear(vs.root() / "body", 6, 4, Default::default());
    let nothing = nn::linear(
        vs.root() / "nothing",
        4,
        0,
        nn::LinearConfig { ws_init: nn::Init::Const(0.0), ..Default::default() },
    );
    let ddp = Ddp::new(nn::seq().add(body), &vs, &group, DdpOptions::default())?;
    let (x, _) = own(&group);
    for _ in 0..3 {
        let output = ddp.forward(&x)?;
        let loss = output.square().mean(Kind::Float) + nothing.forward(&output).sum(Kind::Float);
        ddp.backward(&loss)?;
        descend(&parameters(&vs))?;
    }
});

ranks_test!(ranks_evaluate_as_often_as_they_like, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root(), 6, Default::default());
    let ddp = Ddp::new(norm, &vs, &group, DdpOptions::default())?;
    let (x, _) = own(&group);
    for _ in 0..group.rank() * 3 {
        let output = ddp.evaluate(&x);
        assert!(!output.requires_grad());
        assert_close(&[output], &[ddp.module().forward_t(&x, false).detach()], 0.0);
    }
    ddp.backward(&ddp.forward(&x)?.square().mean(Kind::Float))?;
});

ranks_test!(buffers_can_be_averaged_instead, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root(), 6, Default::default());
    let options = DdpOptions { broadcast_buffers: false, ..DdpOptions::default() };
    let ddp = Ddp::new(norm, &vs, &group, options)?;
    let mean_of = |rank: i64| {
        samples(rank * 100..rank * 100 + 8).0.mean_dim([0i64].as_slice(), false, Kind::Float) * 0.1
    };
    let _ = ddp.forward(&own(&group).0)?;
    let mut running = vs.variables()["running_mean"].shallow_clone();
    assert_close(&[running.copy()], &[mean_of(group.rank() as i64)], 1e-6);
    group.all_reduce_tensor(&mut running, ReduceOp::Avg)?;
    let _ = ddp.evaluate(&own(&group).0);
    assert_close(&[vs.variables()["running_mean"].copy()], &[(mean_of(0) + mean_of(1)) / 2], 1e-6);
});

ranks_test!(after_a_replica_is_gone_another_group_may_have_one, 3, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let (x, y) = own(&group);
    let backward = |ddp: &Ddp<()>| -> Result<()> {
        parameters(&vs).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
        Ok(ddp.backward(&loss(&net.forward(&x), &y))?)
    };
    let mean = |group: &ProcessGroup| averaged(group, |net| loss(&net.forward(&x), &y));
    let ddp = Ddp::new((), &vs, &group, DdpOptions::default())?;
    for _ in 0..2 {
        backward(&ddp)?;
        assert_close(&gradients(&vs), &mean(&group)?, 1e-6);
    }
    drop(ddp);
    // A plain backward is not reduced: the hooks were removed.
    parameters(&vs).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    loss(&net.forward(&x), &y).backward();
    let lone = VarStore::new(Device::Cpu);
    loss(&Net::new(&lone, 0).forward(&x), &y).backward();
    assert_close(&gradients(&vs), &gradients(&lone), 1e-6);

    if let Some(pair) = group.new_group(&[0, 2])? {
        let ddp = Ddp::new((), &vs, &pair, DdpOptions::default())?;
        backward(&ddp)?;
        assert_close(&gradients(&vs), &mean(&pair)?, 1e-6);
    }
    group.barrier()?;
});

ranks_test!(one_parameter_more_on_one_rank_is_an_error_on_all, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let _net = Net::new(&vs, 0);
    if group.rank() == 1 {
        let _ = vs.root().var("more", &[2], nn::Init::Const(0.0));
    }
    let error = Ddp::new((), &vs, &group, DdpOptions::default()).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("it has `more`, which rank 0 has not"), "{error}");
});

ranks_test!(sparse_gradients_are_reduced_as_dense_ones, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let table = nn::embedding(vs.root(), 3, 2, EmbeddingConfig { sparse: true, ..Default::default() });
    let ddp = Ddp::new((), &vs, &group, DdpOptions::default())?;
    // Rows 0 and 0 on rank 0, rows 0 and 1 on rank 1; from the second time on gradients are not zeroed.
    for (step, factor) in [(0, 1.0), (1, 1.0), (2, 2.0), (3, 3.0)] {
        let rows = table.forward(&Tensor::from_slice(&[0i64, group.rank() as i64]));
        ddp.backward(&rows.sum(Kind::Float))?;
        let grad = table.ws.grad();
        assert!(!grad.is_sparse());
        let expected = [1.5f32, 1.5, 0.5, 0.5, 0.0, 0.0].map(|x| x * factor);
        assert_eq!(Vec::<f32>::try_from(grad.flatten(0, -1))?, expected, "step {step}");
        if step == 0 {
            set_grad(&table.ws, None)?;
        }
    }
});

ranks_test!(turns_that_end_early_leave_nothing_behind, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = own(&group);
    let batches = (0..1 + 4 * group.rank()).map(|_| (x.shallow_clone(), y.shallow_clone()));
    for (count, turn) in ddp.uneven(batches, DivideBy::RanksWithData).enumerate() {
        match turn? {
            UnevenTurn::Batch((x, y)) => ddp.backward(&loss(&ddp.forward(&x)?, &y))?,
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        if count == 2 {
            break;
        }
    }
    parameters(&vs).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
    assert_close(&gradients(&vs), &averaged(&group, |net| loss(&net.forward(&x), &y))?, 1e-6);
});
