//! Every collective on GPU tensors, for types and lengths with different routes, against closed-form answers.

use anyhow::Result;
use drumline_comm::{ProcessGroup, ReduceOp, Source};
use drumline_torch::TensorCollectives;
use rank_test::{StandIn, ranks_test};
use tch::{Device, Kind, Tensor};

use super::{GPU, join};

/// Zero, one, an odd number, and more than fits into three pieces of 4 MiB.
const LENGTHS: [i64; 4] = [0, 1, 1023, (4 << 20) + 17];

const KINDS: [Kind; 10] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
];

/// A tensor filled with the rank plus 1.
fn mine(rank: usize, len: i64, kind: Kind) -> Tensor {
    Tensor::full([len], rank as i64 + 1, (Kind::Float, GPU)).to_kind(kind)
}

fn assert_all(tensor: &Tensor, expected: f64, what: &str) {
    let wrong = i64::try_from(tensor.to_kind(Kind::Double).ne(expected).sum(Kind::Int64)).unwrap();
    assert_eq!(wrong, 0, "{what}: {wrong} of {:?} elements are not {expected}", tensor.size());
}

/// The reduction of 1, 2, …, n.
fn expected(op: ReduceOp, kind: Kind, n: usize) -> f64 {
    let (n, is_integer) =
        (n as f64, matches!(kind, Kind::Int64 | Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8));
    match op {
        _ if kind == Kind::Bool => 1.0,
        ReduceOp::Sum => n * (n + 1.0) / 2.0,
        ReduceOp::Avg if is_integer => ((n + 1.0) / 2.0).trunc(),
        ReduceOp::Avg => (n + 1.0) / 2.0,
        ReduceOp::Max => n,
        ReduceOp::PreMulSum(factor) => factor * n * (n + 1.0) / 2.0,
        ReduceOp::Prod => (1..=n as u64).product::<u64>() as f64,
        _ => 1.0,
    }
}

fn reductions(group: &ProcessGroup) -> Result<()> {
    let n = group.size();
    for kind in KINDS {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Avg,
            ReduceOp::Max,
            ReduceOp::Min,
            ReduceOp::Prod,
            ReduceOp::PreMulSum(2.0),
        ] {
            if kind == Kind::Bool && matches!(op, ReduceOp::Avg | ReduceOp::PreMulSum(_)) {
                continue;
            }
            let what = format!("{op} of {kind:?}");
            for len in LENGTHS {
                let mut x = mine(group.rank(), len, kind);
                group.all_reduce_tensor(&mut x, op)?;
                assert_all(&x, expected(op, kind, n), &what);
            }
            let mut x = mine(group.rank(), 100, kind);
            group.reduce_tensor(&mut x, n - 1, op)?;
            let own = if kind == Kind::Bool { 1.0 } else { group.rank() as f64 + 1.0 };
            let value = if group.rank() == n - 1 { expected(op, kind, n) } else { own };
            assert_all(&x, value, &format!("reduce, {what}"));
            let mut part = mine(0, 7, kind);
            group.reduce_scatter_tensor(&mut part, &mine(group.rank(), 7 * n as i64, kind), op)?;
            assert_all(&part, expected(op, kind, n), &format!("reduce_scatter, {what}"));
        }
    }
    let mut bits = mine(group.rank(), 10, Kind::Int);
    group.all_reduce_tensor(&mut bits, ReduceOp::BitOr)?;
    assert_all(&bits, f64::from((1..=n as i32).fold(0, |all, rank| all | rank)), "bits");
    Ok(())
}

fn moves(group: &ProcessGroup) -> Result<()> {
    let (me, n) = (group.rank(), group.size());
    for kind in KINDS {
        for len in LENGTHS {
            let mut x = mine(me, len, kind);
            group.broadcast_tensor(&mut x, n - 1)?;
            assert_all(
                &x,
                if kind == Kind::Bool { 1.0 } else { n as f64 },
                &format!("broadcast of {kind:?}"),
            );
        }
    }
    let all = group.all_gather_tensor(&mine(me, 33, Kind::BFloat16))?;
    let uneven = group.all_gather_uneven_tensor(&mine(me, me as i64 * 5, Kind::Float))?;
    let gathered = group.gather_tensor(&mine(me, 3, Kind::Int16), 0)?;
    assert_eq!(gathered.is_some(), me == 0);
    for rank in 0..n {
        assert_all(&all[rank], rank as f64 + 1.0, "all_gather");
        assert_eq!(uneven[rank].size(), [rank as i64 * 5]);
        assert_all(&uneven[rank], rank as f64 + 1.0, "all_gather_uneven");
        gathered.iter().for_each(|gathered| assert_all(&gathered[rank], rank as f64 + 1.0, "gather"));
    }
    let inputs: Vec<Tensor> = (0..n).map(|rank| mine(rank, 4, Kind::Float)).collect();
    let mut part = mine(9, 4, Kind::Float);
    group.scatter_tensor(&mut part, (me == 0).then_some(&inputs[..]), 0)?;
    assert_all(&part, me as f64 + 1.0, "scatter");
    let to_all: Vec<Tensor> = (0..n).map(|rank| mine(me, (rank + me) as i64, Kind::Int64)).collect();
    let mut from_all: Vec<Tensor> = (0..n).map(|rank| mine(9, (rank + me) as i64, Kind::Int64)).collect();
    group.all_to_all_tensors(&mut from_all, &to_all)?;
    from_all.iter().enumerate().for_each(|(rank, part)| assert_all(part, rank as f64 + 1.0, "all_to_all"));
    let mut turned = mine(9, 2 * n as i64, Kind::Float);
    group.all_to_all_tensor(&mut turned, &mine(me, 2 * n as i64, Kind::Float))?;
    assert_all(&turned.narrow(0, 0, 2), 1.0, "all_to_all of parts");
    let next = (me + 1) % n;
    if n > 1 {
        if me == 0 {
            group.send_tensor(&mine(me, 5, Kind::Float), next, 3)?;
        } else if me == 1 {
            let mut x = mine(9, 5, Kind::Float);
            group.recv_tensor(&mut x, Source::Rank(0), 3)?;
            assert_all(&x, 1.0, "a message");
        }
    }
    Ok(())
}

/// Tensors that are not contiguous, lists of tensors, and overlapping memory.
fn forms(group: &ProcessGroup) -> Result<()> {
    let n = group.size();
    let base = mine(group.rank(), 24, Kind::Float).view([4, 6]);
    let mut turned = base.tr();
    group.all_reduce_tensor(&mut turned, ReduceOp::Sum)?;
    assert_all(&base, expected(ReduceOp::Sum, Kind::Float, n), "a turned view");
    let mut list = [
        mine(group.rank(), 5, Kind::Float),
        mine(group.rank(), 0, Kind::Half),
        mine(group.rank(), 9, Kind::Int),
    ];
    group.all_reduce_tensors(&mut list, ReduceOp::Sum)?;
    list.iter().for_each(|x| assert_all(x, expected(ReduceOp::Sum, x.kind(), n), "a list"));
    group.broadcast_tensors(&mut list, 0)?;
    let mut all = mine(group.rank(), 6 * n as i64, Kind::Float);
    let part = all.narrow(0, 6 * group.rank() as i64, 6);
    group.all_gather_into_tensor(&mut all, &part)?;
    for rank in 0..n as i64 {
        assert_all(&all.narrow(0, 6 * rank, 6), rank as f64 + 1.0, "gathered over itself");
    }
    let complex = Tensor::complex(&mine(group.rank(), 3, Kind::Float), &mine(group.rank(), 3, Kind::Float));
    let mut sum = complex.copy();
    group.all_reduce_tensor(&mut sum, ReduceOp::Sum)?;
    assert_all(&sum.imag(), expected(ReduceOp::Sum, Kind::Float, n), "imaginary parts");
    Ok(())
}

/// Calls with some tensors on the CPU, also on some ranks only: host memory must never reach NCCL.
fn mixed(group: &ProcessGroup) -> Result<()> {
    let (me, n) = (group.rank(), group.size());
    let here = |tensor: Tensor| if me % 2 == 0 { tensor.to_device(Device::Cpu) } else { tensor };
    let float = |rank: usize, len: usize| mine(rank, len as i64, Kind::Float);
    for everywhere in [true, false] {
        let odd = |tensor: Tensor| if everywhere { tensor.to_device(Device::Cpu) } else { here(tensor) };
        let mut all = odd(float(9, 3 * n));
        group.all_gather_into_tensor(&mut all, &float(me, 3))?;
        (0..n).for_each(|rank| {
            assert_all(&all.narrow(0, 3 * rank as i64, 3), rank as f64 + 1.0, "gathered to the CPU");
        });
        let mut all = float(9, 3 * n);
        group.all_gather_into_tensor(&mut all, &odd(float(me, 3)))?;
        assert_all(&all.narrow(0, 0, 3), 1.0, "gathered from the CPU");
        let mut part = odd(float(9, 4));
        group.reduce_scatter_tensor(&mut part, &float(me, 4 * n), ReduceOp::Sum)?;
        assert_all(&part, expected(ReduceOp::Sum, Kind::Float, n), "scattered to the CPU");
        let mut turned = odd(float(9, 2 * n));
        group.all_to_all_tensor(&mut turned, &float(me, 2 * n))?;
        assert_all(&turned.narrow(0, 0, 2), 1.0, "all_to_all to the CPU");
        let inputs: Vec<Tensor> = (0..n).map(|rank| odd(float(rank, 4))).collect();
        let mut part = float(9, 4);
        group.scatter_tensor(&mut part, (me == 0).then_some(&inputs[..]), 0)?;
        assert_all(&part, me as f64 + 1.0, "scattered from the CPU");
        let to_all: Vec<Tensor> = (0..n).map(|rank| odd(float(me, rank + me))).collect();
        let mut from_all: Vec<Tensor> = (0..n).map(|rank| float(9, rank + me)).collect();
        group.all_to_all_tensors(&mut from_all, &to_all)?;
        from_all
            .iter()
            .enumerate()
            .for_each(|(rank, part)| assert_all(part, rank as f64 + 1.0, "all_to_all"));
        let mut list = [float(me, 5), odd(float(me, 7))];
        group.all_reduce_tensors(&mut list, ReduceOp::Sum)?;
        list.iter().for_each(|x| assert_all(x, expected(ReduceOp::Sum, Kind::Float, n), "a mixed list"));
        assert_eq!(list[1].device(), odd(float(0, 1)).device(), "tensors stay where they are");
    }
    Ok(())
}

/// Groups of some ranks have their own routes.
fn groups(group: &ProcessGroup) -> Result<()> {
    let half = group.split(Some((group.rank() % 2) as u32), 0)?.unwrap();
    let mut x = mine(group.rank(), 1000, Kind::Float);
    half.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
    let expected: usize = half.members().iter().map(|rank| rank + 1).sum();
    assert_all(&x, expected as f64, "a group of some ranks");
    Ok(())
}

fn all_of_it() -> Result<ProcessGroup> {
    let group = join()?;
    reductions(&group)?;
    println!("reductions are right");
    moves(&group)?;
    println!("moves are right");
    forms(&group)?;
    println!("forms are right");
    mixed(&group)?;
    println!("mixed devices are right");
    groups(&group)?;
    Ok(group)
}

ranks_test!(a_rank_alone_by_nccl, 1, timeout = super::BRIEF, {
    drop(all_of_it()?);
    let version = drumline_torch::nccl::version()?;
    assert!(version.starts_with("2."), "{version}");
});
on_each_route!(all_collectives, { drop(all_of_it()?) });

ranks_test!(
    three_ranks_by_the_stand_in_for_nccl,
    3,
    {
        assert_eq!(all_of_it()?.is_recordable(), Ok(()), "they use NCCL");
    },
    |ranks| {
        StandIn::new()?.with(&ranks).pass()?;
    }
);

ranks_test!(what_a_group_says_of_recording, 2, {
    let group = join()?;
    assert!(group.is_recordable().unwrap_err().to_string().contains("no collective on a GPU's tensor yet"));
    group.all_reduce_tensor(&mut mine(0, 3, Kind::Float), ReduceOp::Sum)?;
    let reason = group.is_recordable().unwrap_err().to_string();
    assert!(reason.starts_with("ranks 0, 1 share the GPU "), "{reason}");
    let me = group.split(Some(group.rank() as u32), 0)?.unwrap();
    me.all_reduce_tensor(&mut mine(0, 3, Kind::Float), ReduceOp::Sum)?;
    assert_eq!(me.is_recordable(), Ok(()), "a single rank uses NCCL");
});
