//! Sections of keys, declared as structs.

use super::value::Value;

/// A key as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The full name: `TRAIN.BATCH_SIZE`.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// What it takes, in words.
    pub expects: String,
    /// What it takes in a file, as a JSON schema.
    pub schema: serde_json::Value,
    /// What it is for.
    pub about: &'static str,
}

/// Keys that share the part before the point.
pub(crate) trait Section {
    /// That part; empty for keys without one.
    fn prefix(&self) -> &'static str;
    /// All its keys.
    fn entries(&self) -> Vec<Entry>;
    /// Sets a key by its full name: `None` if it is not one of these, an error that says what was expected.
    fn set(&mut self, key: &str, value: &Value) -> Option<Result<(), String>>;
}

/// Declares a section: its fields, with key, type, default and meaning.
macro_rules! section {
    ($(#[doc = $of:literal])* $name:ident $prefix:literal {
        $($(#[doc = $about:literal])* $key:literal $field:ident: $type:ty = $default:expr;)*
    }) => {
        $(#[doc = $of])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($(#[doc = $about])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $crate::config::section::Section for $name {
            fn prefix(&self) -> &'static str {
                $prefix
            }

            fn entries(&self) -> Vec<$crate::config::Entry> {
                vec![$($crate::config::Entry {
                    key: $crate::config::section::full($prefix, $key),
                    value: $crate::config::setting::Setting::write(&self.$field),
                    expects: <$type as $crate::config::setting::Setting>::expects(),
                    schema: <$type as $crate::config::setting::Setting>::schema(),
                    about: concat!($($about),*).trim_start(),
                },)*]
            }

            fn set(&mut self, key: &str, value: &$crate::config::Value) -> Option<Result<(), String>> {
                $(if key == $crate::config::section::full($prefix, $key) {
                    let read = <$type as $crate::config::setting::Setting>::read(value);
                    let expects = <$type as $crate::config::setting::Setting>::expects;
                    return Some(read.map(|read| self.$field = read).ok_or_else(expects));
                })*
                None
            }
        }
    };
}

pub(crate) use section;

/// The full name of a key.
pub(crate) fn full(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}
