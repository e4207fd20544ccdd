//! BERT and the Transformer with vocabularies that are cut along `tp`, against one rank: logits, losses, gradients.

use std::collections::BTreeMap;

use drumline::ProcessGroup;
use drumline::comm::{Axis, CommError, LocalGroup, Mesh};
use drumline::engine::Part;
use drumline::trainer::{CrossEntropy, Loss, Mode, Model, Supervised};
use drumline_torch::{Named, grad, parameters};
use drumline_zoo::decode::{BeamOptions, beam_search};
use drumline_zoo::mlm::weights as bert_weights;
use drumline_zoo::models::bert::{Bert, BertOptions, MaskedBatch};
use drumline_zoo::models::transformer::{Pairs, Specials, Transformer, TransformerOptions, padded};
use drumline_zoo::models::{Logits, ModelRanks};
use drumline_zoo::weights::{self, Holding};
use drumline_zoo::words::WordLoss;
use rank_test::anyhow::{self, Result};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use super::golden::{floats, json, path};

/// The vocabulary of the golden BERT, which no number of ranks here divides.
const WORDS: i64 = 27;

/// What one rank computes, and what parts must compute.
#[derive(Debug)]
struct Computed {
    /// Logits of all classes.
    logits: Tensor,
    loss: f64,
    /// Of this rank's variables.
    gradients: BTreeMap<String, Tensor>,
    parts: Vec<Part>,
}

fn on_ranks<R: Send>(ranks: usize, body: impl Fn(&ModelRanks) -> Result<R> + Sync) -> Vec<R> {
    let body = |group: ProcessGroup| {
        tch::set_num_threads(1);
        let ranks = ModelRanks::on(&Mesh::along(&group, Axis::Tp)?);
        body(&ranks).map_err(|error| CommError::Init { cause: format!("{error:#}") })
    };
    LocalGroup::run(ranks, body).unwrap_or_else(|error| panic!("{ranks} ranks: {error:?}"))
}

fn holding(ranks: &ModelRanks) -> Holding {
    Holding { parts: ranks.tp.parts(), ..Holding::default() }
}

/// The number of classes that this rank has.
fn own(ranks: &ModelRanks, classes: i64) -> i64 {
    let own = ranks.tp.cut(classes).range(ranks.tp.rank());
    own.end - own.start
}

/// Computes the label-smoothed loss and its gradients. The logits have the same bits on all ranks.
fn computed<B: Supervised>(
    ranks: &ModelRanks,
    store: &VarStore,
    logits: &Logits,
    batch: &B,
) -> Result<Computed> {
    let whole = no_grad(|| logits.whole())?.detach();
    let smoothed = WordLoss(CrossEntropy { label_smoothing: 0.1, ignored: Some(5) });
    let loss = smoothed.sum(logits, batch).map_err(anyhow::Error::from_boxed)?;
    loss.backward();
    let gradient = |Named { name, tensor }| -> Result<(String, Tensor)> {
        Ok((name, grad(&tensor)?.unwrap_or_else(|| tensor.zeros_like())))
    };
    let gradients = parameters(store).into_iter().map(gradient).collect::<Result<_>>()?;
    Ok(Computed { logits: whole, loss: loss.double_value(&[]), gradients, parts: ranks.tp.parts() })
}

/// Compares what ranks have with what one rank alone has.
fn check(one: &Computed, all: &[Computed]) {
    let near = |one: &Tensor, other: &Tensor| one.allclose(other, 1e-4, 1e-5, false);
    for found in all {
        assert!(near(&one.logits, &found.logits) && found.logits == all[0].logits, "logits");
        assert!((one.loss - found.loss).abs() < 1e-4 * one.loss, "{} and {}", one.loss, found.loss);
        assert_eq!(one.gradients.len(), found.gradients.len());
        for (name, whole) in &one.gradients {
            let own = &found.gradients[name];
            let part = found.parts.iter().find(|part| part.whole.name == *name);
            let expected =
                part.map_or_else(|| whole.shallow_clone(), |part| part.of(whole, &own.size()).unwrap());
            assert!(near(&expected, own), "gradient of {name} on {} ranks", all.len());
        }
    }
}

fn bert_options() -> BertOptions {
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

fn masked() -> MaskedBatch {
    let golden = json("bert.json");
    let row = |key: &str| Tensor::from_slice(&floats(&golden[key])).to_kind(Kind::Int64);
    let rows = |key: &str| {
        let rows = golden[key].as_array().unwrap().iter().map(floats).collect::<Vec<_>>();
        Tensor::from_slice2(&rows).to_kind(Kind::Int64)
    };
    MaskedBatch { tokens: rows("tokens"), types: rows("types"), places: row("places"), words: row("words") }
}

#[test]
fn a_bert_of_hugging_faces_names_is_cut_by_its_vocabulary() {
    let of_rank = |ranks: &ModelRanks| -> Result<Computed> {
        let store = VarStore::new(Device::Cpu);
        let model = Bert::on(ranks, &store.root(), &bert_options(), WORDS)?;
        bert_weights::load_parts(&store, &holding(ranks), &path("bert.safetensors"))?;
        let batch = masked();
        let logits = model.forward_batch(&batch, Mode::Train).map_err(anyhow::Error::from_boxed)?;
        let own = own(ranks, WORDS);
        assert_eq!(logits.local().size()[1], own);
        let variables = store.variables();
        assert_eq!(variables["bert.embeddings.word_embeddings.weight"].size(), [own, 16]);
        assert_eq!(variables["cls.predictions.bias"].size(), [own]);
        let all = no_grad(|| model.logits(&batch.tokens, &batch.types)).flatten(0, 1);
        let places = all.index_select(0, &batch.places);
        assert!(places.allclose(&no_grad(|| logits.whole())?, 1e-4, 1e-5, false));
        computed(ranks, &store, &logits, &batch)
    };
    let one = on_ranks(1, of_rank).remove(0);
    [2, 4].into_iter().for_each(|ranks| check(&one, &on_ranks(ranks, of_rank)));
}

/// Vocabularies of 11 and 13 words, or one of 13.
fn transformer_options(share_embeddings: bool, proj_share_weight: bool) -> TransformerOptions {
    TransformerOptions {
        n_layers: 1,
        n_head: 4,
        d_word_vec: 8,
        d_model: 8,
        d_inner_hid: 16,
        dropout: 0.0,
        src_vocab: if share_embeddings { 13 } else { 11 },
        tgt_vocab: 13,
        share_embeddings,
        proj_share_weight,
        ..Default::default()
    }
}

#[test]
fn a_transformer_is_cut_by_its_vocabularies_and_translates() {
    let folder = tempfile::tempdir().unwrap();
    for (share_embeddings, proj_share_weight) in [(false, true), (false, false), (true, true)] {
        let options = transformer_options(share_embeddings, proj_share_weight);
        let file = folder.path().join("model.safetensors");
        let store = VarStore::new(Device::Cpu);
        Transformer::new(&store.root(), &options).unwrap();
        weights::save(&store, &file).unwrap();
        let of_rank = |ranks: &ModelRanks| -> Result<(Computed, Vec<Vec<i64>>)> {
            let store = VarStore::new(Device::Cpu);
            let model = Transformer::on(ranks, &store.root(), &options)?;
            weights::load_parts(&store, &holding(ranks), &file)?;
            assert_eq!(store.variables()["tgt_embed.weight"].size(), [own(ranks, 13), 8]);
            let (sources, targets) = (vec![vec![4, 5, 6], vec![7]], vec![vec![8, 9], vec![10, 11, 12, 5]]);
            let batch = Pairs::new(&sources, &targets, Specials::default());
            let logits = model.forward_batch(&batch, Mode::Train).map_err(anyhow::Error::from_boxed)?;
            let found = computed(ranks, &store, &logits, &batch)?;
            let search = BeamOptions { beam_size: 3, max_steps: 6, ..Default::default() };
            let translations = beam_search(&[&model], &padded(&sources, 0), &search)?;
            Ok((found, translations.into_iter().map(|mut best| best.remove(0).tokens).collect()))
        };
        let (one, translations) = on_ranks(1, of_rank).remove(0);
        assert_eq!(one.logits.size(), [8, 13]);
        for ranks in [2, 4] {
            let (found, translated): (Vec<_>, Vec<_>) = on_ranks(ranks, of_rank).into_iter().unzip();
            check(&one, &found);
            assert!(translated.iter().all(|of_rank| *of_rank == translations), "{translated:?}");
        }
    }
}

ranks_test!(parts_that_ranks_draw_are_those_of_the_whole_models, 3, {
    let group = ProcessGroup::from_env()?;
    let bert = BertOptions { num_attention_heads: 3, hidden_size: 12, ..bert_options() };
    let transformer =
        TransformerOptions { n_head: 3, d_word_vec: 12, d_model: 12, ..transformer_options(false, false) };
    let drawn = |ranks: &ModelRanks| -> Result<VarStore> {
        let store = VarStore::new(Device::Cpu);
        tch::manual_seed(5);
        Bert::on(ranks, &(store.root() / "bert"), &bert, WORDS)?;
        Transformer::on(ranks, &(store.root() / "transformer"), &transformer)?;
        Ok(store)
    };
    let ranks = ModelRanks::on(&Mesh::along(&group, Axis::Tp)?);
    let (own, whole) = (drawn(&ranks)?.variables(), drawn(&ModelRanks::default())?.variables());
    anyhow::ensure!(own.len() == whole.len() && !ranks.tp.parts().is_empty());
    for (name, value) in whole {
        let part = ranks.tp.parts().into_iter().find(|part| part.whole.name == name);
        let own = own[&name].detach();
        let is_table = ["word_embeddings", "_embed.", "generator"].iter().any(|table| name.contains(table));
        anyhow::ensure!(part.is_some() || !is_table, "`{name}` is cut");
        let expected = part.map_or_else(|| Ok(value.shallow_clone()), |part| part.of(&value, &own.size()))?;
        anyhow::ensure!(own == expected.detach(), "`{name}`");
    }
});
