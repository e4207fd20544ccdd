//! BERT matches PyTorch's layers for the same weights, read from a file with Hugging Face's names.

use drumline::optim::no_decay_on_norms;
use drumline::trainer::{Loss, Mode, Model};
use drumline_torch::{AdamOptions, AdamW, Optimizer, grad, parameters};
use drumline_zoo::mlm::weights as bert_weights;
use drumline_zoo::models::bert::{Bert, BertOptions, MaskedBatch};
use drumline_zoo::weights;
use drumline_zoo::words::WordLoss;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::golden::{assert_close, brief, floats, json, path, strings};

const TOLERANCE: f64 = 1e-5;
const WORDS: i64 = 27;

fn options() -> BertOptions {
    BertOptions {
        num_hidden_layers: 2,
        num_attention_heads: 4,
        hidden_size: 16,
        intermediate_size: 24,
        max_position_embeddings: 12,
        dropout: 0.0,
        ..BertOptions::default()
    }
}

fn loaded(options: &BertOptions) -> (VarStore, Bert) {
    let store = VarStore::new(Device::Cpu);
    let model = Bert::new(&store.root(), options, WORDS).unwrap();
    bert_weights::load(&store, &path("bert.safetensors")).unwrap();
    (store, model)
}

fn batch() -> MaskedBatch {
    let golden = json("bert.json");
    let row = |key: &str| Tensor::from_slice(&floats(&golden[key])).to_kind(Kind::Int64);
    let rows = |key: &str| {
        let rows = golden[key].as_array().unwrap().iter().map(floats).collect::<Vec<_>>();
        Tensor::from_slice2(&rows).to_kind(Kind::Int64)
    };
    MaskedBatch { tokens: rows("tokens"), types: rows("types"), places: row("places"), words: row("words") }
}

/// The mean over masked places.
fn loss(model: &Bert, batch: &MaskedBatch) -> Tensor {
    let logits = model.forward_batch(batch, Mode::Train).unwrap();
    WordLoss::default().sum(&logits, batch).unwrap() / batch.words.numel() as f64
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

#[test]
fn logits_loss_and_gradients_are_pytorchs() {
    let golden = json("bert.json");
    let ((store, model), batch) = (loaded(&options()), batch());
    let logits = model.logits(&batch.tokens, &batch.types).flatten(0, 1);
    let real = logits.index_select(0, &batch.tokens.ne(0).flatten(0, 1).nonzero().squeeze_dim(1));
    assert_close("logits", &values(&real), &floats(&golden["logits"]), TOLERANCE);
    let masked = model.forward_batch(&batch, Mode::Train).unwrap().whole().unwrap();
    assert_close("masked", &values(&masked), &values(&logits.index_select(0, &batch.places)), TOLERANCE);
    let loss = loss(&model, &batch);
    assert_close("loss", &values(&loss), &[golden["loss"].as_f64().unwrap()], TOLERANCE);
    loss.backward();
    let mut names = Vec::new();
    for named in parameters(&store) {
        let gradient = grad(&named.tensor).unwrap().expect("every parameter is used");
        assert_close(
            &named.name,
            &brief(&gradient),
            &floats(&golden["gradients"][&named.name]),
            2.0 * TOLERANCE,
        );
        names.push(named.name);
    }
    names.sort();
    assert_eq!(names, strings(&golden["names"]));
}

#[test]
fn steps_of_adamw_are_pytorchs() {
    let golden = &json("bert.json")["adamw"];
    let number = |key: &str| golden[key].as_f64().unwrap();
    let (mut store, batch) = (VarStore::new(Device::Cpu), batch());
    let model = Bert::new(&store.root(), &options(), WORDS).unwrap();
    // In f32, rounding dominates where a gradient is nearly zero: AdamW makes a whole step in the direction of its
    // sign.
    store.double();
    bert_weights::load(&store, &path("bert.safetensors")).unwrap();
    let betas = floats(&golden["betas"]);
    let adam = AdamOptions {
        lr: number("lr"),
        betas: (betas[0], betas[1]),
        weight_decay: Some(number("weight_decay")),
        ..AdamOptions::default()
    };
    let mut optimizer = AdamW::new(no_decay_on_norms(parameters(&store)), adam).unwrap();
    for (step, expected) in floats(&golden["losses"]).into_iter().enumerate() {
        optimizer.zero_grad().unwrap();
        let loss = loss(&model, &batch);
        assert_close(&format!("step {step}"), &values(&loss), &[expected], 1e-9);
        loss.backward();
        optimizer.step().unwrap();
    }
    for named in parameters(&store) {
        assert_close(&named.name, &brief(&named.tensor), &floats(&golden["weights"][&named.name]), 1e-9);
    }
}

#[test]
fn padding_and_other_texts_have_no_effect_and_dropout_has_one() {
    let (_store, model) = loaded(&BertOptions { dropout: 0.3, ..options() });
    let batch = batch();
    let whole = model.logits(&batch.tokens, &batch.types);
    for (text, len) in [(0, 7), (1, 9), (2, 3)] {
        let [tokens, types] =
            [&batch.tokens, &batch.types].map(|all| all.narrow(0, text, 1).narrow(1, 0, len));
        let (alone, among) = (model.logits(&tokens, &types), whole.narrow(0, text, 1).narrow(1, 0, len));
        assert!(alone.allclose(&among, 1e-5, 1e-6, false), "text {text}");
    }
    let logits = |mode| model.forward_batch(&batch, mode).unwrap().whole().unwrap();
    let [one, two] = [Mode::Eval, Mode::Train].map(logits);
    assert!(!one.allclose(&two, 1e-3, 1e-3, false));
}

#[test]
fn what_is_saved_has_hugging_faces_names_and_tied_tensors_must_be_tied() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let (store, _) = loaded(&options());
    weights::save(&store, &file).unwrap();
    let mut tensors = Tensor::read_safetensors(&file).unwrap();
    let mut names: Vec<_> = tensors.iter().map(|(name, _)| name.clone()).collect();
    names.sort();
    assert_eq!(names, strings(&json("bert.json")["names"]));
    let (other, model) = loaded(&options());
    bert_weights::load(&other, &file).unwrap();
    assert_eq!(
        model.logits(&batch().tokens, &batch().types),
        loaded(&options()).1.logits(&batch().tokens, &batch().types)
    );
    tensors.push(("cls.predictions.decoder.bias".into(), Tensor::ones([27], (Kind::Float, Device::Cpu))));
    Tensor::write_safetensors(&tensors, &file).unwrap();
    let said = bert_weights::load(&other, &file).unwrap_err().to_string();
    assert!(said.contains("its values are not those of cls.predictions.bias"), "{said}");
}

#[test]
fn sizes_that_cannot_be_built_and_files_of_other_sizes_are_refused() {
    let store = VarStore::new(Device::Cpu);
    let refused = |change: fn(&mut BertOptions)| {
        let mut other = options();
        change(&mut other);
        Bert::new(&store.root(), &other, WORDS).unwrap_err().to_string()
    };
    assert_eq!(refused(|o| o.hidden_size = 0), "hidden_size is 0; try 1 or more");
    assert!(
        refused(|o| o.num_attention_heads = 3)
            .starts_with("hidden_size 16 cannot be split among 3 heads; try")
    );
    assert_eq!(refused(|o| o.dropout = 1.0), "dropout is 1; try 0 to below 1");
    assert!(store.is_empty());
    Bert::new(&store.root(), &BertOptions { num_hidden_layers: 3, ..options() }, 30).unwrap();
    let said = bert_weights::load(&store, &path("bert.safetensors")).unwrap_err().to_string();
    assert!(said.contains("missing: bert.encoder.layer.2.attention.output.LayerNorm.bias"), "{said}");
}
