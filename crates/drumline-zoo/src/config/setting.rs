//! How values of configuration keys are parsed and written.
//!
//! As in yacs, the type of the key decides: a text from the command line is parsed as that type, and `None` is only
//! accepted for optional keys. Unlike in yacs, a float key also accepts an integer.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::value::Value;

/// A type that a key can have.
pub(crate) trait Setting: Sized {
    /// A description of the accepted values.
    fn expects() -> String;
    /// The JSON schema of the accepted values in a file, for editors. It is stricter than `read`, which also accepts
    /// texts.
    fn schema() -> Json;
    /// Parses a value.
    fn read(value: &Value) -> Option<Self>;
    /// Writes the value so that `read` returns it again.
    fn write(&self) -> Value;
}

impl Setting for bool {
    fn expects() -> String {
        "true or false".into()
    }

    fn schema() -> Json {
        json!({"type": "boolean"})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(*value),
            Value::Text(text) => text.trim().to_ascii_lowercase().parse().ok(),
            _ => None,
        }
    }

    fn write(&self) -> Value {
        Value::Bool(*self)
    }
}

impl Setting for i64 {
    fn expects() -> String {
        "a whole number, also a negative one".into()
    }

    fn schema() -> Json {
        json!({"type": "integer"})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Int(value) => Some(*value),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    fn write(&self) -> Value {
        Value::Int(*self)
    }
}

impl Setting for u64 {
    fn expects() -> String {
        "a whole number".into()
    }

    fn schema() -> Json {
        json!({"type": "integer", "minimum": 0})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Int(value) => (*value).try_into().ok(),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    fn write(&self) -> Value {
        i64::try_from(*self).map_or_else(|_| Value::Text(self.to_string()), Value::Int)
    }
}

/// Unsigned numbers that are read and written as `u64`.
macro_rules! unsigned {
    ($($type:ty),+) => {$(
        impl Setting for $type {
            fn expects() -> String {
                u64::expects()
            }

            fn schema() -> Json {
                u64::schema()
            }

            fn read(value: &Value) -> Option<Self> {
                u64::read(value)?.try_into().ok()
            }

            fn write(&self) -> Value {
                (*self as u64).write()
            }
        }
    )+};
}

unsigned!(u32, usize);

impl Setting for f64 {
    fn expects() -> String {
        "a number".into()
    }

    fn schema() -> Json {
        json!({"type": "number"})
    }

    fn read(value: &Value) -> Option<Self> {
        let number = match value {
            Value::Float(value) => Some(*value),
            Value::Int(value) => Some(*value as f64),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        number.filter(|number| number.is_finite())
    }

    fn write(&self) -> Value {
        Value::Float(*self)
    }
}

impl Setting for String {
    fn expects() -> String {
        "a text".into()
    }

    fn schema() -> Json {
        json!({"type": "string"})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Null | Value::List(_) | Value::Section(_) => None,
            Value::Text(text) => Some(unquoted(text).to_owned()),
            other => Some(other.to_string()),
        }
    }

    fn write(&self) -> Value {
        Value::Text(self.clone())
    }
}

impl Setting for PathBuf {
    fn expects() -> String {
        "a path".into()
    }

    fn schema() -> Json {
        String::schema()
    }

    fn read(value: &Value) -> Option<Self> {
        String::read(value).map(Into::into)
    }

    fn write(&self) -> Value {
        Value::Text(self.to_string_lossy().into_owned())
    }
}

impl<T: Setting> Setting for Option<T> {
    fn expects() -> String {
        format!("{} or null", T::expects())
    }

    fn schema() -> Json {
        json!({"anyOf": [T::schema(), {"type": "null"}]})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            Value::Text(text) if ["None", "null", "~"].contains(&text.trim()) => Some(None),
            value => T::read(value).map(Some),
        }
    }

    fn write(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::write)
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn expects() -> String {
        format!("a list [a, b], each {}", T::expects())
    }

    fn schema() -> Json {
        json!({"type": "array", "items": T::schema()})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::List(values) => values.iter().map(T::read).collect(),
            Value::Text(text) => {
                let text = text.trim();
                let list = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
                let tuple = || text.strip_prefix('(').and_then(|text| text.strip_suffix(')'));
                let parts = list.or_else(tuple)?.split(',').map(str::trim);
                parts.filter(|part| !part.is_empty()).map(|part| T::read(&Value::Text(part.into()))).collect()
            }
            _ => None,
        }
    }

    fn write(&self) -> Value {
        Value::List(self.iter().map(T::write).collect())
    }
}

/// Removes quotes: Python users write `'x'`, and shells pass the quotes on.
fn unquoted(text: &str) -> &str {
    let within = |quote| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    within('\'').or_else(|| within('"')).unwrap_or(text)
}

/// Declares an enum whose variants have names in a configuration.
macro_rules! choice {
    ($(#[$about:meta])* $name:ident, $expects:literal { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// The name in a configuration.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl $crate::config::setting::Setting for $name {
            fn expects() -> String {
                $expects.into()
            }

            fn schema() -> serde_json::Value {
                serde_json::json!({"enum": [$($text),*]})
            }

            fn read(value: &$crate::config::Value) -> Option<Self> {
                match <String as $crate::config::setting::Setting>::read(value)?.trim() {
                    $($text => Some(Self::$variant),)*
                    _ => None,
                }
            }

            fn write(&self) -> $crate::config::Value {
                $crate::config::Value::Text(self.name().into())
            }
        }
    };
}

pub(crate) use choice;

/// On, off, or decided automatically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// Decided automatically.
    Auto,
    /// On.
    On,
    /// Off.
    Off,
}

impl Setting for Switch {
    fn expects() -> String {
        "auto, true or false".into()
    }

    fn schema() -> Json {
        json!({"enum": ["auto", true, false]})
    }

    fn read(value: &Value) -> Option<Self> {
        match bool::read(value) {
            Some(true) => Some(Self::On),
            Some(false) => Some(Self::Off),
            None => (String::read(value)?.trim() == "auto").then_some(Self::Auto),
        }
    }

    fn write(&self) -> Value {
        match self {
            Self::Auto => Value::Text("auto".into()),
            Self::On => Value::Bool(true),
            Self::Off => Value::Bool(false),
        }
    }
}

choice! {
    /// How the learning rate decays.
    LrPolicy, "cos or steps" {
        /// A half cosine from 1 to `OPTIM.MIN_LR`.
        Cos = "cos",
        /// Multiplied by `OPTIM.LR_MULT` at each of `OPTIM.STEPS`.
        Steps = "steps",
    }
}

choice! {
    /// The learning rate after the warm-up.
    AfterWarmup, "linear, cosine or constant" {
        /// Decays linearly to zero.
        Linear = "linear",
        /// Decays as a half cosine to `OPTIM.MIN_LR`.
        Cosine = "cosine",
        /// Stays constant.
        Constant = "constant",
    }
}

choice! {
    /// The optimizer.
    OptimizerName, "adafactor, adagrad, adam, adamw, lamb, lion or sgd" {
        /// Adafactor.
        Adafactor = "adafactor",
        /// Adagrad.
        Adagrad = "adagrad",
        /// Adam.
        Adam = "adam",
        /// AdamW.
        Adamw = "adamw",
        /// LAMB.
        Lamb = "lamb",
        /// Lion.
        Lion = "lion",
        /// SGD.
        Sgd = "sgd",
    }
}

choice! {
    /// How Adam keeps its running means.
    MomentsKind, "f32, bf16 or 8bit" {
        /// In f32.
        F32 = "f32",
        /// In bf16 with random rounding.
        Bf16 = "bf16",
        /// In 8 bits with a scale for each block.
        EightBit = "8bit",
    }
}

choice! {
    /// How master weights are kept.
    MasterWeightsKind, "copy or split" {
        /// As f32 copies.
        Copy = "copy",
        /// As the 16 bits that a bf16 weight lacks.
        Split = "split",
    }
}

choice! {
    /// The format of a dataset.
    DataKind, "auto, cifar10, cifar100, folder or dummy" {
        /// Detected from the files.
        Auto = "auto",
        /// CIFAR-10's binary files.
        Cifar10 = "cifar10",
        /// CIFAR-100's binary files.
        Cifar100 = "cifar100",
        /// `SPLIT/CLASS/image.jpg`, as in ImageNet.
        Folder = "folder",
        /// Random images without a folder, as with `MODEL.DUMMY_INPUT`.
        Dummy = "dummy",
    }
}

choice! {
    /// The device to compute on.
    DeviceKind, "auto, cpu or cuda" {
        /// A GPU if there is one.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// The GPU of this rank.
        Cuda = "cuda",
    }
}

choice! {
    /// The precision of training.
    PrecisionKind, "fp32, bf16, fp16 or bf16-master" {
        /// f32 throughout.
        Fp32 = "fp32",
        /// bfloat16 in matrix products and convolutions.
        Bf16 = "bf16",
        /// float16 in matrix products and convolutions, with a scaled loss.
        Fp16 = "fp16",
        /// Like bf16, but the weights are also stored in bfloat16; the optimizer updates f32 master copies.
        Bf16Master = "bf16-master",
    }
}

choice! {
    /// The memory layout of images and convolution weights.
    MemoryFormat, "auto, contiguous or channels_last" {
        /// Channels last on a GPU, contiguous on a CPU.
        Auto = "auto",
        /// NCHW: one channel after the other.
        Contiguous = "contiguous",
        /// NHWC: all channels of a pixel together.
        ChannelsLast = "channels_last",
    }
}

impl MemoryFormat {
    /// Whether the layout is channels-last on a device.
    pub fn is_channels_last(self, device: tch::Device) -> bool {
        match self {
            Self::Auto => device.is_cuda(),
            Self::ChannelsLast => true,
            Self::Contiguous => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_read_from_files_and_command_lines() {
        let text = |text: &str| Switch::read(&Value::Text(text.into()));
        assert_eq!(
            [text("auto"), text("True"), text("false")],
            [Switch::Auto, Switch::On, Switch::Off].map(Some)
        );
        assert_eq!([text("on"), text("None"), Switch::read(&Value::Int(1))], [None; 3]);
        for switch in [Switch::Auto, Switch::On, Switch::Off] {
            assert_eq!(Switch::read(&switch.write()), Some(switch));
        }
    }
}
