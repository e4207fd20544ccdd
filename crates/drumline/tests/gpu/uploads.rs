//! Batches that are copied beside a step are those of the next one, and whole.

use rank_test::ranks_test;

use super::trained::{BRIEF, Case, WARM_UPS, assert_same_losses, join, train};

ranks_test!(batches_copied_beside_a_step_are_those_of_the_next_one, 1, timeout = BRIEF, {
    let group = join()?;
    // 8 MiB a batch, so that a copy takes longer than a step; the last batch of an epoch is of another shape.
    let large = Case { data: (128 * 10 + 57, 16_384), batch_size: 128, epochs: 4, ..Case::default() };
    for update_every in [1, 2] {
        // Without workers nothing is taken before its turn.
        let in_turn = train(&group, Case { workers: 0, update_every, ..large })?;
        // Those of the recording and before it, and the last of each epoch.
        let forwards = (WARM_UPS + 1) * update_every + 4;
        assert_eq!(in_turn.forwards, forwards);
        for (workers, pin_memory) in [(3, true), (1, true), (2, false)] {
            let ahead = train(&group, Case { workers, pin_memory, update_every, ..large })?;
            assert_eq!(ahead.forwards, forwards);
            assert_same_losses(&in_turn, &ahead, 1e-6);
        }
        let eager = train(&group, Case { graphs: false, update_every, ..large })?;
        assert_same_losses(&eager, &in_turn, 1e-4);
    }
});
