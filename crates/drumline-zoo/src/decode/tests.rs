//! Compares the search with a simple one that recomputes everything at each step, and the decoder with the full forward
//! pass.

use super::*;
use crate::models::transformer::{NormPlace, TransformerOptions, padded};
use tch::Device;
use tch::nn::VarStore;

/// A model whose weights come from a formula, because other tests draw from the global generator at the same time.
fn model(seed: u8, norm: NormPlace) -> (VarStore, Transformer) {
    tch::set_num_threads(1);
    let store = VarStore::new(Device::Cpu);
    let (d_word_vec, d_model, src_vocab, tgt_vocab) = (16, 16, 12, 9);
    let options = TransformerOptions {
        n_layers: 2,
        n_head: 4,
        d_word_vec,
        d_model,
        d_inner_hid: 32,
        src_vocab,
        tgt_vocab,
        norm,
        proj_share_weight: false,
        ..Default::default()
    };
    let model = Transformer::new(&store.root(), &options).unwrap();
    let mut all: Vec<_> = store.variables().into_iter().filter(|(_, tensor)| tensor.dim() > 1).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    for (place, (name, mut tensor)) in (0..).zip(all) {
        let index = Tensor::arange(tensor.numel() as i64, (Kind::Double, Device::Cpu));
        let angles = &index * (0.7 + 0.1 * f64::from(seed)) + &index * &index * 1e-2 + f64::from(place);
        // Some tokens are much more probable than others, so that translations end at different steps.
        let scale = if name == "generator.weight" { 1.0 } else { 0.3 };
        no_grad(|| tensor.copy_(&(angles.sin() * scale).view_as(&tensor)));
    }
    (store, model)
}

fn sentences() -> Vec<Vec<i64>> {
    vec![vec![4, 5, 6, 7, 11], vec![8], vec![9, 9, 10], vec![], vec![5, 4]]
}

#[test]
fn the_incremental_decoder_matches_the_full_forward() {
    for norm in [NormPlace::After, NormPlace::Before] {
        let (_store, model) = model(1, norm);
        let source = padded(&sentences()[..3], 0);
        // More places than the first capacity.
        let words = Tensor::randint_low(3, 9, [6, 2 * 16 + 3], (Kind::Int64, Device::Cpu));
        let twice = source.repeat_interleave_self_int(2, 0, None);
        let whole = no_grad(|| model.forward(&twice, &words, false));
        let mut decoder = Decoder::new(&model, &source, 2);
        for place in 0..words.size()[1] {
            let next = no_grad(|| decoder.next(&words.select(1, place)));
            assert!(next.allclose(&whole.select(1, place), 1e-5, 1e-5, false), "{norm:?} {place}");
        }
    }
}

#[test]
fn rows_are_reordered_and_finished_sentences_dropped() {
    let (_store, model) = model(2, NormPlace::After);
    let source = padded(&sentences()[..3], 0);
    let words = Tensor::from_slice2(&[[3i64, 4], [3, 5], [3, 6], [3, 7], [3, 8], [3, 4]]);
    let next = no_grad(|| {
        let mut decoder = Decoder::new(&model, &source, 2);
        let _ = decoder.next(&words.select(1, 0));
        let _ = decoder.next(&words.select(1, 1));
        decoder.keep(&Kept { rows: vec![1, 0, 5, 5], sentences: vec![0, 2] });
        decoder.next(&Tensor::from_slice(&[6i64, 7, 8, 2]))
    });
    let whole = Tensor::from_slice2(&[[3i64, 5, 6], [3, 4, 7], [3, 4, 8], [3, 4, 2]]);
    let source = source.index_select(0, &Tensor::from_slice(&[0i64, 0, 2, 2]));
    let whole = no_grad(|| model.forward(&source, &whole, false)).select(1, 2);
    assert!(next.allclose(&whole, 1e-5, 1e-5, false));
}

/// Log probabilities of the next tokens after prefixes of one length, from a full forward pass.
fn next_words(models: &[&Transformer], source: &[i64], begun: &[Vec<i64>], bos: i64) -> Vec<Vec<f64>> {
    let source = match source {
        [] => padded(&[vec![0]], 0),
        words => padded(&[words.to_vec()], 0),
    };
    let source = source.expand([begun.len() as i64, -1], false);
    let begun: Vec<_> = begun.iter().map(|words| [&[bos], &words[..]].concat()).collect();
    let probabilities = models.iter().map(|model| {
        let logits = model.forward(&source, &padded(&begun, 0), false).select(1, -1).to_kind(Kind::Double);
        let _ = logits.select(1, 0).fill_(f64::NEG_INFINITY);
        logits.softmax(1, None)
    });
    let mean = probabilities.reduce(|a, b| a + b).unwrap() / models.len() as f64;
    Vec::try_from(mean.log()).unwrap()
}

/// A partial translation, the sum of its scores, and whether it is finished.
type Begun = (Vec<i64>, f64, bool);

/// A search for one sentence over the whole vocabulary, without a cache.
fn plain_search(models: &[&Transformer], source: &[i64], options: &BeamOptions) -> Vec<Hypothesis> {
    let alpha = options.alpha.max(0.0);
    let penalty = |length: usize| ((5.0 + length as f64) / 6.0).powf(alpha);
    let mut beam: Vec<Begun> = vec![(Vec::new(), 0.0, false)];
    for _ in 0..options.max_steps {
        let (finished, begun): (Vec<_>, Vec<_>) = beam.into_iter().partition(|entry| entry.2);
        let words: Vec<_> = begun.iter().map(|entry| entry.0.clone()).collect();
        let mut grown: Vec<_> =
            finished.into_iter().map(|entry| (entry.1 / penalty(entry.0.len()), entry)).collect();
        for ((tokens, sum, _), scores) in
            begun.into_iter().zip(next_words(models, source, &words, options.specials.bos))
        {
            for (word, score) in (0..).zip(scores) {
                let all = if word == 1 { tokens.clone() } else { [&tokens[..], &[word]].concat() };
                grown.push(((sum + score) / penalty(tokens.len() + 1), (all, sum + score, word == 1)));
            }
        }
        grown.sort_by(|a, b| b.0.total_cmp(&a.0));
        beam = grown.into_iter().take(options.beam_size).map(|(_, entry)| entry).collect();
        if beam.iter().all(|entry| entry.2) {
            break;
        }
    }
    let scored = |(tokens, sum, _): Begun| {
        let by = if options.alpha > 0.0 { penalty(tokens.len()) } else { tokens.len() as f64 };
        Hypothesis { tokens, score: sum / by }
    };
    let mut all: Vec<_> = beam.into_iter().map(scored).collect();
    all.sort_by(|a, b| b.score.total_cmp(&a.score));
    all.truncate(options.keep_n);
    all
}

fn assert_same(got: &[Hypothesis], expected: &[Hypothesis], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.tokens, expected.tokens, "{what}");
        let close = got.score == expected.score || (got.score - expected.score).abs() < 1e-4;
        assert!(close, "{what}: {} is not {}", got.score, expected.score);
    }
}

#[test]
fn the_search_matches_a_simple_search() {
    let (_first, first) = model(3, NormPlace::After);
    let (_second, second) = model(4, NormPlace::Before);
    let source = sentences();
    let mut lengths = std::collections::BTreeSet::new();
    for models in [&[&first][..], &[&second], &[&first, &second]] {
        for (beam_size, alpha, batch) in [(1, -1.0, 5), (3, -1.0, 2), (4, 0.6, 5), (9, 1.5, 3), (12, 0.0, 1)]
        {
            let options = BeamOptions {
                beam_size,
                alpha,
                keep_n: beam_size.min(3),
                max_steps: 7,
                batch,
                specials: Specials { bos: 3, ..Default::default() },
            };
            let got = beam_search(models, &padded(&source, 0), &options).unwrap();
            assert_eq!(got.len(), source.len());
            for (got, sentence) in got.iter().zip(&source) {
                let expected = no_grad(|| plain_search(models, sentence, &options));
                assert_same(got, &expected, &format!("{} models, {options:?}, {sentence:?}", models.len()));
                lengths.extend(got.iter().map(|hypothesis| hypothesis.tokens.len()));
            }
        }
    }
    assert!(lengths.len() > 3, "some end early, some late: {lengths:?}");
}

#[test]
fn all_translations_are_found_by_a_beam_that_holds_them() {
    let (_store, model) = model(5, NormPlace::After);
    // Two steps over 9 tokens, without padding: at most 8 × 8 translations.
    let options = BeamOptions { beam_size: 80, alpha: 1.0, keep_n: 80, max_steps: 2, ..Default::default() };
    let found = &beam_search(&[&model], &padded(&sentences()[..1], 0), &options).unwrap()[0];
    assert_eq!(found.len(), 1 + 7 * 8);
    let distinct: std::collections::BTreeSet<_> = found.iter().map(|one| &one.tokens).collect();
    // A token followed by the end and the same token followed by another one are different; the empty translation
    // occurs once.
    assert_eq!(distinct.len(), found.len());
}

#[test]
fn empty_input_is_translated_to_nothing() {
    let (_store, model) = model(6, NormPlace::After);
    let options = BeamOptions { max_steps: 3, ..Default::default() };
    let translated = |size: [i64; 2]| {
        beam_search(&[&model], &Tensor::zeros(size, (Kind::Int64, Device::Cpu)), &options).unwrap().len()
    };
    assert_eq!(
        (translated([0, 4]), translated([0, 0]), translated([7, 0]), translated([2, 3])),
        (0, 0, 7, 2)
    );
}

#[test]
fn invalid_searches_are_refused() {
    let (_store, model) = model(7, NormPlace::After);
    let source = padded(&sentences(), 0);
    let refused = |models: &[&Transformer], source: &Tensor, options: BeamOptions| {
        beam_search(models, source, &options).unwrap_err().to_string()
    };
    let usual = BeamOptions::default();
    let models = [&model];
    assert_eq!(refused(&[], &source, usual), "there is no model to translate with; try one or more");
    assert_eq!(
        refused(&models, &source, BeamOptions { beam_size: 0, ..usual }),
        "beam_size is 0; try 1 or more"
    );
    assert_eq!(
        refused(&models, &source, BeamOptions { keep_n: 6, ..usual }),
        "keep_n is 6, but the beam 5; try a greater beam_size"
    );
    assert_eq!(
        refused(&models, &source.get(0), usual),
        "the source is [5] of Int64; try i64 ids of sentences × places"
    );
    let bos = BeamOptions { specials: Specials { bos: 9, ..Default::default() }, ..usual };
    assert_eq!(refused(&models, &source, bos), "there is no word 9 in a vocabulary of 9; try other specials");
}
