//! Ten thousand random all-reduces: all ranks hold the same bits, for all values, sizes, types and transports.

use drumline_comm::{Element, ProcessGroup, ReduceOp, Transport, bf16, f16};

use crate::numbers::Random;
use crate::threads::{Result, run};

const ALL: usize = 10_000;

/// A floating-point type made from random bits: NaNs with any payload, infinities, denormals, both zeros.
trait Bits: Element {
    fn from_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! bits {
    ($($type:ident: $word:ty;)*) => {$(
        impl Bits for $type {
            fn from_bits(bits: u64) -> Self { $type::from_bits(bits as $word) }
            fn bits(self) -> u64 { self.to_bits().into() }
        }
    )*};
}

bits! { f64: u64; f32: u32; f16: u16; bf16: u16; }

/// Mostly numbers of similar size, whose sums depend on the order, with some of everything else.
fn random_value<T: Bits>(random: &mut Random) -> T {
    let (any, width) = (random.next(), 8 * size_of::<T>() as u32);
    let (exponent, mantissa) = match width {
        64 => (11, 52),
        32 => (8, 23),
        _ if T::DTYPE == drumline_comm::DType::F16 => (5, 10),
        _ => (8, 7),
    };
    let (sign, fraction) = (any >> 63 << (width - 1), any & ((1 << mantissa) - 1));
    let specials = [0, (1 << exponent) - 1];
    let power = match random.below(40) {
        0 => specials[random.below(2)],
        1 => random.next() & ((1 << exponent) - 1),
        _ => (1 << (exponent - 1)) - 3 + random.below(5) as u64,
    };
    T::from_bits(sign | power << mantissa | if random.below(50) == 0 { 0 } else { fraction })
}

fn one_call<T: Bits>(group: &ProcessGroup, shared: &mut Random, heap: &mut [T], out: &mut Bitwise) -> Result {
    let scale = shared.below(14);
    let len = shared.below(2 << scale).min(heap.len());
    let op = [ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max]
        [shared.below(6)];
    let on_heap = shared.below(2) == 1;
    let start = shared.below(heap.len() - len + 1);
    let mut own = Random::new(shared.next() ^ group.rank() as u64);
    let mut private: Vec<T> = Vec::new();
    let data = if on_heap {
        &mut heap[start..start + len]
    } else {
        // An odd start on odd ranks: the same bits at another alignment.
        private.resize(len + group.rank() % 2, T::from_bits(0));
        &mut private[group.rank() % 2..]
    };
    data.fill_with(|| random_value(&mut own));
    group.all_reduce(data, op)?;
    let what = if on_heap { "in the heap" } else { "private" };
    out.push((format!("{op} of {len} {} {what}", T::DTYPE), data.iter().map(|x| x.bits()).collect()));
    Ok(())
}

/// A description of each call, and the bits of its result.
type Bitwise = Vec<(String, Vec<u64>)>;

fn calls(group: &ProcessGroup, seed: u64, count: usize) -> Result<Bitwise> {
    let mut shared = Random::new(seed);
    let mut out = Vec::new();
    let (mut a, mut b) = (group.heap_alloc::<f64>(20_000)?, group.heap_alloc::<f32>(20_000)?);
    let (mut c, mut d) = (group.heap_alloc::<f16>(20_000)?, group.heap_alloc::<bf16>(20_000)?);
    for _ in 0..count {
        match shared.below(4) {
            0 => one_call(group, &mut shared, &mut a, &mut out)?,
            1 => one_call(group, &mut shared, &mut b, &mut out)?,
            2 => one_call(group, &mut shared, &mut c, &mut out)?,
            _ => one_call(group, &mut shared, &mut d, &mut out)?,
        }
    }
    Ok(out)
}

fn same_bits(transport: Transport, share: usize) {
    for ranks in 2..=5 {
        let seed = 1000 * ranks as u64;
        let results = run(ranks, transport, move |group| calls(group, seed, ALL * share / 40));
        for (rank, result) in results.iter().enumerate().skip(1) {
            for ((what, mine), (_, first)) in result.iter().zip(&results[0]) {
                let differs = mine.iter().zip(first).position(|(a, b)| a != b);
                let pair = differs.map(|i| format!("{:x} instead of {:x} at {i}", mine[i], first[i]));
                assert_eq!(pair, None, "rank {rank} of {ranks} over {transport:?}: {what}");
            }
        }
    }
}

#[test]
fn all_ranks_hold_the_same_bits_over_shared_memory() {
    same_bits(Transport::Shm, 7);
}

#[test]
fn all_ranks_hold_the_same_bits_over_tcp() {
    same_bits(Transport::Tcp, 3);
}

/// The control: the sums of these values do depend on the order.
#[test]
fn another_order_gives_other_bits() {
    let mut random = Random::new(5);
    let mut differ = 0;
    for _ in 0..1000 {
        let [a, b, c]: [f32; 3] = std::array::from_fn(|_| random_value(&mut random));
        differ += usize::from(((a + b) + c).to_bits() != ((c + b) + a).to_bits());
    }
    assert!(differ > 100, "only {differ} of 1000 sums depend on the order");
}
