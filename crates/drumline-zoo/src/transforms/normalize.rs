//! Normalisation: (byte / 255 - mean) / std for each channel, by table.

/// The normalised values of all 256 bytes in three channels, bit-equal to torchvision's `ToTensor` and `Normalize`.
#[derive(Debug, Clone)]
pub struct Normalize {
    tables: Box<[[f32; 256]; 3]>,
}

impl Normalize {
    /// Creates the table from mean and standard deviation of red, green and blue, on the scale from 0 to 1.
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Self {
        let number = |channel: usize, byte: usize| (byte as f32 / 255.0 - mean[channel]) / std[channel];
        let table = |channel| std::array::from_fn(|byte| number(channel, byte));
        Self { tables: Box::new(std::array::from_fn(table)) }
    }

    /// The table for CIFAR.
    pub fn cifar() -> Self {
        Self::new([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
    }

    /// The table for ImageNet.
    pub fn imagenet() -> Self {
        Self::new([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    }

    /// The normalised values of a channel's bytes.
    pub(crate) fn table(&self, channel: usize) -> &[f32; 256] {
        &self.tables[channel]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    #[test]
    fn values_equal_those_of_tensor_arithmetic() {
        let bytes = Tensor::arange(256, (Kind::Uint8, tch::Device::Cpu)).to_kind(Kind::Float) / 255.0;
        let expected = (bytes - Tensor::from(0.4822f32)) / Tensor::from(0.1994f32);
        let expected = Vec::<f32>::try_from(expected).unwrap();
        assert_eq!(Normalize::cifar().table(1).as_slice(), expected);
    }
}
