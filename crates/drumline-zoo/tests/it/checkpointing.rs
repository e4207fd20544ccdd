//! Activation checkpointing of the models: the same bits as without it, and the memory that it saves.

use drumline::trainer::{Mode, Model};
use drumline_text::synth_story::SynthStoryOptions;
use drumline_torch::{SavedSize, autocast, saved_size};
use drumline_zoo::models::bert::{Bert, BertOptions, MaskedBatch};
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use drumline_zoo::models::text::{Pool, TextClassifier, TextNet, TextOptions};
use drumline_zoo::models::transformer::{Pairs, Specials, Transformer, TransformerOptions};
use drumline_zoo::models::{Checkpointing, ModelOptions, build};
use rank_test::ranks_test;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::failing_runs::shared;
use super::running::Place;
use super::texts::weights;

const ALL: [Checkpointing; 5] = [
    Checkpointing::None,
    Checkpointing::Full,
    Checkpointing::Selective,
    Checkpointing::Every(2),
    Checkpointing::Offload,
];

/// The loss, the gradients and the buffers of two steps, the same for each kind of checkpointing.
fn same_bits(what: &str, step: impl Fn(&VarStore, Checkpointing) -> Box<dyn Fn() -> Tensor>) {
    tch::set_num_threads(1);
    let run = |how: Checkpointing| {
        tch::manual_seed(11);
        let store = VarStore::new(Device::Cpu);
        let forward = step(&store, how);
        let mut found = Vec::new();
        for _ in 0..2 {
            let loss = forward();
            loss.backward();
            found.push(loss.detach());
        }
        let variables: std::collections::BTreeMap<_, _> = store.variables().into_iter().collect();
        for variable in variables.values() {
            found.push(if variable.requires_grad() { variable.grad() } else { variable.shallow_clone() });
        }
        found
    };
    let expected = run(Checkpointing::None);
    assert!(
        expected[0].ne_tensor(&expected[1]).double_value(&[]) > 0.0,
        "{what} is random, or has statistics"
    );
    for how in &ALL[1..] {
        let found = run(*how);
        assert_eq!(found.len(), expected.len());
        let equal = found.iter().zip(&expected).all(|(ours, theirs)| ours.equal(theirs));
        assert!(equal, "{what} with {how}");
    }
}

fn gpt(dropout: f64, checkpoint: Checkpointing, n_layer: i64) -> GptOptions {
    let (n_head, n_embd, n_positions, vocab_size) = (4, 32, 16, 50);
    GptOptions { n_layer, n_head, n_embd, n_positions, vocab_size, dropout, checkpoint, ..Default::default() }
}

fn tokens(texts: i64, places: i64) -> Tensor {
    (Tensor::arange(texts * places, (Kind::Int64, Device::Cpu)) * 7).remainder(49).view([texts, places])
}

// In processes of their own, because all threads share the random generator.
ranks_test!(gpt_is_the_same_with_checkpoints, 1, {
    for precision in [None, Some(Kind::BFloat16)] {
        same_bits("gpt", |store, how| {
            let model = Gpt::new(&store.root(), &gpt(0.1, how, 4)).unwrap();
            let (tokens, targets) = (tokens(3, 16), tokens(3, 16).flip([1]));
            let loss = move || model.loss(&tokens, &targets, Mode::Train).unwrap();
            Box::new(move || match precision {
                Some(kind) => autocast(Device::Cpu, kind, &loss).unwrap(),
                None => loss(),
            })
        });
    }
});

ranks_test!(a_transformer_is_the_same_with_checkpoints, 1, {
    same_bits("transformer", |store, how| {
        let options = TransformerOptions {
            n_layers: 2,
            n_head: 4,
            d_word_vec: 16,
            d_model: 16,
            d_inner_hid: 24,
            src_vocab: 14,
            tgt_vocab: 14,
            checkpoint: how,
            ..Default::default()
        };
        let model = Transformer::new(&store.root(), &options).unwrap();
        let (sources, targets) = (vec![vec![4, 5, 6], vec![7]], vec![vec![8, 9], vec![10, 11, 12]]);
        let batch = Pairs::new(&sources, &targets, Specials::default());
        Box::new(move || {
            let logits = model.forward_batch(&batch, Mode::Train).unwrap();
            logits.local().cross_entropy_for_logits(&batch.words)
        })
    });
});

ranks_test!(bert_is_the_same_with_checkpoints, 1, {
    same_bits("bert", |store, how| {
        let (hidden_size, intermediate_size) = (16, 32);
        let options = BertOptions { hidden_size, intermediate_size, checkpoint: how, ..Default::default() };
        let model = Bert::new(&store.root(), &options, 50).unwrap();
        let tokens = tokens(3, 8) + 1;
        let _ = tokens.narrow(1, 6, 2).narrow(0, 1, 2).fill_(0);
        let places = Tensor::from_slice(&[1i64, 9, 17]);
        let words = Tensor::from_slice(&[3i64, 4, 5]);
        let batch = MaskedBatch { types: tokens.zeros_like(), tokens, places, words };
        Box::new(move || {
            let logits = model.forward_batch(&batch, Mode::Train).unwrap();
            logits.local().cross_entropy_for_logits(&batch.words)
        })
    });
});

ranks_test!(a_text_model_is_the_same_with_checkpoints, 1, {
    same_bits("text", |store, how| {
        let net = TextNet::Transformer { n_layers: 2, n_head: 2, d_inner_hid: 16, pool: Pool::Mean };
        let options = TextOptions {
            net,
            vocab: 50,
            d_word_vec: 8,
            num_classes: 3,
            checkpoint: how,
            ..Default::default()
        };
        let model = TextClassifier::new(&store.root(), &options).unwrap();
        let (tokens, classes) = (tokens(3, 8), Tensor::from_slice(&[0i64, 2, 1]));
        Box::new(move || model.forward_t(&tokens, true).cross_entropy_for_logits(&classes))
    });
});

ranks_test!(resnets_and_their_running_statistics_are_the_same_with_checkpoints, 1, {
    for arch in ["resnet18", "resnet50"] {
        same_bits(arch, |store, how| {
            let options = ModelOptions { num_classes: 10, checkpoint: how, ..Default::default() };
            let model = build(arch, &store.root(), &options).unwrap();
            let images = Tensor::randn([4, 3, 32, 32], (Kind::Float, Device::Cpu));
            let (labels, calls) = (Tensor::from_slice(&[1i64, 7, 3, 0]), std::cell::Cell::new(0.0));
            // Each step has another input.
            Box::new(move || {
                calls.set(calls.get() + 1.0);
                model.forward_t(&(&images * calls.get()).sin(), true).cross_entropy_for_logits(&labels)
            })
        });
    }
});

/// The bytes that a layer of a GPT keeps, in units of the hidden states of a batch: b · s · h floats.
fn per_layer(checkpoint: Checkpointing) -> f64 {
    let kept = |n_layer: i64| {
        let store = VarStore::new(Device::Cpu);
        let model = Gpt::new(&store.root(), &gpt(0.0, checkpoint, n_layer)).unwrap();
        let forward = || model.loss(&tokens(3, 16), &tokens(3, 16), Mode::Train).unwrap();
        let (_loss, SavedSize { bytes, .. }) = saved_size(forward).unwrap();
        bytes as f64
    };
    (kept(4) - kept(2)) / 2.0 / f64::from(4 * 3 * 16 * 32)
}

#[test]
fn memory_shrinks_as_the_formula_says() {
    tch::set_num_threads(1);
    // A row of h = 32 floats has mean and deviation of two norms, and a sum of exponentials for each of 4 heads.
    let (norms, attention) = (4.0 / 32.0, 4.0 / 32.0);
    // Inputs of two norms (2), their results (2), queries, keys and values (3), attention (1), GELU's input and result
    // (4 + 4): 16, the 34 bytes of the usual formula for 16 bits without its masks of dropout and residual copies.
    assert_eq!(per_layer(Checkpointing::None), 16.0 + norms + attention);
    assert_eq!(per_layer(Checkpointing::Full), 1.0);
    // The input (1), queries, keys and values (3), attention (1), its projection (1), and GELU's input (4).
    assert_eq!(per_layer(Checkpointing::Selective), 10.0 + attention);
    // Of two layers, one is a checkpoint.
    assert_eq!(per_layer(Checkpointing::Every(2)), (17.0 + norms + attention) / 2.0);
}

#[test]
fn models_without_blocks_refuse_checkpoints() {
    for arch in ["mlp", "convnet"] {
        let options = ModelOptions { checkpoint: Checkpointing::Full, ..Default::default() };
        let error = build(arch, &VarStore::new(Device::Cpu).root(), &options).unwrap_err().to_string();
        let words =
            format!("checkpointing is full, but {arch} has no blocks that could be computed again; try none");
        assert_eq!(error, words);
    }
    let options = TextOptions { checkpoint: Checkpointing::Selective, ..Default::default() };
    let error = options.check().unwrap_err().to_string();
    assert!(error.contains("but bilstm has no blocks"), "{error}");
    let error =
        Gpt::new(&VarStore::new(Device::Cpu).root(), &gpt(0.0, Checkpointing::Every(3), 2)).unwrap_err();
    assert!(error.to_string().contains("checkpointing is 3, but the model has 2 blocks; try"), "{error}");
}

const STORIES: SynthStoryOptions = SynthStoryOptions { train: 24, valid: 6, seed: 3 };

#[test]
fn runs_with_checkpoints_end_with_the_same_weights() {
    let run = |ranks: usize, words: &str| {
        let place = Place::of_stories(&STORIES);
        place.passes(ranks, &format!("train TRAIN.MAX_STEPS 4 MODEL.DROPOUT 0.1 {words}"));
        weights(&place)
    };
    let plain = run(2, "");
    for how in ["full", "selective", "2"] {
        assert!(run(2, &format!("MODEL.CHECKPOINT {how}")) == plain, "{how}");
    }
    assert!(run(2, "RNG_SEED 8") != plain);
    let place = Place::of_stories(&STORIES);
    let ranks = place.run(2, "train MODEL.CHECKPOINT 3");
    let said = shared(&ranks);
    assert!(said.contains("checkpointing is 3, but the model has 2 blocks"), "{said}");
    let ranks = place.run(2, "train MODEL.CHECKPOINT some");
    let said = shared(&ranks);
    assert!(said.contains("expected none, full, selective, offload, or a number from 1"), "{said}");
}
