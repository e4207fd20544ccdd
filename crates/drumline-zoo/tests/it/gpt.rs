//! GPT-2 matches PyTorch for the same weights, read from a file in Hugging Face's format.

use drumline::trainer::Mode;
use drumline_torch::{grad, parameters};
use drumline_zoo::gpt::weights;
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use safetensors::SafeTensors;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use super::golden::{assert_close, brief, floats, json, path, strings};

const TOLERANCE: f64 = 1e-5;

fn options() -> GptOptions {
    GptOptions { n_layer: 2, n_head: 4, n_embd: 16, n_positions: 12, vocab_size: 27, ..Default::default() }
}

fn loaded(options: &GptOptions) -> (VarStore, Gpt) {
    let store = VarStore::new(Device::Cpu);
    let model = Gpt::new(&store.root(), options).unwrap();
    weights::load(&store, options, &path("gpt.safetensors")).unwrap();
    (store, model)
}

fn tokens() -> Tensor {
    let rows = json("gpt.json")["tokens"].as_array().unwrap().iter().map(floats).collect::<Vec<_>>();
    Tensor::from_slice2(&rows).to_kind(Kind::Int64)
}

#[test]
fn logits_loss_and_gradients_are_pytorchs() {
    let golden = json("gpt.json");
    let (input, target) = (tokens().narrow(1, 0, 7), tokens().narrow(1, 1, 7));
    for (vocab_multiple, loss_chunks) in [(1, 1), (1, 4), (64, 1), (64, 4)] {
        let what = format!("{vocab_multiple}, {loss_chunks} chunks");
        let (store, model) = loaded(&GptOptions { vocab_multiple, loss_chunks, ..options() });
        let logits = model.logits(&input).narrow(2, 0, 27).to_kind(Kind::Double).reshape([-1]);
        let logits = Vec::<f64>::try_from(logits.detach()).unwrap();
        assert_close(&what, &logits, &floats(&golden["logits"]), TOLERANCE);
        let loss = model.loss(&input, &target, Mode::Train).unwrap() / 21.0;
        assert_close(&what, &[loss.double_value(&[])], &[golden["loss"].as_f64().unwrap()], TOLERANCE);
        loss.backward();
        let mut names = Vec::new();
        for named in parameters(&store) {
            let mut gradient = grad(&named.tensor).unwrap().expect("every parameter is used");
            if named.name == "wte.weight" {
                gradient = gradient.narrow(0, 0, 27);
            }
            let expected = floats(&golden["gradients"][&named.name]);
            assert_close(&format!("{what}: {}", named.name), &brief(&gradient), &expected, 2.0 * TOLERANCE);
            names.push(named.name);
        }
        names.sort();
        assert_eq!(names, strings(&golden["names"]));
    }
}

#[test]
fn the_likeliest_continuation_is_pytorchs() {
    let (_store, model) = loaded(&GptOptions { vocab_multiple: 64, ..options() });
    let expected: Vec<_> = floats(&json("gpt.json")["greedy"]).iter().map(|token| *token as i64).collect();
    no_grad(|| {
        let mut cache = model.cache();
        let mut logits = model.next(&Tensor::from_slice2(&[&expected[..2]]), &mut cache);
        for token in &expected[2..] {
            assert_eq!(logits.argmax(-1, false).int64_value(&[0]), *token);
            if cache.len() < 12 {
                logits = model.next(&Tensor::from_slice2(&[[*token]]), &mut cache);
            }
        }
    });
}

#[test]
fn what_is_saved_has_hugging_faces_names_and_layout() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let padded = GptOptions { vocab_multiple: 128, ..options() };
    let (store, _) = loaded(&padded);
    weights::save(&store, &padded, &file).unwrap();
    let [ours, theirs] = [file.clone(), path("gpt.safetensors")].map(|path| std::fs::read(path).unwrap());
    let [ours, theirs] = [&ours, &theirs].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    assert_eq!(ours.len(), 28);
    for (name, view) in ours.iter() {
        let other = theirs.tensor(&format!("transformer.{name}")).unwrap();
        assert!(view.shape() == other.shape() && view.data() == other.data(), "{name}");
    }
    let (again, _) = loaded(&padded);
    weights::load(&again, &padded, &file).unwrap();
}

#[test]
fn files_of_other_sizes_are_refused() {
    let store = VarStore::new(Device::Cpu);
    let other = GptOptions { n_layer: 3, vocab_size: 30, ..options() };
    Gpt::new(&store.root(), &other).unwrap();
    let said = weights::load(&store, &other, &path("gpt.safetensors")).unwrap_err().to_string();
    assert!(said.contains("missing: h.2.attn.c_attn.bias"), "{said}");
    assert!(said.contains("wte.weight is [27, 16], the model's [30, 16]"), "{said}");
}
