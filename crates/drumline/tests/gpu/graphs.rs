//! Steps by graphs have the losses of eager steps. If they cannot be recorded, training continues eagerly, and one line
//! says why.

use drumline::LogOptions;
use drumline::engine::Stage;
use drumline::trainer::{Callback, CallbackResult, Precision, TrainState};
use rank_test::ranks_test;

use super::trained::{BRIEF, Case, Trained, WARM_UPS, Waves, assert_same_losses, join, train, train_on};

ranks_test!(a_training_by_graphs_has_the_losses_of_one_without, 1, timeout = BRIEF, {
    let group = join()?;
    let cases = [(Precision::F32, 1e-5), (Precision::Bf16, 1e-3)];
    let ways = [(false, 1), (true, 1), (false, 2)];
    for ((precision, close), (adam, update_every)) in
        cases.iter().flat_map(|case| ways.map(|way| (*case, way)))
    {
        let epochs = 6 * update_every as u64;
        let case = Case { precision, adam, update_every, epochs, ..Case::default() };
        let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
        assert_eq!((eager.steps.len(), eager.forwards), (24, 24 * update_every));
        assert_eq!(graphed.forwards, (WARM_UPS + 1) * update_every, "{case:?}");
        assert_same_losses(&eager, &graphed, close);
    }
});

ranks_test!(a_rank_that_reduces_over_nccl_rehearses_and_records, 1, timeout = BRIEF, {
    let group = join()?;
    for update_every in [1, 2] {
        let case =
            Case { reduces_alone: true, update_every, epochs: 6 * update_every as u64, ..Case::default() };
        let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
        assert_eq!(graphed.forwards, (WARM_UPS + 2) * update_every, "{case:?}");
        assert_same_losses(&eager, &graphed, 1e-5);
    }
});

ranks_test!(each_stage_of_zero_is_recorded, 1, timeout = BRIEF, {
    let group = join()?;
    for (zero, update_every) in Stage::ALL.into_iter().skip(1).flat_map(|stage| [(stage, 1), (stage, 2)]) {
        let plain = Case { update_every, epochs: 6 * update_every as u64, ..Case::default() };
        let case = Case { zero: Some(zero), ..plain };
        let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
        assert_eq!(graphed.forwards, (WARM_UPS + 2) * update_every, "{case:?}");
        assert_same_losses(&eager, &graphed, 1e-5);
        let replica = train(&group, Case { graphs: false, ..plain })?;
        assert_same_losses(&Trained { weights: 0.0, ..replica }, &graphed, 1e-5);
    }
});

ranks_test!(
    ranks_that_share_a_gpu_continue_without_graphs_and_say_why,
    2,
    timeout = BRIEF,
    {
        drumline::init_logging(LogOptions { filter: Some("info".into()), ..LogOptions::default() })?;
        let group = join()?;
        let case = Case { batch_size: 8, ..Case::default() };
        let (asked, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
        assert_eq!((asked.steps.len(), asked.forwards), (24, 24));
        assert_same_losses(&eager, &asked, 1e-6);
    },
    |ranks| {
        let report = ranks.env([("DRUMLINE_LOG", "info")]).pass()?;
        let reported = |words: &str| -> usize {
            report.ranks.iter().map(|rank| rank.stderr_text().matches(words).count()).sum()
        };
        assert_eq!(reported("steps do not run as CUDA graphs: ranks 0, 1 share the GPU"), 1, "{report}");
    }
);

ranks_test!(
    a_model_that_cannot_be_recorded_is_trained_without_a_word_of_a_panic,
    1,
    timeout = BRIEF,
    {
        drumline::init_logging(LogOptions { filter: Some("info".into()), ..LogOptions::default() })?;
        let group = join()?;
        for reduces_alone in [false, true] {
            let case = Case { reads: true, reduces_alone, ..Case::default() };
            let (asked, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
            assert_eq!((asked.steps.len(), asked.forwards), (24, 25), "one was tried");
            assert_same_losses(&eager, &asked, 1e-6);
        }
    },
    |ranks| {
        let report = ranks.env([("DRUMLINE_LOG", "info")]).pass()?;
        let output = report.ranks[0].stderr_text();
        assert!(!output.contains("panicked at"), "{output}");
        let reported: Vec<_> =
            output.lines().filter(|line| line.contains("not run as CUDA graphs")).collect();
        assert_eq!(reported.len(), 2, "once for each training: {output}");
        assert!(reported.iter().all(|line| line.contains("captur")), "{reported:?}");
    }
);

ranks_test!(
    a_rank_alone_that_offloads_stays_eager_and_says_so_once,
    1,
    timeout = BRIEF,
    {
        drumline::init_logging(LogOptions { filter: Some("info".into()), ..LogOptions::default() })?;
        let group = join()?;
        let case = Case { offloads: true, adam: true, ..Case::default() };
        let offloaded = train(&group, case)?;
        let resident = train(&group, Case { offloads: false, graphs: false, ..case })?;
        assert_eq!((offloaded.steps.len(), offloaded.forwards), (24, 24), "all steps are eager");
        assert_same_losses(&resident, &offloaded, 1e-4);
    },
    |ranks| {
        let report = ranks.env([("DRUMLINE_LOG", "info")]).pass()?;
        let output = report.ranks[0].stderr_text();
        let words = "steps do not run as CUDA graphs: the optimizer's state is in host memory";
        assert_eq!(output.matches(words).count(), 1, "{output}");
        assert!(!output.contains("the optimizer does not run as a CUDA graph"), "{output}");
    }
);

ranks_test!(
    a_schedule_that_cycles_the_momentum_has_the_losses_of_eager_steps,
    1,
    timeout = BRIEF,
    {
        drumline::init_logging(LogOptions { filter: Some("info".into()), ..LogOptions::default() })?;
        let group = join()?;
        let case = Case { adam: true, cycles: true, ..Case::default() };
        let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
        assert_eq!(graphed.forwards, WARM_UPS + 1, "forward and backward are recorded");
        assert_same_losses(&eager, &graphed, 1e-5);
    },
    |ranks| {
        let report = ranks.env([("DRUMLINE_LOG", "info")]).pass()?;
        let output = report.ranks[0].stderr_text();
        let words = "the optimizer does not run as a CUDA graph while the schedule changes its betas";
        assert_eq!(output.matches(words).count(), 1, "{output}");
    }
);

/// Freezes the first layer after 8 steps, and thaws it after 16.
struct Freezing {
    does: bool,
}

impl Callback for Freezing {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let requires_grad = match state.step() {
            8 => false,
            16 => true,
            _ => return Ok(()),
        };
        for named in state.parameters().iter().filter(|named| self.does && named.name.starts_with("first.")) {
            let _ = named.tensor.shallow_clone().set_requires_grad(requires_grad);
        }
        Ok(())
    }
}

ranks_test!(parameters_that_are_frozen_and_thawed_have_the_losses_of_eager_steps, 1, timeout = BRIEF, {
    let group = join()?;
    for (precision, close, adam, reduces_alone) in [
        (Precision::F32, 1e-5, false, false),
        (Precision::F32, 1e-5, true, true),
        (Precision::Fp16, 1e-2, false, false),
    ] {
        let case = Case { precision, adam, reduces_alone, ..Case::default() };
        let run = |case: Case, does| {
            let data = Waves { len: case.data.0, width: case.data.1 };
            train_on(&group, case, data, Freezing { does })
        };
        let (graphed, eager) = (run(case, true)?, run(Case { graphs: false, ..case }, true)?);
        assert_eq!((eager.steps.len(), eager.forwards), (24, 24));
        // Recorded three times; a rank that reduces rehearses each time. The step that finds the change is the first of
        // the warm-ups.
        let once = WARM_UPS + 1 + usize::from(reduces_alone);
        assert_eq!(graphed.forwards, 3 * once, "{case:?}");
        assert_same_losses(&eager, &graphed, close);
        // Control: it matters that they are frozen.
        let never = run(Case { graphs: false, ..case }, false)?;
        assert!((never.weights - eager.weights).abs() > 1e-4, "{} {}", never.weights, eager.weights);
    }
});
