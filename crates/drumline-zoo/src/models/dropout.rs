//! Dropout that spends less on random numbers than libtorch's does on a CPU.
//!
//! libtorch draws a number of its own for each element, which costs as much as a matrix product. Here one draw of 64 bits serves four
//! elements, 16 bits each; the probability is met to 1/65536, and what is kept is scaled by exactly what was kept.

use tch::{Device, Kind, Tensor};

/// Elements are zeroed with probability `p`, the others scaled so that the mean stays; with 0 nothing is done.
pub(super) fn dropout(xs: &Tensor, p: f64) -> Tensor {
    if p == 0.0 {
        return xs.shallow_clone();
    }
    if xs.device() != Device::Cpu {
        return xs.dropout(p, true);
    }
    let dropped = (p * STEPS).round();
    let scale = STEPS / (STEPS - dropped);
    let kept = sixteen_bits(&xs.size()).ge(dropped as i64 + i64::from(i16::MIN));
    xs * (kept.to_kind(xs.kind()) * scale)
}

/// Different values of 16 bits.
const STEPS: f64 = 65536.0;

fn sixteen_bits(size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    let words = Tensor::empty([(count + 3) / 4], (Kind::Int64, Device::Cpu)).random_from_(i64::MIN, None);
    words.view_dtype(Kind::Int16).narrow(0, 0, count).view(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_dropped_as_asked_and_the_mean_stays() {
        for p in [0.1, 0.5, 0.9] {
            let ones = Tensor::ones([300, 1001], (Kind::Float, Device::Cpu));
            let out = dropout(&ones, p);
            let zeros = out.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            let mean = out.mean(Kind::Double).double_value(&[]);
            let deviation = (p * (1.0 - p) / 300300.0).sqrt();
            assert!((zeros - p).abs() < 6.0 * deviation, "{p}: {zeros}");
            assert!((mean - 1.0).abs() < 6.0 * deviation / (1.0 - p), "{p}: {mean}");
        }
    }

    #[test]
    fn gradients_go_where_values_went() {
        let xs = Tensor::ones([7, 5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let out = dropout(&xs, 0.5);
        out.sum(Kind::Float).backward();
        assert_eq!(xs.grad(), out.detach());
        assert_eq!(dropout(&xs, 0.0), xs);
        assert_eq!(dropout(&Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)), 0.1).size(), [0, 3]);
    }
}
