//! BERT training with `drumline-train`: learning, several ranks, resuming, testing, and errors.

use std::collections::BTreeMap;
use std::fs;

use drumline_text::synth_text::SynthTextOptions;

use super::failing_runs::shared;
use super::golden::{json, strings};
use super::running::{Place, assert_same_figures, column};
use super::texts::weights;

const LARGE: SynthTextOptions = SynthTextOptions { train: 2500, dev: 201, test: 150, seed: 3 };
const SMALL: SynthTextOptions = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };

/// The perplexity, and the accuracy in percent, of a model that knows only the word frequencies.
fn by_counting(texts: &str) -> (f64, f64) {
    let mut counts = BTreeMap::<&str, f64>::new();
    texts.split([' ', '\n']).for_each(|word| *counts.entry(word).or_default() += 1.0);
    let all: f64 = counts.values().sum();
    let entropy: f64 = counts.values().map(|count| -count / all * (count / all).ln()).sum();
    (entropy.exp(), 100.0 * counts.values().fold(0.0, |most: f64, count| most.max(*count)) / all)
}

fn line(said: &str) -> String {
    said.lines().find(|line| line.contains("== test:")).unwrap().to_owned()
}

#[test]
fn two_ranks_learn_and_any_number_evaluates() {
    let place = Place::of_masks(&LARGE);
    let said = place.passes(2, "train OPTIM.MAX_EPOCH 12 MODEL.DROPOUT 0");
    for words in ["=  Training  =", "texts/s", "| ppl ", "| acc ", "best ppl ", "| 201 texts"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let events = place.events();
    let (ppl, acc) = by_counting(&fs::read_to_string(place.path("data/dev.csv")).unwrap());
    let best = column(&events, "eval", "ppl").into_iter().fold(f64::MAX, f64::min);
    let most = column(&events, "eval", "acc").into_iter().fold(0.0, f64::max);
    assert!(
        best < ppl / 3.0 && most > 3.0 * acc && ppl > 20.0,
        "{best} {most}, by counting {ppl} {acc}: {said}"
    );
    let [losses, ppls] = ["loss", "ppl"].map(|key| column(&events, "eval", key));
    assert!((losses[0].exp() - ppls[0]).abs() < 1e-6 * ppls[0]);
    assert!(!place.path("exp/labels.json").exists(), "there are none");
    let kept = tch::Tensor::read_safetensors(place.path("exp/checkpoints/best/model.safetensors")).unwrap();
    let mut names: Vec<_> = kept.into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, strings(&json("bert.json")["names"]), "those of a model of two layers");
    // A test does not need the training file, and its masks are the same for any number of ranks.
    fs::remove_file(place.path("data/train.csv")).unwrap();
    let [one, three] = [1, 3].map(|ranks| line(&place.passes(ranks, "test")));
    assert_eq!(one, three, "each text counts once, with the same masks");
    assert!(one.contains("| 150 texts | best model, "), "{one}");
    let dev = place.path("data/dev.csv").display().to_string();
    let again = line(&place.passes(2, &format!("test RNG_SEED 99 TEXT.TEST {dev}")));
    assert!(
        again.contains(&format!("| ppl {best:.3} | acc ")),
        "the masks of evaluations are fixed: {again}"
    );
}

#[test]
fn ranks_that_have_parts_of_the_layers_make_the_steps_of_one() {
    let train = "train OPTIM.METHOD sgd MODEL.DROPOUT 0.1 TRAIN.BATCH_SIZE 7 OPTIM.MAX_EPOCH 2";
    let runs =
        [(1, ""), (2, "PARALLEL.TP 2"), (4, "PARALLEL.TP 4 MODEL.CHECKPOINT full")].map(|(ranks, words)| {
            let place = Place::of_masks(&SMALL);
            place.passes(ranks, &format!("{train} {words}"));
            let events = place.events();
            let tested = [1, 2].map(|ranks| line(&place.passes(ranks, &format!("test PARALLEL.TP {ranks}"))));
            let [one, cut] = tested.each_ref().map(|line| line.split("best").next().unwrap());
            assert_same_figures(one, cut);
            [column(&events, "step", "loss"), column(&events, "eval", "loss"), column(&events, "eval", "acc")]
                .concat()
        });
    for (place, other) in runs[1..].iter().enumerate() {
        let near = runs[0].iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-4 * a.abs().max(1.0));
        assert!(runs[0].len() > 6 && runs[0].len() == other.len() && near, "{place}: {runs:?}");
    }
}

#[test]
fn a_run_of_parts_resumes_on_one_rank_and_a_whole_one_on_parts() {
    let words = |steps: usize, more: &str| {
        format!(
            "train MODEL.DROPOUT 0.1 OPTIM.SCHEDULE constant OPTIM.WARMUP 0 TRAIN.PRINT_FREQ 1 TRAIN.SAVE_FREQ 2 TRAIN.MAX_STEPS {steps} {more}"
        )
    };
    let (whole, cut) = (Place::of_masks(&SMALL), Place::of_masks(&SMALL));
    whole.passes(1, &words(6, ""));
    cut.passes(2, &words(2, "PARALLEL.TP 2"));
    let said = cut.passes(1, &words(4, ""));
    assert!(said.contains("[resume] == after step 2"), "{said}");
    cut.passes(2, &words(6, "PARALLEL.TP 2 PARALLEL.ZERO 1"));
    let [one, other] = [&whole, &cut].map(|place| column(&place.events(), "step", "loss"));
    let near = one.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-4 * a.abs());
    assert!(one.len() == 6 && other.len() == 6 && near, "{one:?}, {other:?}");
    // Weights of a file are read by parts.
    let weights = whole.path("exp/checkpoints/latest/model.safetensors").display().to_string();
    let more = format!("MODEL.WEIGHTS {weights} TEXT.TEST {}", whole.path("data/dev.csv").display());
    let tested = [(1, ""), (2, "PARALLEL.TP 2"), (4, "PARALLEL.TP 2 PARALLEL.PP 2")].map(|(ranks, mesh)| {
        let said = line(&whole.passes(ranks, &format!("test {more} {mesh}")));
        said.split("texts").next().unwrap().to_owned()
    });
    tested[1..].iter().for_each(|cut| assert_same_figures(&tested[0], cut));
}

#[test]
fn one_rank_and_two_make_the_same_steps() {
    let runs = [(1, 2), (2, 1)].map(|(ranks, accumulate)| {
        let place = Place::of_masks(&SMALL);
        let words = "OPTIM.METHOD sgd MODEL.DROPOUT 0 TRAIN.BATCH_SIZE 7";
        place.passes(ranks, &format!("train {words} TRAIN.ACCUMULATE {accumulate}"));
        (weights(&place), place.events())
    });
    let [(one, one_events), (two, two_events)] = &runs;
    let far = one.iter().zip(two).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(one.len() == two.len() && far < 1e-5, "{far}");
    for (kind, key) in [("step", "loss"), ("step", "acc"), ("eval", "loss"), ("eval", "ppl"), ("eval", "acc")]
    {
        let [one, two] = [one_events, two_events].map(|events| column(events, kind, key));
        let near = one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-4 * a.abs().max(1.0));
        assert!(!one.is_empty() && one.len() == two.len() && near, "{kind} {key}: {one:?}, {two:?}");
    }
}

#[test]
fn a_run_in_two_parts_is_the_same_as_one() {
    let words = "train OPTIM.SCHEDULE constant OPTIM.WARMUP 4 MODEL.DROPOUT 0.1 TRAIN.SAVE_FREQ 2";
    let (whole, parts) = (Place::of_masks(&SMALL), Place::of_masks(&SMALL));
    whole.passes(2, words);
    parts.passes(2, &format!("{words} TRAIN.MAX_STEPS 4"));
    let vocabulary = fs::read(parts.path("exp/vocab.json")).unwrap();
    let said = parts.passes(2, words);
    assert!(said.contains("[resume] == after step 4, epoch 2 =="), "{said}");
    let [one, two] = [&whole, &parts].map(|place| column(&place.events(), "step", "loss"));
    assert_eq!(one, two, "bit for bit");
    assert_eq!(weights(&whole), weights(&parts));
    assert_eq!(fs::read(parts.path("exp/vocab.json")).unwrap(), vocabulary);
    let again = parts.passes(2, words);
    assert!(again.contains("nothing left to do after step 12, 4 epochs; best ppl"), "{again}");
}

#[test]
fn weights_of_one_run_initialise_another() {
    let place = Place::of_masks(&SMALL);
    place.passes(2, "train PRECISION bf16 TRAIN.ACCUMULATE 2");
    let file = place.path("first.safetensors");
    fs::copy(place.path("exp/checkpoints/best/model.safetensors"), &file).unwrap();
    let words = format!("MODEL.WEIGHTS {}", file.display());
    let [of_run, of_file] =
        ["".to_owned(), words.clone()].map(|more| line(&place.passes(1, &format!("test {more}"))));
    let figures = |line: &str| line.split(" | ").take(3).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(figures(&of_run), figures(&of_file));
    let out = place.path("second").display().to_string();
    place.passes(1, &format!("train {words} OUT_DIR {out} TRAIN.MAX_STEPS 1"));
}

#[test]
fn invalid_runs_are_refused_with_advice() {
    let place = Place::of_masks(&SMALL);
    let unknown = place.path("data/unknown.csv");
    fs::write(&unknown, "text\nqqq qqq\n").unwrap();
    for (words, expected) in [
        (
            format!("train TEXT.DEV {}", unknown.display()),
            "has no text with a word of the vocabulary; try other data",
        ),
        ("train TEXT.FIELDS [words]".into(), "try another TEXT.FIELDS, of: text, label"),
        ("train TEXT.TRAIN /no/such.csv".into(), "TEXT.TRAIN: no file /no/such.csv; try"),
        ("test".into(), "vocab.json\": No such file or directory (os error 2); try the OUT_DIR of a run"),
    ] {
        let ranks = place.run(2, &words);
        let said = shared(&ranks);
        assert!(said.contains(expected), "{words}: {said}");
    }
    place.passes(2, "train TRAIN.MAX_STEPS 4");
    let ranks = place.run(2, "train TRAIN.BATCH_SIZE 9");
    assert!(
        shared(&ranks).contains("TRAIN.BATCH_SIZE was 16, and is 9 now, so batches would have other texts"),
        "{}",
        ranks[0].stderr
    );
}
