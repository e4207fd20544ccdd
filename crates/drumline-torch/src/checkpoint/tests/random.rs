//! Functions that draw random numbers. In processes of their own where numbers are compared, because all threads share the
//! generator.

use rank_test::ranks_test;

use super::super::operation::{Watch, random};
use super::*;
use crate::{dropout, sum_with_dropout};

ranks_test!(random_numbers_are_those_of_the_first_forward, 1, {
    let (block, x) = (Block::new(), leaf());
    let net = |block: &Block, xs: &Tensor| -> Result<Tensor, FunctionError> {
        let ours = sum_with_dropout(xs, &dropout(&block.forward(xs), 0.3)?, 0.4)?;
        Ok(ours.f_dropout(0.2, true)? * Tensor::f_rand([8], FLOAT)?)
    };
    let mut all = Vec::new();
    for checkpointed in [false, true] {
        tch::manual_seed(9);
        let mut xs = &x * 1.0;
        for _ in 0..2 {
            let (block, before) = (block.shared(), xs.shallow_clone());
            xs = if checkpointed {
                checkpoint(move |xs| net(&block, &xs[0]), &[&before]).unwrap()
            } else {
                net(&block, &before).unwrap()
            };
        }
        xs.square().sum(Kind::Float).backward();
        let mut found = block.grads(&x);
        found.push(Tensor::rand([3], FLOAT));
        all.push(found);
    }
    assert_eq!(all[0], all[1], "gradients, and the numbers that are drawn after them");
});

ranks_test!(results_that_draw_random_numbers_themselves_are_kept_by_every_checkpoint, 1, {
    let (x, runs) = (leaf(), Arc::<AtomicUsize>::default());
    let grad = |how: fn(Shared, &Tensor) -> Tensor| {
        tch::manual_seed(4);
        let runs = Arc::clone(&runs);
        let block = move |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
            let before = xs[0].f_dropout(0.5, true)?;
            let drawn = keep_drawn(&[&before], || {
                runs.fetch_add(1, Ordering::Relaxed);
                Ok(before.f_exp()?.f_dropout(0.5, true)?)
            })?;
            // The second forward draws this one after it, too.
            Ok(drawn.f_sin()?.f_dropout(0.5, true)? * Tensor::f_rand([8], FLOAT)?)
        };
        how(Box::new(block), &x).square().sum(Kind::Float).backward();
        let found = (x.grad().copy(), Tensor::rand([3], FLOAT));
        no_grad(|| drop(x.grad().zero_()));
        found
    };
    let expected = grad(|block, x| block(&[x * 1.0]).unwrap());
    runs.store(0, Ordering::Relaxed);
    assert_eq!(grad(|block, x| checkpoint(block, &[&(x * 1.0)]).unwrap()), expected);
    assert_eq!(grad(|block, x| selective_checkpoint(block, &[&(x * 1.0)]).unwrap()), expected);
    assert_eq!(runs.load(Ordering::Relaxed), 2, "once in each");
});

/// A block that is handed to a checkpoint.
type Shared = Box<dyn Fn(&[Tensor]) -> Result<Tensor, FunctionError> + Send>;

#[test]
fn random_operations_are_found() {
    let looked = |body: &dyn Fn()| {
        let _watch = Watch::random().unwrap();
        body();
        random()
    };
    let x = waves(&[1, 2, 4, 4], 0.3);
    let attend = |p: f64| {
        drop(Tensor::scaled_dot_product_attention(&x, &x, &x, None::<&Tensor>, p, false, None, false));
    };
    assert_eq!(looked(&|| drop(x.gelu("none").matmul(&x))), None);
    assert_eq!(looked(&|| drop(x.dropout(0.0, true))), None);
    assert_eq!(looked(&|| drop(x.dropout(0.5, false))), None);
    assert_eq!(looked(&|| attend(0.0)), None);
    assert_eq!(looked(&|| attend(0.1)).as_deref(), Some("aten::scaled_dot_product_attention"));
    assert_eq!(looked(&|| drop(x.dropout(0.5, true))).as_deref(), Some("aten::dropout"));
    assert!(looked(&|| drop(Tensor::rand([2], FLOAT))).is_some());
    assert_eq!(looked(&|| ()), None, "a watch begins with nothing");
}
