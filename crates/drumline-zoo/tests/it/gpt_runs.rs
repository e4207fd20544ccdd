//! GPT training with `drumline-train`: learning, several ranks, resuming, and errors.

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

/// The perplexity of a model that knows only the byte frequencies.
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
fn two_ranks_learn_and_their_model_generates_text() {
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

/// Exports the model that was just trained as a Hugging Face folder.
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
    let values = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "eos_token_id"]
        .map(|key| config[key].as_u64());
    assert_eq!(values, [2, 2, 48, 48, 257, 256].map(Some));
    let words = ["--greedy", "--max-tokens", "60", "Tom had a "];
    let of_export = {
        let from = ["generate", "--from", exported.to_str().unwrap()];
        ended(start(1, from.iter().chain(&words).map(|word| (*word).to_owned()).collect())).remove(0)
    };
    assert_eq!(of_export.stdout, text(place, &words), "{}", of_export.stderr);
    let refused = run("exp", &place.path("exp"));
    assert!(refused.stderr.contains("has files already; try a new folder"), "{}", refused.stderr);
    let missing = run("data", &exported);
    assert!(missing.stderr.contains("has neither the config.yaml of a run"), "{}", missing.stderr);
}

/// Generates with the model that was just trained.
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
    for (words, expected) in [
        (&["--top-p", "2", "x"][..], "top-p is 2; try more than 0, up to 1"),
        (&["--greedy", "--top-k", "2", "x"], "cannot be used with"),
    ] {
        let rank = generated(place, words);
        assert!(!rank.exit.is_success() && rank.stderr.contains(expected), "{words:?}: {}", rank.stderr);
    }
}

#[test]
fn one_rank_and_two_make_the_same_steps() {
    // Masks of dropout depend on the position of a sample in its step, and not on its rank.
    let runs = [(1, 2), (2, 1)].map(|(ranks, accumulate)| {
        let place = Place::of_stories(&SMALL);
        let words = format!("train TRAIN.MAX_STEPS 6 TRAIN.ACCUMULATE {accumulate} MODEL.DROPOUT 0.2");
        place.passes(ranks, &words);
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
    for (change, expected) in [
        ("MODEL.BLOCK 47", "MODEL.BLOCK was 48, and is 47 now"),
        ("TRAIN.SHUFFLE False", "TRAIN.SHUFFLE was true, and is false now"),
    ] {
        let ranks = place.run(2, &format!("train {change}"));
        let said = shared(&ranks);
        assert!(said.contains(&format!("is in the middle of an epoch: {expected}")), "{said}");
    }
    fs::copy(place.path("data/valid.tokens"), place.path("data/train.tokens")).unwrap();
    let ranks = place.run(1, "train");
    let expected = "the position is of a data set of ";
    assert!(
        ranks[0].stderr.contains(expected) && ranks[0].stderr.contains(", but this one has "),
        "{}",
        ranks[0].stderr
    );
}

#[test]
fn another_model_and_other_tokens_are_reported() {
    let place = Place::of_stories(&SMALL);
    let has =
        format!("note: the run in {} has MODEL.N_LAYER 2, and now it is 3", place.path("exp").display());
    place.passes(1, "train");
    let said = place.passes(2, "train MODEL.N_LAYER 3");
    assert!(said.contains(&has) && said.contains("nothing left to do"), "{said}");
    let ranks = place.run(2, "train MODEL.N_LAYER 3 OPTIM.MAX_EPOCH 2");
    assert!(ranks[0].stdout.contains(&has) && !ranks[0].exit.is_success(), "{}", ranks[0].stdout);
    let again = place.passes(1, "train OPTIM.MAX_EPOCH 2");
    assert!(!again.contains("note: "), "control: {again}");
    fs::copy(place.path("data/valid.tokens"), place.path("data/train.tokens")).unwrap();
    let ranks = place.run(1, "train OPTIM.MAX_EPOCH 3");
    assert!(ranks[0].stderr.contains("TRAIN.ACCEPT_NEW_DATA True"), "{}", ranks[0].stderr);
    let said = place.passes(1, "train OPTIM.MAX_EPOCH 3 TRAIN.ACCEPT_NEW_DATA True");
    assert!(said.contains("Training Finished"), "{said}");
}

/// Runs `drumline data` with these arguments.
fn data(words: &[&str]) -> Rank {
    let args = std::iter::once("data").chain(words.iter().copied()).map(str::to_owned).collect();
    ended(start(1, args)).remove(0)
}

/// Runs it, asserts that it succeeds, and returns its output.
fn made(words: &[&str]) -> String {
    let rank = data(words);
    assert!(rank.exit.is_success(), "{}", rank.stderr);
    rank.stdout
}

/// Learns a BPE vocabulary of 300 tokens from one of the texts, and encodes the token files with it.
fn with_pieces(place: &Place, text: &str, name: &str) -> String {
    let path = |name: &str| place.path(name).display().to_string();
    let (text, bpe) = (path(text), path(name));
    assert!(made(&["bpe", &text, "--out", &bpe, "--size", "300"]).starts_with("300 tokens in"));
    for name in ["train", "valid"] {
        let (from, out) = (path(&format!("data/{name}.txt")), path(&format!("data/{name}.tokens")));
        let said = made(&["tokens", &from, "--out", &out, "--tokenizer", &bpe]);
        assert!(said.contains("of a vocabulary of 300"), "{said}");
    }
    bpe
}

#[test]
fn bpe_tokens_are_trained_on_and_the_tokenizer_is_stored_with_the_run() {
    let place = Place::of_stories(&SMALL);
    let bpe = with_pieces(&place, "data/train.txt", "bpe");
    let text_file = place.path("data/train.txt").display().to_string();
    let again = data(&["bpe", &text_file, "--out", &bpe, "--size", "310"]);
    assert!(
        again.stderr.contains("vocab.json\" exists already, and was not overwritten"),
        "{}",
        again.stderr
    );
    let ranks = place.run(1, "train");
    let said = &ranks[0].stderr;
    assert!(
        said.contains("of another vocabulary, of 300 tokens, expected the 257 of GPT.TOKENIZER"),
        "{said}"
    );
    place.passes(1, &format!("train GPT.TOKENIZER {bpe} TRAIN.MAX_STEPS 2 MODEL.BLOCK 16"));
    fs::remove_dir_all(place.path("bpe")).unwrap();
    assert!(text(&place, &["--max-tokens", "5", "Ada"]).starts_with("Ada"));
    let ranks = place.run(1, &format!("test GPT.TOKENIZER {bpe} MODEL.BLOCK 16"));
    let kept = place.path("exp/tokenizer.json").display().to_string();
    assert!(ranks[0].stderr.contains(&format!("; try the run's own, {kept}")), "{}", ranks[0].stderr);
    place.passes(1, &format!("test GPT.TOKENIZER {kept} MODEL.BLOCK 16"));
}

#[test]
fn a_run_resumes_only_with_its_own_tokenizer() {
    let place = Place::of_stories(&SMALL);
    let words = "MODEL.BLOCK 16 MODEL.VOCAB_MULTIPLE 64";
    let kept = || fs::read(place.path("exp/tokenizer.json")).unwrap();
    let first = with_pieces(&place, "data/train.txt", "first");
    place.passes(1, &format!("train GPT.TOKENIZER {first} {words}"));
    let of_first = kept();
    let second = with_pieces(&place, "data/valid.txt", "second");
    for words in [format!("train OPTIM.MAX_EPOCH 2 {words}"), format!("test {words}")] {
        let ranks = place.run(2, &format!("{words} GPT.TOKENIZER {second}"));
        let said = shared(&ranks);
        let (exp, file) = (place.path("exp"), place.path("exp/tokenizer.json"));
        let expected = format!("the run in {} has another tokenizer, of 300 tokens, than", exp.display());
        assert!(said.contains(&expected), "{words}: {said}");
        assert!(said.contains(&format!("; try GPT.TOKENIZER {}, or", file.display())), "{words}: {said}");
    }
    assert_eq!(kept(), of_first, "a run that was refused leaves it alone");
    let (file, aside) = (place.path("exp/tokenizer.json"), place.path("aside.json"));
    fs::rename(&file, &aside).unwrap();
    let ranks = place.run(1, &format!("train OPTIM.MAX_EPOCH 2 {words} GPT.TOKENIZER {second}"));
    let said = &ranks[0].stderr;
    assert!(said.contains("has lost its tokenizer.json") && said.contains(&first), "{said}");
    fs::rename(&aside, &file).unwrap();
    let weights = place.path("exp/checkpoints/latest/model.safetensors");
    place.passes(1, &format!("test {words} GPT.TOKENIZER {second} MODEL.WEIGHTS {}", weights.display()));
    place.passes(
        1,
        &format!("train {words} GPT.TOKENIZER {second} TRAIN.AUTO_RESUME False TRAIN.MAX_STEPS 1"),
    );
    assert_ne!(kept(), of_first, "control: a new run leaves its own");
}

#[test]
fn a_run_on_bytes_does_not_resume_with_bpe_or_other_heads() {
    let place = Place::of_stories(&SMALL);
    place.passes(1, "train MODEL.VOCAB_MULTIPLE 64");
    for words in ["train OPTIM.MAX_EPOCH 2", "test"] {
        let ranks = place.run(2, &format!("{words} MODEL.VOCAB_MULTIPLE 64 MODEL.N_HEAD 3"));
        let said = shared(&ranks);
        assert!(said.contains("has MODEL.N_HEAD 2, and now it is 3"), "{words}: {said}");
    }
    let bpe = with_pieces(&place, "data/train.txt", "bpe");
    let ranks = place.run(1, &format!("train MODEL.VOCAB_MULTIPLE 64 OPTIM.MAX_EPOCH 2 GPT.TOKENIZER {bpe}"));
    let said = &ranks[0].stderr;
    assert!(
        said.contains("another tokenizer, of 257 tokens") && said.contains("TOKENIZER bytes, or"),
        "{said}"
    );
}

#[test]
fn the_last_model_is_evaluated_also_between_two_evaluations() {
    let place = Place::of_stories(&SMALL);
    let said = place.passes(2, "train OPTIM.MAX_EPOCH 2 TRAIN.EVAL_FREQ 5");
    let events = place.events();
    let last = |kind| column(&events, kind, "step").last().copied().unwrap();
    let evaluated = column(&events, "eval", "step");
    assert!(last("step") % 5.0 != 0.0 && evaluated.len() > 1, "{evaluated:?}");
    assert_eq!(last("eval"), last("step"), "{said}");
    assert!(evaluated.windows(2).all(|two| two[0] < two[1]), "each once: {evaluated:?}");
    let best = fs::read_link(place.path("exp/checkpoints/best")).unwrap();
    assert_eq!(
        best,
        fs::read_link(place.path("exp/checkpoints/latest")).unwrap(),
        "it gets better and better"
    );
    let again = place.passes(2, "train OPTIM.MAX_EPOCH 2 TRAIN.EVAL_FREQ 5");
    assert!(again.contains("nothing left to do") && again.contains("2 epochs; best ppl "), "{again}");
}

#[test]
fn the_last_model_is_evaluated_also_where_the_steps_end_with_an_epoch() {
    let place = Place::of_stories(&SMALL);
    place.passes(1, "train OPTIM.MAX_EPOCH 1 GPT.DEV null");
    let epoch = *column(&place.events(), "step", "step").last().unwrap();
    assert!(epoch % 5.0 != 0.0, "between two evaluations: {epoch}");
    let words = format!(
        "train OPTIM.MAX_EPOCH 3 TRAIN.MAX_STEPS {epoch} TRAIN.EVAL_FREQ 5 OUT_DIR {}",
        place.path("b").display()
    );
    let said = place.passes(1, &words);
    assert!(said.contains("best ppl "), "{said}");
    let again = place.passes(1, &words);
    assert!(again.contains("nothing left to do"), "{again}");
}

#[test]
fn the_best_model_of_a_run_before_is_not_exported() {
    let place = Place::of_stories(&SMALL);
    place.passes(1, "train TRAIN.MAX_STEPS 2");
    let exported = |out: &str| {
        let (from, out) = (place.path("exp").display().to_string(), place.path(out).display().to_string());
        let args = ["export", "--from", &from, "--out", &out].map(str::to_owned);
        ended(start(1, args.to_vec())).remove(0).stdout
    };
    assert!(exported("a").contains("checkpoints/step-00000002/model.safetensors"), "control");
    let words = "train GPT.DEV null TRAIN.AUTO_RESUME False TRAIN.MAX_STEPS 3";
    place.passes(1, words);
    assert!(exported("b").contains("checkpoints/step-00000003/model.safetensors"));
    let again = place.passes(1, "train GPT.DEV null TRAIN.MAX_STEPS 3");
    assert!(again.contains("nothing left to do after step 3, 0 epochs in "), "no best is made up: {again}");
}

#[test]
fn a_warm_up_as_long_as_the_training_is_reported_once() {
    let place = Place::of_stories(&SMALL);
    let expected = "the warm-up has 2000 steps, and the whole training 2: the learning rate only grows; try";
    let ranks = place.run(2, "train OPTIM.WARMUP 2000 TRAIN.MAX_STEPS 2");
    let counts: Vec<_> = ranks.iter().map(|rank| rank.stderr.matches(expected).count()).collect();
    assert!(ranks[0].exit.is_success() && counts == [1, 0], "{}{}", ranks[0].stderr, ranks[1].stderr);
}

#[test]
fn a_hugging_face_folder_is_read() {
    let place = Place::of_stories(&SMALL);
    let folder = place.path("exp");
    fs::create_dir(&folder).unwrap();
    fs::copy(golden::path("gpt.safetensors"), folder.join("model.safetensors")).unwrap();
    let config = r#"{"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": 27, "activation_function": "gelu_new"}"#;
    fs::write(folder.join("config.json"), config).unwrap();
    let said = |place: &Place| generated(place, &["--greedy", "--max-tokens", "3", "b"]).stderr;
    assert!(said(&place).contains("vocab.json\" does not exist"), "{}", said(&place));
    // 26 letters and the end-of-text token, in the format of GPT-2's files.
    let letters = ('a'..='z').map(|letter| letter.to_string()).chain(["<|endoftext|>".to_owned()]);
    let vocabulary: serde_json::Map<_, _> =
        letters.enumerate().map(|(id, letter)| (letter, id.into())).collect();
    fs::write(folder.join("vocab.json"), serde_json::to_vec(&vocabulary).unwrap()).unwrap();
    fs::write(folder.join("merges.txt"), "#version: 0.2\n").unwrap();
    // Tokens 3 and 7, and the most probable continuation in PyTorch.
    let tokens = golden::floats(&golden::json("gpt.json")["greedy"]);
    let expected: String = tokens.iter().map(|token| char::from(b'a' + *token as u8)).collect();
    let greedy = ["--greedy", "--max-tokens", "3", "dh"];
    assert_eq!(text(&place, &greedy), format!("{}\n", &expected[..5]));
    let with = |key: &str, value: &str| {
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
    };
    other_computations_are_refused(&place, with);
    // The configuration defines the end-of-text token.
    with("eos_token_id", &tokens[2].to_string());
    assert_eq!(text(&place, &greedy), "dh\n");
    with("eos_token_id", "27");
    let said = generated(&place, &["--max-tokens", "3"]).stderr;
    assert!(said.contains("the end-of-text token is 27, but the model has 27 tokens; try"), "{said}");
}

/// Checks configurations in which one key has another value.
fn other_computations_are_refused(place: &Place, with: impl Fn(&str, &str)) {
    for (key, value, known) in [
        ("model_type", "\"gpt_neo\"", "gpt2"),
        ("layer_norm_epsilon", "1e-6", "1e-5"),
        ("activation_function", "\"relu\"", "gelu_new or gelu_pytorch_tanh"),
        ("scale_attn_weights", "false", "true"),
        ("scale_attn_by_inverse_layer_idx", "true", "false"),
        ("tie_word_embeddings", "false", "true"),
        ("add_cross_attention", "true", "false"),
        ("n_inner", "32", "64, 4 times n_embd, or null"),
        ("eos_token_id", "[1, 2]", "one token"),
    ] {
        with(key, value);
        let rank = generated(place, &["--greedy", "--max-tokens", "3", "dh"]);
        let said = &rank.stderr;
        assert!(!rank.exit.is_success() && said.contains("config.json"), "{key}: {said}");
        assert!(said.contains(&format!("{key} is {value}, expected {known}")), "{key}: {said}");
    }
    for (key, value) in [
        ("layer_norm_epsilon", "1e-05"),
        ("activation_function", "\"gelu_pytorch_tanh\""),
        ("n_inner", "64"),
        ("n_inner", "null"),
        ("scale_attn_weights", "true"),
        ("eos_token_id", "[26]"),
    ] {
        with(key, value);
        text(place, &["--greedy", "--max-tokens", "1", "dh"]);
    }
}

#[test]
fn weights_of_another_model_are_refused_to_begin_with() {
    let place = Place::of_stories(&SMALL);
    place.passes(1, "train TRAIN.MAX_STEPS 1");
    let mut tensors =
        tch::Tensor::read_safetensors(place.path("exp/checkpoints/latest/model.safetensors")).unwrap();
    let embedding = tensors.iter().find(|(name, _)| name == "wte.weight").unwrap().1.copy();
    let begun = |tensors: &[(String, tch::Tensor)]| {
        let file = place.path("begin.safetensors");
        tch::Tensor::write_safetensors(tensors, &file).unwrap();
        let words = format!(
            "train OUT_DIR {} TRAIN.MAX_STEPS 1 MODEL.WEIGHTS {}",
            place.path("b").display(),
            file.display()
        );
        place.run(2, &words)
    };
    tensors.push(("lm_head.weight".into(), &embedding * 1.5));
    let ranks = begun(&tensors);
    let said = shared(&ranks);
    assert!(said.contains("tensor `lm_head.weight` of"), "{said}");
    assert!(said.contains("its values are not those of wte.weight, expected the same"), "{said}");
    tensors.last_mut().unwrap().1 = embedding;
    let beside = |epsilon| {
        fs::write(place.path("config.json"), format!(r#"{{"n_embd": 48, "layer_norm_epsilon": {epsilon}}}"#))
    };
    beside("1e-6").unwrap();
    let ranks = begun(&tensors);
    let said = shared(&ranks);
    assert!(said.contains("config.json says: layer_norm_epsilon is 1e-6, expected 1e-5"), "{said}");
    for (config, expected) in [
        (r#"{"n_head": 6}"#, "n_head is 6, and MODEL.N_HEAD 2; try MODEL.N_HEAD 6"),
        (r#"{"n_head": "#, "config.json says: EOF while parsing"),
    ] {
        fs::write(place.path("config.json"), config).unwrap();
        let ranks = begun(&tensors);
        assert!(shared(&ranks).contains(expected), "{}", shared(&ranks));
    }
    beside("1e-5").unwrap();
    assert!(begun(&tensors)[0].exit.is_success(), "control");
}

#[test]
fn bad_input_is_reported_once_by_rank_0() {
    for (words, expected) in [
        (
            "train GPT.TRAIN /no/such.tokens",
            "GPT.TRAIN: no file /no/such.tokens; try drumline data tokens TEXT --out",
        ),
        ("train GPT.DEV /no/such.tokens", "GPT.DEV: no file"),
        ("train MODEL.N_HEAD 5", "MODEL: n_embd 48 cannot be split among 5 heads"),
        ("train MODEL.BLOCK 100000", "tokens, expected at least 100001"),
        ("train TRAIN.BATCH_SIZE 5000", "expected at least 10000, a batch for each of 2 ranks"),
        ("train GPT.TOKENIZER /no/such", "GPT.TOKENIZER: there is no /no/such; try bytes, a tokenizer.json"),
        ("train GPT.TRAIN /tmp", "GPT.TRAIN: /tmp is a folder; try a file of tokens in it"),
        ("train TRAIN.MAX_STEPS=5", "TRAIN.MAX_STEPS=5 has no value; try TRAIN.MAX_STEPS 5"),
        ("train TRAIN.MAX_STEPS", "TRAIN.MAX_STEPS has no value; try TRAIN.MAX_STEPS VALUE"),
        ("test", "no checkpoint in"),
    ] {
        let place = Place::of_stories(&SMALL);
        let ranks = place.run(2, words);
        let said = shared(&ranks);
        assert!(said.contains(expected), "{words}: {said}");
    }
    let place = Place::of_stories(&SMALL);
    append(&place.path("data/train.tokens"), b"x");
    let ranks = place.run(2, "train");
    assert!(shared(&ranks).contains("train.tokens\" is incomplete: it has"), "{}", ranks[0].stderr);
    let nothing = generated(&place, &["x"]);
    assert!(nothing.stderr.contains("no such folder; try the OUT_DIR of a training"), "{}", nothing.stderr);
    fs::create_dir(place.path("exp")).unwrap();
    let nothing = generated(&place, &["x"]);
    assert!(
        nothing.stderr.contains("has neither the config.yaml of a run nor the config.json"),
        "{}",
        nothing.stderr
    );
}
