//! Numbers in JSON that are read with the same bits, including NaN and infinities, which JSON does not have.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An `f64` that keeps its bits in JSON. Only the payload of a NaN is lost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar(pub(crate) f64);

impl Serialize for Scalar {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Word(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(number) => Ok(Self(number)),
            Written::Word(word) => match word.as_str() {
                "NaN" => Ok(Self(f64::NAN)),
                "inf" => Ok(Self(f64::INFINITY)),
                "-inf" => Ok(Self(f64::NEG_INFINITY)),
                _ => Err(D::Error::custom(format!("`{word}` is not a number"))),
            },
        }
    }
}

pub(super) fn to_scalars(values: &BTreeMap<String, f64>) -> BTreeMap<String, Scalar> {
    values.iter().map(|(name, value)| (name.clone(), Scalar(*value))).collect()
}

pub(super) fn to_values(scalars: BTreeMap<String, Scalar>) -> BTreeMap<String, f64> {
    scalars.into_iter().map(|(name, scalar)| (name, scalar.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_with_the_same_bits() {
        let mut bits = 0x0123_4567_89ab_cdef_u64;
        let random = std::iter::repeat_with(|| {
            bits = bits.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            f64::from_bits(bits)
        });
        let special = [0.0, -0.0, 0.1, f64::MIN_POSITIVE, 5e-324, f64::MAX, f64::INFINITY, f64::NEG_INFINITY];
        for value in special.into_iter().chain(random.filter(|value| !value.is_nan()).take(10_000)) {
            let text = serde_json::to_string(&Scalar(value)).unwrap();
            let back: Scalar = serde_json::from_str(&text).unwrap();
            assert_eq!(back.0.to_bits(), value.to_bits(), "{text}");
        }
        let nan: Scalar = serde_json::from_str(&serde_json::to_string(&Scalar(f64::NAN)).unwrap()).unwrap();
        assert!(nan.0.is_nan());
        assert!(serde_json::from_str::<Scalar>("\"much\"").unwrap_err().to_string().contains("`much`"));
    }
}
