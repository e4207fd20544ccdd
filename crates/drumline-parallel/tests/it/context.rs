//! Ring attention against libtorch's attention of all places on one rank.

use anyhow::Result;
use drumline_comm::{GroupOptions, LocalGroup, ProcessGroup};
use drumline_parallel::context::{ContextParallel, Heads, Mask, ring_attention};
use drumline_torch::saved_size;
use rank_test::ranks_test;
use std::time::Instant;
use tch::{Device, Kind, Tensor};

use super::tensor::{TIMEOUT, WELL_BEFORE, as_comm, on_ranks};

/// `[2, 3, places, 8]`.
fn values(places: i64, kind: Kind, seed: f64) -> Tensor {
    let wave = (Tensor::arange(48 * places, (Kind::Double, Device::Cpu)) * 0.61 + seed).sin() * 1.5;
    wave.view([2, 3, places, 8]).to_kind(kind)
}

/// The output, and the gradients of queries, keys and values.
type Made = [Tensor; 4];

fn of_one_rank(places: i64, mask: Mask, kind: Kind) -> Made {
    let [q, k, v] = [1.0, 2.0, 3.0].map(|seed| values(places, kind, seed).set_requires_grad(true));
    let no_mask = None::<Tensor>;
    let causal = mask == Mask::Causal;
    let out = Tensor::scaled_dot_product_attention(&q, &k, &v, no_mask, 0.0, causal, None, false);
    (&out * values(places, kind, 4.0)).sum(kind).backward();
    [out.detach(), q.grad(), k.grad(), v.grad()]
}

fn by_ring(cp: &ContextParallel, places: i64, mask: Mask, kind: Kind) -> Result<Made> {
    let own = |seed| -> Result<Tensor> { Ok(cp.own(&values(places, kind, seed), 2)?) };
    let [q, k, v] = [own(1.0)?, own(2.0)?, own(3.0)?].map(|own| own.copy().set_requires_grad(true));
    let out = ring_attention(cp, Heads { queries: &q, keys: &k, values: &v }, places, mask)?;
    (&out * own(4.0)?).sum(kind).backward();
    Ok([out.detach(), q.grad(), k.grad(), v.grad()])
}

fn check(cp: &ContextParallel, places: i64, mask: Mask, kind: Kind) -> Result<()> {
    let most = if kind == Kind::Double { 1e-12 } else { 5e-6 };
    let (ours, theirs) = (by_ring(cp, places, mask, kind)?, of_one_rank(places, mask, kind));
    for (name, (ours, theirs)) in ["out", "queries", "keys", "values"].iter().zip(ours.iter().zip(&theirs)) {
        let distance = (ours - cp.own(theirs, 2)?).abs();
        let distance = if distance.numel() == 0 { 0.0 } else { distance.max().double_value(&[]) };
        let what = format!("{name} of {places} places on {} ranks, {mask:?}", cp.size());
        assert!(distance < most && ours.kind() == kind, "{what}: {distance:e}");
    }
    Ok(())
}

#[test]
fn output_and_gradients_are_those_of_one_rank() {
    for ranks in 1..=4 {
        on_ranks(ranks, |group| {
            tch::set_num_threads(1);
            let cp = ContextParallel::new(&group);
            for mask in [Mask::Causal, Mask::None] {
                // Fewer places than chunks, lengths that ranks do not divide, and more than one tile.
                for places in [1, 2, 3, 5, 8, 17, 24, 61, 530] {
                    check(&cp, places, mask, Kind::Double)?;
                }
                check(&cp, 37, mask, Kind::Float)?;
            }
            Ok(())
        });
    }
}

ranks_test!(processes_attend_around_the_ring, 3, {
    let cp = ContextParallel::new(&ProcessGroup::from_env()?);
    check(&cp, 40, Mask::Causal, Kind::Double)?;
    check(&cp, 41, Mask::None, Kind::Double)?;
});

#[test]
fn bf16_is_as_close_as_its_rounding() {
    on_ranks(2, |group| {
        let cp = ContextParallel::new(&group);
        let ours = by_ring(&cp, 32, Mask::Causal, Kind::BFloat16)?;
        for (ours, theirs) in ours.iter().zip(&of_one_rank(32, Mask::Causal, Kind::Float)) {
            let distance = (ours.to_kind(Kind::Float) - cp.own(theirs, 2)?).abs().max().double_value(&[]);
            assert!(ours.kind() == Kind::BFloat16 && distance < 0.1, "{distance}");
        }
        Ok(())
    });
}

#[test]
fn a_rank_keeps_only_its_share_for_backward() {
    let kept = |ranks| {
        on_ranks(ranks, |group| {
            let cp = ContextParallel::new(&group);
            let [q, k, v] =
                [1.0, 2.0, 3.0].map(|seed| cp.own(&values(96, Kind::Double, seed), 2).unwrap().copy());
            let [q, k, v] = [q, k, v].map(|own| own.set_requires_grad(true));
            let heads = Heads { queries: &q, keys: &k, values: &v };
            let (_, size) = saved_size(|| ring_attention(&cp, heads, 96, Mask::Causal).unwrap())?;
            Ok(size.bytes)
        })
    };
    let one = kept(1)[0];
    assert!(one > 0);
    assert_eq!(kept(4), [one / 4; 4]);
}

#[test]
fn heads_of_another_length_are_an_error() {
    on_ranks(2, |group| {
        let cp = ContextParallel::new(&group);
        let whole = values(8, Kind::Float, 0.0);
        let heads = Heads { queries: &whole, keys: &whole, values: &whole };
        let error = ring_attention(&cp, heads, 8, Mask::None).unwrap_err().to_string();
        assert!(error.contains("[texts, heads, 4, head size]") && error.contains("of 8"), "{error}");
        Ok(())
    });
}

#[test]
fn a_rank_that_leaves_the_ring_is_named_by_the_others() {
    let options = GroupOptions { timeout: TIMEOUT, ..Default::default() };
    let run = |leaves: bool| {
        LocalGroup::outcomes(3, &options, |group| {
            if leaves && group.rank() == 2 {
                return Err(as_comm("this rank gives up"));
            }
            let made = by_ring(&ContextParallel::new(&group), 12, Mask::Causal, Kind::Double);
            made.map(drop).map_err(|error| as_comm(format!("{error:#}")))
        })
    };
    let started = Instant::now();
    let errors: Vec<_> = run(true).into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(started.elapsed() < WELL_BEFORE, "nobody waits for the timeout: {errors:?}");
    assert!(errors[..2].iter().all(|error| error.contains("rank 2")), "{errors:?}");
    assert!(run(false).into_iter().all(|outcome| outcome.is_ok()), "control");
}
