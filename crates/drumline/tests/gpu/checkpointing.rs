//! Steps with activation checkpoints and dropout run as CUDA graphs, with the losses of eager steps without checkpoints.

use drumline::engine::Stage;
use drumline::trainer::Precision;
use rank_test::ranks_test;

use super::trained::{BRIEF, Case, Kept, WARM_UPS, assert_same_losses, join, train};

/// The case with dropout.
fn dropping(case: Case) -> Case {
    // In fp16 the first steps are left out, because they overflow.
    let epochs = if case.precision == Precision::Fp16 { 10 } else { 6 };
    Case { dropout: 0.2, epochs: epochs * case.update_every as u64, ..case }
}

ranks_test!(recorded_checkpoints_have_the_losses_of_eager_steps_without, 1, timeout = BRIEF, {
    let group = join()?;
    for (precision, close) in [(Precision::F32, 1e-5), (Precision::Bf16, 1e-3), (Precision::Fp16, 1e-2)] {
        for update_every in [1, 2] {
            let plain = dropping(Case { precision, update_every, ..Case::default() });
            let eager = train(&group, Case { graphs: false, ..plain })?;
            for kept in [Kept::All, Kept::Input, Kept::Product] {
                let graphed = train(&group, Case { kept, ..plain })?;
                assert_eq!(
                    graphed.forwards,
                    (WARM_UPS + 1) * update_every,
                    "{kept:?} in {precision:?} is recorded"
                );
                assert_same_losses(&eager, &graphed, close);
            }
            // Control: dropout changes the losses.
            let without = train(&group, Case { graphs: false, dropout: 0.0, ..plain })?;
            assert!((without.steps[0].loss - eager.steps[0].loss).abs() > 1e-4);
        }
    }
});

ranks_test!(recorded_checkpoints_work_with_each_stage_of_zero, 1, timeout = BRIEF, {
    let group = join()?;
    for (zero, kept) in
        Stage::ALL.into_iter().skip(1).flat_map(|stage| [(stage, Kept::Input), (stage, Kept::Product)])
    {
        let plain = dropping(Case { update_every: 2, ..Case::default() });
        let case = Case { zero: Some(zero), kept, ..plain };
        let graphed = train(&group, case)?;
        assert_eq!(graphed.forwards, 2 * (WARM_UPS + 2), "{case:?}");
        let eager = train(&group, Case { graphs: false, ..case })?;
        assert_same_losses(&eager, &graphed, 1e-5);
        let all = train(&group, Case { zero: Some(zero), graphs: false, ..plain })?;
        assert_same_losses(&all, &graphed, 1e-5);
    }
});
