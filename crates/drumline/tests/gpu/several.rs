//! Several ranks that reduce in their graphs, on one GPU, with a library that stands in for NCCL.

use std::time::Duration;

use drumline::trainer::{Callback, CallbackResult, Precision, TrainState};
use rank_test::{StandIn, ranks_test};

use super::trained::{Case, WARM_UPS, Waves, assert_same_losses, join, train, train_on};

/// Enough for several trainings in a row.
const LONG: Duration = Duration::from_secs(90);

/// How long a rank is waited for where one is late.
const TIMEOUT: Duration = Duration::from_secs(5);

const SHARE: Case = Case { batch_size: 8, ..Case::DEFAULT };

ranks_test!(
    two_ranks_by_graphs_have_the_losses_of_two_without,
    2,
    timeout = LONG,
    {
        let group = join()?;
        let f32_again = Case { update_every: 2, epochs: 12, ..SHARE };
        let fp16 = Case { precision: Precision::Fp16, ..SHARE };
        for case in [SHARE, f32_again, fp16, Case { syncs: true, ..SHARE }] {
            let (graphed, eager) = (train(&group, case)?, train(&group, Case { graphs: false, ..case })?);
            assert_eq!(
                graphed.forwards,
                (WARM_UPS + 2) * case.update_every,
                "rehearsed and recorded: {case:?}"
            );
            assert_same_losses(&eager, &graphed, 1e-5);
        }
    },
    |ranks| {
        StandIn::new()?.with(&ranks).pass()?;
    }
);

ranks_test!(
    one_rank_that_cannot_record_makes_all_continue_without_graphs,
    2,
    timeout = LONG,
    {
        let group = join()?;
        let eager = Case { graphs: false, syncs: true, ..SHARE };
        // It fails behind its first norm, whose call the other rank would wait for.
        let case = Case { graphs: true, reads: group.rank() == 1, ..eager };
        let (tried, eager) = (train(&group, case)?, train(&group, eager)?);
        assert_eq!(tried.forwards, eager.forwards + 1, "rehearsed once");
        assert_same_losses(&eager, &tried, 1e-5);
    },
    |ranks| {
        StandIn::new()?.with(&ranks).pass()?;
    }
);

/// Rank 1 comes late to a step that is long recorded.
struct Late;

impl Callback for Late {
    fn on_batch_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        let is_wanted = std::env::var_os("LATE").is_some();
        if is_wanted && state.rank() == 1 && state.step() == 12 {
            std::thread::sleep(2 * TIMEOUT);
        }
        Ok(())
    }
}

ranks_test!(
    a_rank_that_comes_late_to_a_launch_is_reported_and_nothing_hangs,
    2,
    timeout = LONG,
    {
        let group = join()?;
        let case = Case { graphs: std::env::var_os("EAGER").is_none(), ..SHARE };
        let data = Waves { len: SHARE.data.0, width: SHARE.data.1 };
        match train_on(&group, case, data, Late) {
            Ok(trained) => println!("went well by {} forwards", trained.forwards),
            Err(error) => println!("failed: {error:#}"),
        }
    },
    |ranks| {
        let library = StandIn::new()?;
        let all_say = |variables: &[(&str, &str)], words: &[&str]| -> anyhow::Result<()> {
            let timeout = format!("{}s", TIMEOUT.as_secs());
            let ranks = library.with(&ranks).env(variables.iter().copied());
            for rank in ranks.env([("DRUMLINE_TIMEOUT", timeout)]).pass()?.ranks {
                let output = String::from_utf8_lossy(&rank.stdout);
                for words in words {
                    assert!(
                        output.contains(words),
                        "no `{words}` with {variables:?}: {output}{}",
                        rank.stderr_text()
                    );
                }
            }
            Ok(())
        };
        let of_graph = [
            "failed: ",
            "the CUDA graph of step 13 with 1 collectives (bucket or call 0: all_reduce(656 f32, avg) at ",
            "has not ended on the GPU after 5s; another rank may be late",
        ];
        all_say(&[("LATE", "1")], &of_graph)?;
        all_say(&[], &["went well by 5 forwards"])?;
        all_say(
            &[("EAGER", "1"), ("LATE", "1")],
            &["failed: ", "all_reduce(", "timed out after 5s", "rank 1"],
        )?;
        all_say(&[("EAGER", "1")], &["went well by 24 forwards"])?;
    }
);
