//! The loops that apply an operator to slices.
//!
//! They work on blocks that fit the first-level cache, combine two inputs at a time where there are more, and are compiled for
//! several instruction sets. The best one that the CPU has is picked at run time.

use multiversion::multiversion;

use super::{Order, ReduceOp};
use crate::element::{Element, sealed::Sealed};

/// Elements per block: three blocks of the widest type fit a 32 KiB cache.
pub(super) const BLOCK: usize = 1024;

/// The steps of an operator: on each value first, between two values, and on the result.
#[derive(Clone, Copy)]
pub(super) struct Steps<First, Combine, Last> {
    first: First,
    combine: Combine,
    last: Last,
    /// `first` and `last` do nothing, so two inputs can be combined in one pass.
    plain: bool,
}

pub(super) trait Loop<T: Element> {
    fn run<F, C, L>(self, steps: Steps<F, C, L>)
    where
        F: Fn(T::Wide) -> T::Wide + Copy,
        C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        L: Fn(T::Wide) -> T::Wide + Copy;
    fn inputs(&self) -> usize;
}

pub(super) fn with_operator<T: Element, B: Loop<T>>(op: ReduceOp, body: B) {
    let same = |x: T::Wide| x;
    let ranks = body.inputs();
    macro_rules! plain {
        ($name:ident) => {
            body.run(Steps { first: same, combine: |a, b| T::$name(a, b), last: same, plain: true })
        };
    }
    match op {
        ReduceOp::Sum => plain!(add),
        ReduceOp::Prod => plain!(mul),
        ReduceOp::Min => plain!(min),
        ReduceOp::Max => plain!(max),
        ReduceOp::BitAnd => plain!(and),
        ReduceOp::BitOr => plain!(or),
        ReduceOp::BitXor => plain!(xor),
        ReduceOp::Avg => {
            let last = |sum| T::mean(sum, ranks);
            body.run(Steps { first: same, combine: |a, b| T::add(a, b), last, plain: false });
        }
        ReduceOp::PreMulSum(factor) => {
            let first = |x| T::scale(x, factor);
            body.run(Steps { first, combine: |a, b| T::add(a, b), last: same, plain: false });
        }
    }
}

pub(super) struct IntoOut<'a, T> {
    pub(super) out: &'a mut [T],
    pub(super) inputs: &'a [&'a [T]],
}

impl<T: Element> Loop<T> for IntoOut<'_, T> {
    fn run<F, C, L>(self, steps: Steps<F, C, L>)
    where
        F: Fn(T::Wide) -> T::Wide + Copy,
        C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        L: Fn(T::Wide) -> T::Wide + Copy,
    {
        if steps.plain && self.inputs.len() == 2 {
            return pair_into(self.out, self.inputs[0], self.inputs[1], steps.combine);
        }
        let mut sum = [T::zeroed().widen(); BLOCK];
        for start in (0..self.out.len()).step_by(BLOCK) {
            let end = self.out.len().min(start + BLOCK);
            let sum = &mut sum[..end - start];
            combine_rows(sum, self.inputs.iter().map(|input| &input[start..end]), steps);
            finish(&mut self.out[start..end], sum, steps.last);
        }
    }

    fn inputs(&self) -> usize {
        self.inputs.len()
    }
}

pub(super) struct InPlace<'a, T> {
    pub(super) data: &'a mut [T],
    pub(super) theirs: &'a [T],
    pub(super) order: Order,
}

impl<T: Element> Loop<T> for InPlace<'_, T> {
    fn run<F, C, L>(self, Steps { first, combine, last, .. }: Steps<F, C, L>)
    where
        F: Fn(T::Wide) -> T::Wide + Copy,
        C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        L: Fn(T::Wide) -> T::Wide + Copy,
    {
        let forward = |a, b| T::plain_nan(last(combine(first(a), first(b))));
        let backward = |a, b| T::plain_nan(last(combine(first(b), first(a))));
        // For a few elements, looking up the best instruction set would take longer than the reduction.
        match (self.order, self.data.len() <= 16) {
            (Order::MineFirst, true) => in_place(self.data, self.theirs, forward),
            (Order::TheirsFirst, true) => in_place(self.data, self.theirs, backward),
            (Order::MineFirst, false) => pair_in_place(self.data, self.theirs, forward),
            (Order::TheirsFirst, false) => pair_in_place(self.data, self.theirs, backward),
        }
    }

    fn inputs(&self) -> usize {
        2
    }
}

pub(super) struct Everywhere<'a, 'b, T> {
    pub(super) buffers: &'a mut [&'b mut [T]],
}

impl<T: Element> Loop<T> for Everywhere<'_, '_, T> {
    fn run<F, C, L>(self, steps: Steps<F, C, L>)
    where
        F: Fn(T::Wide) -> T::Wide + Copy,
        C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        L: Fn(T::Wide) -> T::Wide + Copy,
    {
        if let [a, b] = self.buffers {
            return pair_everywhere(a, b, steps.first, steps.combine, steps.last);
        }
        let len = self.buffers[0].len();
        let mut sum = [T::zeroed().widen(); BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let end = len.min(start + BLOCK);
            let sum = &mut sum[..end - start];
            combine_rows(sum, self.buffers.iter().map(|buffer| &buffer[start..end]), steps);
            for buffer in self.buffers.iter_mut() {
                finish(&mut buffer[start..end], sum, steps.last);
            }
        }
    }

    fn inputs(&self) -> usize {
        self.buffers.len()
    }
}

/// `sum` becomes `rows[0] ∘ rows[1] ∘ …`, in the wide type.
fn combine_rows<'r, T, F, C, L>(
    sum: &mut [T::Wide],
    mut rows: impl ExactSizeIterator<Item = &'r [T]>,
    Steps { first, combine, .. }: Steps<F, C, L>,
) where
    T: Element,
    F: Fn(T::Wide) -> T::Wide + Copy,
    C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
{
    match (rows.next(), rows.next()) {
        (Some(a), Some(b)) => begin_pair(sum, [a, b], first, combine),
        (Some(only), None) => begin(sum, only, first),
        (None, _) => {}
    }
    while let Some(a) = rows.next() {
        match rows.next() {
            Some(b) => fold_pair(sum, [a, b], first, combine),
            None => fold(sum, a, first, combine),
        }
    }
}

#[inline(always)]
fn in_place<T: Element>(data: &mut [T], theirs: &[T], combine: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    for (mine, &theirs) in data.iter_mut().zip(theirs) {
        *mine = T::narrow(combine(mine.widen(), theirs.widen()));
    }
}

/// Compiles a function for each of these instruction sets.
macro_rules! for_processors {
    ($($function:tt)*) => {
        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl+f16c",
            "x86_64+avx2+f16c",
            "aarch64+neon"
        ))]
        $($function)*
    };
}

for_processors! {
    fn pair_into<T: Element, C: Fn(T::Wide, T::Wide) -> T::Wide + Copy>(
        out: &mut [T],
        a: &[T],
        b: &[T],
        combine: C,
    ) {
        for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
            *out = T::narrow(combine(a.widen(), b.widen()));
        }
    }
}

for_processors! {
    fn pair_in_place<T: Element, C: Fn(T::Wide, T::Wide) -> T::Wide + Copy>(
        data: &mut [T],
        theirs: &[T],
        combine: C,
    ) {
        in_place(data, theirs, combine);
    }
}

for_processors! {
    fn pair_everywhere<T, F, C, L>(a: &mut [T], b: &mut [T], first: F, combine: C, last: L)
    where
        T: Element,
        F: Fn(T::Wide) -> T::Wide + Copy,
        C: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
        L: Fn(T::Wide) -> T::Wide + Copy,
    {
        for (a, b) in a.iter_mut().zip(b) {
            let value = T::narrow(last(combine(first(a.widen()), first(b.widen()))));
            *a = value;
            *b = value;
        }
    }
}

for_processors! {
    fn begin<W: Copy, T: Sealed<Wide = W>, F: Fn(W) -> W + Copy>(sum: &mut [W], input: &[T], first: F) {
        for (sum, &x) in sum.iter_mut().zip(input) {
            *sum = first(x.widen());
        }
    }
}

for_processors! {
    fn fold<W, T, F, C>(sum: &mut [W], input: &[T], first: F, combine: C)
    where
        W: Copy,
        T: Sealed<Wide = W>,
        F: Fn(W) -> W + Copy,
        C: Fn(W, W) -> W + Copy,
    {
        for (sum, &x) in sum.iter_mut().zip(input) {
            *sum = combine(*sum, first(x.widen()));
        }
    }
}

for_processors! {
    fn begin_pair<W, T, F, C>(sum: &mut [W], [a, b]: [&[T]; 2], first: F, combine: C)
    where
        W: Copy,
        T: Sealed<Wide = W>,
        F: Fn(W) -> W + Copy,
        C: Fn(W, W) -> W + Copy,
    {
        for ((sum, &a), &b) in sum.iter_mut().zip(a).zip(b) {
            *sum = combine(first(a.widen()), first(b.widen()));
        }
    }
}

for_processors! {
    fn fold_pair<W, T, F, C>(sum: &mut [W], [a, b]: [&[T]; 2], first: F, combine: C)
    where
        W: Copy,
        T: Sealed<Wide = W>,
        F: Fn(W) -> W + Copy,
        C: Fn(W, W) -> W + Copy,
    {
        for ((sum, &a), &b) in sum.iter_mut().zip(a).zip(b) {
            *sum = combine(combine(*sum, first(a.widen())), first(b.widen()));
        }
    }
}

for_processors! {
    fn finish<W: Copy, T: Sealed<Wide = W>, L: Fn(W) -> W + Copy>(out: &mut [T], sum: &[W], last: L) {
        for (out, &sum) in out.iter_mut().zip(sum) {
            *out = T::narrow(last(sum));
        }
    }
}
