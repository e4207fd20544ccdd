//! Groups made from groups: who is in them, in which order, and that they do not disturb each other.

use drumline_comm::{CommError, ProcessGroup, ReduceOp, Transport};

use crate::threads::{BOTH, Result, run};

fn sum_of_members(group: &ProcessGroup, len: usize) -> Result {
    let world_rank = group.members()[group.rank()];
    let mut data = vec![world_rank as u64; len];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let expected: usize = group.members().iter().sum();
    assert!(data.iter().all(|&x| x == expected as u64), "{} of {:?}", data[0], group.members());
    Ok(())
}

#[test]
fn the_order_of_the_list_is_the_order_of_the_ranks() {
    for transport in BOTH {
        run(5, transport, |group| {
            let list = [3, 0, 4];
            let child = group.new_group(&list)?;
            assert_eq!(child.is_some(), list.contains(&group.rank()));
            if let Some(child) = child {
                assert_eq!(list[child.rank()], group.rank());
                assert_eq!((child.size(), child.members()), (3, &list[..]));
                let mut all = [0u8; 3];
                child.all_gather(&[group.rank() as u8], &mut all)?;
                assert_eq!(all, [3, 0, 4]);
                let mut data = [group.rank() as i32];
                child.broadcast(&mut data, 2)?;
                assert_eq!(data, [4], "roots count in the child");
                sum_of_members(&child, 10_000)?;
            }
            sum_of_members(group, 100)
        });
    }
}

#[test]
fn colors_make_groups_and_keys_order_them() {
    for transport in BOTH {
        run(5, transport, |group| {
            let me = group.rank();
            // Ranks 0, 2, 4 in reverse order; ranks 1, 3 in order.
            let child =
                group.split(Some(me as u32 % 2), if me % 2 == 0 { -(me as i64) } else { 0 })?.unwrap();
            let expected: &[usize] = if me.is_multiple_of(2) { &[4, 2, 0] } else { &[1, 3] };
            assert_eq!(child.members(), expected);
            sum_of_members(&child, 5_000)?;
            let some = group.split((me < 2).then_some(9), 0)?;
            assert_eq!(some.map(|child| child.members().to_vec()), (me < 2).then(|| vec![0, 1]));
            let none = group.split(None, 0)?;
            assert!(none.is_none(), "nobody had a color");
            sum_of_members(group, 10)
        });
    }
}

#[test]
fn groups_of_groups_count_in_their_parents_ranks() {
    for transport in BOTH {
        run(4, transport, |group| {
            let Some(three) = group.new_group(&[3, 1, 0])? else { return Ok(()) };
            let two = three.new_group(&[2, 0])?;
            assert_eq!(two.is_some(), [0, 3].contains(&group.rank()));
            if let Some(two) = two {
                assert_eq!(two.members(), [0, 3]);
                sum_of_members(&two, 3_000)?;
            }
            sum_of_members(&three, 3_000)
        });
    }
}

#[test]
fn a_group_of_one_rank_works() {
    for transport in BOTH {
        run(2, transport, |group| {
            for rank in 0..2 {
                let Some(alone) = group.new_group(&[rank])? else { continue };
                assert_eq!((alone.rank(), alone.size(), alone.members()), (0, 1, &[rank][..]));
                sum_of_members(&alone, 100)?;
                let mut data = [3.0f32];
                alone.all_reduce(&mut data, ReduceOp::PreMulSum(2.0))?;
                assert_eq!(data, [6.0]);
                alone.barrier()?;
                assert_eq!(alone.all_gather_object(&String::from("me"))?, ["me"]);
            }
            Ok(())
        });
    }
}

#[test]
fn groups_are_used_in_turns() {
    for transport in BOTH {
        run(4, transport, |group| {
            let pair = group.split(Some(group.rank() as u32 / 2), 0)?.unwrap();
            let cross = group.split(Some(group.rank() as u32 % 2), 0)?.unwrap();
            for turn in 0..200 {
                sum_of_members([group, &pair, &cross][turn % 3], 1 + turn * 13)?;
            }
            Ok(())
        });
    }
}

#[test]
fn threads_use_different_groups_at_once() {
    for transport in BOTH {
        run(3, transport, |group| {
            let all = [0, 1, 2];
            let groups = (0..3).map(|_| group.new_group(&all)).collect::<Result<Vec<_>>>()?;
            std::thread::scope(|scope| {
                let threads: Vec<_> = groups
                    .iter()
                    .flatten()
                    .map(|group| {
                        scope.spawn(move || (0..100).try_for_each(|i| sum_of_members(group, i * 17)))
                    })
                    .collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })?;
            sum_of_members(group, 7)
        });
    }
}

#[test]
fn clones_of_one_group_take_turns() {
    run(2, Transport::Shm, |group| {
        let totals = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let group = group.clone();
                    scope.spawn(move || {
                        let mut x = [1u64];
                        (0..200).try_for_each(|_| group.all_reduce(&mut x, ReduceOp::Max))?;
                        Ok(x[0])
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<u64>>>()
        })?;
        assert_eq!(totals, [1, 1, 1]);
        Ok(())
    });
}

#[test]
fn invalid_lists_are_errors_and_the_group_stays_usable() {
    for transport in BOTH {
        run(3, transport, |group| {
            let cases: [(&[usize], &str); 3] = [
                (&[0, 1, 0], "rank 0 is twice in the list [0, 1, 0]"),
                (&[], "the list is empty"),
                (&[0, 3], "rank 3 is not in group `world` of 3 ranks"),
            ];
            for (list, expected) in cases {
                match group.new_group(list) {
                    Err(CommError::Invalid { what }) => assert!(what.contains(expected), "{what}"),
                    other => panic!("{list:?}: {other:?}"),
                }
            }
            sum_of_members(&group.new_group(&[2, 1, 0])?.unwrap(), 10)
        });
    }
}

#[test]
fn a_child_outlives_its_parent() {
    for transport in BOTH {
        let children = run(3, transport, |group| Ok((group.rank(), group.new_group(&[0, 2])?)));
        let threads: Vec<_> = children
            .into_iter()
            .filter_map(|(_, child)| child)
            .map(|child| std::thread::spawn(move || sum_of_members(&child, 2_000)))
            .collect();
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
    }
}
