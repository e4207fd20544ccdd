//! Sections of configuration keys, declared as structs.

use super::value::Value;

/// A key with its current value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// The full name: `TRAIN.BATCH_SIZE`.
    pub(crate) key: String,
    /// The current value.
    pub(crate) value: Value,
    /// A description of the values that it takes.
    pub(crate) expects: String,
    /// The JSON schema of its values in a file.
    pub(crate) schema: serde_json::Value,
    /// What the key is for.
    pub(crate) about: &'static str,
}

/// A group of keys with the same prefix before the dot.
pub(crate) trait Section {
    /// The prefix; empty for keys without a section.
    fn prefix(&self) -> &'static str;
    /// All keys of the section.
    fn entries(&self) -> Vec<Entry>;
    /// Sets a key by its full name. Returns `None` if the section does not have the key.
    fn set(&mut self, key: &str, value: &Value) -> Option<Result<(), WrongType>>;
}

/// A value that does not have the type of its key.
#[derive(Debug, thiserror::Error)]
#[error("expected {expects}")]
pub(crate) struct WrongType {
    /// A description of the values that the key takes.
    pub(crate) expects: String,
}

/// Declares a section: a struct whose fields have a key, type, default and description.
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

            fn set(
                &mut self,
                key: &str,
                value: &$crate::config::Value,
            ) -> Option<Result<(), $crate::config::section::WrongType>> {
                $(if key == $crate::config::section::full($prefix, $key) {
                    let read = <$type as $crate::config::setting::Setting>::read(value);
                    let wrong_type = || $crate::config::section::WrongType {
                        expects: <$type as $crate::config::setting::Setting>::expects(),
                    };
                    return Some(read.map(|read| self.$field = read).ok_or_else(wrong_type));
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
