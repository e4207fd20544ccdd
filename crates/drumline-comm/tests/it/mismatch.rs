//! Ranks that make different calls all learn, at once, who called what and where.

use std::time::{Duration, Instant};

use drumline_comm::{Element, ProcessGroup, ReduceOp, Transport};

use crate::threads::{BOTH, Result, outcomes};

type Act = fn(&ProcessGroup) -> Result;

/// Two calls that differ, and how the error shows each.
struct Case {
    most: Act,
    one: Act,
    shown: [&'static str; 2],
}

const SUM: ReduceOp = ReduceOp::Sum;

fn cases() -> Vec<Case> {
    let case = |most: Act, one: Act, shown| Case { most, one, shown };
    vec![
        case(
            |group| group.all_reduce(&mut [0f32; 8], SUM),
            |group| group.broadcast(&mut [0f32; 8], 0),
            ["all_reduce(8 f32, sum)", "broadcast(8 f32, root 0)"],
        ),
        case(
            |group| group.barrier(),
            |group| group.all_reduce(&mut [0u8; 0], SUM),
            ["barrier()", "all_reduce(0 u8, sum)"],
        ),
        case(
            |group| group.all_reduce(&mut [0f32; 8], SUM),
            |group| group.all_reduce(&mut [0i32; 8], SUM),
            ["all_reduce(8 f32, sum)", "all_reduce(8 i32, sum)"],
        ),
        case(
            |group| group.all_reduce(&mut [0f32; 8], SUM),
            |group| group.all_reduce(&mut [0f32; 9], SUM),
            ["all_reduce(8 f32, sum)", "all_reduce(9 f32, sum)"],
        ),
        case(
            |group| group.all_reduce(&mut vec![0f32; 300_000], SUM),
            |group| group.all_reduce(&mut vec![0f32; 200_000], SUM),
            ["all_reduce(300000 f32, sum)", "all_reduce(200000 f32, sum)"],
        ),
        case(
            |group| group.all_reduce(&mut vec![0f32; 300_000], SUM),
            |group| group.all_reduce(&mut [0f32; 1], SUM),
            ["all_reduce(300000 f32, sum)", "all_reduce(1 f32, sum)"],
        ),
        case(
            |group| group.all_reduce(&mut [0f32; 8], SUM),
            |group| group.all_reduce(&mut [0f32; 8], ReduceOp::Max),
            ["all_reduce(8 f32, sum)", "all_reduce(8 f32, max)"],
        ),
        case(
            |group| group.all_reduce(&mut [0f32; 8], ReduceOp::PreMulSum(0.5)),
            |group| group.all_reduce(&mut [0f32; 8], ReduceOp::PreMulSum(-0.5)),
            ["premul-sum(0.5)", "premul-sum(-0.5)"],
        ),
        case(
            |group| group.broadcast(&mut [0u64; 100], 0),
            |group| group.broadcast(&mut [0u64; 100], 1),
            ["broadcast(100 u64, root 0)", "broadcast(100 u64, root 1)"],
        ),
        case(
            |group| group.reduce(&mut [0u64; 100], 1, SUM),
            |group| group.reduce(&mut [0u64; 100], 2, SUM),
            ["reduce(100 u64, sum, root 1)", "reduce(100 u64, sum, root 2)"],
        ),
        case(
            |group| group.all_gather_uneven(&vec![0u8; 1 + group.rank()], &mut [0; 6], &[1, 2, 3]),
            |group| group.all_gather_uneven(&vec![0u8; 3 - group.rank()], &mut [0; 6], &[3, 2, 1]),
            ["all_gather(6 u8, lists ", "all_gather(6 u8, lists "],
        ),
        case(
            |group| group.all_gather(&[0u8; 2], &mut [0; 6]),
            |group| group.all_gather_uneven(&[0u8; 2], &mut [0; 6], &[2, 2, 2]),
            ["all_gather(2 u8)", "all_gather(6 u8, lists "],
        ),
        case(
            |group| group.new_group(&[0, 1]).map(drop),
            |group| group.new_group(&[1, 0]).map(drop),
            ["new_group(lists ", "new_group(lists "],
        ),
        case(
            |group| group.heap_alloc::<f32>(100).map(drop),
            |group| group.heap_alloc::<f32>(200).map(drop),
            ["heap_alloc(100 f32)", "heap_alloc(200 f32)"],
        ),
        case(
            |group| group.scatter((group.rank() == 0).then_some(&[0u8; 6][..]), &mut [0; 2], 0),
            |group| group.gather(&[0u8; 2], (group.rank() == 0).then_some(&mut [0; 6][..]), 0),
            ["scatter(2 u8, root 0)", "gather(2 u8, root 0)"],
        ),
        // All ranks make both calls, but one rank in the other order.
        case(
            |group| group.barrier().and_then(|()| group.all_reduce(&mut [0u8], SUM)),
            |group| group.all_reduce(&mut [0u8], SUM).and_then(|()| group.barrier()),
            ["barrier()", "all_reduce(1 u8, sum)"],
        ),
    ]
}

/// The error of each of three ranks, twice, when rank `odd` makes the other call; and how long that took.
fn errors(transport: Transport, most: Act, one: Act, odd: usize) -> (Vec<Result<[String; 2]>>, Duration) {
    let begin = Instant::now();
    let outcomes = outcomes(3, transport, Duration::from_secs(20), move |group| {
        // Some calls that match, so that links exist and the numbers are not the first ones.
        (0..3).try_for_each(|_| group.barrier())?;
        let act = if group.rank() == odd { one } else { most };
        // Over links, a rank that only sends, or whose own peers made the same call, learns it in a later call.
        let outcome = act(group).and_then(|()| (0..2).try_for_each(|_| group.barrier()));
        let Err(error) = outcome else { return Ok([String::new(), String::new()]) };
        let Err(again) = group.barrier() else { panic!("the group was still usable after {error}") };
        Ok([error.to_string(), again.to_string()])
    });
    (outcomes, begin.elapsed())
}

#[test]
fn every_rank_learns_every_ranks_call_and_place() {
    for transport in BOTH {
        for (index, case) in cases().iter().enumerate() {
            let odd = index % 3;
            let (outcomes, time) = errors(transport, case.most, case.one, odd);
            assert!(time < Duration::from_secs(1), "{transport:?} {:?}: {time:?}", case.shown);
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                let [text, again] = outcome.unwrap();
                let who = format!("rank {rank} over {transport:?}, rank {odd} differs: {text}");
                assert!(text.contains("made different calls"), "{who}");
                for peer in 0..3 {
                    let shown = case.shown[usize::from(peer == odd)];
                    let line =
                        text.lines().find(|line| line.contains(&format!("  rank {peer}: "))).expect(&who);
                    assert!(
                        line.contains(shown) && line.contains("#4") && line.contains("mismatch.rs:"),
                        "{who}"
                    );
                }
                assert_eq!(text, again, "the same error afterwards");
            }
        }
    }
}

#[test]
fn the_error_shows_different_places() {
    for transport in BOTH {
        let most = |group: &ProcessGroup| group.barrier();
        let one = |group: &ProcessGroup| group.all_reduce(&mut [0u8], SUM);
        let (outcomes, _) = errors(transport, most, one, 1);
        let text = outcomes[0].as_ref().unwrap()[0].clone();
        let place = |rank: usize| {
            let line = text.lines().find(|line| line.contains(&format!("rank {rank}:"))).unwrap();
            let number = line.rsplit("mismatch.rs:").next().unwrap();
            number.split(';').next().unwrap().parse::<u32>().unwrap()
        };
        assert_eq!((place(0), place(1)), (place(2), place(0) + 1), "{text}");
    }
}

/// The control: equal calls pass, also from different places in the program.
#[test]
fn equal_calls_pass() {
    for transport in BOTH {
        for case in cases() {
            for act in [case.most, case.one] {
                let (outcomes, _) = errors(transport, act, act, 1);
                for outcome in outcomes {
                    assert_eq!(outcome.unwrap(), ["", ""], "{:?}", case.shown);
                }
            }
        }
        let (outcomes, _) = errors(transport, |group| group.barrier(), |group| group.barrier(), 1);
        assert!(outcomes.into_iter().all(|outcome| outcome.unwrap()[0].is_empty()));
    }
}

#[test]
fn counts_of_an_all_to_all_that_do_not_fit_are_an_error_on_all_ranks() {
    for transport in BOTH {
        let begin = Instant::now();
        let outcomes = outcomes(3, transport, Duration::from_secs(20), |group| {
            let sends = [1; 3];
            // Rank 2 expects two elements from rank 0, which sends one.
            let receives = if group.rank() == 2 { [2, 1, 1] } else { [1; 3] };
            let mut output = vec![0u8; receives.iter().sum()];
            group.all_to_all_uneven(&[7; 3], &sends, &mut output, &receives)?;
            group.barrier()
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("link to rank 0"), "{text}");
            assert_eq!(text.starts_with("rank 2 called off"), rank != 2, "{text}");
            assert!(text.contains("all_to_all(") && text.contains("mismatch.rs:"), "{text}");
        }
        assert!(begin.elapsed() < Duration::from_millis(1500), "{:?}", begin.elapsed());
    }
}

#[test]
fn a_mismatch_in_one_group_leaves_the_others_alone() {
    for transport in BOTH {
        let outcomes = outcomes(2, transport, Duration::from_secs(20), |group| {
            let child = group.new_group(&[0, 1])?.unwrap();
            let outcome = match child.rank() {
                0 => child.barrier(),
                _ => child.all_reduce(&mut [0u8], SUM),
            };
            assert!(outcome.unwrap_err().to_string().contains("group `world/1`"));
            let mut x = [1u8];
            group.all_reduce(&mut x, SUM)?;
            Ok(x)
        });
        for outcome in outcomes {
            assert_eq!(outcome.unwrap(), [2]);
        }
    }
}

/// The last line of the error depends on the difference.
#[test]
fn the_advice_fits_and_the_list_is_in_order() {
    // One place in the program for both ranks: two places would be a branch.
    fn sum<T: Element + Default>(group: &ProcessGroup, len: usize) -> Result {
        group.all_reduce(&mut vec![T::default(); len], SUM)
    }
    fn share(group: &ProcessGroup, root: usize) -> Result {
        group.broadcast(&mut [0u8], root)
    }
    let advice: [(Act, Act, &str); 5] = [
        (|group| group.barrier(), |group| group.all_reduce(&mut [0u8], SUM), "branch"),
        (
            |group| group.all_reduce(&mut [0u8; 2], SUM),
            |group| group.all_reduce(&mut [0u8; 3], SUM),
            "branch",
        ),
        (|group| sum::<u8>(group, 2), |group| sum::<u8>(group, 3), "length"),
        (|group| sum::<u8>(group, 2), |group| sum::<i8>(group, 2), "type"),
        (|group| share(group, 0), |group| share(group, 1), "same root"),
    ];
    for transport in BOTH {
        for (most, one, expected) in advice {
            let (outcomes, _) = errors(transport, most, one, 1);
            for outcome in outcomes {
                let [text, _] = outcome.unwrap();
                assert!(text.lines().last().unwrap().contains(expected), "{transport:?}: {text}");
                let places: Vec<_> = (0..3).map(|rank| text.find(&format!("\n  rank {rank}: "))).collect();
                assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{transport:?}: {text}");
            }
        }
    }
}

/// The error of a rank that only learns of another rank's error contains the group's name once.
#[test]
fn the_error_from_another_rank_repeats_nothing() {
    let outcomes = outcomes(2, Transport::Shm, Duration::from_millis(300), |group| match group.rank() {
        0 => group.barrier(),
        _ => {
            std::thread::sleep(Duration::from_millis(900));
            group.barrier()
        }
    });
    let texts: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(
        texts[0].starts_with("barrier() #1 at ") && texts[0].contains(" on group `world` timed"),
        "{texts:?}"
    );
    assert!(texts[1].starts_with("rank 0 called off group `world`: barrier() #1 at "), "{texts:?}");
    assert_eq!(texts[1].matches("world").count(), 1, "{texts:?}");
}
