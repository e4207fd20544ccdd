//! Fields of a pickled dict, with errors that name the file and the field.

use std::path::Path;

use drumline_pickle::{TensorInfo, TorchFile, Value};

use super::error::DeepSpeedError;

type Result<T> = std::result::Result<T, DeepSpeedError>;

/// A value, and how it is reached.
#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    file: &'a Path,
    name: String,
    value: Option<Value<'a>>,
}

impl<'a> Field<'a> {
    /// What a file contains.
    pub(super) fn root(file: &'a TorchFile) -> Self {
        Self { file: file.path(), name: String::new(), value: Some(file.root()) }
    }

    fn inner(&self, key: &str, value: Option<Value<'a>>) -> Self {
        let name = if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) };
        Self { file: self.file, name, value: value.filter(|value| !value.is_none()) }
    }

    /// A field of this dict. Whether it is there shows when it is used.
    pub(super) fn get(&self, key: &str) -> Self {
        self.inner(key, self.value.and_then(|value| value.get(key)))
    }

    /// A member of a list, or of a dict whose keys are numbers.
    pub(super) fn get_numbered(&self, place: usize) -> Self {
        let of_list = self.value.and_then(|value| value.items()?.nth(place));
        let of_dict = || {
            let mut entries = self.value.and_then(Value::entries)?;
            entries.find(|(key, _)| key.as_int() == Some(place as i64)).map(|(_, value)| value)
        };
        self.inner(&place.to_string(), of_list.or_else(of_dict))
    }

    /// The same as [`get`](Self::get), if it is there and not `None`.
    pub(super) fn find(&self, key: &str) -> Option<Self> {
        let found = self.get(key);
        found.value.is_some().then_some(found)
    }

    pub(super) fn error(&self, expected: &'static str) -> DeepSpeedError {
        let found = self.value.map_or_else(|| "missing".to_owned(), Value::describe);
        DeepSpeedError::Field { file: self.file.to_owned(), field: self.name.clone(), found, expected }
    }

    fn need<T>(&self, read: impl FnOnce(Value<'a>) -> Option<T>, expected: &'static str) -> Result<T> {
        self.value.and_then(read).ok_or_else(|| self.error(expected))
    }

    pub(super) fn count(&self) -> Result<u64> {
        self.need(|value| value.as_int().and_then(|int| int.try_into().ok()), "a number of at least 0")
    }

    pub(super) fn number(&self) -> Option<f64> {
        self.value.and_then(Value::as_float)
    }

    pub(super) fn is_false(&self) -> bool {
        self.value.and_then(Value::as_bool) == Some(false)
    }

    pub(super) fn text(&self) -> Result<&'a str> {
        self.need(Value::as_text, "a string")
    }

    pub(super) fn tensor(&self) -> Result<&'a TensorInfo> {
        self.need(Value::tensor, "a tensor")
    }

    /// The members of a list.
    pub(super) fn items(&self) -> Result<Vec<Self>> {
        let items = self.need(Value::items, "a list")?;
        Ok(items.enumerate().map(|(place, value)| self.inner(&place.to_string(), Some(value))).collect())
    }

    /// The members of a dict, by names.
    pub(super) fn entries(&self) -> Result<Vec<(String, Self)>> {
        let entries = self.need(Value::entries, "a dict")?;
        let named = entries.map(|(key, value)| {
            let name = match key.as_text() {
                Some(name) => name.to_owned(),
                None => {
                    key.as_int().map(|key| key.to_string()).ok_or_else(|| self.error("a dict of names"))?
                }
            };
            let field = self.inner(&name, Some(value));
            Ok((name, field))
        });
        named.collect()
    }

    /// The shape of a tensor.
    pub(super) fn shape(&self) -> Result<Vec<u64>> {
        let sizes = self.items()?;
        let shape: Vec<u64> = sizes.iter().map(Self::count).collect::<Result<_>>()?;
        let numel = shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size));
        if numel.is_none_or(|numel| numel > i64::MAX as u64 / 8) {
            return Err(self.error("the shape of a tensor that fits into memory"));
        }
        Ok(shape)
    }
}
