//! Properties that hold for any weights. `tests/it/gpt.rs` compares the model with PyTorch.

use drumline_torch::{autocast, grad, parameters};
use tch::nn::VarStore;
use tch::{Device, Kind, no_grad};

use super::*;

fn small() -> GptOptions {
    GptOptions { n_layer: 2, n_head: 2, n_embd: 16, n_positions: 12, vocab_size: 29, ..Default::default() }
}

/// Builds a model whose weights come from a formula, because other tests draw random numbers at the same time.
fn made(options: &GptOptions) -> (VarStore, Gpt) {
    let store = VarStore::new(Device::Cpu);
    let model = Gpt::new(&store.root(), options).unwrap();
    for (place, named) in parameters(&store).into_iter().enumerate() {
        let mut tensor = named.tensor;
        let numbers = Tensor::arange(tensor.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + place as f64;
        let shift = f64::from(named.name.contains("ln_") && named.name.ends_with("weight"));
        no_grad(|| {
            tensor.copy_(&((&numbers + &numbers * &numbers * 1e-3).sin() * 0.2 + shift).view_as(&tensor))
        });
    }
    (store, model)
}

fn batch(seed: i64) -> (Tensor, Tensor) {
    let tokens = Tensor::arange(3 * 9, (Kind::Int64, Device::Cpu)) * 17 + seed;
    let tokens = tokens.remainder(29).view([3, 9]);
    (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8))
}

#[test]
fn invalid_options_are_refused() {
    let refused = |change: fn(&mut GptOptions)| {
        let mut options = small();
        change(&mut options);
        Gpt::new(&VarStore::new(Device::Cpu).root(), &options).unwrap_err().to_string()
    };
    assert_eq!(
        refused(|o| o.n_head = 3),
        "n_embd 16 cannot be split among 3 heads; try a multiple of 3, or another number of heads"
    );
    assert_eq!(refused(|o| o.n_layer = 0), "n_layer is 0; try 1 or more");
    assert_eq!(refused(|o| o.dropout = 1.0), "dropout is 1; try 0 to below 1");
    assert_eq!(refused(|o| o.vocab_multiple = 0), "vocab_multiple is 0; try 1 or more");
}

#[test]
fn sizes_and_initial_weights_are_those_of_gpt2() {
    let options = GptOptions { vocab_multiple: 64, ..GptOptions::default() };
    assert_eq!((options.padded_vocab(), GptOptions::default().padded_vocab()), (50304, 50257));
    let store = VarStore::new(Device::Cpu);
    Gpt::new(&store.root(), &GptOptions { n_embd: 64, vocab_size: 500, ..small() }).unwrap();
    let deviation = |name: &str| store.variables()[name].std(true).double_value(&[]);
    assert!((deviation("wte.weight") - 0.02).abs() < 0.001);
    assert!((deviation("h.0.attn.c_attn.weight") - 0.02).abs() < 0.001);
    assert!((deviation("h.1.mlp.c_proj.weight") - 0.01).abs() < 0.001, "0.02 / √4");
    assert!((deviation("h.1.attn.c_proj.weight") - 0.01).abs() < 0.001);
    assert_eq!(deviation("h.1.mlp.c_proj.bias"), 0.0);
}

#[test]
fn the_default_has_124_million_parameters() {
    let GptOptions { n_layer, n_embd, n_positions, vocab_size, .. } = GptOptions::default();
    let block = 12 * n_embd * n_embd + 13 * n_embd;
    assert_eq!(n_layer * block + (vocab_size + n_positions) * n_embd + 2 * n_embd, 124_439_808);
    let (store, _) = made(&small());
    let count: i64 = parameters(&store).iter().map(|named| named.tensor.numel() as i64).sum();
    let block = 12 * 16 * 16 + 13 * 16;
    assert_eq!(count, 2 * block + (29 + 12) * 16 + 2 * 16, "the same sum for a small one");
}

/// The loss, and the gradient of each parameter.
fn outcome(options: &GptOptions, kind: Option<Kind>) -> (f64, Vec<Tensor>) {
    let (store, model) = made(options);
    let (tokens, targets) = batch(1);
    let forward = || model.loss(&tokens, &targets, Mode::Train).unwrap();
    let loss = match kind {
        Some(kind) => autocast(Device::Cpu, kind, forward).unwrap(),
        None => forward(),
    };
    (&loss / 24.0).backward();
    let gradients = parameters(&store).iter().map(|named| grad(&named.tensor).unwrap().unwrap()).collect();
    (loss.double_value(&[]), gradients)
}

#[test]
fn chunks_change_neither_loss_nor_gradients() {
    for vocab_multiple in [1, 64] {
        for (kind, tolerance) in [(None, 1e-6), (Some(Kind::BFloat16), 4e-3)] {
            let plain = GptOptions { vocab_multiple, ..small() };
            let (loss, gradients) = outcome(&plain, kind);
            for loss_chunks in [2, 5, 24, 100] {
                let (chunked, others) = outcome(&GptOptions { loss_chunks, ..plain.clone() }, kind);
                assert!((loss - chunked).abs() < 1e3 * tolerance, "{loss} {chunked}");
                for (one, other) in gradients.iter().zip(&others) {
                    let far = (one - other).abs().max().double_value(&[]);
                    assert!(far < tolerance, "{loss_chunks} chunks, {kind:?}: {far}");
                    assert_eq!(one.kind(), other.kind());
                }
            }
        }
    }
}

#[test]
fn sums_over_many_chunks_are_as_exact_as_over_one() {
    let formula = |size: [i64; 2], by: f64| {
        let numbers = Tensor::arange(size[0] * size[1], (Kind::Double, Device::Cpu)) * by;
        (numbers.sin() * 2.0).view(size).to_kind(Kind::BFloat16)
    };
    let (states, weight) = (formula([1024, 16], 0.7), formula([20, 16], 0.3));
    let targets = Tensor::arange(1024, (Kind::Int64, Device::Cpu)).remainder(20);
    let gradient = |kind: Kind, chunks: i64| {
        let weight = weight.to_kind(kind).set_requires_grad(true);
        let projection = Projection { weight: &weight, bias: None };
        let loss = linear_cross_entropy(&states.to_kind(kind), projection, &targets, chunks).unwrap();
        loss.backward();
        grad(&weight).unwrap().unwrap().to_kind(Kind::Double)
    };
    let exact = gradient(Kind::Double, 1);
    let error =
        |chunks| ((gradient(Kind::BFloat16, chunks) - &exact).norm() / exact.norm()).double_value(&[]);
    assert!(error(64) < 1.5 * error(1), "{} {}", error(64), error(1));
}

#[test]
fn chunks_in_fp16_are_refused_where_gradients_would_be_lost() {
    let half = |chunks| {
        let states = Tensor::ones([8, 4], (Kind::Half, Device::Cpu)).set_requires_grad(true);
        let weight = Tensor::zeros([10, 4], (Kind::Half, Device::Cpu));
        let targets = Tensor::zeros([8], (Kind::Int64, Device::Cpu));
        linear_cross_entropy(&states, Projection { weight: &weight, bias: None }, &targets, chunks)
    };
    let message = half(2).unwrap_err().to_string();
    assert!(message.contains("a loss in 2 chunks") && message.contains("try one chunk"), "{message}");
    assert!(half(1).is_ok() && no_grad(|| half(2)).is_ok());
}

#[test]
fn chunks_in_evaluations_compute_only_the_loss() {
    let (_store, model) = made(&GptOptions { loss_chunks: 3, ..small() });
    let (_other, plain) = made(&small());
    let (tokens, targets) = batch(1);
    let loss = no_grad(|| model.loss(&tokens, &targets, Mode::Eval).unwrap());
    let expected = plain.loss(&tokens, &targets, Mode::Eval).unwrap();
    assert!((loss.double_value(&[]) - expected.double_value(&[])).abs() < 1e-3 && !loss.requires_grad());
}

#[test]
fn padding_rows_are_never_predicted_and_have_no_effect() {
    let options = GptOptions { vocab_multiple: 64, ..small() };
    let (_store, model) = made(&options);
    let (tokens, targets) = batch(2);
    let logits = model.logits(&tokens);
    assert_eq!(logits.size(), [3, 8, 64]);
    let likely = logits.softmax(-1, Kind::Float).narrow(-1, 29, 35).sum(Kind::Float).double_value(&[]);
    assert_eq!(likely, 0.0);
    let real = logits.narrow(-1, 0, 29).reshape([-1, 29]);
    let expected =
        real.cross_entropy_loss::<Tensor>(&targets.reshape([-1]), None, tch::Reduction::Sum, -100, 0.0);
    let loss = model.loss(&tokens, &targets, Mode::Eval).unwrap();
    assert!((loss.double_value(&[]) - expected.double_value(&[])).abs() < 1e-3);
    loss.backward();
    let rows = grad(&model.embedding.wte).unwrap().unwrap().narrow(0, 29, 35);
    assert_eq!(rows.abs().sum(Kind::Float).double_value(&[]), 0.0);
}

#[test]
fn later_tokens_have_no_effect_and_dropout_has_one() {
    let (_store, model) = made(&GptOptions { dropout: 0.3, ..small() });
    let (tokens, targets) = batch(3);
    let part = model.logits(&tokens.narrow(1, 0, 5));
    assert!(part.allclose(&model.logits(&tokens).narrow(1, 0, 5), 1e-5, 1e-6, false));
    let losses =
        [Mode::Eval, Mode::Eval, Mode::Train].map(|mode| model.loss(&tokens, &targets, mode).unwrap());
    assert_eq!(losses[0], losses[1]);
    assert_ne!(losses[0], losses[2]);
}

#[test]
fn the_cache_gives_the_same_logits() {
    let (_store, model) = made(&small());
    let tokens = batch(4).0;
    let whole = model.logits(&tokens);
    for parts in [&[8][..], &[1; 8], &[3, 1, 1, 3], &[1, 7]] {
        let (mut cache, mut first) = (model.cache(), 0);
        assert!(cache.is_empty());
        for part in parts {
            let logits = model.next(&tokens.narrow(1, first, *part), &mut cache);
            first += part;
            assert_eq!(cache.len(), first);
            assert!(
                logits.allclose(&whole.select(1, first - 1), 1e-4, 1e-5, false),
                "{parts:?}, place {first}"
            );
        }
    }
}
