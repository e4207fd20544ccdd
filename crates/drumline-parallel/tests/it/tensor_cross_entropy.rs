//! The cross-entropy of cut classes against libtorch's of whole ones: smoothing, ignored rows, padding, uneven
//! vocabularies, infinities.

use anyhow::Result;
use drumline_parallel::tensor::{
    Features, Sharded, TensorParallel, TpTensor, VocabLabels, vocab_cross_entropy,
};
use tch::{Device, Kind, Reduction, Tensor};

use super::tensor::on_ranks;

const ROWS: i64 = 6;

fn logits(classes: i64, kind: Kind) -> Tensor {
    let wave = (Tensor::arange(ROWS * classes, (Kind::Double, Device::Cpu)) * 1.3).sin() * 4.0;
    wave.view([ROWS, classes]).to_kind(kind)
}

/// The loss and the gradient of this rank's logits.
fn ours(tp: &TensorParallel, whole: &Tensor, labels: VocabLabels<'_>) -> Result<(Tensor, Tensor)> {
    let range = tp.cut(whole.size()[1]).range(tp.rank());
    let own = whole.narrow(1, range.start, range.end - range.start).copy().set_requires_grad(true);
    let cut = TpTensor::<Sharded<Features>>::sharded(own.shallow_clone(), whole.size()[1], tp)?;
    let loss = vocab_cross_entropy(&cut, labels)?.into_tensor();
    (&loss * 0.5).backward();
    Ok((loss.detach(), own.grad()))
}

fn close(one: &Tensor, other: &Tensor, most: f64, what: &str) {
    assert_eq!(one.size(), other.size(), "{what}");
    let distance = || (one - other).abs().max().double_value(&[]);
    assert!(one.numel() == 0 || distance() < most, "{what}: {}", distance());
}

/// Compares with libtorch on whole logits, of which the last `padding` are none.
fn compare(tp: &TensorParallel, classes: i64, padding: i64, smoothing: f64, kind: Kind) -> Result<()> {
    let what = format!("{classes} classes, {padding} of them padding, on {} ranks", tp.size());
    let (whole, valid) = (logits(classes, kind), classes - padding);
    let targets = Tensor::from_slice(&[0, valid - 1, valid / 3, -100, valid / 2, 0]);
    let leaf = whole.copy().set_requires_grad(true);
    let theirs = leaf.narrow(1, 0, valid).cross_entropy_loss::<Tensor>(
        &targets,
        None,
        Reduction::Sum,
        -100,
        smoothing,
    );
    (&theirs * 0.5).backward();
    let num_classes = (padding > 0).then_some(valid);
    let labels = VocabLabels { classes: &targets, num_classes, ignored: Some(-100), smoothing };
    let (loss, grad) = ours(tp, &whole, labels)?;
    let most = if kind == Kind::Double { 1e-13 } else { 2e-5 };
    close(&loss, &theirs.detach(), 100.0 * most, &what);
    let range = tp.cut(classes).range(tp.rank());
    close(&grad, &leaf.grad().narrow(1, range.start, range.end - range.start), most, &what);
    Ok(())
}

#[test]
fn loss_and_gradient_are_those_of_whole_logits() {
    for ranks in 1..=4 {
        on_ranks(ranks, |group| {
            let tp = TensorParallel::new(&group);
            for (classes, padding) in [(13, 0), (16, 3), (8, 0), (9, 5), (2, 0), (1, 0)] {
                for smoothing in [0.0, 0.1] {
                    compare(&tp, classes, padding, smoothing, Kind::Double)?;
                    compare(&tp, classes, padding, smoothing, Kind::Float)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn minus_infinity_and_ignored_rows_leave_no_nan() {
    on_ranks(2, |group| {
        let tp = TensorParallel::new(&group);
        let whole = logits(5, Kind::Double);
        let _ = whole.narrow(1, 0, 3).fill_(f64::NEG_INFINITY);
        // An ignored row without any finite logit, and one with logits that are not numbers.
        let _ = whole.get(3).fill_(f64::NEG_INFINITY);
        let _ = whole.get(4).fill_(f64::NAN);
        let classes = Tensor::from_slice(&[3i64, 4, 3, -1, -1, 4]);
        let labels = VocabLabels { classes: &classes, num_classes: None, ignored: Some(-1), smoothing: 0.0 };
        let (loss, grad) = ours(&tp, &whole, labels)?;
        let counted = Tensor::from_slice(&[0i64, 1, 2, 5]);
        let (rows, of_rows) = (whole.index_select(0, &counted), classes.index_select(0, &counted));
        let theirs =
            rows.cross_entropy_loss::<Tensor>(&of_rows, None, Reduction::Sum, -1, 0.0).double_value(&[]);
        assert!((loss.double_value(&[]) - theirs).abs() < 1e-12);
        assert!(
            grad.isfinite().all().int64_value(&[]) == 1
                && grad.get(3).abs().sum(Kind::Double).double_value(&[]) == 0.0
        );
        let none = Tensor::full([6], -1, (Kind::Int64, Device::Cpu));
        let (loss, grad) = ours(&tp, &whole, VocabLabels { classes: &none, ..labels })?;
        assert_eq!((loss.double_value(&[]), grad.abs().sum(Kind::Double).double_value(&[])), (0.0, 0.0));
        Ok(())
    });
}

#[test]
fn a_wrong_target_is_an_error_on_all_ranks() {
    on_ranks(2, |group| {
        let tp = TensorParallel::new(&group);
        let classes = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 5]);
        let labels = VocabLabels { classes: &classes, num_classes: Some(5), ignored: None, smoothing: 0.0 };
        let error = ours(&tp, &logits(6, Kind::Float), labels).unwrap_err().to_string();
        assert_eq!(error, "a target class is 5; expected 0 to 4; try labels of these classes, or `ignored`");
        Ok(())
    });
}
