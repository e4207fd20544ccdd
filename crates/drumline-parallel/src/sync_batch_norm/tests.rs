//! Synchronised batch normalisation against PyTorch's numbers (`bench/oracle/sync_batch_norm.py`), and inside a model.
//!
//! PyTorch's cases `DistributedDataParallel_SyncBatchNorm*`, `SyncBatchNorm_process_group`,
//! `ddp_sync_bn_training_vs_eval` and `ddp_uneven_inputs_stop_iteration_sync_bn` each have a counterpart here;
//! `sync_bn_logged` is about PyTorch's own log.

use std::collections::HashMap;

use drumline_comm::{CommError, GroupOptions, LocalGroup, ProcessGroup, ReduceOp};
use drumline_torch::TensorCollectives;
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

use super::SyncBatchNorm;
use crate::sync_group::{SyncCall, SyncGroup};

const GOLDEN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/sync_batch_norm.safetensors");

/// PyTorch's results of one case.
struct Case {
    name: &'static str,
    tensors: HashMap<String, Tensor>,
}

impl Case {
    fn read(name: &'static str) -> Self {
        let all = Tensor::read_safetensors(GOLDEN).unwrap().into_iter();
        let ours = all.filter_map(|(key, tensor)| {
            Some((key.strip_prefix(name)?.strip_prefix('/')?.to_owned(), tensor))
        });
        Self { name, tensors: ours.collect() }
    }

    fn of(&self, key: &str) -> Tensor {
        self.tensors[key].copy()
    }

    fn of_rank(&self, key: &str, rank: usize) -> Tensor {
        self.of(&format!("{key}.{rank}"))
    }

    fn num_ranks(&self) -> usize {
        self.tensors.keys().filter(|key| key.starts_with("x.")).count()
    }

    fn layer(&self, sync: &SyncGroup, kind: Kind) -> (nn::VarStore, SyncBatchNorm) {
        let affine = self.tensors.contains_key("weight");
        let mut vs = nn::VarStore::new(Device::Cpu);
        let config = nn::BatchNormConfig { affine, ..Default::default() };
        let layer = SyncBatchNorm::new(vs.root() / "bn", self.of("mean_before").numel() as i64, config, sync);
        if kind == Kind::Double {
            vs.double();
        } else if kind == Kind::Half {
            vs.half();
        } else if kind == Kind::BFloat16 {
            vs.bfloat16();
        }
        tch::no_grad(|| {
            for (name, mut tensor) in vs.variables() {
                let key = match name.trim_start_matches("bn.") {
                    "running_mean" => "mean_before",
                    "running_var" => "var_before",
                    other => other,
                };
                tensor.copy_(&self.of(key));
            }
        });
        (vs, layer)
    }
}

/// The memory format.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    First,
    Last,
}

fn laid(x: Tensor, layout: Layout) -> Tensor {
    match layout {
        Layout::First => x,
        Layout::Last => x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
    }
}

#[track_caller]
fn assert_near(got: &Tensor, want: &Tensor, limit: f64, what: &str) {
    assert_eq!(got.size(), want.size(), "{what}");
    if want.numel() == 0 {
        return;
    }
    let far = (got.to_kind(Kind::Double) - want).abs().max().double_value(&[]);
    let scale = want.abs().max().double_value(&[]).max(1.0);
    assert!(far <= limit * scale, "{what}: differs by {far}, of {scale}");
}

fn limit(kind: Kind) -> f64 {
    match kind {
        Kind::Double => 1e-12,
        Kind::Float => 2e-6,
        Kind::Half => 5e-3,
        _ => 4e-2,
    }
}

/// One step of training and one of evaluation, on this rank's part of a case.
fn check(case: &Case, sync: &SyncGroup, rank: usize, kind: Kind, layout: Layout) {
    let (vs, layer) = case.layer(sync, kind);
    let (limit, what) = (limit(kind), format!("{} {kind:?} {layout:?} rank {rank}", case.name));
    let x = laid(case.of_rank("x", rank).to_kind(kind), layout).set_requires_grad(true);
    let y = layer.forward_t(&x, true);
    assert_eq!((y.kind(), y.stride()), (kind, x.stride()), "{what}");
    assert_near(&y, &case.of_rank("y", rank), limit, &format!("y of {what}"));
    y.backward_with(&case.of_rank("dy", rank).to_kind(kind));
    assert_near(&x.grad(), &case.of_rank("dx", rank), limit, &format!("dx of {what}"));
    assert_eq!(x.grad().stride(), x.stride(), "{what}");
    if let (Some(weight), Some(bias)) = (&layer.ws, &layer.bs) {
        assert_near(
            &weight.grad(),
            &case.of_rank("dweight", rank),
            4.0 * limit,
            &format!("dweight of {what}"),
        );
        assert_near(&bias.grad(), &case.of_rank("dbias", rank), 4.0 * limit, &format!("dbias of {what}"));
    }
    let variables = vs.variables();
    assert_near(&variables["bn.running_mean"], &case.of("mean_after"), limit, &format!("mean of {what}"));
    assert_near(&variables["bn.running_var"], &case.of("var_after"), limit, &format!("var of {what}"));
    let evaluated = layer.forward_t(&x, false);
    assert_near(&evaluated, &case.of_rank("evaluated", rank), limit, &format!("evaluation of {what}"));
}

trait BackwardWith {
    fn backward_with(&self, grad: &Tensor);
}

impl BackwardWith for Tensor {
    fn backward_with(&self, grad: &Tensor) {
        (self * grad).sum(Kind::Double).backward();
    }
}

fn on_ranks(case: &'static str, kinds: &[Kind], layout: Layout) {
    tch::set_num_threads(1);
    LocalGroup::run(Case::read(case).num_ranks(), |group| {
        let (case, sync) = (Case::read(case), SyncGroup::new(&group)?);
        kinds.iter().for_each(|&kind| check(&case, &sync, group.rank(), kind, layout));
        Ok(())
    })
    .unwrap();
}

#[test]
fn sync_batch_norm() {
    on_ranks("images", &[Kind::Double, Kind::Float], Layout::First);
}

#[test]
fn sync_batch_norm_half() {
    on_ranks("images", &[Kind::Half, Kind::BFloat16], Layout::First);
}

#[test]
fn sync_batch_norm_channels_last() {
    on_ranks("images", &[Kind::Double, Kind::Float], Layout::Last);
}

#[test]
fn sync_batch_norm_2d_input_and_others() {
    for case in ["two_dims", "three_dims", "five_dims"] {
        on_ranks(case, &[Kind::Double, Kind::Float], Layout::First);
    }
}

#[test]
fn sync_batch_norm_no_affine() {
    on_ranks("no_affine", &[Kind::Double, Kind::Float], Layout::First);
}

#[test]
fn sync_batch_norm_diff_input_sizes_running_value_and_gradient() {
    on_ranks("uneven", &[Kind::Double, Kind::Float], Layout::First);
}

#[test]
fn sync_batch_norm_single_input_per_process() {
    on_ranks("single", &[Kind::Double, Kind::Float], Layout::First);
}

#[test]
fn a_rank_with_an_empty_batch_takes_part() {
    on_ranks("one_empty", &[Kind::Double, Kind::Float], Layout::First);
}

#[test]
fn sync_batch_norm_process_group() {
    // Two groups of two ranks, each with its own statistics.
    LocalGroup::run(4, |group| {
        let half = group.split(Some(group.rank() as u32 / 2), 0)?.unwrap();
        let sync = SyncGroup::new(&half)?;
        let name = ["images", "uneven"][group.rank() / 2];
        check(&Case::read(name), &sync, half.rank(), Kind::Double, Layout::First);
        Ok(())
    })
    .unwrap();
}

#[test]
fn with_one_rank_it_is_ordinary_batch_normalisation() {
    LocalGroup::run(1, |group| {
        let sync = SyncGroup::new(&group)?;
        sync.begin_step();
        let (vs, plain_vs) = (nn::VarStore::new(Device::Cpu), nn::VarStore::new(Device::Cpu));
        let config = nn::BatchNormConfig { ws_init: nn::Init::Const(0.7), ..Default::default() };
        let layer = SyncBatchNorm::new(vs.root(), 4, config, &sync);
        let plain = nn::batch_norm2d(plain_vs.root(), 4, config);
        let x = Case::read("images").of_rank("x", 0).to_kind(Kind::Float);
        assert_eq!(layer.forward_t(&x, true), plain.forward_t(&x, true));
        assert_eq!(layer.running_var, plain.running_var);
        assert!(sync.calls().is_empty());
        Ok(())
    })
    .unwrap();
}

/// A small model with synchronised norms.
struct Model {
    vs: nn::VarStore,
    conv: nn::Conv2D,
    norm: SyncBatchNorm,
    second: nn::Conv2D,
    second_norm: SyncBatchNorm,
}

impl Model {
    fn new(sync: &SyncGroup) -> Self {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let conv = nn::conv2d(&root / "conv", 3, 6, 3, Default::default());
        let norm = SyncBatchNorm::new(&root / "norm", 6, Default::default(), sync);
        let second = nn::conv2d(&root / "second", 6, 5, 2, Default::default());
        let second_norm = SyncBatchNorm::new(&root / "second_norm", 5, Default::default(), sync);
        vs.double();
        let model = Self { vs, conv, norm, second, second_norm };
        tch::no_grad(|| model.set_weights());
        model
    }

    /// The same weights on all ranks, without the generator that all threads share.
    fn set_weights(&self) {
        for (name, mut tensor) in self.vs.variables().into_iter().filter(|(_, t)| t.requires_grad()) {
            let numbers =
                Tensor::arange(tensor.numel() as i64, (Kind::Double, Device::Cpu)) + name.len() as i64;
            tensor.copy_(&(numbers.sin() * 0.3 + 0.1).view_as(&tensor));
        }
    }

    /// The sum over the batch, so that the losses of ranks add up.
    fn loss(&self, x: &Tensor) -> Tensor {
        let x = self.norm.forward_t(&self.conv.forward(x), true).relu();
        let x = self.second_norm.forward_t(&self.second.forward(&x), true);
        (&x * &x.sin()).sum(Kind::Double)
    }

    /// Gradients summed over the ranks, by name.
    fn gradients(&self, group: &ProcessGroup) -> HashMap<String, Tensor> {
        let variables = self.vs.variables().into_iter().filter(|(_, t)| t.requires_grad());
        let mut named: Vec<_> = variables.collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
            .into_iter()
            .map(|(name, tensor)| {
                let given = tensor.grad();
                let mut grad = if given.defined() { given.copy() } else { tensor.zeros_like().detach() };
                group.all_reduce_tensor(&mut grad, ReduceOp::Sum).unwrap();
                (name, grad)
            })
            .collect()
    }
}

fn batch() -> Tensor {
    Tensor::arange(7 * 3 * 6 * 6, (Kind::Double, Device::Cpu)).sin().view([7, 3, 6, 6])
}

/// The results of one rank with the whole batch.
fn alone() -> (HashMap<String, Tensor>, Tensor) {
    let found = LocalGroup::run(1, |group| {
        let model = Model::new(&SyncGroup::new(&group)?);
        model.loss(&batch()).backward();
        Ok((model.gradients(&group), model.second_norm.running_var.copy()))
    });
    found.unwrap().remove(0)
}

fn assert_equals_alone(model: &Model, group: &ProcessGroup) {
    let (gradients, running_var) = alone();
    for (name, got) in model.gradients(group) {
        assert_near(&got, &gradients[&name], 1e-10, &name);
    }
    assert_near(&model.second_norm.running_var, &running_var, 1e-12, "running_var");
}

#[test]
fn a_model_on_three_ranks_equals_one_on_the_whole_batch() {
    LocalGroup::run(3, |group| {
        let model = Model::new(&SyncGroup::new(&group)?);
        let rows = [[0, 3], [3, 0], [3, 4]][group.rank()];
        model.loss(&batch().narrow(0, rows[0], rows[1])).backward();
        assert_equals_alone(&model, &group);
        Ok(())
    })
    .unwrap();
}

#[test]
fn sync_bn_training_vs_eval() {
    LocalGroup::run(2, |group| {
        let sync = SyncGroup::new(&group)?;
        sync.begin_step();
        let layer = Model::new(&sync).norm;
        let x = Tensor::ones([2, 6, 2, 2], (Kind::Double, Device::Cpu)) * (group.rank() as i64 + 1);
        let _ = layer.forward_t(&x, true);
        assert_eq!(sync.calls(), [SyncCall::Statistics { channels: 6 }]);
        // In evaluation a rank does not communicate, and nothing changes.
        let before = layer.running_mean.copy();
        if group.rank() == 0 {
            let _ = layer.forward_t(&x, false);
        }
        assert_eq!(layer.running_mean, before);
        assert_eq!(sync.calls().len(), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn uneven_inputs_with_sync_bn() {
    // Rank 1 has data for one step, rank 0 for two, the second of which equals a step of one rank.
    LocalGroup::run(2, |group| {
        let sync = SyncGroup::new(&group)?;
        let model = Model::new(&sync);
        sync.begin_step();
        model.loss(&batch()).backward();
        let step = sync.calls();
        let [s, g] =
            [|channels| SyncCall::Statistics { channels }, |channels| SyncCall::Gradients { channels }];
        assert_eq!(step, [s(6), s(5), g(5), g(6)]);
        let model = Model::new(&sync);
        if group.rank() == 0 {
            sync.begin_step();
            model.loss(&batch()).backward();
            assert_eq!(sync.calls(), step);
        } else {
            sync.shadow(&sync.calls())?;
        }
        let (gradients, _) = alone();
        for (name, got) in model.gradients(&group) {
            assert_near(&got, &gradients[&name], 1e-10, &name);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_forward_alone_does_not_wait_or_change_running_statistics() {
    LocalGroup::run(2, |group| {
        let sync = SyncGroup::new(&group)?;
        let model = Model::new(&sync);
        if group.rank() == 1 {
            let _ = sync.alone(|| model.loss(&batch()));
            let mean = &model.vs.variables()["norm.running_mean"];
            assert_eq!(mean.abs().max().double_value(&[]), 0.0, "it does not change");
        }
        sync.begin_step();
        model.loss(&batch()).backward();
        assert_eq!(sync.calls().len(), 4, "control: synchronised again");
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_inputs_are_errors() {
    LocalGroup::run(2, |group| {
        let sync = SyncGroup::new(&group)?;
        let layer = Model::new(&sync).norm;
        let refused = |size: &[i64]| {
            let x = Tensor::zeros(size, (Kind::Double, Device::Cpu));
            layer.f_forward_t(&x, true).unwrap_err().to_string()
        };
        assert!(refused(&[2, 5, 3, 3]).contains("6 channels has shape [2, 5, 3, 3]"));
        assert!(refused(&[6]).contains("[batch, 6, ..]"));
        // One value on all ranks together, on rank 0.
        assert!(refused(&[1 - group.rank() as i64, 6]).contains("no variance"));
        // Empty batches on all ranks change nothing.
        let x = Tensor::zeros([0, 6], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let y = layer.f_forward_t(&x, true).unwrap();
        y.sum(Kind::Double).backward();
        assert_eq!((y.size(), x.grad().size()), (vec![0, 6], vec![0, 6]));
        assert_eq!(layer.running_mean, layer.running_mean.zeros_like());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_failure_in_backward_is_stored() {
    let options = GroupOptions { timeout: std::time::Duration::from_secs(20), ..Default::default() };
    let outcomes = LocalGroup::outcomes(2, &options, |group| {
        let sync = SyncGroup::new(&group)?;
        let model = Model::new(&sync);
        let loss = model.loss(&batch());
        assert!(sync.failure().is_none());
        if group.rank() == 1 {
            // Leaves before backward.
            return Ok(String::new());
        }
        let error = loss.f_backward().unwrap_err().to_string();
        assert!(
            matches!(sync.failure(), Some(CommError::PeerLeft { .. } | CommError::PeerLost { .. })),
            "{error}"
        );
        Ok(error)
    });
    let error = outcomes.into_iter().next().unwrap().unwrap();
    assert!(error.contains("backward failed: rank 1 has left"), "{error}");
}
