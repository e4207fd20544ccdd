//! The conversions between placements: closed-form values and gradients on 1 to 4 ranks, for all lengths from 0 on.

use anyhow::Result;
use drumline_parallel::tensor::{Features, Sequence, Sharded, TensorParallel, TpTensor};
use tch::{Device, Kind, Tensor};

use super::tensor::on_ranks;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// `[2, len, 3]`: different numbers for each seed.
fn values(len: i64, seed: usize) -> Tensor {
    (Tensor::arange(6 * len, DOUBLE) * 0.9 + seed as f64 * 1.7).sin().view([2, len, 3])
}

fn sum(tensors: impl Iterator<Item = Tensor>) -> Tensor {
    tensors.reduce(|sum, next| sum + next).unwrap()
}

fn leaf(values: &Tensor) -> Tensor {
    values.copy().set_requires_grad(true)
}

fn close(one: &Tensor, other: &Tensor, what: &str) {
    assert_eq!(one.size(), other.size(), "{what}");
    assert!(one.numel() == 0 || (one - other).abs().max().double_value(&[]) < 1e-14, "{what}");
}

/// The gradient of `output · by` of an input.
fn gradient(output: &Tensor, by: &Tensor, input: &Tensor) -> Tensor {
    (output * by).sum(Kind::Double).backward();
    input.grad()
}

fn own(whole: &Tensor, tp: &TensorParallel) -> Tensor {
    let range = tp.cut(whole.size()[1]).range(tp.rank());
    whole.narrow(1, range.start, range.end - range.start)
}

/// All conversions of a tensor with `len` places.
fn conversions(tp: &TensorParallel, len: i64) -> Result<()> {
    let (ranks, rank) = (tp.size(), tp.rank());
    let x = leaf(&values(len, 0));
    let replicated = TpTensor::invariant(x.shallow_clone(), tp).replicate()?;
    close(replicated.local(), &x, "replicate");
    let by_all = sum((0..ranks).map(|rank| values(len, 10 + rank)));
    close(&gradient(replicated.local(), &values(len, 10 + rank), &x), &by_all, "its gradient");

    let x = leaf(&values(len, rank));
    let total = TpTensor::partial(x.shallow_clone(), tp).sum()?.into_tensor();
    close(&total, &sum((0..ranks).map(|rank| values(len, rank))), "sum");
    close(&gradient(&total, &values(len, 10), &x), &values(len, 10), "its gradient");

    let x = leaf(&values(len, rank));
    let part = TpTensor::partial(x.shallow_clone(), tp).scatter::<Sequence>()?;
    close(part.local(), &own(&sum((0..ranks).map(|rank| values(len, rank))), tp), "scatter");
    close(&gradient(part.local(), &own(&values(len, 10), tp), &x), &values(len, 10), "its gradient");

    let x = leaf(&own(&values(len, 0), tp));
    let whole = TpTensor::<Sharded<Sequence>>::sharded(x.shallow_clone(), len, tp)?.gather()?;
    close(whole.local(), &values(len, 0), "gather");
    close(&gradient(whole.local(), &values(len, 10 + rank), &x), &own(&by_all, tp), "its gradient");

    let x = leaf(&own(&values(len, 0), tp));
    let whole = TpTensor::<Sharded<Sequence>>::sharded(x.shallow_clone(), len, tp)?.collect()?.into_tensor();
    close(&whole, &values(len, 0), "collect");
    close(&gradient(&whole, &values(len, 10), &x), &own(&values(len, 10), tp), "its gradient");

    let x = leaf(&values(len, 0));
    let part = TpTensor::invariant(x.shallow_clone(), tp).split::<Sequence>()?;
    close(part.local(), &own(&values(len, 0), tp), "split");
    close(&gradient(part.local(), &own(&values(len, 10), tp), &x), &values(len, 10), "its gradient");
    Ok(())
}

#[test]
fn each_conversion_and_its_backward_have_the_closed_form() {
    for ranks in 1..=4 {
        on_ranks(ranks, |group| {
            let tp = TensorParallel::new(&group);
            (0..=9).try_for_each(|len| conversions(&tp, len))
        });
    }
}

#[test]
fn several_invariant_tensors_have_the_sums_of_their_gradients() {
    on_ranks(3, |group| {
        let tp = TensorParallel::new(&group);
        let [one, other, unused] = [0, 1, 2].map(|seed| leaf(&values(2, seed)));
        let all = tp.replicate_all([&one, &other, &unused])?;
        let by = group.rank() as f64 + 1.0;
        (all[0].local() * by + all[1].local() * (2.0 * by)).sum(Kind::Double).backward();
        let ones = values(2, 0).ones_like();
        close(&one.grad(), &(&ones * 6.0), "one");
        close(&other.grad(), &(&ones * 12.0), "other");
        close(&unused.grad(), &ones.zeros_like(), "unused");
        Ok(())
    });
}

#[test]
fn features_are_cut_along_the_last_dim() {
    on_ranks(2, |group| {
        let tp = TensorParallel::new(&group);
        let whole = values(2, 0);
        let part = TpTensor::invariant(whole.shallow_clone(), &tp).split::<Features>()?;
        assert_eq!((part.local().size(), part.whole_len()), (vec![2, 2, 2 - group.rank() as i64], 3));
        close(part.collect()?.local(), &whole, "collect");
        let error = TpTensor::<Sharded<Features>>::sharded(whole, 4, &tp).unwrap_err().to_string();
        assert!(error.contains("expected 2 elements along dim 2, of 4"), "{error}");
        Ok(())
    });
}

#[test]
fn sixteen_bits_are_gathered_and_summed() {
    on_ranks(2, |group| {
        let tp = TensorParallel::new(&group);
        let x = (Tensor::ones([1, 3, 2], DOUBLE) * (group.rank() as f64 + 1.0)).to_kind(Kind::BFloat16);
        let part = TpTensor::partial(x, &tp).scatter::<Sequence>()?;
        assert_eq!(part.local().kind(), Kind::BFloat16);
        assert_eq!(part.gather()?.local().to_kind(Kind::Double), Tensor::ones([1, 3, 2], DOUBLE) * 3.0);
        Ok(())
    });
}
