//! How the types of keys are read from values and written back.
//!
//! As in yacs the type of a key decides: a text that came from a command line is read as that type, `None` only where a key
//! may be without a value. Unlike there a whole number is also a number.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::value::Value;

/// A type that a key can have.
pub(crate) trait Setting: Sized {
    /// What it takes, in words.
    fn expects() -> String;
    /// What it takes in a file, as a JSON schema, for editors. Narrower than `read` where a text would do as well.
    fn schema() -> Json;
    /// The value as this type.
    fn read(value: &Value) -> Option<Self>;
    /// The same way back.
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

impl Setting for u32 {
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
        Value::Int((*self).into())
    }
}

impl Setting for usize {
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

/// `'x'` as a shell passes it on from a Python user's command line.
fn unquoted(text: &str) -> &str {
    let within = |quote| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    within('\'').or_else(|| within('"')).unwrap_or(text)
}

/// An enum whose variants have names in a configuration.
macro_rules! choice {
    ($(#[$about:meta])* $name:ident, $expects:literal { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// As it stands in a configuration.
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

/// On, off, or as the program finds it best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// As it is found best.
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
    /// How the learning rate falls.
    LrPolicy, "cos or steps" {
        /// Half a cosine from 1 to `OPTIM.MIN_LR`.
        Cos = "cos",
        /// Times `OPTIM.LR_MULT` at each of `OPTIM.STEPS`.
        Steps = "steps",
    }
}

choice! {
    /// What lies in the folder of a data set.
    DataKind, "auto, cifar10, cifar100, folder or dummy" {
        /// Told from the files.
        Auto = "auto",
        /// CIFAR-10's binary files.
        Cifar10 = "cifar10",
        /// CIFAR-100's binary files.
        Cifar100 = "cifar100",
        /// `SPLIT/CLASS/image.jpg`, as ImageNet.
        Folder = "folder",
        /// Nothing: random images, as with `MODEL.DUMMY_INPUT`.
        Dummy = "dummy",
    }
}

choice! {
    /// What computes.
    DeviceKind, "auto, cpu or cuda" {
        /// A GPU if there is one.
        Auto = "auto",
        /// The processor.
        Cpu = "cpu",
        /// The GPU of this rank.
        Cuda = "cuda",
    }
}

choice! {
    /// In which numbers a training computes.
    PrecisionKind, "fp32, bf16, fp16 or bf16-master" {
        /// f32 throughout.
        Fp32 = "fp32",
        /// bfloat16 in matrix products and convolutions.
        Bf16 = "bf16",
        /// float16 there, with a scaled loss.
        Fp16 = "fp16",
        /// As bf16, and the weights are kept so, too, with f32 copies that the optimizer steps.
        Bf16Master = "bf16-master",
    }
}

choice! {
    /// How images and the weights of convolutions lie in memory.
    MemoryFormat, "auto, contiguous or channels_last" {
        /// Channels last on a GPU, contiguous on a processor.
        Auto = "auto",
        /// One channel after the other.
        Contiguous = "contiguous",
        /// All channels of a pixel together.
        ChannelsLast = "channels_last",
    }
}

impl MemoryFormat {
    /// Whether channels are last on a device.
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
