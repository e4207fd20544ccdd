//! Activation checkpoints on a GPU: eager and in CUDA graphs, with dropout, attention and offloaded activations.

use drumline_torch::cuda::{GraphedStep, memory, reset_peak, synchronize};
use drumline_torch::{
    Autocast, FunctionError, Masks, NotRecordable, Optimizer, Sgd, SgdOptions, StepSamples, TorchError,
    checkpoint, keep, keep_drawn, mask_layer, offload_saved, parameters, selective_checkpoint,
    sum_with_dropout,
};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu};

const TEXTS: i64 = 4;
const PLACES: i64 = 64;
const SIZE: i64 = 128;
const BLOCKS: usize = 4;

/// What is kept of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Plain,
    Full,
    Selective,
    Offloaded,
}

/// Attention and a feed-forward layer, with dropout.
struct Block {
    attention: [Tensor; 2],
    feed_forward: [Tensor; 2],
    p: f64,
}

impl Block {
    fn shared(&self) -> Self {
        let both = |of: &[Tensor; 2]| of.each_ref().map(Tensor::shallow_clone);
        Self { attention: both(&self.attention), feed_forward: both(&self.feed_forward), p: self.p }
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor, TorchError> {
        let product = |xs: &Tensor, weight: &Tensor| keep(&[xs], || Ok(xs.f_matmul(weight)?));
        let normed = |xs: &Tensor| xs.f_layer_norm([SIZE], None::<&Tensor>, None::<&Tensor>, 1e-5, false);
        let heads = product(&normed(xs)?, &self.attention[0])?.f_chunk(3, -1)?;
        let head = |part: usize| heads[part].f_view([TEXTS, PLACES, 2, SIZE / 2])?.f_transpose(1, 2);
        let (q, k, v) = (head(0)?, head(1)?, head(2)?);
        let seen = keep_drawn(&[&q, &k, &v], || {
            let no_mask = None::<&Tensor>;
            Ok(Tensor::f_scaled_dot_product_attention(&q, &k, &v, no_mask, self.p, true, None, false)?)
        })?;
        let seen = seen.f_transpose(1, 2)?.f_flatten(2, 3)?;
        let xs = sum_with_dropout(xs, &product(&seen, &self.attention[1])?, self.p)?;
        let hidden = product(&normed(&xs)?, &self.feed_forward[0])?.f_gelu("tanh")?;
        sum_with_dropout(&xs, &product(&hidden, &self.feed_forward[1])?, self.p)
    }
}

struct Trained {
    blocks: Vec<Block>,
    how: How,
    masks: Masks,
    optimizer: Sgd,
    input: Tensor,
    bf16: bool,
    micro_batches: usize,
    _store: VarStore,
}

impl Trained {
    fn new(how: How, p: f64, bf16: bool) -> Self {
        tch::manual_seed(3);
        let store = VarStore::new(GPU);
        let init = Init::Randn { mean: 0.0, stdev: 0.05 };
        let blocks = (0..BLOCKS).map(|index| {
            let path = store.root() / index;
            let weight = |name: &str, from, to| path.var(name, &[from, to], init);
            let attention = [weight("qkv", SIZE, 3 * SIZE), weight("o", SIZE, SIZE)];
            Block {
                attention,
                feed_forward: [weight("fc", SIZE, 4 * SIZE), weight("proj", 4 * SIZE, SIZE)],
                p,
            }
        });
        let blocks = blocks.collect();
        let optimizer =
            Sgd::new(parameters(&store), SgdOptions { lr: 0.05, ..SgdOptions::default() }).unwrap();
        let input = (Tensor::arange(TEXTS * PLACES * SIZE, FLOAT) * 0.37).sin().view([TEXTS, PLACES, SIZE]);
        let masks = Masks::new(11, GPU).unwrap();
        Self { blocks, how, masks, optimizer, input, bf16, micro_batches: 1, _store: store }
    }

    fn forward(&self, first: u64) -> Result<Tensor, TorchError> {
        let _scope = self.masks.enter(StepSamples { first, stride: 1, count: TEXTS as u64 });
        let _autocast = self.bf16.then(|| Autocast::new(GPU, Kind::BFloat16)).transpose()?;
        let mut xs = self.input.shallow_clone();
        for (index, block) in self.blocks.iter().enumerate() {
            let block = block.shared();
            let function = move |xs: &[Tensor]| {
                let _layer = mask_layer("block", index);
                Ok(block.forward(&xs[0])?)
            };
            let before = xs.shallow_clone();
            xs = match self.how {
                How::Plain => {
                    function(&[before]).map_err(|cause| TorchError::Custom { operation: "block", cause })?
                }
                How::Full => checkpoint(function, &[&before])?,
                How::Selective => selective_checkpoint(function, &[&before])?,
                How::Offloaded => offload_saved(|| function(&[before]))?
                    .map_err(|cause| TorchError::Custom { operation: "block", cause })?,
            };
        }
        Ok((xs.f_to_kind(Kind::Float)? - &self.input * 0.5).f_square()?.f_mean(Kind::Float)?)
    }

    fn step(&mut self) -> Result<Tensor, TorchError> {
        self.optimizer.zero_grad()?;
        self.masks.advance()?;
        let mut sum = Tensor::f_zeros([1], FLOAT)?;
        for micro in 0..self.micro_batches {
            let loss = self.forward((micro as u64) * TEXTS as u64)?;
            loss.f_backward()?;
            sum = sum.f_add(&loss.detach())?;
        }
        self.optimizer.step()?;
        Ok(sum)
    }
}

/// The losses of steps, and the peak of memory.
fn losses(mut trained: Trained, graphed: bool) -> (Vec<f64>, u64) {
    synchronize(0).unwrap();
    reset_peak(0).unwrap();
    let before = memory(0).unwrap().allocated;
    tch::manual_seed(21);
    let mut step = GraphedStep::new(0).unwrap();
    let one = |trained: &mut Trained, step: &mut GraphedStep<Tensor>| {
        let loss = if graphed {
            step.run(|| trained.step()).unwrap().shallow_clone()
        } else {
            trained.step().unwrap()
        };
        loss.double_value(&[0])
    };
    let losses = (0..8).map(|_| one(&mut trained, &mut step)).collect();
    assert_eq!(step.is_recorded(), graphed);
    (losses, memory(0).unwrap().peak_allocated - before)
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], close: f64) {
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart <= close, "{apart}: {found:?} {expected:?}");
}

#[test]
fn steps_with_checkpoints_have_the_losses_of_those_without_eager_and_as_graphs() {
    let _turn = gpu();
    for (p, bf16, close) in [(0.0, false, 1e-6), (0.2, false, 1e-6), (0.2, true, 2e-3), (0.0, true, 2e-3)] {
        let run = |how, graphed| losses(Trained::new(how, p, bf16), graphed);
        let (expected, plain) = run(How::Plain, false);
        assert!(expected[7] < expected[0], "it learns: {expected:?}");
        for how in [How::Plain, How::Full, How::Selective] {
            for graphed in [false, true] {
                let (found, peak) = run(how, graphed);
                println!("{how:?}, p {p}, bf16 {bf16}, graph {graphed}: peak {peak} of {plain}");
                assert_close(&found, &expected, close);
                assert!(how == How::Plain || graphed || peak < plain, "{how:?}: {peak} of {plain}");
            }
        }
        assert_close(&run(How::Offloaded, false).0, &expected, close);
    }
    // Control: dropout counts, and so does the seed's step.
    let without = losses(Trained::new(How::Full, 0.0, false), false).0;
    let with = losses(Trained::new(How::Full, 0.2, false), false).0;
    assert!((without[0] - with[0]).abs() > 1e-4, "{without:?} {with:?}");
}

#[test]
fn micro_batches_draw_masks_of_their_own_in_a_graph() {
    let _turn = gpu();
    let run = |how, graphed| losses(Trained { micro_batches: 2, ..Trained::new(how, 0.2, false) }, graphed).0;
    let expected = run(How::Plain, false);
    assert_close(&run(How::Full, true), &expected, 1e-6);
    let one = losses(Trained::new(How::Plain, 0.2, false), false).0;
    assert!((2.0 * one[0] - expected[0]).abs() > 1e-6, "two micro-batches of equal inputs have other masks");
}

#[test]
fn offloaded_tensors_leave_the_gpu_and_come_back_in_time() {
    let _turn = gpu();
    const BYTES: u64 = 64 << 20;
    let x = (Tensor::arange(BYTES as i64 / 4, FLOAT) * 1e-3).set_requires_grad(true);
    let run = |offloaded: bool| {
        synchronize(0).unwrap();
        reset_peak(0).unwrap();
        let before = memory(0).unwrap().allocated;
        // Each sine saves its input.
        let sines = || (0..16).fold(&x * 1.0, |x, _| (x * 1.1).sin());
        let y = if offloaded { offload_saved(sines).unwrap() } else { sines() };
        y.sum(Kind::Float).backward();
        let (grad, peak) = (x.grad().copy(), memory(0).unwrap().peak_allocated - before);
        let _ = tch::no_grad(|| x.grad().zero_());
        (grad, peak)
    };
    let (expected, plain) = run(false);
    for _ in 0..3 {
        let (found, peak) = run(true);
        assert_eq!(found, expected);
        println!("{} of {} MB", peak >> 20, plain >> 20);
        assert!(peak < plain - 6 * BYTES, "{peak} of {plain}");
    }
}

#[test]
fn a_tensor_that_is_modified_while_it_is_copied_to_the_host_is_an_error() {
    let _turn = gpu();
    let x = Tensor::ones([1 << 24], FLOAT).set_requires_grad(true);
    let y = offload_saved(|| (&x * 2.0).exp()).unwrap();
    let _ = y.shallow_clone().g_add_scalar_(1.0);
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("was modified in place (version 1, expected 0)"), "{error}");
    // The control: what is not modified has its gradient.
    offload_saved(|| (&x * 2.0).exp()).unwrap().sum(Kind::Float).backward();
    let expected = 2.0 * 2f64.exp();
    assert!((x.grad().mean(Kind::Double).double_value(&[]) / expected - 1.0).abs() < 1e-5);
}

#[test]
fn a_function_that_moves_its_inputs_to_the_gpu_leaves_its_generator_where_it_was() {
    let _turn = gpu();
    let host = (Kind::Float, tch::Device::Cpu);
    let run = |checkpointed: bool| {
        tch::manual_seed(3);
        let x = Tensor::ones([64], host).set_requires_grad(true);
        let block = |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
            let on_gpu = xs[0].f_to_device(GPU)?;
            let drawn = keep_drawn(&[&on_gpu], || Ok(on_gpu.f_exp()?.f_dropout(0.5, true)?))?;
            Ok(drawn.f_sin()?.f_dropout(0.5, true)?)
        };
        let y = if checkpointed {
            checkpoint(block, &[&x]).unwrap()
        } else {
            block(&[x.shallow_clone()]).unwrap()
        };
        let between = Tensor::rand([8], FLOAT);
        y.sum(Kind::Float).backward();
        (x.grad(), between, Tensor::rand([8], FLOAT), Tensor::rand([8], host))
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn random_numbers_of_libtorch_in_a_recorded_checkpoint_are_refused() {
    let _turn = gpu();
    let weight = Tensor::ones([8, 8], FLOAT).set_requires_grad(true);
    let x = Tensor::ones([8, 8], FLOAT);
    let mut graphed = GraphedStep::new(0).unwrap();
    let mut step = || {
        graphed
            .run(|| -> Result<Tensor, TorchError> {
                let weight = weight.shallow_clone();
                let block = move |xs: &[Tensor]| Ok(xs[0].f_matmul(&weight)?.f_dropout(0.5, true)?);
                checkpoint(block, &[&x])?.f_sum(Kind::Float)?.f_backward()?;
                Ok(x.shallow_clone())
            })
            .map(drop)
    };
    (0..3).for_each(|_| step().unwrap());
    let error = step().unwrap_err();
    assert!(
        matches!(&error, TorchError::NotRecordable(NotRecordable::RandomInCheckpoint { operation }) if operation.contains("dropout")),
        "{error}"
    );
}
