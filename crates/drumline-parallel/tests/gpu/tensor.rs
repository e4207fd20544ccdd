//! Tensor and context parallelism of ranks that share a GPU, against one rank on the CPU.

use anyhow::Result;
use drumline_comm::{LocalGroup, ProcessGroup};
use drumline_parallel::context::{ContextParallel, Heads, Mask, ring_attention};
use tch::{Kind, Tensor};

use super::tensor_model::{Between, Trained, distance, trained, trained_on};
use super::{GPU, join};

/// The training of one rank on the CPU.
fn of_one_rank(kind: Kind) -> Trained {
    let all = LocalGroup::run(1, |group| Ok(trained(&group, kind, Between::Whole).unwrap()));
    all.unwrap().remove(0)
}

fn trains(group: &ProcessGroup, kind: Kind, most: f64) -> Result<()> {
    let one = of_one_rank(kind);
    for between in [Between::Whole, Between::Sequence] {
        let ours = trained_on(GPU, group, kind, between)?;
        for (ours, one) in ours.losses.iter().zip(&one.losses) {
            assert!((ours - one).abs() < most * one, "{between:?}: loss {ours} and {one}");
        }
        for (ours, one) in ours.parameters.iter().zip(&one.parameters) {
            let distance = distance(&one.tensor, &ours.tensor.to_device(tch::Device::Cpu));
            assert!(distance < most, "{between:?}: `{}` is {distance:e} away", ours.name);
        }
    }
    Ok(())
}

on_each_route!(ten_steps_are_those_of_one_rank, {
    let group = join()?;
    trains(&group, Kind::Double, 1e-11)?;
    trains(&group, Kind::Float, 1e-4)?;
});

/// `[2, 3, places, 8]`.
fn values(places: i64, seed: f64) -> Tensor {
    let wave = (Tensor::arange(48 * places, (Kind::Double, tch::Device::Cpu)) * 0.61 + seed).sin() * 1.5;
    wave.view([2, 3, places, 8])
}

fn attends(cp: &ContextParallel, places: i64, mask: Mask) -> Result<()> {
    let whole = [1.0, 2.0, 3.0].map(|seed| values(places, seed).set_requires_grad(true));
    let [q, k, v] = &whole;
    let no_mask = None::<Tensor>;
    let causal = mask == Mask::Causal;
    let expected = Tensor::scaled_dot_product_attention(q, k, v, no_mask, 0.0, causal, None, false);
    (&expected * values(places, 4.0)).sum(Kind::Double).backward();
    let own = |whole: &Tensor| cp.own(&whole.detach(), 2).map(|own| own.to_device(GPU));
    let ours = [own(q)?, own(k)?, own(v)?].map(|own| own.set_requires_grad(true));
    let heads = Heads { queries: &ours[0], keys: &ours[1], values: &ours[2] };
    let out = ring_attention(cp, heads, places, mask)?;
    (&out * own(&values(places, 4.0))?).sum(Kind::Double).backward();
    let distance = |ours: &Tensor, whole: &Tensor| -> Result<f64> {
        Ok((ours - own(whole)?).abs().max().double_value(&[]))
    };
    assert!(distance(&out.detach(), &expected)? < 1e-11, "{places} places, {mask:?}");
    for (ours, whole) in ours.iter().zip(&whole) {
        assert!(distance(&ours.grad(), &whole.grad())? < 1e-11, "{places} places, {mask:?}");
    }
    Ok(())
}

on_each_route!(ring_attention_is_that_of_one_rank, {
    let cp = ContextParallel::new(&join()?);
    for mask in [Mask::Causal, Mask::None] {
        [16, 37, 600].into_iter().try_for_each(|places| attends(&cp, places, mask))?;
    }
});
