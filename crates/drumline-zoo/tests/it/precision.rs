//! `PRECISION`, `FP16` and `MODEL.MEMORY_FORMAT`: each trains nearly like f32, resumes, and can be tested afterwards.

use drumline_text::synth_story::SynthStoryOptions;
use drumline_text::synth_text::SynthTextOptions;
use serde_json::Value;

use super::running::{Place, column};

const PRECISIONS: [&str; 3] = ["bf16", "fp16", "bf16-master"];
const SMALL: SynthTextOptions = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };

/// Asserts that two runs have similar losses in each step.
#[track_caller]
fn assert_near(name: &str, short: &[Value], full: &[Value], most: f64) {
    let [short, full] = [short, full].map(|events| column(events, "step", "loss"));
    assert_eq!(short.len(), full.len(), "{name}");
    let off = short.iter().zip(&full).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off > 0.0 && off < most, "{name}: {short:?}, {full:?}");
}

fn shows_its_scale(events: &[Value]) -> bool {
    events.iter().any(|event| event["kind"] == "step" && event["loss_scale"].is_number())
}

#[test]
fn images_are_trained_in_fewer_bits() {
    let words = "MODEL.ARCH convnet TRAIN.AUGMENT False OPTIM.LR_POLICY steps OPTIM.STEPS [0]";
    let full = Place::new();
    full.passes(2, &format!("train {words}"));
    for precision in PRECISIONS {
        let short = Place::new();
        let words = format!("{words} PRECISION {precision} MODEL.MEMORY_FORMAT channels_last");
        // The run is stopped and resumed.
        short.passes(2, &format!("train {words} OPTIM.MAX_EPOCH 1"));
        short.passes(2, &format!("train {words}"));
        assert_near(precision, &short.events(), &full.events(), 0.2);
        assert_eq!(shows_its_scale(&short.events()), precision == "fp16");
        assert!(short.passes(1, &format!("test {words}")).contains("| 21 images |"), "{precision}");
    }
}

#[test]
fn texts_are_trained_in_fewer_bits() {
    for (net, task) in [("bilstm", "tag"), ("transformer", "classify")] {
        let words = format!("MODEL.NET {net} MODEL.DROPOUT 0 OPTIM.MAX_EPOCH 2 OPTIM.GRAD_CLIP 1.0");
        let full = Place::of_texts(task, &SMALL);
        full.passes(2, &format!("train {words}"));
        for precision in PRECISIONS {
            let short = Place::of_texts(task, &SMALL);
            short.passes(2, &format!("train {words} PRECISION {precision}"));
            assert_near(&format!("{net} {precision}"), &short.events(), &full.events(), 0.2);
            assert_eq!(shows_its_scale(&short.events()), precision == "fp16");
            assert!(
                short.passes(1, &format!("test {words} PRECISION {precision}")).contains("== test: loss: ")
            );
        }
    }
}

/// The loss scale of each of six steps in fp16.
fn scales(place: &Place, words: &str) -> Vec<f64> {
    place.passes(1, &format!("train {words} PRECISION fp16 TRAIN.MAX_STEPS 6"));
    column(&place.events(), "step", "loss_scale")
}

#[test]
fn the_loss_is_scaled_as_the_keys_say() {
    let stories = SynthStoryOptions { train: 60, valid: 4, seed: 1 };
    let places: [&dyn Fn() -> Place; 3] =
        [&Place::new, &|| Place::of_texts("tag", &SMALL), &|| Place::of_stories(&stories)];
    for place in places {
        assert_eq!(scales(&place(), "FP16.LOSS_SCALE 128"), [128.0; 6]);
        let moving = scales(&place(), "FP16.INITIAL_SCALE_POWER 4 FP16.LOSS_SCALE_WINDOW 2");
        assert_eq!(moving, [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]);
    }
    let refused = &Place::new().run(1, "train FP16.HYSTERESIS 1")[0];
    let expected =
        "FP16.HYSTERESIS is given, but PRECISION is fp32; try PRECISION fp16, or leave the key out";
    assert!(!refused.exit.is_success() && refused.stderr.contains(expected), "{}", refused.stderr);
}
