//! fp16 with its scaled loss in graphs: the same steps are left out as without.

use drumline::trainer::Precision;
use rank_test::ranks_test;

use super::trained::{BRIEF, Case, Trained, WARM_UPS, assert_same_losses, join, train};

const FP16: Case = Case { epochs: 10, precision: Precision::Fp16, ..Case::DEFAULT };

fn check(eager: &Trained, graphed: &Trained) {
    println!("{:?}", graphed.steps);
    for (step, (eager, graphed)) in eager.steps.iter().zip(&graphed.steps).enumerate() {
        let seen = (graphed.has_overflowed, graphed.scale);
        assert_eq!(seen, (eager.has_overflowed, eager.scale), "step {}: {eager:?}, {graphed:?}", step + 1);
    }
    let left_out = |steps: std::ops::Range<usize>| -> usize {
        graphed.steps[steps].iter().filter(|step| step.has_overflowed).count()
    };
    assert_eq!(left_out(0..WARM_UPS + 1), WARM_UPS + 1, "the optimizer's first step is by graphs");
    let middle = left_out(15..40);
    assert!(middle > 1 && middle < 20, "some steps in the middle: {middle}");
    // A loss of 1 is rounded to 0.001 in fp16.
    assert_same_losses(eager, graphed, 2e-3);
}

ranks_test!(fp16_by_graphs_leaves_out_the_same_steps, 1, timeout = BRIEF, {
    let group = join()?;
    for adam in [false, true] {
        let graphed = train(&group, Case { adam, ..FP16 })?;
        let eager = train(&group, Case { adam, graphs: false, ..FP16 })?;
        assert_eq!((eager.forwards, graphed.forwards), (40, WARM_UPS + 1));
        check(&eager, &graphed);
    }
});

ranks_test!(fp16_over_nccl_by_graphs_leaves_out_the_same_steps, 1, timeout = BRIEF, {
    let group = join()?;
    let case = Case { reduces_alone: true, ..FP16 };
    let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
    assert_eq!((eager.forwards, graphed.forwards), (40, WARM_UPS + 2), "one is a rehearsal");
    check(&eager, &graphed);
});
