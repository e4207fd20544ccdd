//! Every collective × types × strides × sizes × ranks, against closed-form answers.
//!
//! Rank `r` holds `(i + r) % 3` at the index `i`, which every type can hold and every reduction keeps exact.
#![allow(unsafe_code)]

use drumline_comm::{CommError, LocalGroup, ProcessGroup, ReduceOp, Source};
use tch::{Device, Kind, Tensor};

use super::TensorCollectives;
use crate::error::TorchError;

const RANKS: [usize; 3] = [1, 2, 3];
const SIZES: [&[i64]; 5] = [&[], &[0, 3], &[1], &[3, 5, 2, 2], &[1, 7]];
const REALS: [Kind; 7] =
    [Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int, Kind::Int64, Kind::Float, Kind::Double];
const HALVES: [Kind; 2] = [Kind::Half, Kind::BFloat16];
const COMPLEX: [Kind; 2] = [Kind::ComplexFloat, Kind::ComplexDouble];

/// The memory layout of a tensor.
#[derive(Debug, Clone, Copy)]
enum Strides {
    Contiguous,
    Transposed,
    EverySecond,
    ChannelsLast,
}

const STRIDES: [Strides; 4] =
    [Strides::Contiguous, Strides::Transposed, Strides::EverySecond, Strides::ChannelsLast];

/// A tensor with `plain`'s elements in another memory layout.
fn laid(plain: &Tensor, strides: Strides) -> Tensor {
    match strides {
        Strides::Transposed if plain.dim() >= 2 => plain.transpose(0, 1).contiguous().transpose(0, 1),
        Strides::EverySecond if plain.dim() >= 1 => {
            let room = Tensor::stack(&[plain, plain], -1).flatten(-2, -1);
            let last = room.size()[room.dim() - 1];
            room.slice(-1, 0, last, 2)
        }
        // Its strides are those of a tensor with the channels in the last dimension.
        Strides::ChannelsLast if plain.dim() == 4 => {
            plain.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
        }
        _ => plain.copy(),
    }
}

/// The input of rank `rank`.
fn input(rank: usize, size: &[i64], kind: Kind) -> Tensor {
    let numel = size.iter().product::<i64>();
    let whole = (Tensor::arange(numel, (Kind::Int64, Device::Cpu)) + rank as i64).fmod(3).reshape(size);
    match kind {
        Kind::ComplexFloat | Kind::ComplexDouble => {
            let part = if kind == Kind::ComplexFloat { Kind::Float } else { Kind::Double };
            Tensor::complex(&whole.to_kind(part), &(&whole * -2).to_kind(part))
        }
        _ => whole.to_kind(kind),
    }
}

/// The reduction over all ranks, computed by libtorch.
fn reduced(ranks: usize, size: &[i64], kind: Kind, op: ReduceOp) -> Tensor {
    let wide = if COMPLEX.contains(&kind) { Kind::ComplexDouble } else { Kind::Double };
    let all: Vec<_> = (0..ranks).map(|rank| input(rank, size, kind).to_kind(wide)).collect();
    let all = Tensor::stack(&all, 0);
    let value = match op {
        ReduceOp::Prod => all.prod_dim_int(0, false, wide),
        ReduceOp::Min => all.amin(0, false),
        ReduceOp::Max => all.amax(0, false),
        ReduceOp::Avg => all.mean_dim(0, false, wide),
        _ => all.sum_dim_intlist(0, false, wide),
    };
    // Bools are 0 or 1, and integers are truncated.
    value.to_kind(kind)
}

fn assert_same(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!((got.size(), got.kind()), (want.size(), want.kind()), "{what}");
    let wide = if got.is_complex() { Kind::ComplexDouble } else { Kind::Double };
    let far = (got.to_kind(wide) - want.to_kind(wide)).abs();
    let most = if far.numel() == 0 { 0.0 } else { far.max().double_value(&[]) };
    let limit = if HALVES.contains(&got.kind()) { 0.02 } else { 1e-6 };
    assert!(most <= limit, "{what}: got {got}, expected {want}");
}

fn on_ranks(ranks: usize, body: impl Fn(&ProcessGroup) -> Result<(), TorchError> + Sync) {
    LocalGroup::run(ranks, |group| {
        body(&group).unwrap_or_else(|error| panic!("rank {} of {ranks}: {error}", group.rank()));
        Ok(())
    })
    .unwrap();
}

fn on_grid(
    kinds: &[Kind],
    body: impl Fn(&ProcessGroup, &[i64], Kind, Strides) -> Result<(), TorchError> + Sync,
) {
    for ranks in RANKS {
        on_ranks(ranks, |group| {
            for size in SIZES {
                for &kind in kinds {
                    STRIDES.iter().try_for_each(|&strides| body(group, size, kind, strides))?;
                }
            }
            Ok(())
        });
    }
}

fn all_kinds() -> Vec<Kind> {
    [&REALS[..], &HALVES, &COMPLEX, &[Kind::Bool]].concat()
}

#[test]
fn reductions_on_the_grid() {
    on_grid(&all_kinds(), |group, size, kind, strides| {
        let ops: &[ReduceOp] = match kind {
            Kind::Bool => &[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max],
            _ if COMPLEX.contains(&kind) => &[ReduceOp::Sum, ReduceOp::Avg],
            _ => &[ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max],
        };
        for &op in ops {
            let (ranks, what) = (group.size(), format!("{op} of {kind:?} {size:?}, {strides:?}"));
            let want = reduced(ranks, size, kind, op);
            let mut x = laid(&input(group.rank(), size, kind), strides);
            group.all_reduce_tensor(&mut x, op)?;
            assert_same(&x, &want, &format!("all_reduce: {what}"));
            let mut x = laid(&input(group.rank(), size, kind), strides);
            group.reduce_tensor(&mut x, ranks - 1, op)?;
            let want = if group.rank() == ranks - 1 { want } else { input(group.rank(), size, kind) };
            assert_same(&x, &want, &format!("reduce: {what}"));
        }
        Ok(())
    });
}

#[test]
fn copies_on_the_grid() {
    on_grid(&all_kinds(), |group, size, kind, strides| {
        let (me, ranks, what) = (group.rank(), group.size(), format!("{kind:?} {size:?}, {strides:?}"));
        let mine = laid(&input(me, size, kind), strides);
        let mut x = mine.copy();
        group.broadcast_tensor(&mut x, ranks - 1)?;
        assert_same(&x, &input(ranks - 1, size, kind), &what);
        for (rank, got) in group.all_gather_tensor(&mine)?.iter().enumerate() {
            assert_same(got, &input(rank, size, kind), &what);
        }
        let gathered = group.gather_tensor(&mine, 0)?;
        assert_eq!(gathered.is_some(), me == 0);
        for (rank, got) in gathered.iter().flatten().enumerate() {
            assert_same(got, &input(rank, size, kind), &what);
        }
        let parts: Vec<_> = (0..ranks).map(|rank| laid(&input(rank + 5, size, kind), strides)).collect();
        let mut x = mine.copy();
        group.scatter_tensor(&mut x, (me == 0).then_some(&parts[..]), 0)?;
        assert_same(&x, &input(me + 5, size, kind), &what);
        let inputs: Vec<_> = (0..ranks).map(|to| laid(&input(10 * me + to, size, kind), strides)).collect();
        let mut outputs: Vec<_> = (0..ranks).map(|_| laid(&input(0, size, kind), strides)).collect();
        group.all_to_all_tensors(&mut outputs, &inputs)?;
        for (from, got) in outputs.iter().enumerate() {
            assert_same(got, &input(10 * from + me, size, kind), &what);
        }
        let mut x = mine.copy();
        if me == 0 && ranks > 1 {
            group.send_tensor(&laid(&input(7, size, kind), strides), 1, 3)?;
        } else if me == 1 {
            assert_eq!(group.recv_tensor(&mut x, Source::Any, 3)?, 0);
            assert_same(&x, &input(7, size, kind), &what);
        }
        Ok(())
    });
}

#[test]
fn concatenated_parts() {
    on_grid(&[Kind::Float, Kind::ComplexDouble, Kind::Int64], |group, size, kind, strides| {
        let (me, ranks, what) = (group.rank(), group.size(), format!("{kind:?} {size:?}, {strides:?}"));
        let stacked: Vec<i64> = [&[ranks as i64], size].concat();
        let mut all = laid(&input(0, &stacked, kind), strides);
        group.all_gather_into_tensor(&mut all, &laid(&input(me, size, kind), strides))?;
        let want: Vec<_> = (0..ranks).map(|rank| input(rank, size, kind)).collect();
        assert_same(&all, &Tensor::stack(&want, 0), &what);
        let mut part = laid(&input(0, size, kind), strides);
        let whole = laid(&input(me, &stacked, kind), strides);
        group.reduce_scatter_tensor(&mut part, &whole, ReduceOp::Sum)?;
        assert_same(&part, &reduced(ranks, &stacked, kind, ReduceOp::Sum).get(me as i64), &what);
        let mut swapped = laid(&input(0, &stacked, kind), strides);
        group.all_to_all_tensor(&mut swapped, &whole)?;
        let want: Vec<_> = (0..ranks).map(|rank| input(rank, &stacked, kind).get(me as i64)).collect();
        assert_same(&swapped, &Tensor::stack(&want, 0), &what);
        Ok(())
    });
}

#[test]
fn a_part_of_the_output_may_be_the_input() {
    on_ranks(3, |group| {
        let me = group.rank() as i64;
        let mut all = Tensor::full([3, 2], me, (Kind::Float, Device::Cpu));
        let mine = all.get(me);
        group.all_gather_into_tensor(&mut all, &mine)?;
        assert_eq!(all, Tensor::from_slice2(&[[0f32, 0.0], [1.0, 1.0], [2.0, 2.0]]));
        Ok(())
    });
}

#[test]
fn ranks_may_give_different_numbers_of_rows() {
    on_ranks(3, |group| {
        let me = group.rank() as i64;
        for kind in [Kind::Float, Kind::ComplexFloat, Kind::Bool] {
            let mine = Tensor::full([2 * me, 2], me, (Kind::Float, Device::Cpu)).to_kind(kind);
            for (rank, got) in group.all_gather_uneven_tensor(&mine)?.iter().enumerate() {
                let want = Tensor::full([2 * rank as i64, 2], rank as i64, (Kind::Float, Device::Cpu));
                assert_same(got, &want.to_kind(kind), "uneven");
            }
        }
        assert!(group.all_gather_uneven_tensor(&Tensor::from(1.0)).is_err());
        Ok(())
    });
}

#[test]
fn ranks_may_differ_in_strides() {
    on_ranks(2, |group| {
        let strides = [Strides::Contiguous, Strides::ChannelsLast][group.rank()];
        let mut x = laid(&input(group.rank(), &[2, 3, 2, 2], Kind::Float), strides);
        let before = x.stride();
        group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
        assert_same(&x, &reduced(2, &[2, 3, 2, 2], Kind::Float, ReduceOp::Sum), "strides");
        assert_eq!(x.stride(), before);
        Ok(())
    });
}

#[test]
fn lists_of_any_types_keep_their_order() {
    on_ranks(3, |group| {
        let make = |rank: usize| -> Vec<Tensor> {
            let kinds = [Kind::Float, Kind::Int64, Kind::Float, Kind::ComplexFloat, Kind::Bool, Kind::Float];
            let sizes: [&[i64]; 6] = [&[3, 5], &[], &[0], &[4], &[3], &[2, 2]];
            let made = kinds.iter().zip(sizes).map(|(kind, size)| input(rank, size, *kind));
            let mut made: Vec<_> = made.collect();
            made[0] = laid(&made[0], Strides::Transposed);
            made
        };
        let mut summed = make(group.rank());
        group.all_reduce_tensors(&mut summed, ReduceOp::Sum)?;
        for x in &summed {
            assert_same(x, &reduced(3, &x.size(), x.kind(), ReduceOp::Sum), "list");
        }
        let mut given = make(group.rank());
        group.broadcast_tensors(&mut given, 1)?;
        given.iter().zip(make(1)).for_each(|(got, want)| assert_same(got, &want, "list"));
        // The same memory twice: both become the sum of its old values.
        let x = input(group.rank(), &[4], Kind::Float);
        group.all_reduce_tensors(&mut [x.shallow_clone(), x.shallow_clone()], ReduceOp::Sum)?;
        assert_same(&x, &reduced(3, &[4], Kind::Float, ReduceOp::Sum), "twice");
        group.all_reduce_tensors(&mut [], ReduceOp::Sum)
    });
}

#[test]
fn contiguous_tensors_are_reduced_where_they_are() {
    on_ranks(2, |group| {
        let mut x = input(group.rank(), &[1000], Kind::Float);
        let before = x.data_ptr();
        group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
        assert_eq!(x.data_ptr(), before);
        assert!(super::Host::write(&x)?.span().contains(&before.addr()));
        // The same for the symmetric heap.
        let heap = crate::HeapTensor::zeros(group, Kind::Float, 1000)?;
        let mut view = heap.tensor().view([10, 100]);
        view.copy_(&input(group.rank(), &[10, 100], Kind::Float));
        group.all_reduce_tensor(&mut view, ReduceOp::Sum)?;
        assert_same(heap.tensor(), &reduced(2, &[1000], Kind::Float, ReduceOp::Sum), "heap");
        Ok(())
    });
}

/// A tensor of a type that tch does not have.
fn of_code(tensor: &Tensor, code: i32) -> Tensor {
    let mut out = std::ptr::null_mut();
    // SAFETY: the result is one handle that we own.
    unsafe {
        torch_sys::c_generated::atg_to_dtype(&mut out, tensor.as_ptr().cast_mut(), code, 0, 0);
        Tensor::from_ptr(out)
    }
}

#[test]
fn types_that_tch_does_not_have_can_be_sent() {
    const UINTS: [i32; 3] = [27, 28, 29];
    on_ranks(2, |group| {
        for code in UINTS {
            let mut x = of_code(&input(group.rank(), &[5], Kind::Int64), code);
            group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
            assert_same(&x.to_kind(Kind::Int64), &reduced(2, &[5], Kind::Int64, ReduceOp::Sum), "unsigned");
            let all = group.all_gather_tensor(&x)?;
            assert_same(&all[1].to_kind(Kind::Int64), &x.to_kind(Kind::Int64), "unsigned");
        }
        let mut x = input(group.rank(), &[5], Kind::Float).to_kind(Kind::Float8e4m3fn);
        group.broadcast_tensor(&mut x, 1)?;
        assert_same(&x.to_kind(Kind::Float), &input(1, &[5], Kind::Float), "float8");
        assert!(refusal(group.all_reduce_tensor(&mut x, ReduceOp::Sum)).contains("float8"));
        Ok(())
    });
}

#[test]
fn conjugate_views_are_resolved() {
    on_ranks(2, |group| {
        let mut x = input(group.rank(), &[4], Kind::ComplexFloat).internal_conj();
        group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
        let want = reduced(2, &[4], Kind::ComplexFloat, ReduceOp::Sum).conj();
        assert_same(&x.resolve_conj(), &want.resolve_conj(), "conjugate");
        Ok(())
    });
}

#[test]
fn any_byte_but_0_is_true() {
    on_ranks(2, |group| {
        let mut x = Tensor::from_slice(&[0u8, 2, 255, 0]).view_dtype(Kind::Bool);
        group.all_reduce_tensor(&mut x, ReduceOp::Prod)?;
        assert_eq!(Vec::<bool>::try_from(&x).unwrap(), [false, true, true, false]);
        Ok(())
    });
}

fn refusal<T>(outcome: Result<T, TorchError>) -> String {
    match outcome {
        Err(TorchError::Comm(error)) if !matches!(*error, CommError::Invalid { .. }) => {
            panic!("refused in another way: {error}")
        }
        Err(error) => error.to_string(),
        Ok(_) => panic!("not refused"),
    }
}

#[test]
fn invalid_calls_are_errors() {
    on_ranks(1, |group| {
        let mut complex = input(0, &[3], Kind::ComplexFloat);
        for op in [ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::BitAnd] {
            assert!(refusal(group.all_reduce_tensor(&mut complex, op)).contains("complex64"));
            assert!(refusal(group.all_reduce_tensors(&mut [complex.copy()], op)).contains("complex64"));
        }
        let mut truth = input(0, &[3], Kind::Bool);
        assert!(refusal(group.all_reduce_tensor(&mut truth, ReduceOp::Avg)).contains("bool"));
        let mut sparse = input(0, &[3], Kind::Float).to_sparse_sparse_dim(1);
        assert!(refusal(group.all_reduce_tensor(&mut sparse, ReduceOp::Sum)).contains("to_dense"));
        let mut one_place = Tensor::zeros([1], (Kind::Float, Device::Cpu)).expand([4], false);
        assert!(refusal(group.broadcast_tensor(&mut one_place, 0)).contains("one place"));
        assert_eq!(group.all_gather_tensor(&one_place)?[0].size(), [4]);
        let (mut short, long) = (input(0, &[3], Kind::Float), input(0, &[4], Kind::Float));
        assert!(refusal(group.all_gather_into_tensor(&mut short, &long)).contains("4"));
        let other = input(0, &[3], Kind::Double);
        assert!(refusal(group.all_to_all_tensor(&mut short, &other)).contains("float64"));
        assert!(group.all_reduce_tensor(&mut Tensor::new(), ReduceOp::Sum).is_err());
        Ok(())
    });
}

#[test]
fn errors_name_the_callers_location() {
    let outcome = LocalGroup::run(2, |group| {
        let mut x = input(0, &[3 + group.rank() as i64], Kind::Float);
        match group.all_reduce_tensor(&mut x, ReduceOp::Sum) {
            Err(TorchError::Comm(error)) => Err(*error),
            _ => Ok(()),
        }
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("collectives/tests.rs"), "{error}");
}

#[test]
fn leaves_can_be_written_and_other_tensors_of_a_graph_cannot() {
    on_ranks(2, |group| {
        let mut leaf = input(group.rank(), &[3], Kind::Float).set_requires_grad(true);
        let loss = (&leaf * &leaf).sum(Kind::Float);
        group.all_reduce_tensor(&mut leaf, ReduceOp::Sum)?;
        assert!(leaf.requires_grad() && leaf.is_leaf());
        assert_same(&leaf.detach(), &reduced(2, &[3], Kind::Float, ReduceOp::Sum), "leaf");
        // The backward of the product needs the old value of the leaf.
        let error = loss.f_backward().unwrap_err().to_string();
        assert!(error.contains("inplace"), "{error}");
        let mut inner = &leaf * 2.0;
        assert!(refusal(group.all_reduce_tensor(&mut inner, ReduceOp::Sum)).contains("detach"));
        tch::no_grad(|| group.all_reduce_tensor(&mut inner, ReduceOp::Sum))?;
        assert!(!group.all_gather_tensor(&leaf)?[0].requires_grad());
        Ok(())
    });
}
