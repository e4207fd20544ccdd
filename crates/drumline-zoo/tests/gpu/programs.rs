//! `drumline-train` on a GPU, from the command line to `metrics.jsonl`: with CUDA graphs and eager, stopped and
//! resumed, and a GPT that generates text.

use drumline_text::synth_story::SynthStoryOptions;
use drumline_text::synth_text::SynthTextOptions;

use super::running::{Place, column, ended, job};

/// A small run of ten steps in each of two epochs. A higher learning rate would amplify rounding.
const IMAGES: &str = "train --device cuda MODEL.ARCH resnet18 PRECISION bf16-master TRAIN.BATCH_SIZE 64 TEST.BATCH_SIZE 64 \
                      OPTIM.BASE_LR 0.001 OPTIM.LR_POLICY steps OPTIM.STEPS [0] CUDNN.BENCHMARK False CUDNN.DETERMINISTIC True";
const STEPS: usize = 20;

/// The largest root-mean-square difference between the losses of two runs. Rounding causes less: 0.036 between f32 and
/// bf16-master on a CPU. Losses of consecutive batches differ by 0.1, and learning changes them by more, so a step with
/// the previous batch, or without an optimizer, is detected.
const ROUNDING: f64 = 0.05;

fn images() -> Place {
    Place::of_images(640, 64)
}

/// Runs to a successful end. Returns whether a line says that graphs cannot be used.
fn went_without_graphs(place: &Place, words: &str) -> bool {
    let rank = ended(place.job(1, words).env("DRUMLINE_LOG", "info").start().unwrap()).remove(0);
    assert!(rank.exit.is_success(), "{words}: {}{}", rank.stdout, rank.stderr);
    rank.stderr.contains("steps do not run as CUDA graphs")
}

fn losses(place: &Place) -> Vec<f64> {
    column(&place.events(), "step", "loss")
}

fn apart(some: &[f64], others: &[f64]) -> f64 {
    let squares: f64 = some.iter().zip(others).map(|(a, b)| (a - b).powi(2)).sum();
    (squares / some.len().min(others.len()) as f64).sqrt()
}

#[track_caller]
fn assert_same(some: &[f64], others: &[f64]) {
    assert_eq!((some.len(), others.len()), (STEPS, STEPS));
    let (off, of_batches) = (apart(some, others), apart(some, &some[1..]));
    assert!(off < ROUNDING, "{off}: {some:?}, {others:?}");
    assert!(of_batches > ROUNDING, "a batch is too like the next to tell runs apart: {some:?}");
    let (begin, end) = (some[..3].iter().sum::<f64>() / 3.0, some[STEPS - 3..].iter().sum::<f64>() / 3.0);
    assert!(begin - end > 2.0 * ROUNDING, "too little is learnt to tell runs apart: {some:?}");
}

#[test]
fn a_resnet_with_graphs_has_the_losses_of_an_eager_one() {
    let (graphed, eager) = (images(), images());
    assert!(!went_without_graphs(&graphed, IMAGES));
    went_without_graphs(&eager, &format!("{IMAGES} CUDA_GRAPHS False"));
    assert_same(&losses(&graphed), &losses(&eager));
    let evaluated = |place: &Place| column(&place.events(), "eval", "loss");
    assert_eq!([evaluated(&graphed).len(), evaluated(&eager).len()], [2, 2]);
}

#[test]
fn a_run_with_graphs_resumes_where_it_stopped() {
    let (whole, parts) = (images(), images());
    assert!(!went_without_graphs(&whole, IMAGES));
    assert!(!went_without_graphs(&parts, &format!("{IMAGES} OPTIM.MAX_EPOCH 1")));
    assert_eq!(losses(&parts).len(), STEPS / 2);
    assert!(!went_without_graphs(&parts, IMAGES));
    assert_same(&losses(&whole), &losses(&parts));
}

#[test]
fn a_gpt_is_trained_with_graphs_and_generates_text() {
    let place = Place::of_stories(&SynthStoryOptions { train: 200, valid: 10, seed: 3 });
    // The rows of the embedding are a multiple of 8, so our kernels compute the loss.
    let words = "train --device cuda PRECISION bf16-master MODEL.VOCAB_MULTIPLE 64";
    assert!(!went_without_graphs(&place, words));
    let losses = losses(&place);
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(losses.len() > 20 && last < 0.7 * first, "{losses:?}");
    let (from, prompt) = (place.path("exp").display().to_string(), "Ada had a ");
    let words = ["generate", "--from", &from, "--device", "cuda", "--greedy", "--max-tokens", "40", prompt];
    let rank = ended(job(1, words.map(str::to_owned).into()).start().unwrap()).remove(0);
    assert!(rank.exit.is_success(), "{}", rank.stderr);
    assert!(rank.stdout.starts_with(prompt) && rank.stdout.len() > prompt.len() + 20, "{}", rank.stdout);
}

#[test]
fn a_gpt_with_checkpoints_and_dropout_has_graphs_with_the_losses_of_eager_steps() {
    let trained = |words: &str| {
        let place = Place::of_stories(&SynthStoryOptions { train: 200, valid: 10, seed: 3 });
        let common = "train --device cuda PRECISION bf16-master MODEL.VOCAB_MULTIPLE 64 MODEL.DROPOUT 0.1 TRAIN.MAX_STEPS 20";
        let eager = went_without_graphs(&place, &format!("{common} {words}"));
        (eager, losses(&place))
    };
    let expected = trained("CUDA_GRAPHS False").1;
    let off = |found: &[f64]| apart(found, &expected);
    for words in ["", "TRAIN.ACCUMULATE 2 TRAIN.BATCH_SIZE 4"] {
        let expected = if words.is_empty() {
            expected.clone()
        } else {
            trained(&format!("CUDA_GRAPHS False {words}")).1
        };
        for how in ["none", "full", "selective", "2"] {
            let (eager, found) = trained(&format!("CUDA_GRAPHS True MODEL.CHECKPOINT {how} {words}"));
            assert!(!eager, "{how} {words}");
            assert_eq!(found.len(), expected.len());
            assert!(apart(&found, &expected) < 0.02, "{how} {words}: {found:?} {expected:?}");
        }
    }
    // Control.
    let without = trained("CUDA_GRAPHS False MODEL.DROPOUT 0").1;
    assert!(off(&without) > 1e-4, "dropout counts: {without:?} {expected:?}");
}

#[test]
fn an_lstm_trains_with_weights_in_bf16() {
    let place = Place::of_texts("tag", &SynthTextOptions { train: 96, dev: 24, test: 24, seed: 3 });
    let rank = ended(place.job(1, "train --device cuda PRECISION bf16-master").start().unwrap()).remove(0);
    assert!(rank.exit.is_success(), "{}{}", rank.stdout, rank.stderr);
    let losses = losses(&place);
    assert!(losses.iter().all(|loss| loss.is_finite()) && losses[losses.len() - 1] < losses[0], "{losses:?}");
}

#[test]
fn the_gpu_is_printed_once_for_any_number_of_ranks() {
    let ranks = Place::new().run(2, "train --device cuda OPTIM.MAX_EPOCH 1");
    let all: String = ranks.iter().map(|rank| rank.stdout.as_str()).collect();
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{all}{}", ranks[0].stderr);
    assert_eq!(all.matches("[init] == device: cuda:0, NVIDIA ").count(), 1, "{all}");
    assert_eq!(all.matches("[init] == local rank: ").count(), 2, "{all}");
}
