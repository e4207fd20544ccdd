//! The Transformer, its beam search and the text classifiers match PyTorch's layers with the same weights.

use drumline::trainer::{CrossEntropy, Loss, Mode, Model};
use drumline_torch::{grad, parameters};
use drumline_zoo::decode::{BeamOptions, beam_search};
use drumline_zoo::models::text::{Pool, TextClassifier, TextNet, TextOptions, TextTagger};
use drumline_zoo::models::transformer::{
    NormPlace, Pairs, Specials, Transformer, TransformerOptions, padded,
};
use drumline_zoo::weights;
use drumline_zoo::words::WordLoss;
use serde_json::Value;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

use super::golden::{assert_close, brief, fill, floats, json, strings};

const TOLERANCE: f64 = 1e-5;

fn sources() -> [Vec<i64>; 3] {
    [vec![4, 5, 6, 7, 13], vec![8], vec![9, 9, 10, 11]]
}

fn pairs() -> Pairs {
    Pairs::new(&sources(), &[vec![5, 4], vec![12, 11, 10, 9, 8], vec![7]], Specials::default())
}

/// Fills all tensors by a formula of their index among the sorted names, which are returned.
fn fill_model(store: &VarStore, first: u32) -> Vec<String> {
    let mut all = parameters(store);
    all.sort_by(|a, b| a.name.cmp(&b.name));
    for (index, named) in (first..).zip(&all) {
        let mut tensor = named.tensor.shallow_clone();
        let shift = f64::from(named.name.contains("norm") && named.name.ends_with("weight"));
        no_grad(|| tensor.copy_(&(fill(index, &tensor.size()) + shift)));
    }
    all.into_iter().map(|named| named.name).collect()
}

fn options(case: &Value) -> TransformerOptions {
    let is = |key: &str| case[key].as_bool().unwrap();
    let (d_word_vec, d_model, src_vocab, tgt_vocab) = (16, 16, 14, 14);
    TransformerOptions {
        n_layers: 2,
        n_head: 4,
        d_word_vec,
        d_model,
        d_inner_hid: 24,
        src_vocab,
        tgt_vocab,
        dropout: 0.0,
        share_embeddings: is("share_embeddings"),
        proj_share_weight: is("proj_share_weight"),
        norm: if is("norm_first") { NormPlace::Before } else { NormPlace::After },
        pad: 0,
        ..TransformerOptions::default()
    }
}

/// Outputs where the target is not padding, loss and gradients.
fn check(what: &str, case: &Value, store: &VarStore, (logits, loss, target): (Tensor, Tensor, &Tensor)) {
    let real = target.ne(0).flatten(0, -1).nonzero().squeeze_dim(1);
    let width = *logits.size().last().unwrap();
    let real = logits.reshape([-1, width]).index_select(0, &real).to_kind(Kind::Double).flatten(0, 1);
    let real = Vec::<f64>::try_from(real.detach()).unwrap();
    assert_close(&format!("{what} logits"), &real, &floats(&case["logits"]), TOLERANCE);
    assert_close(
        &format!("{what} loss"),
        &[loss.double_value(&[])],
        &[case["loss"].as_f64().unwrap()],
        TOLERANCE,
    );
    loss.backward();
    for named in parameters(store) {
        let gradient = grad(&named.tensor).unwrap().expect("every parameter is used");
        let expected = floats(&case["gradients"][&named.name]);
        assert_close(&format!("{what} {}", named.name), &brief(&gradient), &expected, 2.0 * TOLERANCE);
    }
}

#[test]
fn the_transformer_matches_pytorch() {
    let golden = json("transformer.json");
    for (what, case) in golden["translation"].as_object().unwrap() {
        let store = VarStore::new(Device::Cpu);
        let model = Transformer::new(&store.root(), &options(case)).unwrap();
        assert_eq!(fill_model(&store, 0), strings(&case["names"]), "{what}");
        let batch = pairs();
        let logits = model.forward_batch(&batch, Mode::Train).unwrap();
        let smoothed = WordLoss(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() });
        let loss = smoothed.sum(&logits, &batch).unwrap();
        check(what, case, &store, (logits.whole().unwrap(), loss, &batch.words));
    }
}

#[test]
fn the_beam_search_matches_a_simple_one_in_pytorch() {
    let golden = json("transformer.json");
    let made = [0, 100].map(|first| {
        let store = VarStore::new(Device::Cpu);
        let case = &golden["translation"]["output_shared"];
        let model = Transformer::new(&store.root(), &options(case)).unwrap();
        fill_model(&store, first);
        model
    });
    for case in golden["beam"].as_array().unwrap() {
        let number = |key: &str| case[key].as_u64().unwrap() as usize;
        let (beam_size, alpha) = (number("beam_size"), case["alpha"].as_f64().unwrap());
        let options = BeamOptions {
            beam_size,
            alpha,
            keep_n: beam_size.min(2),
            max_steps: number("max_steps"),
            ..Default::default()
        };
        let models: Vec<_> = made.iter().take(number("models")).collect();
        let found = beam_search(&models, &padded(&sources(), 0), &options).unwrap();
        for (found, expected) in found.iter().zip(case["found"].as_array().unwrap()) {
            for (found, expected) in found.iter().zip(expected.as_array().unwrap()) {
                let tokens: Vec<_> = floats(&expected["tokens"]).into_iter().map(|id| id as i64).collect();
                assert_eq!(found.tokens, tokens, "{options:?}");
                let score = expected["score"].as_f64().unwrap();
                assert_close(&format!("{options:?}"), &[found.score], &[score], TOLERANCE);
            }
        }
    }
}

#[test]
fn text_models_match_pytorch() {
    let encoder = |pool| TextNet::Transformer { n_layers: 2, n_head: 4, d_inner_hid: 24, pool };
    for case in json("transformer.json")["text"].as_array().unwrap() {
        let net = match case["net"].as_str().unwrap() {
            "bilstm" => TextNet::BiLstm { n_layers: 2, d_hidden: 10 },
            "first" => encoder(Pool::First),
            _ => encoder(Pool::Mean),
        };
        let options = TextOptions {
            net,
            vocab: 14,
            d_word_vec: 16,
            num_classes: 5,
            dropout: 0.0,
            ..TextOptions::default()
        };
        let store = VarStore::new(Device::Cpu);
        let (model, target): (Box<dyn ModuleT>, _) = if case["tags"].as_bool().unwrap() {
            let tags = sources().map(|words| words.into_iter().map(|word| 1 + word % 4).collect::<Vec<_>>());
            (Box::new(TextTagger::new(&store.root(), &options).unwrap()), padded(&tags, 0))
        } else {
            let model = TextClassifier::new(&store.root(), &options).unwrap();
            (Box::new(model), Tensor::from_slice(&[1i64, 4, 2]))
        };
        assert_eq!(fill_model(&store, 0), strings(&case["names"]), "{net:?}");
        let batch = (padded(&sources(), 0), target);
        let logits = model.forward_t(&batch.0, true);
        let loss = CrossEntropy { ignored: Some(0), label_smoothing: 0.0 }.sum(&logits, &batch).unwrap();
        check(&format!("{net:?}"), case, &store, (logits, loss, &batch.1));
    }
}

#[test]
fn weights_go_to_a_file_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("transformer.safetensors");
    let case = &json("transformer.json")["translation"]["all_shared"];
    let [(first, one), (second, other)] = [0, 1].map(|_| {
        let store = VarStore::new(Device::Cpu);
        let model = Transformer::new(&store.root(), &options(case)).unwrap();
        (store, model)
    });
    weights::save(&first, &file).unwrap();
    weights::load(&second, &file).unwrap();
    let pairs = pairs();
    let logits = |model: &Transformer| model.forward(&pairs.source, &pairs.target_in, false);
    assert_eq!(logits(&one), logits(&other));
}
