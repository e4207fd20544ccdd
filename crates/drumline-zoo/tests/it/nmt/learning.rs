//! Training: the same on any number of ranks, with each schedule, to a good BLEU.

use std::time::{Duration, Instant};

use drumline_launch::Signal;

use super::super::running::{start, start_program};
use super::{Task, difference};

/// The losses of all steps, the BLEU of validations, and the last translations.
fn curve(nproc: usize, cycle: usize) -> (Vec<f64>, Vec<f64>, String) {
    curve_with(nproc, cycle, "")
}

fn curve_with(nproc: usize, cycle: usize, more: &str) -> (Vec<f64>, Vec<f64>, String) {
    let task = Task::new();
    let said = task.train(nproc, &format!("training_configs.update_cycle {cycle} {more}"));
    let steps = task.column("step", "step").len();
    assert_eq!(said.matches("Training Finished").count(), 1, "{said}");
    assert!(said.contains(" words/s") && !said.contains(" 0 words/s"), "words are counted: {said}");
    let config = &task.events()[0]["config"];
    assert!(config["batch_size_per_gpu"].is_null() && config["update_every"] == cycle, "{config}");
    let last = task.read(&format!("valid/step-{steps:08}.txt"));
    (task.column("step", "loss"), task.column("eval", "bleu"), last)
}

#[test]
fn ranks_that_divide_everything_make_the_steps_of_one() {
    let (losses, _, last) = curve(1, 2);
    let (divided, _, translated) = curve_with(2, 1, "PARALLEL.ZERO 3");
    assert!(difference(&losses, &divided) < 1e-4, "{losses:?} {divided:?}");
    assert_eq!(last, translated);
}

#[test]
fn ranks_that_have_parts_of_the_layers_make_the_steps_of_one() {
    // Where padding is removed, masks depend on the rank that has a sentence: only ranks of tp have the same ones.
    for (dropout, nproc, cycle, more) in
        [("0.1", 2, 2, "PARALLEL.TP 2"), ("0", 4, 1, "PARALLEL.TP 2 PARALLEL.ZERO 1")]
    {
        let dropout = format!("model_configs.dropout {dropout}");
        let (losses, bleu, last) = curve_with(1, 2, &dropout);
        let (cut, cut_bleu, translated) = curve_with(nproc, cycle, &format!("{dropout} {more}"));
        assert!(difference(&losses, &cut) < 1e-4, "{more}: {losses:?} {cut:?}");
        // Rounding may choose between two translations of one score.
        let near = |(one, other): (&f64, &f64)| (one - other).abs() < 0.5 || one.is_nan();
        assert!(bleu.iter().zip(&cut_bleu).all(near), "{more}: {bleu:?} {cut_bleu:?}");
        let counts = |translated: &str| translated.lines().count();
        assert_eq!((cut_bleu.len(), counts(&translated)), (bleu.len(), counts(&last)), "{more}");
    }
}

#[test]
fn a_run_of_parts_resumes_on_one_rank_and_translates() {
    // The output layer has its own weights.
    let words = |steps: usize, more: &str| {
        format!(
            "{more} model_configs.proj_share_weight False model_configs.label_smoothing 0.2 \
             training_configs.disp_freq 1 training_configs.save_freq 1 training_configs.max_steps {steps}"
        )
    };
    let (whole, cut) = (Task::new(), Task::new());
    whole.train(1, &words(4, ""));
    cut.train(2, &words(2, "PARALLEL.TP 2"));
    let said = cut.train(1, &words(4, "--reload"));
    assert!(said.contains("[resume] == after step 2"), "{said}");
    let [one, other] = [&whole, &cut].map(|task| task.column("step", "loss"));
    assert!(difference(&one, &other) < 1e-4, "{one:?} {other:?}");
    cut.train(2, &words(6, "--reload PARALLEL.TP 2"));
    cut.passes(1, "translate --model DIR/save --source DIR/test.src --out DIR/out.txt");
    assert_eq!(cut.read("out.txt").lines().count(), 11);
}

#[test]
fn ranks_that_have_stages_of_the_layers_make_the_steps_of_one() {
    let losses = |nproc: usize, more: &str| {
        let task = Task::new();
        let said = task.train(nproc, &format!("model_configs.dropout 0.1 {more}"));
        (task.column("step", "loss"), task.column("eval", "ppl"), said)
    };
    let (one, ppl, _) = losses(1, "training_configs.update_cycle 2");
    for (nproc, more) in [
        (2, "training_configs.update_cycle 2 PARALLEL.PP 2"),
        (4, "PARALLEL.MICRO_BATCHES 2 PARALLEL.PP 2 PARALLEL.TP 2 PARALLEL.SCHEDULE zbv"),
    ] {
        let (cut, cut_ppl, said) = losses(nproc, more);
        assert!(said.contains("validations have no BLEU"), "{said}");
        assert!(difference(&one, &cut) < 1e-4, "{more}: {one:?} {cut:?}");
        let last = [&ppl, &cut_ppl].map(|all| *all.last().unwrap());
        assert!((last[0] - last[1]).abs() < 1e-3 * last[0], "{more}: {ppl:?} {cut_ppl:?}");
    }
}

/// The seed's experiment: more ranks with a smaller update cycle give the same result.
#[test]
fn ranks_and_update_cycles_are_interchangeable() {
    let (losses, bleu, last) = curve(1, 4);
    assert!(losses.len() >= 8 && losses.last() < losses.first(), "{losses:?}");
    for (nproc, cycle) in [(2, 2), (4, 1)] {
        let (others, other_bleu, other_last) = curve(nproc, cycle);
        assert!(difference(&losses, &others) < 1e-4, "{nproc} ranks: {losses:?} {others:?}");
        assert!(
            bleu.iter().zip(&other_bleu).all(|(some, other)| (some - other).abs() < 0.5 || some.is_nan())
        );
        assert_eq!(bleu.len(), other_bleu.len());
        assert_eq!(last, other_last, "{nproc} ranks");
    }
    let (others, ..) = curve(2, 1);
    assert!(others.len() > losses.len(), "the control: another batch is another training");
}

#[test]
fn a_training_resumes_bit_for_bit_and_keeps_the_best_and_the_last() {
    let (whole, parts) = (Task::new(), Task::new());
    let keep = "training_configs.num_kept_checkpoints 2 training_configs.num_kept_best_model 2";
    let average = "training_configs.moving_average_method ema training_configs.moving_average_alpha 0.1";
    whole.train(2, &format!("{keep} {average} training_configs.max_steps 20"));
    parts.train(2, &format!("{keep} {average} training_configs.max_steps 8"));
    let refused = parts.run(2, "nmt --config_path DIR/nmt.yaml");
    assert!(!refused[0].exit.is_success());
    assert!(
        refused[0].stderr.contains("has checkpoints of another training; try --reload"),
        "{}",
        refused[0].stderr
    );
    let said = parts.passes(
        2,
        &format!("nmt --config_path DIR/nmt.yaml --reload {keep} {average} training_configs.max_steps 20"),
    );
    assert!(said.contains("[resume] == after step 8"), "{said}");
    for key in ["loss", "lr"] {
        assert_eq!(whole.column("step", key), parts.column("step", key), "{key}");
    }
    assert_eq!(whole.column("eval", "ppl"), parts.column("eval", "ppl"));
    let steps = |task: &Task| {
        let names = std::fs::read_dir(task.path("save")).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name.starts_with("step-"));
        names.len()
    };
    assert!((2..=4).contains(&steps(&whole)), "{}", steps(&whole));
    let again = parts.train(2, "--reload training_configs.max_steps 20");
    assert!(again.contains("nothing left to do after step 20"), "{again}");
}

#[test]
fn schedules_clipping_and_averages_of_njunmt_are_taken() {
    for (pairs, first_and_last) in [
        (
            "optimizer_configs.schedule_method isqrt optimizer_configs.learning_rate 0.001 \
             optimizer_configs.scheduler_configs.warmup_steps 1",
            Some((0.001, 0.001)),
        ),
        (
            "optimizer_configs.schedule_method linear optimizer_configs.learning_rate 0.008 \
             optimizer_configs.scheduler_configs.decay_steps 8",
            Some((0.007, 0.0)),
        ),
        (
            "optimizer_configs.schedule_method loss optimizer_configs.learning_rate 0.00005 \
             optimizer_configs.optimizer sgd training_configs.moving_average_method sma",
            Some((0.00005, 0.00005)),
        ),
        (
            "training_configs.norm_by_words False training_configs.batching_key samples training_configs.batch_size 6",
            None,
        ),
        (
            "optimizer_configs.schedule_method None optimizer_configs.optimizer adamw optimizer_configs.learning_rate 0.01",
            Some((0.01, 0.01)),
        ),
    ] {
        let task = Task::new();
        task.train(2, &format!("training_configs.max_steps 8 {pairs}"));
        let (losses, rates) = (task.column("step", "loss"), task.column("step", "lr"));
        assert!(losses.len() == 8 && losses.iter().all(|loss| loss.is_finite()), "{pairs}: {losses:?}");
        if let Some((first, last)) = first_and_last {
            assert!((rates[0] - first).abs() < 1e-9 && (rates[7] - last).abs() < 1e-9, "{pairs}: {rates:?}");
        }
    }
}

#[test]
fn a_validation_that_gets_no_better_ends_the_training() {
    let task = Task::new();
    let said = task.train(
        2,
        "optimizer_configs.schedule_method None optimizer_configs.learning_rate 0.0 training_configs.bleu_valid_freq 4 \
         training_configs.early_stop_patience 2 training_configs.loss_valid_freq 1",
    );
    assert!(said.contains("early stop: no better bleu in 2 evaluations"), "{said}");
    assert_eq!(task.column("step", "step").len(), 12, "validations by loss alone do not count");
}

/// The configuration of the repository, on the data that it names.
#[test]
fn the_task_by_rule_is_learned_to_a_bleu_above_90() {
    let task = Task::of(&Default::default());
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config/nmt.yaml")).unwrap();
    let dir = task.folder.path().to_str().unwrap();
    std::fs::write(task.path("nmt.yaml"), text.replace("data/translation", dir).replace("exp/nmt", dir))
        .unwrap();
    task.passes(2, "train --cfg DIR/nmt.yaml training_configs.max_epochs 3");
    let said = task.passes(
        2,
        "translate --model DIR/save --source DIR/test.src --out DIR/out.txt --reference DIR/test.tgt --alpha 0.6",
    );
    let bleu = said.split("BLEU = ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert!(bleu.parse::<f64>().unwrap() > 90.0, "{said}");
}

#[test]
fn ranks_have_different_random_numbers() {
    let task = Task::new();
    task.train(2, "training_configs.max_steps 2 model_configs.dropout 0.1");
    let bytes = std::fs::read(task.path("save/latest/rng.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let of_rank = |rank: usize| file.tensor(&format!("{rank}.cpu")).unwrap().data().to_vec();
    assert_ne!(of_rank(0), of_rank(1));
}

#[test]
fn a_job_resumes_when_its_launcher_restarts_it() {
    let task = Task::new();
    task.train(2, "training_configs.max_steps 4");
    let dir = task.folder.path().to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_drumline-train");
    let again = format!(
        "TORCHELASTIC_RESTART_COUNT=1 exec {program} nmt --config_path {dir}/nmt.yaml training_configs.max_steps 6"
    );
    let ranks = super::ended(start_program("sh", 2, vec!["-c".into(), again]));
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{}", ranks[0].stderr);
    assert!(ranks[0].stdout.contains("[resume] == after step 4"), "{}", ranks[0].stdout);
}

/// The last validation runs in the end too.
#[test]
fn a_last_validation_that_a_signal_interrupted_runs_on_resume() {
    let task = Task::new();
    let pairs = "training_configs.max_steps 6 training_configs.valid_batch_size 1 training_configs.bleu_valid_configs.max_steps 4000 \
                 training_configs.bleu_valid_configs.beam_size 8 optimizer_configs.learning_rate 0.0";
    let dir = task.folder.path().to_str().unwrap();
    let words = format!("nmt --config_path DIR/nmt.yaml --reload {pairs}");
    let job = start(2, words.split_whitespace().map(|word| word.replace("DIR", dir)).collect());
    job.wait_for_line(0, "== step: [ 6/", Instant::now() + Duration::from_secs(120)).unwrap();
    for rank in 0..2 {
        job.signal(rank, Signal::TERM).unwrap();
    }
    let ranks = super::ended(job);
    let was_cut = ranks[0].stdout.contains("[stop] ==");
    let said =
        task.passes(2, &words.replace("max_steps 4000", "max_steps 3").replace("beam_size 8", "beam_size 2"));
    // If the signal came too late, the validation has already run, and nothing is left to do.
    assert_eq!(was_cut, said.contains("| bleu "), "{} {said}", ranks[0].stdout);
    assert!(task.path("valid/step-00000006.txt").exists() && task.path("save/best").exists());
}

#[test]
fn one_rank_and_several_make_the_same_steps() {
    let task = Task::new();
    for (nproc, more) in [(2, ""), (3, "training_configs.update_cycle 2"), (2, "run_configs.precision bf16")]
    {
        let words = "train --verify-parity=3 --cfg DIR/nmt.yaml model_configs.dropout 0.1";
        let said = task.passes(nproc, &format!("{words} {more}"));
        assert!(said.contains("note: dropout is off here"), "{said}");
        assert!(said.contains("the same, but for rounding: at most "), "{more}: {said}");
    }
    assert!(!task.path("save").exists() && !task.path("log").exists(), "nothing is written");
}

#[test]
fn a_test_gives_the_figures_of_the_validation() {
    let task = Task::new();
    task.train(2, "training_configs.max_steps 12 training_configs.bleu_valid_freq 4");
    let [steps, losses, ppl, bleu] = ["step", "loss", "ppl", "bleu"].map(|key| task.column("eval", key));
    let best = std::fs::read_link(task.path("save/best")).unwrap().display().to_string();
    for (words, model, step) in [
        ("test --cfg DIR/save/config.yaml", "best", best.trim_start_matches("step-").parse().unwrap()),
        ("test --last --cfg DIR/nmt.yaml", "last", 12.0),
    ] {
        let at = steps.iter().position(|other| *other == step).unwrap();
        for nproc in [1, 3] {
            let said = task.passes(nproc, words);
            let line = format!(
                "== test: loss: {:.4} | ppl {:.3} | bleu {:.3} | 13 pairs | ",
                losses[at], ppl[at], bleu[at]
            );
            assert!(said.contains(&format!("{line}{model} model, ")), "{nproc} ranks, {line}: {said}");
        }
    }
    let none = Task::new();
    let ranks = none.run(2, "test --cfg DIR/nmt.yaml");
    assert!(ranks[0].stderr.contains("no checkpoint in"), "{}", ranks[0].stderr);
}

#[test]
fn translations_are_trained_in_fewer_bits() {
    let losses = |precision: &str| {
        let task = Task::new();
        task.train(2, &format!("run_configs.precision {precision}"));
        assert!(!task.column("eval", "bleu").is_empty(), "{precision}");
        let scales = task.column("step", "loss_scale");
        assert_eq!(scales.contains(&256.0), precision.starts_with("fp16"), "{scales:?}");
        task.column("step", "loss")
    };
    let full = losses("fp32");
    for precision in ["bf16", "fp16 FP16.LOSS_SCALE 256", "bf16-master"] {
        let short = losses(precision);
        let off = short.iter().zip(&full).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(short.len() == full.len() && off > 0.0 && off < 0.2, "{precision}: {short:?}, {full:?}");
    }
}
