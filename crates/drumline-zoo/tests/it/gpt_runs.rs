//! A GPT by `drumline-train`: what is learnt, on how many ranks, gone on from, refused, and what it says then.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use drumline_text::synth_story::SynthStoryOptions;

use super::failing_runs::shared;
use super::golden;
use super::running::{Place, Rank, column, ended, start};
use super::texts::{append, weights};

const LARGE: SynthStoryOptions = SynthStoryOptions { train: 400, valid: 20, seed: 3 };
const SMALL: SynthStoryOptions = SynthStoryOptions { train: 24, valid: 6, seed: 3 };

/// What a model that knows only how often bytes come would reach.
fn unigram_perplexity(bytes: &[u8]) -> f64 {
    let mut counts = [0f64; 256];
    bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1.0);
    let all = bytes.len() as f64;
    counts
        .iter()
        .filter(|count| **count > 0.0)
        .map(|count| -count / all * (count / all).ln())
        .sum::<f64>()
        .exp()
}

fn generated(place: &Place, words: &[&str]) -> Rank {
    let from = place.path("exp").display().to_string();
    let args = ["generate", "--from", &from].iter().chain(words).map(|word| (*word).to_owned()).collect();
    ended(start(1, args)).remove(0)
}

fn text(place: &Place, words: &[&str]) -> String {
    let rank = generated(place, words);
    assert!(rank.exit.is_success(), "{words:?}: {}", rank.stderr);
    rank.stdout
}

#[test]
fn two_ranks_learn_and_what_they_learnt_goes_on() {
    let place = Place::of_stories(&LARGE);
    let said = place.passes(2, "train MODEL.LOSS_CHUNKS 3 MODEL.VOCAB_MULTIPLE 64 OPTIM.MAX_EPOCH 2");
    for words in ["=  Training  =", "tokens/s", "| ppl ", "best ppl ", "windows"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let events = place.events();
    let reached = column(&events, "eval", "ppl").into_iter().fold(f64::MAX, f64::min);
    let unigram = unigram_perplexity(&fs::read(place.path("data/valid.txt")).unwrap());
    assert!(reached < unigram / 3.0 && unigram > 10.0, "{reached}, by counting {unigram}: {said}");
    let losses = column(&events, "eval", "loss");
    let last = column(&events, "eval", "ppl");
    assert!((losses[0].exp() - last[0]).abs() < 1e-6 * last[0]);
    assert!(column(&events, "step", "tokens_per_s").iter().all(|rate| *rate > 0.0));
    let line = |said: &str| said.lines().find(|line| line.contains("== test:")).unwrap().to_owned();
    let [one, three] = [1, 3].map(|ranks| line(&place.passes(ranks, "test MODEL.VOCAB_MULTIPLE 64")));
    assert_eq!(one, three, "each window counts once");
    generation(&place);
    export(&place);
}

/// The model that was just trained, as a folder of Hugging Face's.
fn export(place: &Place) {
    let exported = place.path("hf");
    let run = |from: &str, out: &Path| {
        let (from, out) = (place.path(from).display().to_string(), out.display().to_string());
        ended(start(1, ["export", "--from", &from, "--out", &out].map(str::to_owned).to_vec())).remove(0)
    };
    let rank = run("exp", &exported);
    assert!(
        rank.exit.is_success() && rank.stdout.starts_with("257 tokens, "),
        "{}{}",
        rank.stdout,
        rank.stderr
    );
    let read =
        |path: PathBuf| tch::Tensor::read_safetensors(path).unwrap().into_iter().collect::<BTreeMap<_, _>>();
    let kept = read(place.path("exp/checkpoints/best/model.safetensors"));
    let cut = read(exported.join("model.safetensors"));
    assert_eq!(kept.keys().collect::<Vec<_>>(), cut.keys().collect::<Vec<_>>());
    assert_eq!((kept["wte.weight"].size()[0], cut["wte.weight"].size()[0]), (320, 257));
    for (name, tensor) in &cut {
        assert_eq!(*tensor, kept[name].narrow(0, 0, tensor.size()[0]), "{name}");
    }
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(exported.join("config.json")).unwrap()).unwrap();
    let told = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "eos_token_id"]
        .map(|key| config[key].as_u64());
    assert_eq!(told, [2, 2, 48, 48, 257, 256].map(Some));
    let words = ["--greedy", "--max-tokens", "60", "Tom had a "];
    let of_export = {
        let from = ["generate", "--from", exported.to_str().unwrap()];
        ended(start(1, from.iter().chain(&words).map(|word| (*word).to_owned()).collect())).remove(0)
    };
    assert_eq!(of_export.stdout, text(place, &words), "{}", of_export.stderr);
    let refused = run("exp", &place.path("exp"));
    assert!(refused.stderr.contains("has files already; try a new folder"), "{}", refused.stderr);
    let missing = run("data", &exported);
    assert!(missing.stderr.contains("neither config.yaml of a run"), "{}", missing.stderr);
}

/// Of the model that was just trained.
fn generation(place: &Place) {
    let prompt = "Ada had a ";
    let greedy = text(place, &["--greedy", "--max-tokens", "100", prompt]);
    assert_eq!(greedy, text(place, &["--greedy", "--max-tokens", "100", "--no-cache", prompt]));
    assert!(greedy.starts_with(prompt) && greedy.len() > prompt.len() + 20, "{greedy}");
    let drawn = |seed| {
        text(place, &["--seed", seed, "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", prompt])
    };
    assert_eq!(drawn("5"), drawn("5"));
    assert_ne!(drawn("5"), drawn("6"), "control");
    let several = text(place, &["--greedy", "--max-tokens", "100", prompt, "Tom had"]);
    assert!(several.starts_with(&greedy) && several.contains("\nTom had"), "{several}");
    assert!(!text(place, &["--max-tokens", "3"]).is_empty(), "without a prompt");
    for (words, told) in [
        (&["--top-p", "2", "x"][..], "top-p is 2; try more than 0, up to 1"),
        (&["--greedy", "--top-k", "2", "x"], "cannot be used with"),
    ] {
        let rank = generated(place, words);
        assert!(!rank.exit.is_success() && rank.stderr.contains(told), "{words:?}: {}", rank.stderr);
    }
}

#[test]
fn one_rank_and_two_make_the_same_steps() {
    let runs = [(1, 2), (2, 1)].map(|(ranks, accumulate)| {
        let place = Place::of_stories(&SMALL);
        place.passes(ranks, &format!("train TRAIN.MAX_STEPS 6 TRAIN.ACCUMULATE {accumulate}"));
        place.events()
    });
    for (kind, key) in
        [("step", "loss"), ("step", "samples"), ("step", "lr"), ("eval", "loss"), ("eval", "ppl")]
    {
        let [one, two] = [&runs[0], &runs[1]].map(|events| column(events, kind, key));
        let near = one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 2e-4 * a.abs());
        assert!(!one.is_empty() && one.len() == two.len() && near, "{kind} {key}: {one:?}, {two:?}");
    }
}

#[test]
fn a_run_in_two_parts_is_the_same_as_one() {
    let words =
        "train OPTIM.SCHEDULE constant OPTIM.WARMUP 4 MODEL.DROPOUT 0.1 OPTIM.MAX_EPOCH 2 TRAIN.EVAL_FREQ 4";
    let (whole, parts) = (Place::of_stories(&SMALL), Place::of_stories(&SMALL));
    whole.passes(2, words);
    parts.passes(2, &format!("{words} TRAIN.MAX_STEPS 3"));
    let said = parts.passes(2, words);
    assert!(said.contains("[resume] == after step 3, epoch 1 =="), "{said}");
    let [one, two] = [&whole, &parts].map(|place| column(&place.events(), "step", "loss"));
    assert!(one.len() > 8);
    assert_eq!(one, two, "bit for bit");
    assert_eq!(weights(&whole), weights(&parts));
}

#[test]
fn other_tokens_within_an_epoch_are_refused() {
    let place = Place::of_stories(&SMALL);
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let ranks = place.run(2, "train MODEL.BLOCK 47");
    let said = shared(&ranks);
    assert!(said.contains("stands in the midst of an epoch: MODEL.BLOCK was 48, and is 47 now"), "{said}");
    fs::copy(place.path("data/valid.tokens"), place.path("data/train.tokens")).unwrap();
    let ranks = place.run(1, "train");
    assert!(ranks[0].stderr.contains("the tokens of GPT.TRAIN was"), "{}", ranks[0].stderr);
}

#[test]
fn pieces_are_learnt_from_and_kept_with_the_run() {
    let place = Place::of_stories(&SMALL);
    let path = |name: &str| place.path(name).display().to_string();
    let made = |words: &[&str]| {
        let args = std::iter::once("data").chain(words.iter().copied()).map(str::to_owned).collect();
        let rank = ended(start(1, args)).remove(0);
        assert!(rank.exit.is_success(), "{}", rank.stderr);
        rank.stdout
    };
    let (text_file, bpe) = (path("data/train.txt"), path("bpe"));
    assert!(made(&["bpe", &text_file, "--out", &bpe, "--size", "300"]).starts_with("300 tokens in"));
    for name in ["train", "valid"] {
        let (from, out) = (path(&format!("data/{name}.txt")), path(&format!("data/{name}.tokens")));
        assert!(
            made(&["tokens", &from, "--out", &out, "--tokenizer", &bpe]).contains("of a vocabulary of 300")
        );
    }
    let ranks = place.run(1, "train");
    let said = &ranks[0].stderr;
    assert!(
        said.contains("of another vocabulary, of 300 tokens, expected the 257 of GPT.TOKENIZER"),
        "{said}"
    );
    place.passes(1, &format!("train GPT.TOKENIZER {bpe} TRAIN.MAX_STEPS 2 MODEL.BLOCK 16"));
    fs::remove_dir_all(place.path("bpe")).unwrap();
    assert!(text(&place, &["--max-tokens", "5", "Ada"]).starts_with("Ada"));
}

#[test]
fn a_folder_of_hugging_faces_is_read() {
    let place = Place::of_stories(&SMALL);
    let folder = place.path("exp");
    fs::create_dir(&folder).unwrap();
    fs::copy(golden::path("gpt.safetensors"), folder.join("model.safetensors")).unwrap();
    let config = r#"{"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": 27, "activation_function": "gelu_new"}"#;
    fs::write(folder.join("config.json"), config).unwrap();
    let said = |place: &Place| generated(place, &["--greedy", "--max-tokens", "3", "b"]).stderr;
    assert!(said(&place).contains("vocab.json\" is not there"), "{}", said(&place));
    // 26 letters and the end of a text, as GPT-2's files have them.
    let letters = ('a'..='z').map(|letter| letter.to_string()).chain(["<|endoftext|>".to_owned()]);
    let vocabulary: serde_json::Map<_, _> =
        letters.enumerate().map(|(id, letter)| (letter, id.into())).collect();
    fs::write(folder.join("vocab.json"), serde_json::to_vec(&vocabulary).unwrap()).unwrap();
    fs::write(folder.join("merges.txt"), "#version: 0.2\n").unwrap();
    // Tokens 3 and 7, and the likeliest that follow in PyTorch.
    let tokens = golden::floats(&golden::json("gpt.json")["greedy"]);
    let expected: String = tokens.iter().map(|token| char::from(b'a' + *token as u8)).collect();
    assert_eq!(text(&place, &["--greedy", "--max-tokens", "3", "dh"]), format!("{}\n", &expected[..5]));
}

#[test]
fn bad_input_is_told_once_by_rank_0() {
    for (words, told) in [
        (
            "train GPT.TRAIN /no/such.tokens",
            "GPT.TRAIN: no file /no/such.tokens; try drumline data tokens TEXT --out",
        ),
        ("train GPT.DEV /no/such.tokens", "GPT.DEV: no file"),
        ("train MODEL.N_HEAD 5", "MODEL: n_embd 48 cannot be split among 5 heads"),
        ("train MODEL.BLOCK 100000", "tokens, expected at least 100001"),
        ("train TRAIN.BATCH_SIZE 5000", "expected at least 10000, a batch for each of 2 ranks"),
        ("train GPT.TOKENIZER /no/such", "cannot read"),
        ("train --verify-parity", "--verify-parity is for images"),
        ("test", "no checkpoint in"),
    ] {
        let place = Place::of_stories(&SMALL);
        let ranks = place.run(2, words);
        let said = shared(&ranks);
        assert!(said.contains(told), "{words}: {said}");
    }
    let place = Place::of_stories(&SMALL);
    append(&place.path("data/train.tokens"), b"x");
    let ranks = place.run(2, "train");
    assert!(shared(&ranks).contains("train.tokens\" is torn: it has"), "{}", ranks[0].stderr);
    let nothing = generated(&place, &["x"]);
    assert!(nothing.stderr.contains("no such folder; try the OUT_DIR of a training"), "{}", nothing.stderr);
    fs::create_dir(place.path("exp")).unwrap();
    let nothing = generated(&place, &["x"]);
    assert!(nothing.stderr.contains("neither config.yaml of a run nor config.json"), "{}", nothing.stderr);
}
